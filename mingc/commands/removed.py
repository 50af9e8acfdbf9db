"""Commands and options that earlier versions had: each is refused with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

from mingc.errors import ConfigError

_ONE_EACH = "export one artifact for each backend and target; an artifact has the engines of one"
_CONFORMANCE = "run `python -m conformance ARTIFACT --reference DIR` in a checkout"
# The command, its option (None: the command itself), and the fix.
REMOVED = (
    ("plan", None, "see the table of measured capacity in docs/deployment.md"),
    ("demo", None, "run `make demo`, or `python scripts/demo.py`, in a checkout"),
    ("export", "--keep-all", f"leave it out: the fastest engines are kept; {_ONE_EACH}"),
    *((command, "--engines", _ONE_EACH) for command in ("serve", "verify", "probe")),
    *((command, "--target", _ONE_EACH) for command in ("serve", "verify", "probe")),
    ("verify", "--reference", _CONFORMANCE),
    ("verify", "--against", _CONFORMANCE),
    ("serve", "--expert-usage-interval", "leave it out; benchmarks count the experts that steps read"),
    ("bundle pack", "--oci", "push the bundle with `oras`: the recipe is in docs/deployment.md"),
)


def refuse_removed(words: Sequence[str]) -> None:
    """Raise a ConfigError when the command line `words` has a command, option or value that was removed."""
    line = " ".join([*words[:2], ""])
    split = [word.partition("=") for word in words]
    flags = [flag for flag, _, _ in split]
    for command, option, fix in REMOVED:
        if line.startswith(f"{command} ") and (option is None or option in flags):
            raise ConfigError(f"{option or command} was removed", where=f"mingc {command}", fix=fix)
    if words[:1] != ["export"]:
        return
    if flags.count("--target") > 1:
        raise ConfigError("--target is given several times", where="mingc export", fix=_ONE_EACH)
    for (flag, equals, value), after in zip(split, [*words[1:], ""], strict=True):
        chosen = value if equals else after
        if flag == "--backend" and "+" in chosen:
            raise ConfigError(
                f"--backend {chosen}: names several backends", where="mingc export", fix=_ONE_EACH
            )
