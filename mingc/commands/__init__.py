"""The commands of `mingc`, one file a command: only these know export, runtime, verify and probe together."""

from __future__ import annotations

FOUND_PROBLEMS = 3  # exit code of a command that ran to its end and found problems
INTERRUPTED = 130  # by Ctrl-C or SIGTERM
