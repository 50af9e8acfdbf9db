"""One tensor-parallel rank in a process of its own, as the runtime would run it: `python thinker_rank.py JOB`.

JOB is JSON: rank, world_size, port, weights, and for every graph its name, engine, inputs and output file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mingc.runtime import distributed
from mingc.runtime.engines.aoti import load


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    distributed.init(rank=job["rank"], world_size=job["world_size"], port=job["port"], timeout_s=60)
    weights = load_file(job["weights"])
    for graph in job["graphs"]:
        engine = load(Path(graph["engine"]), torch.device("cpu"))
        engine.bind(weights)
        tensors = load_file(graph["inputs"])
        arguments = [tensors[name] for name in graph["names"]]
        # Many runs: the group's threads and the engine's must get along however they interleave.
        for _ in range(50):
            outputs = engine.run(arguments)
        save_file({"logits": outputs[0].contiguous()}, graph["outputs"])
    loaded = {name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules}
    assert not loaded, f"running an engine loaded {loaded}"
    distributed.shutdown()


if __name__ == "__main__":
    main()
