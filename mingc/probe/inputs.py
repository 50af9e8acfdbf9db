"""Valid inputs and state for any engine, derived from the tensor names of its graph: a server under load.

Floats are random; the name of an integer input gives its meaning. Every request already holds `context` tokens, or as
many as its slot or pages take, in its own slot or pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mingc.artifacts.spec import GraphSpec
from mingc.dtypes import torch_dtype
from mingc.errors import ArtifactError

_SAMPLING = (0.7, 50.0, 0.95, 0.02, 1.05)  # temperature, top_k, top_p, min_p, repetition penalty
_STEADY_PATCH = 100  # a patch in the middle of a segment: the decoder's rings are full


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCase:
    """One graph at one set of sizes.

    Attributes:
        sizes: sizes of the bucketed dims, and of dims that take every size.
        context: tokens of each request before this call; together with the new ones at most `room`.
        parameters: the stage's parameters, from the manifest.
    """

    stage: str
    spec: GraphSpec
    sizes: Mapping[str, int]
    context: int
    parameters: Mapping[str, Any]

    @property
    def requests(self) -> int:
        """Requests per call; 1 for a graph of a single request."""
        return self.sizes.get("B", 1)

    @property
    def tokens(self) -> int:
        """New tokens per request."""
        return self.sizes.get("T", 1)

    @property
    def pages(self) -> int:
        """Pages for a request's context and new tokens."""
        return -(-(self.context + self.tokens) // page_size(self.parameters))

    def parameter(self, name: str) -> int:
        """Parameter `name` of the stage. Raises: ArtifactError when it has none, or not a positive number."""
        value = self.parameters.get(name)
        if not isinstance(value, int) or value < 1:
            raise ArtifactError(
                f"probe needs the parameter {name} of {self.stage} to generate inputs, found {value!r}",
                where=f"{self.stage}.{self.spec.name}",
                fix="choose other engines with --engine",
            )
        return value

    def all_sizes(self) -> dict[str, int]:
        """Sizes of all dims; pools hold what the requests need, plus slot 0 and page 0."""
        pools = {"S": self.requests + 1, "KV": page_size(self.parameters) * (1 + self.requests * self.pages)}
        sizes = {**self.sizes}
        for dim in self.spec.dims:
            if dim.name not in sizes:
                if dim.name not in pools:
                    raise ArtifactError(
                        f"dim {dim.name} has no buckets, and probe has no size for it",
                        where=f"{self.stage}.{self.spec.name}",
                    )
                sizes[dim.name] = max(pools[dim.name], dim.minimum)
        return sizes

    def io_bytes(self) -> int:
        """Bytes of all inputs and outputs of one call."""
        sizes = self.all_sizes()
        return sum(
            math.prod(each.shape_at(sizes)) * torch_dtype(each.dtype).itemsize
            for each in (*self.spec.inputs, *self.spec.outputs)
        )

    def make(self, device: torch.device) -> dict[str, Tensor]:
        """Inputs and state by name on `device`.

        Raises: ArtifactError when an integer input has an unknown name.
        """
        sizes, generator = self.all_sizes(), torch.Generator().manual_seed(1)
        tensors = {}
        for tensor in (*self.spec.inputs, *self.spec.state):
            shape = tensor.shape_at(sizes)
            dtype = torch_dtype(tensor.dtype)
            rule = _RULES.get(tensor.name)
            if rule is not None:
                value = rule(self, shape)
            elif dtype.is_floating_point:
                # Zeros would take less power than random numbers, and the device would clock higher.
                on_device = torch.Generator(device).manual_seed(1)
                value = torch.randn(shape, generator=on_device, device=device)
            elif dtype == torch.bool:
                value = torch.randint(0, 2, shape, generator=generator)
            else:
                raise ArtifactError(
                    f"probe cannot generate the integer input {tensor.name}",
                    where=f"{self.stage}.{self.spec.name}",
                    fix="choose other engines with --engine",
                )
            tensors[tensor.name] = value.to(device, dtype).contiguous()
        return tensors


def page_size(parameters: Mapping[str, Any]) -> int:
    """Tokens per page of the stage's KV pool; 1 for a stage without pages."""
    size: int = parameters.get("page_size", 1)
    return size


def room(spec: GraphSpec, sizes: Mapping[str, int], tokens_per_page: int) -> float:
    """Tokens, held and new, that fit into a request's slot or page table row; infinity without either."""
    bounds = [math.inf]
    for tensor in (*spec.inputs, *spec.state):
        shape = tensor.shape_at({**{dim.name: dim.minimum for dim in spec.dims}, **sizes})
        if tensor.name.startswith("k_slots"):
            bounds.append(shape[1])
        elif tensor.name == "page_table":
            bounds.append(shape[-1] * tokens_per_page)
    return min(bounds)


_Shape = tuple[int, ...]


def _draw(below: int, shape: _Shape) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(2))


