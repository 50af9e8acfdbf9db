"""Speech by up to 1,000 replicas: a discrete-event simulation over measured step times with Serve's router policy.

A replica is what `mingc serve` does with speech: up to 32 requests advance by one patch per step; the time of a step
with n requests is that of `patch_step_ms` in a result file of `talker.py`, interpolated between the measured batches.
Requests arrive as a Poisson process, lengths in patches are geometric. The router asks two replicas at random for their
number of requests and takes the one with fewer; when that one has `max_ongoing_requests` it asks again after a pause.
This is the policy of Ray Serve's `PowerOfTwoChoicesRequestRouter`; `random` is there for comparison.

It leaves out the network, the proxies, the CPU side of a replica, and lost replicas. First it simulates 1 to 32 clients
of one replica and compares them with figures of `speech_http.py`. Rows `proxies` and `controller` give the number of
proxies and the load of the controller, from Ray's own figures and from `ray_serve.py`.

    python benchmarks/replica_simulation.py --json benchmarks/results/replica-simulation-cpu-….json
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cpu_result

RESULTS = Path(__file__).resolve().parent / "results"
STEPS, SERVED = "talker-h200-2026-11-22.json", "speech-http-h200-2026-11-21-all.json"
PROXY = "ray-serve-cpu-2026-11-23.json"
CHUNK_RATE = 50  # chunks per second of a stream that `ray_serve.py` measures
MAX_LAG_MS = 50.0  # p99 of the chunk lag up to which a proxy counts as able to carry its streams
# Requests per second of one proxy, 8 cores, 8 replicas that do nothing: docs.ray.io/en/latest/serve/performance.html
# gives 3,000 to 4,000.
PROXY_REQUESTS_PER_S = 3000
# Autoscaled replicas with one controller, by github.com/ray-project/ray/issues/60680: below 500 nothing is to be done,
# above 1,000 a change that was proposed there is needed, above 2,000 another architecture.
CONTROLLER_REPLICAS = ((500, "within"), (1000, "with care"), (2000, "with changes of Ray"))
PATCH_S = 0.32  # sound in one patch
MAX_BATCH = 32
MAX_ONGOING = 64
_BACKOFF_S = 0.025  # first pause of Serve's router when no replica has room
_POLICIES = ("two choices", "random")


@dataclass(frozen=True)
class MeasuredSteps:
    """Seconds of one step by its number of requests."""

    seconds: tuple[float, ...]  # index n: n requests

    @staticmethod
    def read(path: Path) -> MeasuredSteps:
        """From the figures `patch_step_ms` of a result file, linear between the measured batches."""
        rows = json.loads(path.read_text(encoding="utf-8"))["figures"]
        measured = {
            row["batch"]: row["median"] / 1000
            for row in rows
            if row["name"] == "patch_step_ms" and "streams" not in row and row.get("context") == 256
        }
        batches = sorted(measured)
        if batches[0] != 1 or batches[-1] < MAX_BATCH:
            raise SystemExit(f"{path.name}: batches {batches} do not cover 1 to {MAX_BATCH}")
        seconds = [0.0]
        for count in range(1, MAX_BATCH + 1):
            above = batches[bisect_left(batches, count)]
            below = max(each for each in batches if each <= count)
            share = 0.0 if above == below else (count - below) / (above - below)
            seconds.append(measured[below] + share * (measured[above] - measured[below]))
        return MeasuredSteps(tuple(seconds))

    @property
    def capacity(self) -> float:
        """Patches per second of a full batch."""
        return MAX_BATCH / self.seconds[MAX_BATCH]


@dataclass(slots=True)
class Replica:
    """Requests of one replica. `ends`: step numbers at which running ones have their last patch, a heap."""

    waiting: deque[tuple[float, int]] = field(default_factory=deque)  # arrival, patches
    joining: list[float] = field(default_factory=list)  # arrivals of those whose first patch is under way
    ends: list[int] = field(default_factory=list)
    step: int = 0
    is_stepping: bool = False
    busy_s: float = 0.0

    @property
    def ongoing(self) -> int:
        return len(self.waiting) + len(self.ends)


class Simulation:
    """Replicas, a router and the events of a run.

    Args:
        on_end: called with the time when a request ends; for closed loops.
    """

    def __init__(
        self,
        times: MeasuredSteps,
        num_replicas: int,
        policy: str,
        seed: int,
        on_end: Callable[[float], None] | None = None,
    ) -> None:
        self._times = times
        self.replicas = [Replica() for _ in range(num_replicas)]
        self._policy = policy
        self._random = random.Random(seed)
        self._on_end = on_end
        self._events: list[tuple[float, int, int, int, float, int]] = []
        self._count = 0
        self.first_audio: list[tuple[float, float]] = []  # arrival, seconds to the first patch
        self.num_patches = 0
        self.num_backoffs = 0

    def arrive(self, at: float, patches: int) -> None:
        """A request for `patches` patches at time `at`."""
        self._push(at, -1, at, patches)

    def run(self, until: float) -> None:
        """Process all events before `until`."""
        while self._events and self._events[0][0] < until:
            now, _, replica, _, arrival, patches = heapq.heappop(self._events)
            if replica < 0:
                self._route(now, arrival, patches)
            else:
                self._end_step(now, self.replicas[replica], replica)

    def _push(self, at: float, replica: int, arrival: float = 0.0, patches: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, replica, 0, arrival, patches))

    def _route(self, now: float, arrival: float, patches: int) -> None:
        count = len(self.replicas)
        first = int(self._random.random() * count)
        chosen = first
        if self._policy == "two choices" and count > 1:
            second = int(self._random.random() * (count - 1))
            second += second >= first
            chosen = min(first, second, key=lambda index: self.replicas[index].ongoing)
        replica = self.replicas[chosen]
        if replica.ongoing >= MAX_ONGOING:
            self.num_backoffs += 1
            self._push(now + _BACKOFF_S, -1, arrival, patches)
            return
        replica.waiting.append((arrival, patches))
        if not replica.is_stepping:
            self._begin_step(now, replica, chosen)

    def _begin_step(self, now: float, replica: Replica, index: int) -> None:
        while replica.waiting and len(replica.ends) < MAX_BATCH:
            arrival, patches = replica.waiting.popleft()
            heapq.heappush(replica.ends, replica.step + patches)
            replica.joining.append(arrival)
        batch = len(replica.ends)
        replica.is_stepping = batch > 0
        if batch:
            seconds = self._times.seconds[batch]
            replica.busy_s += seconds
            self.num_patches += batch
            self._push(now + seconds, index)

    def _end_step(self, now: float, replica: Replica, index: int) -> None:
        replica.step += 1
        for arrival in replica.joining:
            self.first_audio.append((arrival, now - arrival))
        replica.joining.clear()
        while replica.ends and replica.ends[0] <= replica.step:
            heapq.heappop(replica.ends)
            if self._on_end is not None:
                self._on_end(now)
        self._begin_step(now, replica, index)


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def simulate_load(
    times: MeasuredSteps,
    num_replicas: int,
    load: float,
    policy: str,
    *,
    patches: int,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Requests at `load` times the capacity; the first fifth of the run is left out."""
    rate = load * num_replicas * times.capacity / patches
    chance = random.Random(seed)
    simulation = Simulation(times, num_replicas, policy, seed + 1)
    at = 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        length = 1 + int(chance.expovariate(1 / (patches - 0.5)))
        simulation.arrive(at, length)
    simulation.run(seconds)
    late = sorted(delay * 1000 for arrival, delay in simulation.first_audio if arrival > seconds / 5)
    return {
        "name": "first_audio_ms",
        "replicas": num_replicas,
        "load": load,
        "policy": policy,
        "median": round(statistics.median(late), 2),
        "p95": round(quantile(late, 0.95), 2),
        "p99": round(quantile(late, 0.99), 2),
        "n": len(late),
        # Patches per possible patches: a step of few requests counts as a part of a full one.
        "utilisation": round(simulation.num_patches / (times.capacity * num_replicas * seconds), 4),
        "stepping": round(sum(each.busy_s for each in simulation.replicas) / (num_replicas * seconds), 4),
        "audio_s_per_s": round(simulation.num_patches * PATCH_S / seconds, 1),
        "backoffs": simulation.num_backoffs,
        "unit": "ms",
    }


