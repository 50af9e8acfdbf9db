"""The engines of an artifact that this process runs: those of the requested backends, if they can be loaded here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.engine_choice import OPTION, choose_engines, parse_choice, used_backends
from mingc.artifacts.manifest import Manifest
from mingc.errors import ArtifactError
from mingc.runtime.engines.backends import unavailable


def with_engines(artifact: Artifact, words: Sequence[str], *, loads: Sequence[str] | None = None) -> Artifact:
    """`artifact` with the engines that `words` (`STAGE=BACKEND`) select, and the default ones of other stages.

    Args:
        loads: stages whose engines will be loaded; None: all.

    Raises: ConfigError when the artifact lacks them; ArtifactError when a backend cannot be loaded here. There is no
    fallback to another backend.
    """
    manifest = choose_engines(artifact.manifest, parse_choice(words))
    check_available(manifest, artifact.manifest, str(artifact.root), loads)
    return replace(artifact, manifest=manifest)


def check_available(
    chosen: Manifest, whole: Manifest, where: str, loads: Sequence[str] | None = None
) -> None:
    """Raises: ArtifactError when a backend of `chosen` cannot be loaded; it names the others in `whole`."""
    device = chosen.fingerprint.device
    for backend, stages in used_backends(chosen).items():
        needed = [stage for stage in stages if loads is None or stage in loads]
        problem = unavailable(backend, device) if needed else None
        if problem is None:
            continue
        reason, fix = problem
        others = [
            f"{stage}={other}"
            for stage in needed
            for other in _others(whole, stage, backend)
            if not unavailable(other, device)
        ]
        raise ArtifactError(
            f"the engines of {', '.join(needed)} need backend {backend}: {reason}",
            where=where,
            fix=f"{fix}; or ask for other engines of this artifact: {OPTION} {','.join(others)}"
            if others
            else fix,
        )


def _others(manifest: Manifest, stage: str, backend: str) -> list[str]:
    """Another backend than `backend` with engines of every graph of a stage, if there is one."""
    graphs = manifest.stages[stage].graphs.values()
    common = [each for each in next(iter(graphs)).backends if all(each in graph.backends for graph in graphs)]
    return [each for each in common if each != backend][:1]