def _input_ids(case: ProbeCase, shape: _Shape) -> Tensor:
    return _draw(case.parameter("vocab_size"), shape)


def _position_index(case: ProbeCase, shape: _Shape) -> Tensor:
    return _draw(case.parameter("position_grid_size") ** 2, shape)


def _segment(case: ProbeCase, shape: _Shape) -> Tensor:
    """Put all into one segment: prompt index per token of a chunk (T,), or patch range per patch (M, G, 2)."""
    if len(shape) == 1:
        return torch.zeros(shape)
    return torch.tensor([0, math.prod(shape[:-1])]).expand(shape)


def _slots(case: ProbeCase, shape: _Shape) -> Tensor:
    """A slot for each request, and slot 0 for rows without one."""
    slots = torch.arange(1, shape[0] + 1)
    return torch.where(slots <= case.requests, slots, 0)


def _lengths(case: ProbeCase, shape: _Shape) -> Tensor:
    """Mel frames of clips; tokens including the new one for paged requests; tokens before it for slots."""
    if "frames_per_token" in case.parameters:
        return torch.full(shape, case.sizes["T4"] * case.parameter("frames_per_token"))
    is_paged = any(each.name == "page_table" for each in case.spec.inputs)
    return torch.full(shape, case.context + (1 if is_paged else 0))


def _num_frames(case: ProbeCase, shape: _Shape) -> Tensor:
    """Frames without padding."""
    return torch.full(shape, case.sizes["T"] * case.parameter("frames_per_latent"))


def _positions(case: ProbeCase, shape: _Shape) -> Tensor:
    """Of words, and of a picture: frame, row and column of each token."""
    limits = case.parameters.get("max_positions")
    if isinstance(limits, list | tuple):
        return _draw(min(limits), shape)
    return (case.context + torch.arange(shape[-1] if case.tokens > 1 else 1)).expand(shape)


def _page_table(case: ProbeCase, shape: _Shape) -> Tensor:
    """Page table with pages in random order; unused entries are page 0."""
    generator = torch.Generator().manual_seed(3)
    pages = 1 + torch.randperm(case.requests * case.pages, generator=generator).view(
        case.requests, case.pages
    )
    table = torch.zeros(shape, dtype=torch.int64)
    table[: case.requests, : case.pages] = pages
    return table


def _sampling(case: ProbeCase, shape: _Shape) -> Tensor:
    """Fill rows with every sampling parameter and evenly spaced uniform numbers, without bans.

    Columns: `docs/internals/kernels.md`.
    """
    columns = torch.zeros(shape)
    columns[:, : len(_SAMPLING)] = torch.tensor(_SAMPLING)
    columns[:, len(_SAMPLING)] = (torch.arange(shape[0]) + 0.5) / shape[0]
    return columns


_RULES: Mapping[str, Callable[[ProbeCase, _Shape], Tensor]] = {
    "input_ids": _input_ids,
    "ids": lambda case, shape: 3 + _draw(256, shape),  # bytes
    "embed_kind": lambda case, shape: _draw(3, shape),
    "positions": _positions,
    "page_table": _page_table,
    "lengths": _lengths,
    "last": lambda case, shape: torch.full(shape, case.tokens - 1),
    "index": lambda case, shape: case.context + torch.arange(shape[0]),
    "slots": _slots,
    "patch_index": lambda case, shape: torch.full(shape, _STEADY_PATCH),
    "num_frames": _num_frames,
    "temperature": lambda case, shape: torch.zeros(shape),
    "position_index": _position_index,
    "position_weight": lambda case, shape: torch.full(shape, 0.25),
    "coordinates": lambda case, shape: _draw(64, shape),
    "segment": _segment,
    "sampling": _sampling,
}
