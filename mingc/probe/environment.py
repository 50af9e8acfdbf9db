"""The machine and the versions that a probe ran with."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime

import torch

import mingc
from mingc.host.description import installed_version, processor_name
from mingc.host.machine import driver_version, gpu
from mingc.probe.report import Environment


def this_environment() -> Environment:
    """Facts about this process and machine; None for unknown ones."""
    has_gpu = torch.cuda.is_available()
    return Environment(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        mingc=mingc.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        onnxruntime=installed_version("onnxruntime"),
        cuda=torch.version.cuda,
        driver=driver_version(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_gpu else None,  # type: ignore[no-untyped-call]
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        torch_threads=torch.get_num_threads(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        gpus=tuple(
            f"{each.name}, {each.memory_bytes / 2**30:.0f} GiB, capability {each.capability[0]}.{each.capability[1]}"
            for each in (gpu(index) for index in range(torch.cuda.device_count() if has_gpu else 0))
        ),
    )
