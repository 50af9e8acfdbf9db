"""What this machine offers to engines: torch release, device, instruction set or compute capability."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The part of a fingerprint that a machine decides."""

    torch: str
    device: str
    capability: str


def current_host(device: str) -> Host:
    """The machine this process runs on, as seen for `device` (cpu or cuda); as a CPU where there is no GPU."""
    import torch

    release = torch.__version__.split("+")[0]
    if device == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        capability = f"{major}.{minor}"
    else:
        device = "cpu"
        capability = torch.backends.cpu.get_cpu_capability()
    return Host(torch=release, device=device, capability=capability)
