"""`mingc audit A B` with files: each fault is named by a deliberately bad file, and repetitions are equivalent."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from audited_server import HZ, tones, wav
from mingc_command import CHECKPOINT, mingc_here
from numpy.typing import NDArray

from mingc.audit.comparison import judge
from mingc.audit.measures import Measured
from mingc.audit.sounds import Sound
from mingc.media.dsp.resample import resample

Wave = NDArray[np.float32]
TEXTS = {"one": "The morning train was late again.", "two": "街上几乎没有行人。"}


def write(
    folder: Path,
    change: Callable[[Wave], Wave] = lambda wave: wave,
    *,
    hz: int = HZ,
    seeds: tuple[int, ...] = (1, 2),
) -> Path:
    """A group: repetitions of two utterances, with their texts."""
    for seed in seeds:
        for name, text in TEXTS.items():
            path = folder / f"run{seed}" / f"{name}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wav(change(tones(text, seed=seed)), hz))
            path.with_suffix(".txt").write_text(text, encoding="utf-8")
    return folder


def audit(*words: object, code: int) -> Any:
    done = mingc_here("audit", *words, "--json")
    assert done.code == code, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def listener(tmp_path: Path) -> str:
    """A command that says what is heard: of a file whose peak is clipped, nonsense."""
    script = tmp_path / "listen.py"
    script.write_text(
        f"import sys, array\nsamples = array.array('h', open(sys.argv[1], 'rb').read()[44:])\n"
        f"texts = {TEXTS!r}\n"
        "print('nothing like it' if max(samples) > 29500 else texts[sys.argv[1].split('/')[-1].split('.')[0]])\n",
        encoding="utf-8",
    )
    return f"{sys.executable} -SE {script} {{}}"


def low_passed(wave: Wave) -> Wave:
    spectrum = np.fft.rfft(wave)
    spectrum[np.fft.rfftfreq(len(wave), 1 / HZ) > 400] = 0
    return np.fft.irfft(spectrum, len(wave)).astype(np.float32)


def paused(wave: Wave) -> Wave:
    return np.concatenate([wave[: len(wave) // 2], np.zeros(3 * HZ, np.float32), wave[len(wave) // 2 :]])


def higher(wave: Wave) -> Wave:
    """By 2.7 semitones, and as much faster: no usual rate in a header does this."""
    return resample(wave, 7, 6)


FAULTS: dict[str, tuple[Callable[[Wave], Wave], str]] = {
    "silent": (lambda wave: 1e-6 * wave, "silence: 0 of 4 sounds of A, 4 of 4 of B"),
    "clipped": (lambda wave: np.clip(12 * wave, -1, 1), "clipping: 0 of 4 sounds of A, 4 of 4 of B"),
    "paused": (paused, "pause: 0 of 4 sounds of A, 4 of 4 of B"),
    "cut off": (lambda wave: wave[: len(wave) // 4], "pace: 0 of 4 sounds of A, 4 of 4 of B"),
    "louder": (lambda wave: 1.6 * wave, "loudness: 4.0"),
    "dull": (low_passed, "mel distance, aligned: "),
    "higher": (higher, "pitch: 2.6"),
    "too short": (lambda wave: wave[: 4 * len(wave) // 5], "duration: 0.2"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_group_differs_for_its_fault(fault: str, tmp_path: Path) -> None:
    change, reason = FAULTS[fault]
    report = audit(write(tmp_path / "a"), write(tmp_path / "b", change, seeds=(4, 5)), code=3)
    assert report["verdict"] == "different"
    assert any(each.startswith(reason) for each in report["reasons"]), report["reasons"]


def test_samples_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    for name, samples in (("a", tones("abc")), ("b", np.full(HZ, np.nan, np.float32))):
        soundfile.write(tmp_path / f"{name}.wav", samples, HZ, subtype="FLOAT")
    report = audit(tmp_path / "a.wav", tmp_path / "b.wav", code=3)
    assert "values: 0 of 1 sounds of A, 1 of 1 of B; B b.wav: samples are not numbers" in report["reasons"]
    assert report["sounds"][1]["figures"]["rms"] is None


def test_repetitions_with_other_noise_are_equivalent(tmp_path: Path) -> None:
    report = audit(write(tmp_path / "a"), write(tmp_path / "b", seeds=(4, 5)), code=0)
    assert report["verdict"] == "equivalent", report["reasons"]
    assert all(row["within"] > 0 and not row["is_off"] for row in report["figures"])
    assert [each["figure"] for each in report["figures"]] == [
        "mel distance, aligned", "duration", "loudness", "spectral centroid", "pitch",
    ]  # fmt: skip
    assert {each["group"] for each in report["sounds"]} == {"A", "B"} and len(report["sounds"]) == 8


def test_the_yardstick_is_that_of_either_group_and_at_least_what_is_heard(tmp_path: Path) -> None:
    one, again = write(tmp_path / "one", seeds=(1,)), write(tmp_path / "again", seeds=(4, 5))
    for report in (audit(one, again, code=0), audit(again, one, code=0)):
        assert all(row["within"] > 0 for row in report["figures"])
    shutil.copytree(one / "run1", one / "run2")
    quieter = write(tmp_path / "quieter", lambda wave: 0.97 * wave, seeds=(1,))
    report = audit(one, quieter, code=0)
    assert all(row["within"] == 0 for row in report["figures"]) and report["figures"][2]["across"] > 0.2


def test_a_fault_of_a_larger_share_of_either_group_is_a_reason(tmp_path: Path) -> None:
    good, clipped = write(tmp_path / "good", seeds=(1, 2)), write(tmp_path / "bad", FAULTS["clipped"][0])
    shutil.copytree(good / "run1", clipped / "good1")
    shutil.copytree(good / "run2", clipped / "good2")
    less = write(tmp_path / "less", FAULTS["clipped"][0])
    reasons = audit(less, clipped, code=3)["reasons"]
    assert any(
        each.startswith("clipping: 4 of 4 sounds of A, 4 of 8 of B; A run1/one.wav") for each in reasons
    )


def test_the_same_file_has_distance_zero_and_no_yardstick(tmp_path: Path) -> None:
    file = write(tmp_path / "a") / "run1" / "one.wav"
    other = tmp_path / "other.wav"
    shutil.copyfile(file, other)
    report = audit(file, other, code=0)
    assert report["verdict"] == "equivalent"
    assert all(row["across"] == 0 and row["within"] is None for row in report["figures"])
    assert "nothing is repeated" in report["notes"][0]


def test_a_header_of_24_khz_over_samples_of_44_khz_is_named(tmp_path: Path) -> None:
    """The trap of a factor of 1.84, seen from the sounds alone, and from a text too slow to be speech."""
    good, bad = write(tmp_path / "a"), write(tmp_path / "b", hz=24_000, seeds=(4, 5))
    for text in tmp_path.rglob("*.txt"):
        text.unlink()
    for one, other, longer in ((good, bad, 1.84), (bad, good, 0.54)):
        reason = audit(one, other, code=3)["reasons"][0]
        found = re.match(r"header: B is ([\d.]+) times as long as A and ([\d.]+) times as high", reason)
        assert found and float(found[1]) == pytest.approx(longer, rel=0.02), reason
        assert "would fit at 44100 Hz" in reason


def test_the_same_sound_at_another_true_rate_is_no_wrong_header(tmp_path: Path) -> None:
    good = write(tmp_path / "a")
    other = write(tmp_path / "b", lambda wave: resample(wave, HZ, 24_000), hz=24_000, seeds=(4, 5))
    report = audit(good, other, code=3)
    assert report["reasons"][0] == "sample rates are [44100] Hz in A and [24000] Hz in B"


def test_words_that_are_heard_make_other_sounds_intelligible(tmp_path: Path, listener: str) -> None:
    good, dull = write(tmp_path / "a"), write(tmp_path / "b", low_passed, seeds=(4, 5))
    report = audit(good, dull, "--transcriber", listener, code=0)
    assert (
        report["verdict"] == "intelligible"
        and "error rate of words: 0.0% in A, 0.0% in B" in report["reasons"]
    )
    unheard = write(tmp_path / "c", lambda wave: 0.95 * wave / np.abs(wave).max(), seeds=(4, 5))
    report = audit(good, unheard, "--transcriber", listener, code=3)
    assert any("heard as 'nothing like it'" in each for each in report["reasons"])


@pytest.mark.parametrize(
    ("rate", "verdict"), [(0.04, "intelligible"), (0.08, "different"), (0.2, "different")]
)
def test_other_sounds_are_intelligible_if_both_say_the_words_as_well(rate: float, verdict: str) -> None:
    wave = tones(TEXTS["one"])
    good, dull = (
        Measured(sound=Sound(name="x", utterance="x", samples=samples, hz=HZ), transcript="", error_rate=each)
        for samples, each in ((wave, 0.0), (low_passed(wave), rate))
    )
    assert judge([good], [dull]).verdict == judge([dull], [good]).verdict == verdict


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 7", "ended with 7"),
        ("echo a broken model >&2; exit 1", "a broken model"),
        ("sleep 600 & wait", "ended with -9 within 0.5 s"),
        ("exec yes", "a transcript is wanted"),
    ],
)
def test_a_command_that_fails_hangs_or_prints_without_end_is_an_error(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingc.audit.server._COMMAND_S", 0.5)
    file = write(tmp_path / "a", seeds=(1,)) / "run1" / "one.wav"
    done = mingc_here("audit", file, file, "--transcriber", shlex.join(["sh", "-c", script]))
    assert done.code == 2 and message in done.stderr


def test_single_files_and_folders_keep_their_own_words(tmp_path: Path, listener: str) -> None:
    """A text of one group holds for the sounds of the other that have none."""
    folder = write(tmp_path / "b", seeds=(1,))
    report = audit(folder / "run1" / "one.wav", folder, "--transcriber", listener, code=0)
    assert [each["text"] for each in report["sounds"]] == [TEXTS["one"], *TEXTS.values()]
    assert all(each["figures"]["error_rate"] == 0 for each in report["sounds"])


def test_a_sound_without_samples_and_one_of_a_third_of_a_second(tmp_path: Path) -> None:
    for name, length in (("empty", 0), ("short", HZ // 3)):
        (tmp_path / f"{name}.wav").write_bytes(wav(tones("abcdefgh")[:length]))
    report = audit(tmp_path / "empty.wav", tmp_path / "short.wav", "--html", tmp_path / "page.html", code=3)
    assert [each["where"] for each in report["checks"]] == ["A empty.wav"], "a short sound is no silence"
    assert report["checks"][0]["name"] == "silence"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere.wav", "nowhere.wav"), "cannot be read"),
        ((str(CHECKPOINT / "config.json"),) * 2, "cannot be decoded"),
        ((str(CHECKPOINT / "talker" / "llm"),) * 2, "has no sound file"),
        (("a.wav",), "there is no B"),
        (("a.wav", "http://127.0.0.1:9"), "one is a server"),
        (("--self", "a.wav"), "only servers and artifacts"),
        (("a.wav", "b.wav", "--html", "/nowhere/page.html"), "/nowhere"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: tuple[str, ...], message: str) -> None:
    done = mingc_here("audit", *words)
    assert done.code == 2 and message in done.stderr


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mingc.audit.audit", None)
    done = mingc_here("audit", "a.wav", "b.wav")
    assert done.code == 2 and "pip install 'mingc[serve]'" in done.stderr


def test_the_page_has_everything_in_it(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    audit(write(tmp_path / "a"), write(tmp_path / "b", low_passed, seeds=(4, 5)), "--html", page, code=3)
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == text.count("data:audio/mpeg;base64,") == 4
    assert not re.search(r'(src|href)="?https?:', text) and "img-src data:" in text
