"""Choice of the engines that this machine runs from an artifact for several targets. No torch.

The rule: among targets whose engines run here, those for a GPU come before those for a CPU, then the one that the
export named first. `--target` selects one; there is no fallback to another target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mingc.artifacts.artifact import Artifact, check_fingerprint, fingerprint_problems
from mingc.artifacts.manifest import Fingerprint, Manifest
from mingc.artifacts.target import cuda_capability, is_rtx, rtx_capabilities
from mingc.errors import ConfigError, IncompatibleError
from mingc.host.machine import Host

OPTION = "--target"

HostOf = Callable[[str], Host]
"""The machine as seen for a device, `cpu` or `cuda`; as a CPU where there is no GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFit:
    """Whether the engines for one target run on this machine, and whether they are loaded."""

    target: str
    needs: str
    runs: bool
    is_loaded: bool
    reason: str


def target_views(manifest: Manifest) -> tuple[Manifest, ...]:
    """The manifest once for each target, in the order of the export, reduced to the engines for that target."""
    first = replace(manifest, other_targets=())
    others = tuple(
        replace(
            first,
            fingerprint=replace(
                manifest.fingerprint, target=each.target, device=each.device, capability=each.capability
            ),
            stages=each.stages,
            parameters=each.parameters,
            served_goldens=each.served_goldens,
        )
        for each in manifest.other_targets
    )
    return (first, *others)


def target_view(manifest: Manifest, target: str | None) -> Manifest:
    """The view for `target`; None: the first. Nothing is compared with this machine.

    Raises: ConfigError when the artifact has no engines for `target`.
    """
    views = target_views(manifest)
    return views[0] if target is None else _asked(views, target)


def choose_target(manifest: Manifest, host_of: HostOf, asked: str | None = None) -> Manifest:
    """The view of `manifest` whose engines this machine runs: those for the target `asked`, else by the rule above.

    Raises: ConfigError when the artifact has no engines for `asked`; IncompatibleError when those do not run here, or
        none of the artifact do.
    """
    views = target_views(manifest)
    if asked is not None or len(views) == 1:
        view = views[0] if asked is None else _asked(views, asked)
        recorded = view.fingerprint
        try:
            check_fingerprint(recorded, host_of(recorded.device))
        except IncompatibleError as error:
            others = [each.fingerprint.target for each in views if not _problems(each, host_of)]
            if not others:
                raise
            raise IncompatibleError(
                f"the engines for {recorded.target} do not run here: {_why_not(view, host_of)}",
                where=OPTION,
                fix=f"leave {OPTION} out, or pass {OPTION} {others[0]}; {recorded.target} needs "
                f"{needed_machine(recorded)}",
            ) from error
        return view
    fitting = [each for each in views if not _problems(each, host_of)]
    if not fitting:
        listed = "\n".join(f"  {each.fingerprint.target}: {_why_not(each, host_of)}" for each in views)
        raise IncompatibleError(
            f"none of the artifact's targets is this machine:\n{listed}",
            where="manifest.json, fingerprint",
            fix="run it on one of them with the torch it was built with, or export again here",
        )
    return min(fitting, key=_is_for_cpu)


def with_target(artifact: Artifact, host_of: HostOf, asked: str | None = None) -> Artifact:
    """`artifact` reduced to the engines for one target. Raises: as `choose_target`."""
    return replace(artifact, manifest=choose_target(artifact.manifest, host_of, asked))


def explain_targets(manifest: Manifest, host_of: HostOf, asked: str | None = None) -> tuple[TargetFit, ...]:
    """For each target of the artifact whether its engines run here, and why they are loaded or not."""
    views = target_views(manifest)
    try:
        loaded = choose_target(manifest, host_of, asked).fingerprint.target
    except (IncompatibleError, ConfigError):
        loaded = None
    fits = []
    for view in views:
        target, problems = view.fingerprint.target, _problems(view, host_of)
        if problems:
            reason = _why_not(view, host_of)
        elif target != loaded:
            reason = f"runs here as well: {OPTION} {target} asks for it"
        elif len(views) == 1:
            reason = "the only one"
        else:
            reason = f"asked for by {OPTION}" if asked is not None else _preference(views, view, host_of)
        fits.append(
            TargetFit(
                target=target,
                needs=needed_machine(view.fingerprint),
                runs=not problems,
                is_loaded=target == loaded,
                reason=reason,
            )
        )
    return tuple(fits)


def needed_machine(recorded: Fingerprint) -> str:
    """The machine that engines need, in words: `a GPU of compute capability 8.6 or 8.9`."""
    if recorded.device == "cpu":
        return f"a CPU with {recorded.capability}"
    card = "an RTX card" if is_rtx(recorded.target) else "a GPU"
    return f"{card} of compute capability {' or '.join(recorded.capability.split(','))}"


def _asked(views: tuple[Manifest, ...], asked: str) -> Manifest:
    """The view for the target `asked`; RTX cards may be some of those that a target names, `cuda:smNN` is a `cuda`."""
    try:
        cards, gpu = {*(rtx_capabilities(asked) or ())}, cuda_capability(asked)
        for view in views:
            own = view.fingerprint.target
            if own == asked or (cards and cards <= {*(rtx_capabilities(own) or ())}):
                return view
            if gpu is not None and (own, view.fingerprint.capability) == ("cuda", "{}.{}".format(*gpu)):
                return view
    except ValueError as error:
        raise ConfigError(f"{OPTION} {asked}: {error}", where=OPTION) from error
    held = ", ".join(map(_name, views))
    raise ConfigError(
        f"the artifact has no engines for {asked}",
        where=OPTION,
        fix=f"it has those for {held}; or export again with --target {asked}",
    )


def _name(view: Manifest) -> str:
    """The target of `view`; of CUDA with the GPU: `cuda:smNN`."""
    recorded = view.fingerprint
    return f"cuda:sm{recorded.capability.replace('.', '')}" if recorded.target == "cuda" else recorded.target


def _problems(view: Manifest, host_of: HostOf) -> list[str]:
    return fingerprint_problems(view.fingerprint, host_of(view.fingerprint.device))


def _why_not(view: Manifest, host_of: HostOf) -> str:
    """Why the engines of `view` do not run here, in one line."""
    recorded, problems = view.fingerprint, _problems(view, host_of)
    here = host_of(recorded.device)
    if recorded.device == "cuda" and here.device == "cpu":
        return "built; this machine has no CUDA device"
    if recorded.device == "cuda" and here.capability not in recorded.capability.split(","):
        return f"built; the GPU here has compute capability {here.capability}"
    return f"built; {', '.join(problems)}"


def _is_for_cpu(view: Manifest) -> bool:
    return view.fingerprint.device == "cpu"


def _preference(views: tuple[Manifest, ...], chosen: Manifest, host_of: HostOf) -> str:
    """Why `chosen` comes before the other views."""
    if not _is_for_cpu(chosen):
        return "the first target with engines for this GPU"
    if all(map(_is_for_cpu, views)):
        return "the first target that runs here"
    if host_of("cuda").device == "cpu":
        return "no CUDA device"
    return "no engines for this GPU"
