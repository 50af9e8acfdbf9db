"""A small run of `benchmarks/media_fuzz.py`: mutated media neither crash a decoder nor fail in another way."""

from __future__ import annotations

from media_fuzz import corpus, decode_all, mutants, tasks
from preprocess_data import audio_parameters, vision_parameters


def test_every_file_of_the_corpus_is_decoded() -> None:
    kinds = tasks(vision_parameters(), audio_parameters())
    report = decode_all(((kinds[kind], name, data) for kind, name, data in corpus()), max_seconds=60)
    assert report.faults == []
    assert {outcome for counts in report.outcomes.values() for outcome in counts} == {"decoded"}, report


def test_mutated_media_are_decoded_or_refused() -> None:
    report = decode_all(mutants(vision_parameters(), audio_parameters(), count=350, seed=1), max_seconds=60)
    assert report.faults == []
    assert report.files == 350
    assert set(report.outcomes) == {"image", "audio", "video"}
    for counts in report.outcomes.values():
        assert counts["decoded"] > 5, "mutants that are refused at the first byte test nothing"
        assert counts["undecodable_media"] > 5
