"""Names and prose use the field's words: private words that were replaced do not come back.

Old names may stand in CHANGELOG.md, whose table says what they became.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = [
    path
    for folder in ("mingc", "tests", "benchmarks", "scripts")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cu") and path != Path(__file__)
]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]

# Whole identifiers, or a module's file name.
_NAMES = """
ring_attention slot_attention slot_prefill_attention segment_attention short_attention
expert_row row_linear layer_row dit_rows graph_edges begin_early
Tiles KernelTiles RowTiles LayerRowTiles TileContents moe_tiles moe_candidates tile_choice expert_trial Gates
StaticRun InputBlock Download SideStream PrefillPace LaunchLead PatchTimes StepTimes
Way obstacle take_from_first take_from_first_ RankJob lifeline tether tethered StepWatch last_resort
Mailbox mailbox Channel Speaker ChatRun SpeechRun ChatParts SpeechParts ChatCall SpeechCall answer_run
GraphPlan border Ledger excuse excuses shake shaken RouteWatch Fidelity fidelity
Ceilings EngineFloor EngineWork KernelWork count_work told teller tells heard Heard crowd crowds
rank_outputs option_values interruption this_machine Machine
grace_s max_in_flight kv_tokens context_tokens prefill_tokens
"""
NAMES = frozenset(_NAMES.split())
# Words that are in no identifier, neither as `was_told` nor as `HeardAudio`.
PARTS = frozenset(
    (*("told", "tells", "teller", "heard", "hears", "crowd", "crowds", "nobody", "whoever", "roundings"),
     *("excuse", "excuses", "ledger", "lifeline", "tether", "tethered", "mailbox"))
)  # fmt: skip
OLD_KERNEL = re.compile(r"mingc_\w+_early")
# Python 3.12 and later split f-strings.
_TEXT = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))

_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")

# Prose: docstrings, comments, messages and documents.
PROSE = {
    word: re.compile(pattern, re.IGNORECASE)
    for word, pattern in {
        "tell, told": r"\b(tell|tells|told|telling|teller)\b",
        "hear, heard": r"\b(hear|hears|heard|hearing)\b",
        "meet": r"\bmeets?\b",
        "wish": r"\bwish(es)?\b",
        "hold against": r"\b(hold|holds|held|holding)( \w+){0,3} against\b",
        "whoever, nobody": r"\b(whoever|nobody)\b",
        "crowd": r"\bcrowds?\b",
        "roundings": r"\broundings\b",
        "as it shall, felt": r"\b(as it shall|is felt|be felt)\b",
        "sums over ranks": r"\bsums? over ranks\b",
        "run ahead": r"\brun(s|ning)? ahead\b",
        "pairs of chunks": r"\bpairs? of chunks\b",
        "lifeline, tether": r"\b(lifelines?|tether(s|ed)?)\b",
        "last resort": r"\blast resort\b",
        "mailbox": r"\bmailbox(es)?\b",
        "ledger, excuse": r"\b(ledgers?|excuses?|excused)\b",
        "old options": r"--(max-in-flight|kv-tokens|context-tokens|slots|prefill-tokens|grace)\b|--(no-)?tune\b",
    }.items()
}
# Text that may use a word: `--against` lives on as a hidden alias of verify.
ALLOWED = {
    "context_tokens": (
        "prober.py",
        "report.py",
        "html_report.py",
        "test_probe.py",
        "test_probe_html.py",
    ),  # tokens that a request holds
    "whoever, nobody": ("speech_clients.py",),  # a sentence that is spoken
    "hear, heard": ("mixed_requests.py", "openai_checks.py"),  # a question of a client
}
# The benchmark commands of the notes are quoted from result files.
QUOTED = re.compile(r"`[^`]*`")


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that the code defines or uses, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg, node.value.lineno
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[-1], node.lineno


def prose(source: str, is_python: bool) -> Iterator[tuple[str, int]]:
    """Comments and strings of a Python file, or everything of another file, with lines."""
    if not is_python:
        yield source, 1
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _TEXT:
            yield token.string, token.start[0]


def found_in(source: str, name: str, is_python: bool) -> list[str]:
    """Old words of one file, with lines."""
    problems = []
    if is_python:
        for identifier, line in identifiers(ast.parse(source)):
            parts = {part.lower() for part in _PART.findall(identifier)}
            is_old = identifier in NAMES or OLD_KERNEL.fullmatch(identifier) or parts & PARTS
            if is_old and name not in ALLOWED.get(identifier, ()):
                problems.append(f"line {line}: {identifier}")
    for text, start in prose(source, is_python):
        flat = text if is_python else QUOTED.sub(lambda match: " " * len(match[0]), text)
        for word, pattern in PROSE.items():
            if name in ALLOWED.get(word, ()):
                continue
            for match in pattern.finditer(flat):
                line = start + text.count("\n", 0, match.start())
                problems.append(f"line {line}: {match[0]!r} ({word})")
    return problems


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_uses_the_fields_words(path: Path) -> None:
    assert path.stem not in NAMES
    assert not found_in(path.read_text(encoding="utf-8"), path.name, path.suffix == ".py")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_use_the_fields_words(path: Path) -> None:
    assert not found_in(path.read_text(encoding="utf-8"), path.name, is_python=False)


@pytest.mark.parametrize(
    "source",
    [
        "def ring_attention(): ...",
        "from x import Mailbox",
        "told = 1",
        "# what a step is told",
        '"""Outputs are held closely against float32."""',
        "run(prefill_tokens=4)",
        "mingc_linear_early()",
    ],
)
def test_an_old_word_is_found(source: str) -> None:
    assert found_in(source, "x.py", is_python=True)


@pytest.mark.parametrize(
    "source", ["# a ring buffer", "# compared with float32", "prefill = 1", "early = 2  # ends early"]
)
def test_the_fields_words_pass(source: str) -> None:
    assert not found_in(source, "x.py", is_python=True)
