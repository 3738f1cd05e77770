"""What engines count, for Prometheus: ``pip install kvzc[prometheus]``.

::

    import prometheus_client
    kvzc.prometheus.export(engine)             # once per engine
    prometheus_client.start_http_server(9100)

Nothing is sampled or kept in between: each scrape reads ``engine.stats()`` and
``engine.peer_stats()``. A closed engine is not exported any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ._core import Engine

# Of engine.stats(): name there, name here, help.
GAUGES = [
    ("regions", "kvzc_regions", "Open regions."),
    ("storages", "kvzc_storages", "Registered storages."),
    ("grants", "kvzc_grants", "Grants that are alive."),
    ("peers", "kvzc_peers", "Connected peers."),
    ("transfers_running", "kvzc_transfers_running", "Transfers that have not ended."),
    ("arrivals_pending", "kvzc_arrivals_pending", "Tags that nobody has taken."),
    (
        "quarantined_bytes",
        "kvzc_quarantined_bytes",
        "Bytes of revoked grants that a silent peer may still touch.",
    ),
]
COUNTERS = [
    ("arrivals_arrived", "kvzc_arrivals", "Tags that came in."),
    ("arrivals_expired", "kvzc_arrivals_expired", "Tags that nobody took in arrival_ttl."),
    ("arrivals_forgotten", "kvzc_arrivals_forgotten", "Tags that were forgotten on demand."),
    (
        "temporary_registrations",
        "kvzc_temporary_registrations",
        "Memory that was registered for one transfer alone.",
    ),
]
# The same, in nanoseconds there and in seconds here.
SECONDS = [
    ("wait_ns", "kvzc_wait_seconds", "Threads waited for transfers."),
    ("arrival_wait_ns", "kvzc_arrival_wait_seconds", "Threads waited for tags."),
    ("accept_wait_ns", "kvzc_accept_wait_seconds", "Threads waited to have a transfer accepted."),
]
FAILED = "transfers_failed_"


# Ends of buckets, the same at every scrape: powers of two, as the engine counts.
BYTES = [2**i for i in range(4, 41, 3)]
NANOSECONDS = [2**i for i in range(7, 36, 2)]


def _histogram(
    buckets: Iterable[tuple[int, int]], ends: list[int], scale: float
) -> list[tuple[str, float]]:
    """Turn (least, count) into cumulative counts below each end."""
    counted = list(buckets)
    out = [
        (repr(end * scale), float(sum(count for least, count in counted if least < end)))
        for end in ends
    ]
    return [*out, ("+Inf", float(sum(count for _, count in counted)))]


class EnginesCollector(Collector):
    """Reads the engines that were exported to one registry, at each scrape."""

    def __init__(self) -> None:
        self._engines: list[Engine] = []

    def add(self, engine: Engine) -> None:
        if engine not in self._engines:
            self._engines.append(engine)

    def remove(self, engine: Engine) -> None:
        """Export this engine no longer."""
        self._engines = [each for each in self._engines if each is not engine]

    def collect(self) -> Iterator[Metric]:
        self._engines = [engine for engine in self._engines if not engine.closed]
        if not self._engines:
            return
        read = [(engine.name, engine.stats(), engine.peer_stats()) for engine in self._engines]
        for key, metric, text in GAUGES:
            gauge = GaugeMetricFamily(metric, text, labels=["engine"])
            for name, stats, _ in read:
                gauge.add_metric([name], stats[key])
            yield gauge
        for table, scale in ((COUNTERS, 1.0), (SECONDS, 1e-9)):
            for key, metric, text in table:
                counter = CounterMetricFamily(metric, text, labels=["engine"])
                for name, stats, _ in read:
                    counter.add_metric([name], stats[key] * scale)
                yield counter
        failed = CounterMetricFamily(
            "kvzc_transfers_failed_by_cause", "Transfers that failed.", labels=["engine", "cause"]
        )
        for name, stats, _ in read:
            for key, count in stats.items():
                if key.startswith(FAILED):
                    failed.add_metric([name, key.removeprefix(FAILED)], count)
        yield failed
        yield from self._traffic([(name, peers) for name, _, peers in read])

    @staticmethod
    def _traffic(read: list[tuple[str, list[dict[str, Any]]]]) -> Iterator[Metric]:
        labels = ["engine", "peer", "incarnation", "transport", "direction"]
        transfers = CounterMetricFamily(
            "kvzc_transfers", "Transfers that have ended.", labels=[*labels, "outcome"]
        )
        moved = CounterMetricFamily("kvzc_bytes", "Bytes moved.", labels=labels)
        runs = CounterMetricFamily("kvzc_runs", "Contiguous pieces moved.", labels=labels)
        queued = CounterMetricFamily(
            "kvzc_queue_seconds", "From acceptance until the transport was asked.", labels=labels
        )
        size = HistogramMetricFamily("kvzc_transfer_bytes", "Sizes of transfers.", labels=labels)
        took = HistogramMetricFamily(
            "kvzc_transfer_seconds", "From acceptance to the end.", labels=labels
        )
        for name, peer in ((name, peer) for name, peers in read for peer in peers):
            for direction in ("put", "get"):
                traffic = peer[direction]
                at = [name, peer["name"], peer["incarnation"], peer["transport"], direction]
                for outcome in ("done", "failed", "cancelled"):
                    transfers.add_metric([*at, outcome], traffic[outcome])
                moved.add_metric(at, traffic["bytes"])
                runs.add_metric(at, traffic["runs"])
                queued.add_metric(at, traffic["queue_ns"] * 1e-9)
                size.add_metric(at, _histogram(traffic["by_bytes"], BYTES, 1), traffic["bytes"])
                took.add_metric(
                    at, _histogram(traffic["by_ns"], NANOSECONDS, 1e-9), traffic["ns"] * 1e-9
                )
        yield from (transfers, moved, runs, queued, size, took)


_collectors: WeakKeyDictionary[CollectorRegistry, EnginesCollector] = WeakKeyDictionary()


def export(engine: Engine, registry: CollectorRegistry = REGISTRY) -> EnginesCollector:
    """Have a registry read this engine at each scrape, besides others that it reads already.

    Returns what reads them; its ``remove(engine)`` ends it before the engine is closed.
    """
    collector = _collectors.get(registry)
    if collector is None:
        collector = _collectors[registry] = EnginesCollector()
        registry.register(collector)
    collector.add(engine)
    return collector
