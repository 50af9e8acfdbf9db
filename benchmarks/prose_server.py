"""`mingc serve` whose answers are prose: the texts of an answer's tokens are those of fixed answers (`prose.txt`).

With random weights the thinker writes random tokens, whose clauses end at random places, but where clauses end decides
when speech begins. This server computes, samples and counts the same random tokens; only their texts are replaced
before they are sent and spoken. Answers are replayed in turns, each from its beginning again when it ends.

    python benchmarks/prose_server.py [--no-two-batch-overlap] serve ARTIFACT …

With `--no-two-batch-overlap` several ranks run the chunks of a prompt one after the other, for comparison.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mingc.cli import main
from mingc.commands import serve
from mingc.console.child_main import exit_with_parent
from mingc.runtime.service import omni
from mingc.runtime.thinker.step_options import StepOptions

# About as a tokenizer of both languages cuts: words with the space before them, long ones in parts; one or two
# ideographs; marks alone.
_TOKEN = re.compile(r" ?[A-Za-z'’-]{1,8}|[一-鿿]{1,2}| ?\d|\s|.")

ANSWERS = tuple(Path(__file__).with_name("prose.txt").read_text(encoding="utf-8").splitlines())


def pieces(text: str) -> Sequence[str]:
    """The texts of the tokens of an answer."""
    return _TOKEN.findall(text)


class ProseDetokenizer:
    """In the place of `Detokenizer`: the n-th one replays the n-th answer."""

    _numbers = itertools.count()

    def __init__(self, _: object) -> None:
        text = ANSWERS[next(self._numbers) % len(ANSWERS)]
        self._pieces = itertools.cycle([*pieces(text), " "])

    def push(self, _: int) -> str:
        return next(self._pieces)

    def flush(self) -> str:
        return ""


if __name__ == "__main__":
    omni.Detokenizer = ProseDetokenizer  # type: ignore[misc, assignment]
    if sys.argv[1] == "--no-two-batch-overlap":
        serve._DEFAULTS["steps"] = StepOptions(two_batch_overlap=False)  # type: ignore[assignment]
        del sys.argv[1]
    exit_with_parent()
    main()
