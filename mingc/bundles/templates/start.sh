#!/bin/sh
# Serve this bundle. Arguments are options of `mingc serve`; MINGC_PUBLIC_KEY requires its signature.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
if [ -n "${MINGC_PUBLIC_KEY:-}" ]; then
    set -- --require-signature "$MINGC_PUBLIC_KEY" "$@"
fi
exec "${MINGC:-mingc}" serve "$here" "$@"
