"""What a server says and hears, against what is known: collected from one server, then judged, one or two together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np

from mingc.audit.comparison import Judgement, faults, judge, language
from mingc.audit.measures import Embed, Measured
from mingc.audit.questions import COOKBOOK, LONG, SENTENCES, Question, digest_of, made_questions, media_part
from mingc.audit.report import Check, FigureRow, Verdict
from mingc.audit.server import Transcribe
from mingc.audit.sounds import read_file, read_sound
from mingc.bench.server import AbsentError, AnswerError, Server
from mingc.errors import MingcError
from mingc.text.error_rate import normalised, word_errors

_QUOTED = 80  # characters of an answer in the report


@dataclass(kw_only=True, slots=True)
class Collected:
    """What one server answered.

    Attributes:
        sounds: all speech; of `long` the long texts, of `sentences` the others.
        answers: by the names of questions.
        problems: what could not be asked, as checks.
    """

    name: str
    sample_rate: int | None = None
    sentences: list[Measured] = field(default_factory=list)
    long: list[Measured] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    problems: list[Check] = field(default_factory=list)

    @property
    def sounds(self) -> list[Measured]:
        return [*self.sentences, *self.long]


def heard(each: Measured, transcribe: Transcribe | None) -> Measured:
    """Add transcript and error rate: of words, for Chinese of characters."""
    if transcribe is None or not each.sound.text:
        return each
    words = transcribe(each.sound)[: 10 * len(each.sound.text) + 100]  # megabytes are no less wrong
    return replace(each, transcript=words, error_rate=word_errors(each.sound.text, words).rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speaking:
    """A server that speaks, what transcribes its speech, and where both go."""

    server: Server
    found: Collected
    transcribe: Transcribe
    embed: Embed | None
    log: Callable[[str], None]

    def sentences(self, voices: Sequence[str | None], repeats: int) -> None:
        """Have every sentence spoken `repeats` times in every voice."""
        for voice, (kind, sentences) in product(voices, SENTENCES.items()):
            self.log(
                f"{self.found.name}: {voice or 'the default voice'} speaks {len(sentences)} sentences ({kind})"
            )
            for (index, text), repeat in product(enumerate(sentences, 1), range(1, repeats + 1)):
                utterance = f"{voice or 'default'}/{kind}-{index}"
                self.speak(text, voice, utterance, f"{utterance}.{repeat}", self.found.sentences)

    def speak(self, text: str, voice: str | None, utterance: str, name: str, into: list[Measured]) -> None:
        """Speak and transcribe a text; a failure becomes a problem."""
        try:
            data, counted_s = self.server.speak(text, voice, language(text))
            sound = read_sound(data, f"{name}.wav", utterance=utterance, text=text, counted_s=counted_s)
            into.append(Measured(sound=sound, embed=self.embed))
            into[-1] = heard(into[-1], self.transcribe)
        except MingcError as error:
            problem = _problem(f"speech {utterance}", self.found.name, error)
            if problem not in self.found.problems:  # the same of each repetition
                self.found.problems.append(problem)


def _problem(name: str, where: str, error: MingcError) -> Check:
    """A request that failed; without a fault where the server has no such route."""
    return Check(
        name=name, where=where, outcome="skipped" if isinstance(error, AbsentError) else "bad", found=error.message
    )  # fmt: skip


def collect(speaking: Speaking, *, repeats: int, media: Path | None) -> None:
    """Ask a server everything."""
    server, found, log = speaking.server, speaking.found, speaking.log
    name = found.name
    voices = server.voices()
    speaking.sentences(voices, repeats)
    for kind, text in LONG.items():
        log(f"{name}: a long text ({kind})")
        utterance = f"{voices[0] or 'default'}/long-{kind}"
        speaking.speak(text, voices[0], utterance, utterance, found.long)
    for question in (*made_questions(), *COOKBOOK):
        problem = _missing(question, server, media)
        if problem is not None:
            found.problems.append(Check(name=question.name, where=name, outcome="skipped", found=problem))
            continue
        log(f"{name}: {question.name}")
        parts = question.media
        if question.file and media is not None:
            parts = (media_part(question.file, read_file(media / question.file)),)
        try:
            found.answers[question.name] = server.ask(question.text, parts, max_tokens=question.max_tokens)
        except AnswerError as error:
            found.problems.append(_problem(question.name, name, error))


def _missing(question: Question, server: Server, media: Path | None) -> str | None:
    """Why a question cannot be asked."""
    inputs = server.entry.get("input_modalities")
    if inputs is not None and question.needs not in inputs:
        return f"the server takes no {question.needs}"
    if question.file and (media is None or not (media / question.file).is_file()):
        return f"{question.file} is not in the folder of --media ({question.source})"
    return None


def checks_of(found: Collected) -> list[Check]:
    """Judge what one server answered."""
    return [*_speech_checks(found), *_answer_checks(found), *found.problems]


def _speech_checks(found: Collected) -> Iterator[Check]:
    groups: dict[str, list[Measured]] = {}
    for each in found.sentences:
        groups.setdefault(each.sound.utterance.rpartition("-")[0], []).append(each)
    for each in found.long:
        groups[each.sound.utterance] = [each]
    for name, group in groups.items():
        kinds: dict[str, list[str]] = {}
        for each in group:
            for kind, why in faults(each).items():
                kinds.setdefault(kind, []).append(f"{each.sound.name}: {why}")
        wrong = [
            f"{kind}: {len(all_of_it)} of {len(group)}, {all_of_it[0]}" for kind, all_of_it in kinds.items()
        ]
        rates = {each.sound.hz for each in group}
        if found.sample_rate is not None and rates != {found.sample_rate}:
            wrong.append(
                f"header: files have {sorted(rates)} Hz, the list of models says {found.sample_rate}"
            )
        yield Check(
            name=f"speech {name}",
            where=found.name,
            outcome="bad" if wrong else "good",
            found="; ".join(wrong) or _summary(group),
            expected="the words, at the pace and level of speech",
        )
    spoken = [each for each in found.sentences if each.sound.text]
    if len({each.sound.text for each in spoken}) > 1 and len({each.sound.data for each in spoken}) == 1:
        yield Check(
            name="speech differs", where=found.name, outcome="bad", found="every text is the same sound",
            expected="another sound for another text",
        )  # fmt: skip


def _summary(group: Sequence[Measured]) -> str:
    errors = [each.error_rate for each in group if each.error_rate is not None]
    levels = [each.loudness_lufs for each in group if each.loudness_lufs is not None]
    words = f"error rate {np.mean(errors):.1%}" if errors else "not transcribed"
    drift = group[0].drift.get("drift_timbre_db")
    return (
        f"{words}, {np.mean([each.seconds_per_character or 0.0 for each in group]):.3f} s per character, "
        f"{np.mean(levels):.1f} LUFS" + (f", drift {drift:.1f} dB" if drift is not None else "")
    )


def _answer_checks(found: Collected) -> Iterator[Check]:
    questions = {each.name: each for each in (*made_questions(), *COOKBOOK)}
    for name, answer in found.answers.items():
        question = questions[name]
        lacks = question.missing(answer)
        said = f"{answer[:_QUOTED]!r}{' …' * (len(answer) > _QUOTED)}"
        published = ""
        if question.digest:
            is_same = digest_of(answer) == question.digest
            published = "; the published answer" if is_same else "; not word for word the published answer"
        yield Check(
            name=name,
            where=found.name,
            outcome="bad" if lacks else "good",
            found=said + (f" lacks {', '.join(lacks)}" if lacks else published),
            expected=" and ".join("/".join(group) for group in question.keywords),
        )
    answers = [normalised(each) for each in found.answers.values()]
    if len(answers) > 2 and len({*answers}) == 1:
        yield Check(
            name="answers differ", where=found.name, outcome="bad", found="every question has the same answer",
            expected="another answer to another question",
        )  # fmt: skip


def judge_servers(servers: Sequence[Collected]) -> Judgement:
    """Judge one server alone, or each and how far they differ."""
    checks = [check for each in servers for check in checks_of(each)]
    reasons = [f"{each.where}: {each.name}: {each.found}" for each in checks if each.outcome == "bad"]
    skipped: dict[tuple[str, str], list[str]] = {}
    for each in checks:
        if each.outcome == "skipped":
            skipped.setdefault((each.where, each.found), []).append(each.name)
    notes = [f"{where}: {', '.join(names)} skipped: {found}" for (where, found), names in skipped.items()]
    figures: tuple[FigureRow, ...] = ()
    if len(servers) == 2:
        one, other = servers
        same = [
            name
            for name in one.answers
            if normalised(one.answers[name]) == normalised(other.answers.get(name, ""))
        ]
        checks.append(
            Check(
                name="same answers", where="both", outcome="noted",
                found=f"{len(same)} of {len(one.answers)} greedy answers are the same words",
            )
        )  # fmt: skip
        if one.sounds and other.sounds:
            sounds = judge(one.sounds, other.sounds)
            figures = sounds.figures
            words = f"the speech of both is {sounds.verdict}: {'; '.join(sounds.reasons)}"
            (reasons if sounds.verdict == "different" else notes).append(words)
    if not any(each.outcome == "good" for each in checks):
        reasons.append("nothing was found good")
    verdict: Verdict = "bad" if reasons else "good"
    good = sum(each.outcome == "good" for each in checks)
    besides = f", {sum(map(len, skipped.values()))} were skipped" if skipped else ""
    return Judgement(
        verdict=verdict,
        reasons=tuple(reasons) or (f"all {good} checks are good{besides}",),
        notes=tuple(notes),
        figures=figures,
        checks=tuple(checks),
    )
