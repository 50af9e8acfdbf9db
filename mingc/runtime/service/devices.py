"""Devices and host threads of a service: one for each rank of the thinker, one for each talker, those that draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mingc.artifacts.artifact import fingerprint_problems
from mingc.artifacts.manifest import Fingerprint
from mingc.errors import ConfigError, IncompatibleError
from mingc.host.machine import current_host
from mingc.runtime.service.options import EngineOptions

_TALKER_DEVICE, _IMAGE_DEVICE = "--talker-device", "--image-device"


def host_threads(device: str, requested: int | None) -> int | None:
    """Threads for torch's work on the host; None keeps torch's setting.

    With a GPU the host only prepares inputs. A copy of more than 32,768 values (the inputs of a prompt or of sixteen
    patches) would use several threads and wait until the last one is scheduled, sometimes for many times the duration
    of the copy.
    """
    return 1 if requested is None and device == "cuda" else requested


def start_device(device: torch.device) -> None:
    """Create the context of a CUDA device, which loading would otherwise do."""
    torch.cuda.synchronize(device)


def rank_devices(kind: str, world_size: int) -> list[torch.device]:
    """A device for each rank of the thinker. Raises: ConfigError when too few GPUs are visible."""
    if kind != "cuda":
        return [torch.device(kind)] * world_size
    if torch.cuda.device_count() < world_size:
        raise ConfigError(
            f"{world_size} ranks need as many GPUs, {torch.cuda.device_count()} are visible",
            where="CUDA_VISIBLE_DEVICES",
            fix="make more GPUs visible, or export with a smaller --tp",
        )
    return [torch.device("cuda", index) for index in range(world_size)]


def talker_devices(options: EngineOptions, recorded: Fingerprint, *, has_speech: bool) -> list[torch.device]:
    """The devices that `options` name for talkers; an empty list means the default.

    Raises: ConfigError when no talker is loaded, its engines run on another kind of device, or a GPU is not visible;
        IncompatibleError when its engines do not run on one of the GPUs.
    """
    return _named_devices(
        _TALKER_DEVICE,
        options.talker_devices,
        recorded,
        None if has_speech else ("no speech stages of the artifact are loaded", "talker, cfm and audio_vae"),
    )


def image_devices(options: EngineOptions, recorded: Fingerprint, *, draws: bool) -> list[torch.device]:
    """The devices that `options` name for pictures; an empty list means the default.

    Raises: as of `talker_devices`, when the artifact does not draw or its engines do not run there.
    """
    return _named_devices(
        _IMAGE_DEVICE,
        options.image_devices,
        recorded,
        None if draws else ("the artifact draws no pictures", "image_condition, image_dit and image_vae"),
    )


def _named_devices(
    flag: str, names: Sequence[str], recorded: Fingerprint, missing: tuple[str, str] | None
) -> list[torch.device]:
    """The devices that option `flag` names. `missing`: why there is nothing to load, and stages that would be."""
    if not names:
        return []
    if missing is not None:
        problem, stages = missing
        raise ConfigError(
            f"{flag} {','.join(names)}: {problem}",
            where=flag,
            fix=f"leave it out, or export {stages} as well",
        )
    devices = [*map(torch.device, names)]
    for device in devices:
        if device.type != recorded.device:
            raise ConfigError(
                f"{flag} {device}: the engines of the artifact run on {recorded.device}",
                where=flag,
                fix=f"name devices of that kind ({'cpu' if recorded.device == 'cpu' else 'cuda:0'}), or leave it out",
            )
        if device.type == "cuda":
            _check_gpu(flag, device, recorded)
    return devices


def _check_gpu(flag: str, device: torch.device, recorded: Fingerprint) -> None:
    visible = torch.cuda.device_count()
    if device.index >= visible:
        raise ConfigError(
            f"{flag} {device}: {visible} GPUs are visible, cuda:0 to cuda:{visible - 1}",
            where=flag,
            fix="name one of them, or make more visible (CUDA_VISIBLE_DEVICES)",
        )
    problems = fingerprint_problems(recorded, current_host("cuda", device.index))
    if problems:
        raise IncompatibleError(
            f"{flag} {device}: the engines do not run there: {', '.join(problems)}",
            where=flag,
            fix=f"name a GPU of compute capability {' or '.join(recorded.capability.split(','))}, or leave it out",
        )
