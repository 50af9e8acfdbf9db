"""The manifest of an artifact: stages, stage graph, parameters, engines, files and build fingerprint. No torch."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from mingc.artifacts.codec import decode, encode
from mingc.artifacts.parameter_ranges import range_problems
from mingc.artifacts.parameters import BUILT_IN
from mingc.artifacts.signature_problems import signature_problems
from mingc.artifacts.spec import GraphSpec
from mingc.artifacts.stage_graph import StageGraph
from mingc.artifacts.target import KernelConfig
from mingc.errors import ArtifactError, ManifestError

SCHEMA = 11
FILE_NAME = "manifest.json"
NO_SERVED_GOLDENS = "no served goldens: "  # begins the note that says why an export recorded no requests
_MAX_SIZE = 1 << 40  # of one dim of a tensor; larger ones overflow where sizes are multiplied
_DTYPES = ("float32", "bfloat16")
_HASH_KEY = "sha256"  # of the document without this key
_FIX = "copy the artifact again, or export again"

_Parameters = TypeVar("_Parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The environment and the machine that engines were built for; compared with this machine before loading."""

    mingc: str
    torch: str  # release, without the local build tag: engines of 2.13.0+cpu and 2.13.0 are the same code
    target: str
    device: str  # cpu or cuda
    capability: str  # instruction set or compute capability the engines need
    dtype: str
    world_size: int
    config_sha256: str
    checkpoint_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Distance of a compiled graph from its float32 reference: worst relative error of any output.

    `eager` is the error of the uncompiled module. The reference computes with the stored weights; when they are
    quantized, `quantization` is its distance from the float32 reference with the checkpoint's weights. `rerouted` is
    the share of tokens that rounding sends to other experts; each is compared with the reference computed with these
    experts. None: nothing is routed, or nothing is rounded. `untested_experts` counts experts that
    no token of the check is routed to; None: the graph has no router.
    """

    compiled: float
    eager: float
    quantization: float | None = None
    rerouted: float | None = None
    untested_experts: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCost:
    """Minimum work of one call of an engine at sizes `dims`, as counted in the traced graph.

    Attributes:
        flops: operations of matrix products, convolutions and attention; a multiply-add is two.
        weight_bytes: every weight once; for tables only the rows that are used.
        reuse_bytes: weights that are read again, counted for each further use; a cache may hold some.
        state_bytes: state read or written.
        context_flops, context_bytes: what each token of context per request adds to these.
        uncounted: kernels without a cost rule; if there are any, the figures are too small.
    """

    dims: dict[str, int]
    flops: int
    weight_bytes: int
    state_bytes: int
    reuse_bytes: int = 0
    context_flops: int = 0
    context_bytes: int = 0
    uncounted: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRecord:
    """One compiled engine of a graph.

    `dims` are the sizes that a static engine was compiled for; None: the engine takes every size in the graph's ranges.
    `file` is relative to the artifact. `cost` holds one entry for a static engine, else one for every combination of
    buckets.
    """

    backend: str
    file: str
    dims: dict[str, int] | None
    compile_seconds: float
    cost: tuple[EngineCost, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTiming:
    """Calls of one backend's engine at sizes `dims`, timed at export alternately with other backends.

    If one of them failed, each was timed alone. `median_us`: microseconds of the median of `calls` calls.
    """

    backend: str
    dims: dict[str, int]
    median_us: float
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendRefusal:
    """A backend that could not build a graph, or whose engines failed a check or a timing, and the reason."""

    backend: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendTrial:
    """Results of `--backend auto` for a graph. `device` names the processor or GPU that engines were timed on.

    Without `timings` a single backend was left.
    """

    device: str
    timings: tuple[EngineTiming, ...] = ()
    refused: tuple[BackendRefusal, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRecord:
    """One graph of a stage: its I/O signature, one engine for all sizes or one per size, its golden and its parity.

    `trial` says why `--backend auto` kept these engines; None: the backend was named. `auto` may keep engines of
    different backends for different sizes.
    """

    spec: GraphSpec
    engines: tuple[EngineRecord, ...]
    golden: str
    parity: Parity
    trial: BackendTrial | None = None

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of the engines."""
        return tuple(dict.fromkeys(engine.backend for engine in self.engines))


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationError:
    """Quantization error of a decoder, on one prompt of random text; all arithmetic in float32.

    `layer_cosine` is the cosine between the residual update of each layer and its update with the checkpoint's weights
    from the same stream: the mean over tokens. `layer_scale` is the size of the update along the exact one, relative to
    the exact one: the median over tokens; empty in artifacts of older exports. `logit_kl` is the mean divergence
    KL(exact ‖ quantized) of the next token's distributions after all layers, in nats; `same_argmax` is the share of
    tokens whose most likely next token does not change.
    """

    tokens: int
    layer_cosine: tuple[float, ...]
    logit_kl: float
    same_argmax: float
    layer_scale: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedKernel:
    """The fastest of the timed configurations of the mixture-of-experts kernels for `tokens` tokens.

    Attributes:
        kernel: moe_gemv (one token including its routing), expert_gemv (one routed token), batch (a few tokens) or
            grouped (a prefill chunk).
        intermediate_size: this rank's share of an expert.
        top_k: experts of a token.
        up, down: the experts' first and second GEMM.
        block_m, swap_operands, extra_rows: for grouped GEMMs, see `mingc.kernels.triton.moe_config.MoeConfig`.
        us, default_us: microseconds for a layer's experts with this configuration and with the default one; equal when
            the default was the fastest.
        device: name of the GPU they were timed on.
    """

    kernel: Literal["moe_gemv", "expert_gemv", "batch", "grouped"]
    tokens: int
    hidden_size: int
    intermediate_size: int
    experts: int
    top_k: int
    weight_format: Literal["bfloat16", "fp8", "int4"]
    up: KernelConfig
    down: KernelConfig
    block_m: int
    swap_operands: bool
    extra_rows: int
    us: float
    default_us: float
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """One stage: graphs by name, and the weights files of each rank (of one rank when the stage is not sharded).

    `quantization_error` is set when the weights of a decoder are quantized. `repeated` maps a layer instance
    without stored weights to the instance whose weights are stored: an export of random weights stores one instance of
    a graph, and loading draws the others from the same distribution, seeded by their names. `kernel_configs` lists the
    kernels that were timed at export.
    """

    is_sharded: bool
    weights: tuple[tuple[str, ...], ...]
    graphs: dict[str, GraphRecord]
    quantization_error: QuantizationError | None = None
    repeated: dict[str, str] = field(default_factory=dict)
    kernel_configs: tuple[TunedKernel, ...] = ()

    @property
    def weights_files(self) -> tuple[str, ...]:
        """The weights files of all ranks."""
        return tuple(file for files in self.weights for file in files)


