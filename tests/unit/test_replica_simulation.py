"""The simulation of many replicas: queueing by hand, and what a load needs of proxies and controller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from replica_simulation import (
    MAX_BATCH,
    MAX_ONGOING,
    MeasuredSteps,
    Simulation,
    needed,
    proxy_chunk_rate,
    simulate_clients,
)

# One request a step takes 10 ms, each further one 1 ms more.
STEPS = MeasuredSteps((0.0, *(0.010 + 0.001 * more for more in range(MAX_BATCH))))


def test_a_request_alone_gets_a_patch_per_step() -> None:
    simulation = Simulation(STEPS, 1, "two choices", 0)
    simulation.arrive(1.0, 3)
    simulation.run(2.0)
    assert simulation.first_audio == [(1.0, pytest.approx(0.010))] and simulation.num_patches == 3


def test_a_request_that_comes_during_a_step_joins_the_next() -> None:
    """It waits for 8 of the first 10 ms, and its first step has two requests: 11 ms."""
    simulation = Simulation(STEPS, 1, "random", 0)
    simulation.arrive(0.0, 5)
    simulation.arrive(0.002, 5)
    simulation.run(1.0)
    assert simulation.first_audio[1] == (0.002, pytest.approx(0.008 + 0.011))


def test_the_router_takes_the_replica_with_fewer_requests_and_waits_when_it_is_full() -> None:
    simulation = Simulation(STEPS, 2, "two choices", 0)
    for _ in range(2 * MAX_ONGOING + 1):
        simulation.arrive(0.0, 100)
    simulation.run(0.001)
    assert [replica.ongoing for replica in simulation.replicas] == [MAX_ONGOING, MAX_ONGOING]
    assert simulation.num_backoffs == 1


def test_clients_that_follow_each_other_fill_a_replica() -> None:
    """32 at a time: 32 patches in 41 ms, 0.32 s of sound each."""
    assert simulate_clients(STEPS, 32, 60, 60.0) == pytest.approx(32 * 0.32 / 0.041, rel=0.01)


def test_what_a_load_needs_of_proxies_and_controller() -> None:
    """A full replica sends 32 patches in 41 ms: 780 a second. At 500 chunks per second and proxy, 10 need 16."""
    proxies, controller = needed(STEPS, 10, 1.0, 60, 500)
    assert (proxies["median"], proxies["chunks_per_s"], proxies["requests_per_s"]) == (16, 7805, 130.1)
    assert proxies["for_requests_alone"] == 1 and controller["autoscaling"] == "within"
    words = [needed(STEPS, count, 1.0, 60, 500)[1]["autoscaling"] for count in (499, 500, 1000, 2000)]
    assert words == ["within", "with care", "with changes of Ray", "beyond it"]


def test_the_rate_of_a_proxy_is_that_of_the_most_streams_without_much_lag(tmp_path: Path) -> None:
    rows = [("mingc serve", 64, 1.0), ("Ray Serve", 1, 2.0), ("Ray Serve", 8, 50.0), ("Ray Serve", 32, 50.1)]
    figures = [
        {"name": "chunk_lag_ms", "front": front, "streams": count, "p99": p99} for front, count, p99 in rows
    ]
    # One of another part of the run, which has no front.
    figures.append({"name": "chunk_lag_ms", "settings": "none", "streams": 64, "p99": 1.0})
    (tmp_path / "r.json").write_text(json.dumps({"figures": figures}))
    assert proxy_chunk_rate(tmp_path / "r.json") == (400, 50.0)
