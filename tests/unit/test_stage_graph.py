"""The stage graph: faults are listed, producers and paths are found, and stages come in data-flow order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mingc.artifacts.stage_graph import CLIENT, Edge, ImagePath, SpeechPath, StageGraph, StageNode

# Consumers first: the order of nodes and edges must not matter.
SPEAKING = StageGraph(
    nodes=(
        StageNode(name="vocoder", policy="stream"),
        StageNode(name="sampler", policy="loop"),
        StageNode(name="speaker", policy="autoregressive"),
        StageNode(name="decoder", policy="autoregressive"),
        StageNode(name="eye", policy="once"),
    ),
    edges=(
        Edge("vocoder", CLIENT, "speech"),
        Edge("decoder", CLIENT, "text"),
        Edge("sampler", "vocoder", "latents"),
        Edge("sampler", "speaker", "patch_embedding"),
        Edge("speaker", "sampler", "condition"),
        Edge("decoder", "speaker", "text"),
        Edge("eye", "decoder", "image"),
    ),
)


DRAWING = StageGraph(
    nodes=tuple(
        StageNode(name=name, policy="once") for name in ("developer", "decoder", "painter", "font", "idea")
    ),
    edges=(
        Edge("developer", CLIENT, "picture"),
        Edge("painter", "developer", "latents"),
        Edge("font", "painter", "glyph"),
        Edge("idea", "painter", "condition"),
        Edge("decoder", "idea", "hidden"),
        Edge("decoder", CLIENT, "text"),
    ),
)


def without(source: str, port: str, graph: StageGraph = SPEAKING) -> StageGraph:
    """`graph` without the edge from `source` to `port`."""
    edges = tuple(edge for edge in graph.edges if (edge.source, edge.port) != (source, port))
    assert len(edges) == len(graph.edges) - 1
    return replace(graph, edges=edges)


def test_a_sound_graph_has_no_problem() -> None:
    assert not [*SPEAKING.problems()]


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        (replace(SPEAKING, version=2), "stage graph of version 2, expected 1"),
        (replace(SPEAKING, nodes=(*SPEAKING.nodes, SPEAKING.nodes[0])), "stage vocoder is listed twice"),
        (
            replace(SPEAKING, nodes=(*SPEAKING.nodes, StageNode(name="client", policy="once"))),
            "'client' is not a valid stage name",
        ),
        (
            replace(SPEAKING, edges=(*SPEAKING.edges, Edge("ear", "decoder", "audio"))),
            "edge ear → decoder.audio names ear, which is not a stage of the graph",
        ),
        (
            replace(SPEAKING, edges=(*SPEAKING.edges, Edge("eye", "painter", "image"))),
            "edge eye → painter.image names painter, which is not a stage of the graph",
        ),
        (
            replace(SPEAKING, edges=(*SPEAKING.edges, Edge("sampler", "decoder", "image"))),
            "port image of decoder has several producers: eye, sampler",
        ),
    ],
)
def test_a_fault_is_listed_once(graph: StageGraph, problem: str) -> None:
    assert [*graph.problems()] == [problem]


def test_paths_are_found_from_the_ports_of_the_client() -> None:
    assert SPEAKING.text_decoder() == "decoder"
    assert SPEAKING.speech_path() == SpeechPath(speech_llm="speaker", sampler="sampler", vocoder="vocoder")
    assert SPEAKING.producer("decoder", "video") is None


@pytest.mark.parametrize(
    ("source", "port"), [("vocoder", "speech"), ("sampler", "latents"), ("speaker", "condition")]
)
def test_speech_needs_every_stage_of_its_path(source: str, port: str) -> None:
    assert without(source, port).speech_path() is None


def test_pictures_need_every_stage_of_their_path_but_the_glyphs() -> None:
    path = ImagePath(condition="idea", glyph="font", sampler="painter", decoder="developer")
    assert DRAWING.image_path() == path
    assert without("font", "glyph", DRAWING).image_path() == replace(path, glyph=None)
    for edge in DRAWING.edges:
        if edge.source != "font":
            assert without(edge.source, edge.port, DRAWING).image_path() is None
    assert SPEAKING.image_path() is None


def test_stages_come_after_their_producers() -> None:
    """The edge from the sampler to the speech LLM is feedback: the sampler comes after the stage that it serves."""
    assert SPEAKING.data_flow() == ("eye", "decoder", "speaker", "sampler", "vocoder")


def test_policies_are_found_by_name() -> None:
    assert SPEAKING.policy("vocoder") == "stream"
    with pytest.raises(KeyError, match="no stage ear"):
        SPEAKING.policy("ear")
