"""A rank above 0 of the thinker: a child process of the server that runs the steps it is sent.

Started as `python -m mingc.runtime.thinker.ranks.rank_process JOB`, JOB being the JSON of `WorkerConfig`. It ends
when its socket closes, which
the kernel does however the server dies.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.codec import decode
from mingc.artifacts.manifest import read_manifest
from mingc.runtime.distributed import process_group
from mingc.runtime.engines.stage_loader import load_stage
from mingc.runtime.thinker.ranks.step_codec import receive_step
from mingc.runtime.thinker.startup import create_worker
from mingc.runtime.thinker.step import PrefillStep

LOADED, READY = b"L", b"R"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """What a child is told.

    Attributes:
        steps: file descriptor of the socket that steps come in on and `LOADED`, `READY` go out on.
        lifeline: file descriptor of a pipe that closes when the server is gone.
        port: where the ranks meet.
        timeout_s: of a collective that the host waits for.
    """

    artifact: str
    rank: int
    world_size: int
    device: str
    num_pages: int
    num_threads: int
    port: int
    timeout_s: float
    steps: int
    lifeline: int


def main() -> None:
    job = decode(WorkerConfig, json.loads(sys.argv[1]))
    # These come to a whole group of processes; the server decides when its ranks end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_server, args=(job.lifeline,), daemon=True).start()
    torch.set_num_threads(job.num_threads)
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with socket.socket(fileno=job.steps) as sock:
        root = Path(job.artifact)
        manifest = read_manifest(root)
        stage = load_stage(Artifact(root, manifest), "thinker", device, rank=job.rank)
        sock.sendall(LOADED)
        process_group.init(
            rank=job.rank,
            world_size=job.world_size,
            port=job.port,
            device=job.device,
            timeout_s=job.timeout_s,
        )
        worker = create_worker(stage, manifest, num_pages=job.num_pages, device=device)
        sock.sendall(READY)
        while (step := receive_step(sock)) is not None:
            if isinstance(step, PrefillStep):
                (worker.prefill if step.sampling is None else worker.launch_prefill)(step)
            elif step.sampling is None:
                worker.decode(step)
            else:
                worker.launch_decode(step)
        worker.close()
    process_group.shutdown()


def _end_with_the_server(lifeline: int) -> None:
    # Also out of a collective that waits for ranks which are gone.
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