@dataclass(frozen=True, kw_only=True, slots=True)
class VoiceRecord:
    """A registered voice. `file` holds `latents` (1, 4N, 64), `embeds` (N, D), `speaker` (D,), all float32."""

    name: str
    file: str
    transcript: str
    num_patches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole manifest.json. Paths are relative to the artifact and use `/`.

    `parameters` maps a built-in stage to its dataclass, and a stage of another distribution to JSON, which
    `parameters_of` reads as the dataclass of that distribution.
    """

    schema: int
    model: str
    fingerprint: Fingerprint
    stages: dict[str, StageRecord]
    graph: StageGraph
    parameters: Mapping[str, Any]
    tokenizers: dict[str, str]  # stage → tokenizer.json
    speaker_network: str | None  # ONNX file of the speaker embedding, for voices registered later
    voices: tuple[VoiceRecord, ...]
    notes: tuple[str, ...]  # fix-ups and omissions of the export, one line each
    files: dict[str, FileRecord]
    served_goldens: str | None = None  # whole requests and their answers; None: no prompt can be built

    def to_json(self) -> str:
        """The content of manifest.json, with the hash that `read_manifest` checks."""
        document = encode(self)
        document[_HASH_KEY] = content_hash(document)
        return json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True) + "\n"

    @property
    def hash(self) -> str:
        """The hash that `manifest.json` contains."""
        return content_hash(encode(self))

    @property
    def weights_files(self) -> frozenset[str]:
        """The weights files of all stages."""
        return frozenset(file for stage in self.stages.values() for file in stage.weights_files)

    def named_files(self) -> Iterator[str]:
        """Every file that a record names."""
        for stage in self.stages.values():
            yield from stage.weights_files
            for graph in stage.graphs.values():
                yield graph.golden
                yield from (engine.file for engine in graph.engines)
        yield from self.tokenizers.values()
        yield from (voice.file for voice in self.voices)
        for optional in (self.speaker_network, self.served_goldens):
            if optional is not None:
                yield optional

    def find_parameters(self, stage: str, kind: type[_Parameters]) -> _Parameters | None:
        """The parameters of `stage`, None when the artifact has none. JSON of other distributions is decoded here.

        Raises: ManifestError when the dataclass `kind` does not describe them.
        """
        given = self.parameters.get(stage)
        if given is None or isinstance(given, kind):
            return given
        where = f"$.parameters.{stage}"
        if not isinstance(given, Mapping):
            raise ManifestError(f"{stage} has {type(given).__name__}, not {kind.__name__}", where=where)
        return _read_parameters(kind, given, where)

    def parameters_of(self, stage: str, kind: type[_Parameters]) -> _Parameters:
        """As `find_parameters`. Raises: ArtifactError as well, when the artifact has no parameters of `stage`."""
        found = self.find_parameters(stage, kind)
        if found is None:
            raise ArtifactError(
                f"the manifest has no parameters of {stage}", where=FILE_NAME, fix="export again"
            )
        return found

    def stages_by_backend(self) -> dict[str, list[str]]:
        """The stages that have engines of each backend."""
        found: dict[str, list[str]] = {}
        for name, stage in self.stages.items():
            for backend in dict.fromkeys(each for graph in stage.graphs.values() for each in graph.backends):
                found.setdefault(backend, []).append(name)
        return found

    def voice(self, name: str) -> VoiceRecord | None:
        """The voice called `name`, or None."""
        return next((voice for voice in self.voices if voice.name == name), None)


def content_hash(document: Mapping[str, Any]) -> str:
    """sha256 of a manifest document without its own hash; whitespace and the order of keys do not matter."""
    content = {key: value for key, value in document.items() if key != _HASH_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest()


def read_manifest(artifact: Path) -> Manifest:
    """The manifest of the artifact folder; no other file is read. Raises ManifestError.

    A value that cannot be read is reported with its path; the hash detects all other changes.
    """
    path = artifact / FILE_NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(
            f"{artifact} holds no {FILE_NAME}" if artifact.exists() else f"{artifact} does not exist",
            where=str(artifact),
            fix="pass a folder that mingc export wrote",
        ) from None
    except PermissionError:
        raise ManifestError(
            f"this user may not read {FILE_NAME}",
            where=str(path),
            fix=f"run chmod -R a+rX {shlex.quote(str(artifact))} as the owner, or run as the owner",
        ) from None
    except OSError as error:
        raise ManifestError(f"{FILE_NAME} is not readable: {error}", where=str(path), fix=_FIX) from error
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, path: str) -> Manifest:
    """The manifest with this content; `path` names it in errors. Raises ManifestError."""
    try:
        document: Any = json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise ManifestError(f"{FILE_NAME} is not readable: {error}", where=path, fix=_FIX) from error
    except RecursionError:
        raise ManifestError(f"{FILE_NAME} is nested too deeply", where=path, fix=_FIX) from None
    schema = document.get("schema") if isinstance(document, Mapping) else None
    if schema != SCHEMA:
        raise ManifestError(
            f"manifest schema {repr(schema)[:40]}, this mingc reads schema {SCHEMA}",
            where=path,
            fix=_schema_fix(schema, document),
        )
    try:
        manifest = decode(Manifest, {key: value for key, value in document.items() if key != _HASH_KEY})
        manifest = replace(manifest, parameters=_typed(manifest.parameters))
        problems = [*_graph_problems(manifest), *_record_problems(manifest)]
        built_in = {name: given for name, given in manifest.parameters.items() if name in BUILT_IN}
        for name, given in built_in.items():
            problems += range_problems(given, f"$.parameters.{name}")
        if not problems:
            signatures = {
                stage: {graph: each.spec for graph, each in record.graphs.items()}
                for stage, record in manifest.stages.items()
            }
            problems += signature_problems(built_in, signatures, manifest.fingerprint.world_size)
    except ManifestError as error:
        raise ManifestError(error.message, where=f"{path}: {error.where}", fix=_FIX) from error
    if problems:
        raise ManifestError("\n".join(problems), where=path, fix=_FIX)
    # A file outside the artifact, or without a recorded hash, was not written by the export.
    outside = [name for name in manifest.files if not is_inside(name)]
    unlisted = sorted({*manifest.named_files()} - {*manifest.files})
    if outside or unlisted:
        problem = (
            f"{outside[0]!r} is not a path inside the artifact"
            if outside
            else f"{unlisted[0]} is not in the file table"
        )
        raise ManifestError(
            f"{FILE_NAME} names files that do not belong to the artifact: {problem}",
            where=path,
            fix=_FIX,
        )
    if document.get(_HASH_KEY) != content_hash(document):
        raise ManifestError(
            f"{FILE_NAME} is not as exported: its content does not have the sha256 that it records",
            where=path,
            fix="copy the artifact again; to change a value, export again",
        )
    return manifest


def _schema_fix(schema: object, document: Any) -> str:
    """Fix for another schema: an older artifact can be exported again, a newer one needs a newer mingc."""
    fingerprint = document.get("fingerprint") if isinstance(document, Mapping) else None
    written = fingerprint.get("mingc") if isinstance(fingerprint, Mapping) else None
    by = f" {written}" if isinstance(written, str) and written.isprintable() and len(written) < 40 else ""
    again = "export the checkpoint again with this mingc"
    if isinstance(schema, int) and schema > SCHEMA:
        return f"install the mingc{by} that wrote the artifact, or a later one; or {again}"
    return f"{again}, or install the mingc{by} that wrote the artifact, from before schema {SCHEMA}"


def _typed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the parameters of built-in stages."""
    return {
        name: decode(BUILT_IN[name], given, f"$.parameters.{name}") if name in BUILT_IN else given
        for name, given in parameters.items()
    }


