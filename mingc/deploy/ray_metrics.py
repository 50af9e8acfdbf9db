"""Copies the metrics of a replica to Ray, which exports them per node with labels of replica and deployment.

A histogram becomes three counters, because Ray's histograms accept only single observations: `NAME_bucket` with the
label `le`, `NAME_sum` and `NAME_count`. `histogram_quantile` reads them as usual.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ray.serve.metrics import Counter, Gauge

from mingc.runtime.request import ServiceLoad
from mingc.server.metrics import Metrics

log = logging.getLogger("mingc.deploy")

_PREFIX = "mingc_"  # Ray itself has the metrics of the process


class RayMetrics:
    """Copies `metrics` to Ray. Call it in a replica only: Serve adds the labels of the replica."""

    def __init__(self, metrics: Metrics, load: Callable[[], ServiceLoad]) -> None:
        self._metrics = metrics
        self._load = load
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    async def publish(self, period_s: float) -> None:
        """Copy forever, every `period_s` seconds."""
        while True:
            try:
                self.copy()
            except Exception as error:  # a replica serves without metrics rather than not at all
                log.error("metrics were not copied to Ray: %s", error)
            await asyncio.sleep(period_s)

    def copy(self) -> None:
        """Set gauges, and advance counters by their growth since the last call."""
        for sample in self._metrics.samples(self._load()):
            if not sample.name.startswith(_PREFIX) or sample.name.endswith("_created"):
                continue
            tags = dict(sample.labels)
            if sample.is_counter:
                key = sample.name, tuple(sorted(tags.items()))
                added = sample.value - self._counted.get(key, 0.0)
                self._counted[key] = sample.value
                if added > 0:
                    self._counter(sample.name, tags).inc(added, tags=tags)
            else:
                self._gauge(sample.name, tags).set(sample.value, tags=tags)

    def _gauge(self, name: str, tags: dict[str, str]) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description="see docs/metrics.md", tag_keys=tuple(tags))  # type: ignore[arg-type]  # Ray: any length
        return self._gauges[name]

    def _counter(self, name: str, tags: dict[str, str]) -> Counter:
        if name not in self._counters:
            description = "see docs/metrics.md"
            # Ray adds `_total` itself.
            ray_name = name.removesuffix("_total")
            self._counters[name] = Counter(ray_name, description=description, tag_keys=tuple(tags))  # type: ignore[arg-type]  # Ray: any length
        return self._counters[name]
