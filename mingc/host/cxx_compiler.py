"""The C++ compiler of this machine, which builds the engines of AOTInductor."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

INSTALL = "apt-get install g++, or set CXX to a compiler"


def compiler() -> str | None:
    """Its command, which may have options; None when there is none."""
    return os.environ.get("CXX") or next((each for each in ("g++", "clang++") if shutil.which(each)), None)


@cache
def compiler_problem(command: str) -> tuple[str, str] | None:
    """Why `command` builds no library that torch can load, and the fix; tried once in a process, in half a second.

    A library that contains a libstdc++ crashes the process that loads it.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
            source.write_text("#include <string>\nstd::string hello() { return std::string(99, 'x'); }\n")
            words = [*command.split(), "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
            subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
            code = library.read_bytes()
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        return f"{command}: {said.splitlines()[-1] if said else 'failed'}", INSTALL
    except OSError as error:
        fix = f"{INSTALL}; set TMPDIR to a folder that can be written"
        return f"{command}: not tried: {error.strerror}", fix
    if b"libstdc++.so" not in code and b"libc++.so" not in code:
        detail = f"{command} links libstdc++ statically: engines built with it crash when loaded"
        return detail, "set CXX=/usr/bin/g++ CC=/usr/bin/gcc and unset CUDAHOSTCXX"
    return None