def simulate_clients(times: MeasuredSteps, clients: int, patches: int, seconds: float) -> float:
    """Seconds of sound per second of one replica whose `clients` send the next request when one ends."""
    simulation = Simulation(times, 1, "random", 0, on_end=lambda now: simulation.arrive(now, patches))
    for _ in range(clients):
        simulation.arrive(0.0, patches)
    simulation.run(seconds)
    return simulation.num_patches * PATCH_S / seconds


def validate(times: MeasuredSteps, measured: Path) -> list[dict[str, Any]]:
    """One replica, simulated and as measured by `speech_http.py`: both rates, and their quotient."""
    figures = []
    for row in json.loads(measured.read_text(encoding="utf-8"))["figures"]:
        if row["name"] != "audio_s_per_s" or not row["streamed"]:
            continue
        simulated = simulate_clients(times, row["concurrency"], row["patches"], 60.0)
        figures.append(
            {
                "name": "one_replica_audio_s_per_s",
                "clients": row["concurrency"],
                "median": round(simulated, 1),
                "measured": row["median"],
                "simulated_by_measured": round(simulated / row["median"], 3),
                "unit": "s/s",
            }
        )
    return figures


def proxy_chunk_rate(measured: Path) -> tuple[int, float]:
    """Chunks per second that one proxy carried with a p99 lag of at most `MAX_LAG_MS`, and that lag.

    A lower bound: the largest measured number of streams, on the machine of the result file.
    """
    rows = [
        row
        for row in json.loads(measured.read_text(encoding="utf-8"))["figures"]
        if row["name"] == "chunk_lag_ms" and row.get("front") == "Ray Serve" and row["p99"] <= MAX_LAG_MS
    ]
    if not rows:
        raise SystemExit(f"{measured.name}: no number of streams has a p99 lag of at most {MAX_LAG_MS:g} ms")
    best = max(rows, key=lambda row: row["streams"])
    return best["streams"] * CHUNK_RATE, best["p99"]