def _read_parameters(kind: type[_Parameters], given: Any, where: str) -> _Parameters:
    read = decode(kind, given, where)
    problems = [*range_problems(read, where)] if kind in BUILT_IN.values() else []
    if problems:
        raise ManifestError("\n".join(problems), where=FILE_NAME, fix="export again")
    return read


def _graph_problems(manifest: Manifest) -> Iterator[str]:
    yield from manifest.graph.problems()
    nodes = {node.name for node in manifest.graph.nodes}
    for name in sorted(nodes ^ {*manifest.stages}):
        yield f"stage {name} is {'not in the stage graph' if name in manifest.stages else 'in the stage graph only'}"
    for name in sorted({*manifest.parameters} ^ {*manifest.stages}):
        if name in manifest.stages:
            yield f"stage {name} has no parameters"
        else:
            yield f"parameters of {name}, which is not a stage"


def _record_problems(manifest: Manifest) -> Iterator[str]:
    """One line per record that cannot be run: ranks without weights, a graph without engines."""
    ranks = manifest.fingerprint.world_size
    if ranks < 1:
        yield f"$.fingerprint.world_size is {ranks}, expected 1 or more"
    if manifest.fingerprint.dtype not in _DTYPES:
        yield f"$.fingerprint.dtype is {manifest.fingerprint.dtype!r}, expected {' or '.join(_DTYPES)}"
    for stage, record in manifest.stages.items():
        if not record.graphs:
            yield f"stage {stage} has no graph"
        expected = ranks if record.is_sharded else 1
        if len(record.weights) != expected:
            yield f"stage {stage} has weights of {len(record.weights)} ranks, expected {expected}"
        for name, graph in record.graphs.items():
            where = f"graph {stage}.{name}"
            if graph.spec.name != name:
                yield f"{where} has the signature of {graph.spec.name}"
            if not graph.engines:
                yield f"{where} has no engine"
            if not graph.spec.layer_instances:
                yield f"{where} has no layer instance"
            built = [None if each.dims is None else sorted(each.dims.items()) for each in graph.engines]
            if any(built.count(sizes) > 1 for sizes in built) or (None in built and len(built) > 1):
                yield f"{where} has two engines for the same sizes"
            dims = {dim.name for dim in graph.spec.dims}
            tensors = (*graph.spec.inputs, *graph.spec.outputs, *graph.spec.state)
            used = {size for tensor in tensors for size in tensor.shape if isinstance(size, str)}
            sizes = [size for tensor in tensors for size in tensor.shape if isinstance(size, int)]
            sizes += [size for dim in graph.spec.dims for size in (dim.minimum, dim.maximum, *dim.buckets)]
            absurd = [size for size in sizes if not 0 <= size <= _MAX_SIZE]
            if absurd:
                yield f"{where} has the size {absurd[0]}, expected 0 to {_MAX_SIZE}"
            if used - dims:
                yield f"{where} has no dim {', '.join(sorted(used - dims))}"
            bucketed = {dim.name for dim in graph.spec.dims if dim.buckets}
            for engine in graph.engines:
                if engine.dims is not None and bucketed - {*engine.dims}:
                    yield f"{where} has an engine without a size of {', '.join(sorted(bucketed - {*engine.dims}))}"


def is_inside(name: str) -> bool:
    """Whether `name` is a relative path, with `/`, that stays inside its folder."""
    path = PurePosixPath(name)
    is_plain = name.isprintable() and "\\" not in name  # no NUL, no half of a surrogate pair
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and is_plain
