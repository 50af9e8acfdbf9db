"""Synthetic thinker: one layer of each kind on disk, all layers in memory, served like any other."""

from __future__ import annotations

import itertools
from pathlib import Path

import httpx
import pytest
import torch
from server_thread import run_server

from mingc.artifacts.artifact import Artifact, open_artifact
from mingc.artifacts.parameters import ThinkerParameters
from mingc.export.assets.byte_tokenizer import word
from mingc.media.decoding import InProcessDecoder
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.engines.stage_loader import load_stage, rank_weight_bytes
from mingc.runtime.service.builder import open_service


@pytest.fixture(scope="module")
def artifact(synthetic_thinker_artifact: Path) -> Artifact:
    return open_artifact(synthetic_thinker_artifact)


def test_one_layer_of_each_kind_is_stored(artifact: Artifact) -> None:
    record = artifact.manifest.stages["thinker"]
    first, others = record.graphs["prefill_experts"].spec.layer_instances[0], record.repeated
    assert len(others) > 2 and set(others.values()) == {"layers.0.attention", first}
    stored = load_stage(artifact, "thinker", torch.device("cpu"), only_first=True).weights
    assert not any(name.startswith(tuple(f"{each}." for each in others)) for name in stored)
    size = sum(value.nbytes for value in stored.values())
    assert size <= artifact.manifest.files[record.weights_files[0]].size_bytes < size + 64_000  # a header


def test_every_layer_has_weights_of_its_own(artifact: Artifact) -> None:
    weights = load_stage(artifact, "thinker", torch.device("cpu")).weights
    experts = artifact.manifest.stages["thinker"].graphs["prefill_experts"].spec.layer_instances
    layers = [[f"layers.{index}.attention" for index in range(3)], list(experts[:3])]
    for instances in layers:
        names = [name.removeprefix(instances[0]) for name in weights if name.startswith(f"{instances[0]}.")]
        assert names
        for name in names:
            drawn = [weights[each + name].flatten() for each in instances]
            assert all(not torch.equal(one, other) for one, other in itertools.combinations(drawn, 2)), name
            if drawn[0].numel() > 500:
                for moment in (torch.mean, torch.std):
                    stored, *others = [float(moment(each)) for each in drawn]
                    assert others == pytest.approx([stored] * 2, rel=0.15, abs=0.15 * float(drawn[0].std()))
    assert rank_weight_bytes(artifact, "thinker", 0) == sum(value.nbytes for value in weights.values())


def test_layers_are_the_same_at_every_load(artifact: Artifact) -> None:
    first, again = (load_stage(artifact, "thinker", torch.device("cpu")).weights for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_layers_route_differently(artifact: Artifact) -> None:
    weights = load_stage(artifact, "thinker", torch.device("cpu")).weights
    routers = [value[0] for name, value in weights.items() if name.endswith("router.weight")]
    hidden = torch.randn(64, routers[0].shape[1], generator=torch.Generator().manual_seed(0))
    chosen = [(hidden @ router.float().T).argmax(1) for router in routers]
    for one, other in itertools.combinations(chosen, 2):
        assert (one == other).float().mean() < 0.5


def test_real_weights_are_not_repeated(wide_thinker_artifact: Path) -> None:
    real = open_artifact(wide_thinker_artifact)
    assert real.manifest.stages["thinker"].repeated == {}
    weights = load_stage(real, "thinker", torch.device("cpu")).weights
    assert rank_weight_bytes(real, "thinker", 0) == sum(value.nbytes for value in weights.values())


def test_its_tokenizer_has_one_token_per_byte_or_word(artifact: Artifact) -> None:
    tokenizer = TextTokenizer.from_file(artifact.path(artifact.manifest.tokenizers["thinker"]))
    parameters = artifact.manifest.parameters_of("thinker", ThinkerParameters)
    assert tokenizer.vocab_size == parameters.vocab_size
    text = "Grüße, 世界 \n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    last = parameters.vocab_size - 1
    assert tokenizer.decode([last]) == f" {word(last)}"
    assert tokenizer.encode(f" {word(last)} {word(last - 1)}") == [last, last - 1]


def test_a_synthetic_thinker_is_served(synthetic_thinker_artifact: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 1.0, "seed": 1}
    with (
        run_server(lambda: open_service(synthetic_thinker_artifact, media=InProcessDecoder())) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] > 2 and 1 <= usage["completion_tokens"] <= 4
