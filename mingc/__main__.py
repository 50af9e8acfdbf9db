"""`python -m mingc`: the same as the `mingc` command."""

from __future__ import annotations

from mingc.cli import main

if __name__ == "__main__":
    main()
