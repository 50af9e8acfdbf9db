"""The stage graph: run policies of the stages and the edges between them. Standard library only.

Export writes it from what each stage declares; the runtime finds the stages of a service by walking back from the
ports of the client, so neither side names stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

VERSION = 1
CLIENT = "client"
_NAME = re.compile(r"[A-Za-z0-9_-]+")  # part of file names and of `stage.graph`

Policy = Literal["once", "autoregressive", "loop", "stream"]
"""How often a stage runs for a request: one call, a step per token, a fixed number of solver steps per call of its
consumer, or a call per chunk of a stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageNode:
    """A stage and its run policy."""

    name: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class Edge:
    """Output of stage `source` that is input `port` of stage `target`; either end may be `CLIENT`."""

    source: str
    target: str
    port: str

    def __str__(self) -> str:
        return f"{self.source} → {self.target}.{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechPath:
    """The stages that turn text into speech for the client."""

    speech_llm: str
    sampler: str
    vocoder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePath:
    """The stages that turn hidden rows of the text decoder into a picture for the client.

    `glyph`: encodes the text that a picture is to show; None: none does.
    """

    condition: str
    glyph: str | None
    sampler: str
    decoder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGraph:
    """Stages and edges of an artifact. The client is a node without an entry; a port has one producer at most."""

    version: int = VERSION
    nodes: tuple[StageNode, ...] = ()
    edges: tuple[Edge, ...] = ()

    def problems(self) -> Iterator[str]:
        """One line per fault.

        Faults are another version, a repeated node, an unknown end of an edge, an edge from the client to itself, and
        a port with several producers.
        """
        if self.version != VERSION:
            yield f"stage graph of version {self.version}, expected {VERSION}"
        names = [node.name for node in self.nodes]
        for name in sorted({*names}):
            if name == CLIENT or not _NAME.fullmatch(name):
                yield f"{name!r} is not a valid stage name"
            elif names.count(name) > 1:
                yield f"stage {name} is listed twice"
        for edge in self.edges:
            if edge.source == edge.target == CLIENT:
                yield f"edge {edge} joins the client with itself"
            unknown = [end for end in (edge.source, edge.target) if end not in (*names, CLIENT)]
            if unknown:
                yield f"edge {edge} names {unknown[0]}, which is not a stage of the graph"
        producers: dict[tuple[str, str], list[str]] = {}
        for edge in self.edges:
            producers.setdefault((edge.target, edge.port), []).append(edge.source)
        for (target, port), sources in producers.items():
            if len(sources) > 1:
                yield f"port {port} of {target} has several producers: {', '.join(sources)}"

    def policy(self, name: str) -> Policy:
        """The run policy of stage `name`; KeyError when the graph lacks the stage."""
        for node in self.nodes:
            if node.name == name:
                return node.policy
        raise KeyError(f"the stage graph has no stage {name}")

    def producer(self, target: str, port: str) -> str | None:
        """The stage whose output is `port` of `target`; None when no stage produces it."""
        return next(
            (edge.source for edge in self.edges if (edge.target, edge.port) == (target, port)),
            None,
        )

    def consumer(self, source: str, port: str) -> str | None:
        """The first stage that takes an output of `source` as its `port`; None when no stage does."""
        return next((edge.target for edge in self.edges if (edge.source, edge.port) == (source, port)), None)

    def text_decoder(self) -> str | None:
        """The stage that produces the client's text."""
        return self.producer(CLIENT, "text")

    def speech_path(self) -> SpeechPath | None:
        """The stages behind the client's speech; None unless all are there."""
        vocoder = self.producer(CLIENT, "speech")
        sampler = vocoder and self.producer(vocoder, "latents")
        speech_llm = sampler and self.producer(sampler, "condition")
        if not vocoder or not sampler or not speech_llm:
            return None
        return SpeechPath(speech_llm=speech_llm, sampler=sampler, vocoder=vocoder)

    def image_path(self) -> ImagePath | None:
        """The stages behind the client's pictures; None unless all are there, and the text decoder before them."""
        decoder = self.producer(CLIENT, "picture")
        sampler = decoder and self.producer(decoder, "latents")
        condition = sampler and self.producer(sampler, "condition")
        hidden = condition and self.producer(condition, "hidden")
        if not decoder or not sampler or not condition or not hidden or hidden != self.text_decoder():
            return None
        return ImagePath(
            condition=condition, glyph=self.producer(sampler, "glyph"), sampler=sampler, decoder=decoder
        )

    def data_flow(self) -> tuple[str, ...]:
        """Names of all stages, producers before their consumers where no feedback edge forbids it."""
        ordered: dict[str, None] = {}

        def visit(name: str, path: tuple[str, ...]) -> None:
            if name in ordered or name in path:
                return
            for edge in self.edges:
                if edge.target == name:
                    visit(edge.source, (*path, name))
            ordered[name] = None

        visit(CLIENT, ())
        for node in self.nodes:
            visit(node.name, ())
        return tuple(name for name in ordered if name != CLIENT)
