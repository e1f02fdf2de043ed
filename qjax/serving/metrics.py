"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from qjax.generation import Generation
from qjax.serving.errors import Unavailable
from qjax.serving.worker import Worker

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of one server; no label has a value that a client chooses."""

    def __init__(self, worker: Worker):
        self._registry = registry = CollectorRegistry()
        self.responses = Counter("qjax_responses", "Answers by route and status.", ["route", "status"], registry=registry)
        self._tokens = Counter(
            "qjax_tokens", "Tokens of prompts, those of them that were not read again, and of answers.", ["kind"], registry=registry
        )
        self._first = Histogram("qjax_first_token_seconds", "From a request's start to its first token.", buckets=SECONDS, registry=registry)
        self._decode = Histogram("qjax_decode_seconds", "From a prompt's end to the answer's.", buckets=SECONDS, registry=registry)
        self._ends = Counter("qjax_generations", "Ended generations by how they ended.", ["finish"], registry=registry)
        Gauge("qjax_requests", "Requests that run or wait.", registry=registry).set_function(lambda: worker.waiting)
        registry.register(_Caches(worker))

    def ended(self, generation: Generation) -> None:
        self._ends.labels(generation.finish).inc()
        for kind, count in (("prompt", generation.prompt_tokens), ("cached", generation.start), ("generated", len(generation.tokens))):
            self._tokens.labels(kind).inc(count)
        if generation.tokens:
            self._first.observe(generation.first_token_seconds)
            self._decode.observe(generation.decode_seconds)

    def text(self) -> bytes:
        """All of them as Prometheus reads them. Waits for the forward that runs."""
        return generate_latest(self._registry)


class _Caches:
    """The caches' own counters; none while there is no engine."""

    def __init__(self, worker: Worker):
        self._worker = worker

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()  # else the registry would collect at once, before there is an engine

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("qjax_cache", "Counters and sizes of the caches, as /v1/cache/stats has them.", labels=["tier", "name"])
        try:
            stats = self._worker.do(lambda engine: engine.caches.stats())
        except Unavailable:
            return
        for tier, values in stats.items():
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    family.add_metric([tier, name], value)
        yield family