def needed(
    times: MeasuredSteps, num_replicas: int, load: float, patches: int, chunk_rate: int
) -> list[dict[str, Any]]:
    """Proxies and controller for streamed speech at `load` times the capacity; a patch is a chunk."""
    chunks = load * num_replicas * times.capacity
    controller = next((word for most, word in CONTROLLER_REPLICAS if num_replicas < most), "beyond it")
    row = {"replicas": num_replicas, "load": load}
    return [
        {"name": "proxies", **row, "median": math.ceil(chunks / chunk_rate), "chunks_per_s": round(chunks),
         "for_requests_alone": math.ceil(chunks / patches / PROXY_REQUESTS_PER_S),
         "requests_per_s": round(chunks / patches, 1), "chunks_per_s_of_one": chunk_rate, "unit": "proxies"},
        {"name": "controller", **row, "median": num_replicas, "autoscaling": controller, "unit": "replicas"},
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="10,100,1000", help="numbers of replicas, separated by commas")
    parser.add_argument(
        "--loads", default="0.5,0.7,0.8,0.9,0.95", help="shares of the capacity, separated by commas"
    )
    parser.add_argument(
        "--patches", type=int, default=60, help="mean length of a request; 60 are 19.2 s of sound"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated time of each run")
    parser.add_argument(
        "--steps", type=Path, default=RESULTS / STEPS, help="result file with the times of steps"
    )
    parser.add_argument(
        "--proxy", type=Path, default=RESULTS / PROXY, help="result file of ray_serve.py with the part `lag`"
    )
    parser.add_argument("--json", type=Path, help="result file to write")
    given = cpu_result.parse_args(parser)
    times = MeasuredSteps.read(given.steps)
    figures = validate(times, RESULTS / SERVED)
    chunk_rate, _ = proxy_chunk_rate(given.proxy)
    for count in map(int, given.replicas.split(",")):
        for load in map(float, given.loads.split(",")):
            for row in needed(times, count, load, given.patches, chunk_rate):
                figures.append(row)
                print(json.dumps(row), flush=True)
            for policy in _POLICIES:
                figures.append(
                    simulate_load(
                        times, count, load, policy, patches=given.patches, seconds=given.seconds, seed=count
                    )
                )
                print(json.dumps(figures[-1]), flush=True)
    if given.json is not None:
        cpu_result.write(
            given.json,
            "replica_simulation",
            figures,
            steps=given.steps.name,
            served=SERVED,
            proxy=given.proxy.name,
        )


if __name__ == "__main__":
    main()
