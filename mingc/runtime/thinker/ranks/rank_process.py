"""Process of a thinker rank above 0: receives steps from rank 0 (`rank_group`) and runs them on its own worker.

`python -m mingc.runtime.thinker.ranks.rank_process CONFIG` starts it; CONFIG is the JSON of `WorkerConfig`. It ends
when its step socket or the parent pipe closes; the kernel closes them however the server dies.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from mingc.artifacts.artifact import open_unchecked
from mingc.artifacts.codec import decode
from mingc.host.parent_watchdog import watch_pipe
from mingc.runtime.distributed import process_group
from mingc.runtime.engines.stage_loader import load_stage
from mingc.runtime.thinker.create_worker import create_worker
from mingc.runtime.thinker.ranks.step_codec import receive_num_pages, receive_step
from mingc.runtime.thinker.step import PrefillStep, SampleStep
from mingc.runtime.thinker.step_options import DEFAULT_STEPS, StepOptions

LOADED, READY = b"L", b"R"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Configuration of one rank process.

    Attributes:
        port: port of the store for the rendezvous, see `process_group.host_store`.
        timeout_s: limit of collectives that the host waits for.
        step_socket: file descriptor; the number of KV pages and steps come in, `LOADED` and `READY` go out.
        parent_pipe: file descriptor that is closed when the server dies.
    """

    artifact: str
    rank: int
    world_size: int
    device: str
    num_threads: int
    port: int
    timeout_s: float
    step_socket: int
    parent_pipe: int
    options: StepOptions = DEFAULT_STEPS


def main() -> None:
    config = decode(WorkerConfig, json.loads(sys.argv[1]))
    # A terminal sends these signals to the whole process group; the server decides when its ranks end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch_pipe(config.parent_pipe)  # ends the process also while it waits in a collective
    torch.set_num_threads(config.num_threads)
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with socket.socket(fileno=config.step_socket) as sock:
        # The server has checked the artifact, and that its engines run here.
        artifact = open_unchecked(Path(config.artifact))
        manifest = artifact.manifest
        decoder = manifest.graph.text_decoder()
        assert decoder is not None, "the server found the decoder"
        stage = load_stage(artifact, decoder, device, rank=config.rank)
        sock.sendall(LOADED)
        num_pages = receive_num_pages(sock)
        if num_pages is None:
            return  # rank 0 gave up
        process_group.init(
            rank=config.rank,
            world_size=config.world_size,
            port=config.port,
            device=config.device,
            timeout_s=config.timeout_s,
        )
        worker = create_worker(stage, manifest, num_pages=num_pages, device=device, options=config.options)
        sock.sendall(READY)
        while (step := receive_step(sock)) is not None:
            if isinstance(step, PrefillStep):
                (worker.prefill if step.sampling is None else worker.launch_prefill)(step)
            elif isinstance(step, SampleStep):
                worker.launch_sampling(step)
            elif step.sampling is None:
                worker.decode(step)
            else:
                worker.launch_decode(step)
        worker.close()
    process_group.shutdown()


if __name__ == "__main__":
    main()
