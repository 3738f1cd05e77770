"""Counters, Prometheus, and the trace."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvzc
import numpy as np
import pytest
from helpers import Peer, State, stopped, until
from kvzc.prometheus import export
from prometheus_client import CollectorRegistry, generate_latest


@pytest.fixture
def engines() -> Iterator[tuple[kvzc.Engine, kvzc.Engine]]:
    with kvzc.Engine("owner-w") as owner, kvzc.Engine("writer-w") as writer:
        yield owner, writer


def test_counts_per_peer_and_direction(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    target = owner.empty((4, 1024), "uint8")
    with owner.register(target) as region:
        handle = region.handle()
        for _ in range(3):
            writer.put(np.zeros((2, 1024), np.uint8), handle[::2]).wait(20)
        writer.get(np.zeros(1024, np.uint8), handle[0]).wait(20)
        grant = region[0].grant(access="put")
        revoked = grant.handle()
        writer.connect(revoked)
        grant.revoke(timeout=20)
        with pytest.raises(kvzc.Revoked):
            writer.put(np.zeros(1024, np.uint8), revoked).wait(20)
        (peer,) = writer.peer_stats()
        assert (peer["name"], peer["incarnation"]) == ("owner-w", owner.incarnation)
        assert peer["connected"]
        put, got = peer["put"], peer["get"]
        # connect() is a transfer of no bytes.
        assert (put["done"], put["bytes"], put["runs"]) == (4, 3 * 2048, 6)
        assert put["by_bytes"] == [(0, 1), (2048, 3)]
        assert sum(count for _, count in put["by_ns"]) == 4
        assert 0 < put["ns"] < 60e9
        assert peer["transport"] == "shm"
        assert (got["done"], got["bytes"], got["by_bytes"]) == (1, 1024, [(1024, 1)])
        stats = writer.stats()
        assert stats["transfers_failed_Revoked"] == stats["transfers_failed"]
        assert stats["transfers_failed_PeerLost"] == 0


def test_what_a_transfer_waits_for_its_connection_is_queue_time(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    with owner.register(np.zeros(64, np.uint8)) as region:
        handle = region.handle()
        writer.put(np.zeros(64, np.uint8), handle).wait(20)
        (peer,) = writer.peer_stats()
        first = peer["put"]["queue_ns"]
        assert 0 < first <= peer["put"]["ns"]  # It waited for the handshake.
        writer.put(np.zeros(64, np.uint8), handle).wait(20)
        (peer,) = writer.peer_stats()
        assert peer["put"]["queue_ns"] == first  # This one did not.
        assert writer.stats()["queue_ns"] == first


def own(state: State) -> str:
    state.owner = kvzc.Engine("standing")
    state.region = state.owner.register(np.zeros(64, np.uint8))
    return state.region.handle().to_text()


def test_what_threads_wait_is_counted(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    with pytest.raises(kvzc.TimedOut):
        owner.arrivals.wait(b"never", timeout=0.2)
    assert owner.stats()["arrival_wait_ns"] >= 0.15e9
    assert owner.stats()["wait_ns"] == owner.stats()["accept_wait_ns"] == 0
    with Peer() as peer:
        handle = kvzc.RemoteHandle.from_text(peer.call(own))
        with stopped(peer):
            transfer = writer.put(np.zeros(64, np.uint8), handle)
            with pytest.raises(kvzc.TimedOut):
                transfer.wait(0.2)
            assert 0.15e9 <= writer.stats()["wait_ns"] < 20e9
            queue = kvzc.CompletionQueue(4)
            writer.put(np.zeros(64, np.uint8), handle, queue=queue)
            before = writer.stats()["wait_ns"]
            with pytest.raises(kvzc.TimedOut):
                queue.wait(timeout=0.2)
            assert 0.15e9 <= writer.stats()["wait_ns"] - before < 20e9
        transfer.wait(20)
        waited = writer.stats()["wait_ns"]
        transfer.wait(20)  # It is over: that is no waiting.
        assert writer.stats()["wait_ns"] == waited


def test_waiting_for_acceptance_is_counted() -> None:
    with (
        kvzc.Engine("narrow", arrival_depth=1) as owner,
        kvzc.Engine("waits") as writer,
        owner.register(np.zeros(64, np.uint8)) as region,
    ):
        handle = region.handle()
        writer.put(np.zeros(64, np.uint8), handle, notify=b"1").wait(20)
        before = writer.stats()["accept_wait_ns"]
        with pytest.raises(kvzc.TimedOut):
            writer.put(np.zeros(64, np.uint8), handle, notify=b"2", accept_timeout=0.2)
        assert writer.stats()["accept_wait_ns"] - before >= 0.15e9


def test_counters_outlive_the_peer() -> None:
    with kvzc.Engine() as writer:
        with kvzc.Engine("short-lived") as owner, owner.register(np.zeros(64, np.uint8)) as region:
            writer.put(np.zeros(64, np.uint8), region.handle()).wait(20)
        (peer,) = writer.peer_stats()
        assert not peer["connected"]
        assert peer["put"]["bytes"] == 64


def test_a_peer_that_only_wrote_here_is_remembered_too() -> None:
    with kvzc.Engine() as owner, owner.register(np.zeros(64, np.uint8)) as region:
        with kvzc.Engine("came-and-went") as writer:
            writer.put(np.zeros(64, np.uint8), region.handle()).wait(20)
        until(lambda: not owner.peer_stats()[0]["connected"])
        (peer,) = owner.peer_stats()
        assert (peer["name"], peer["transport"]) == ("came-and-went", "shm")


def test_beyond_1024_peers_the_rest_is_counted_together() -> None:
    """Peers that come and go for ever take no memory for ever, and no transfer goes uncounted."""
    most, more = 1024, 3
    source = np.ones(64, np.uint8)
    with kvzc.Engine() as writer:
        for _ in range(most + more):
            with kvzc.Engine() as owner, owner.register(owner.empty(64, "uint8")) as region:
                writer.put(source, region.handle()).wait(20)
        peers = writer.peer_stats()
        assert len(peers) == most + 1
        (rest,) = [peer for peer in peers if peer["name"] == ""]
        assert (rest["put"]["done"], rest["put"]["bytes"]) == (more, 64 * more)
        assert sum(peer["put"]["bytes"] for peer in peers) == 64 * (most + more)
        assert writer.stats()["bytes_done"] == 64 * (most + more)


def test_prometheus_reads_it(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    registry = CollectorRegistry()
    export(writer, registry)
    with owner.register(np.zeros(4096, np.uint8)) as region:
        for _ in range(2):
            writer.put(np.zeros(4096, np.uint8), region.handle()).wait(20)
        text = generate_latest(registry).decode()
        at = (
            f'direction="put",engine="writer-w",incarnation="{owner.incarnation}",peer="owner-w",'
            'transport="shm"'
        )
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

        def value(metric: str, **labels: str) -> float:
            wanted = sorted([*at.split(","), *(f'{k}="{v}"' for k, v in labels.items())])
            for line, number in lines.items():
                name, _, rest = line.partition("{")
                if name == metric and sorted(rest.rstrip("}").split(",")) == wanted:
                    return float(number)
            raise AssertionError(f"no {metric} {labels} in\n{text}")

        assert value("kvzc_bytes_total") == 8192
        assert value("kvzc_transfers_total", outcome="done") == 2
        assert value("kvzc_transfer_bytes_count") == 2
        assert value("kvzc_transfer_bytes_sum") == 8192
        assert value("kvzc_transfer_bytes_bucket", le="1024") == 0
        # Each bucket holds those below it too.
        for end in ("8192", "65536"):
            assert value("kvzc_transfer_bytes_bucket", le=end) == 2
        assert value("kvzc_transfer_bytes_bucket", le="+Inf") == 2
        assert 0 < value("kvzc_transfer_seconds_sum") < 60
        assert 0 < value("kvzc_queue_seconds_total") <= value("kvzc_transfer_seconds_sum")
        assert 0 <= float(lines['kvzc_wait_seconds_total{engine="writer-w"}']) < 60
        assert lines['kvzc_peers{engine="writer-w"}'] == "1.0"
        assert 'kvzc_transfers_failed_by_cause_total{cause="PeerLost",engine="writer-w"}' in lines
    writer.close()
    assert generate_latest(registry) == b""


def test_prometheus_reads_several_engines(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    registry = CollectorRegistry(auto_describe=True)
    for engine in (*engines, *engines):
        collector = export(engine, registry)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE kvzc_regions gauge") == 1
    for name in ("owner-w", "writer-w"):
        assert text.count(f'kvzc_regions{{engine="{name}"}}') == 1
    collector.remove(engines[0])
    text = generate_latest(registry).decode()
    assert 'engine="owner-w"' not in text
    assert 'engine="writer-w"' in text


def events_in(path: Path) -> list[dict[str, Any]]:
    """Reads the file as Perfetto does: an array that need not be closed."""
    text = path.read_text()
    assert text.startswith("[\n")
    assert text.endswith(",\n")
    parsed: list[dict[str, Any]] = json.loads(text[:-2] + "]")
    return parsed


def test_the_trace_has_a_lane_per_peer_and_direction(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.touch()  # As tempfile does.
    count, nbytes = 6, 8 << 20
    with (
        kvzc.Engine('o"1') as owner,
        kvzc.Engine("w", trace=path) as writer,
        owner.register(owner.empty((count, nbytes), "uint8")) as region,
    ):
        handle = region.handle()
        source = writer.empty((nbytes,), "uint8")
        running = [writer.put(source, handle[i], label=("layer", i)) for i in range(count)]
        kvzc.wait(running, 30)
        writer.get(source, handle[0], label="\ud800").wait(30)
        with pytest.raises(kvzc.Cancelled):
            writer.put(source, handle[0], deadline=0).wait(30)
        ends = {(each.submitted_ns, each.done_ns) for each in running}
    events = events_in(path)
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert set(names.values()) >= {'put to o"1', 'get from o"1'}
    slices = [event for event in events if event["ph"] == "X"]
    whole = [each for each in slices if each.get("args")]
    assert len(whole) == count + 2
    labelled = {each["args"]["label"] for each in whole if "label" in each["args"]}
    assert labelled == {str(("layer", i)) for i in range(count)} | {"\\ud800"}
    assert [each["args"]["error"] for each in whole if "error" in each["args"]] == ["Cancelled"]
    times = {(round(each["ts"] * 1000), round((each["ts"] + each["dur"]) * 1000)) for each in whole}
    assert ends <= times
    # Slices of one track never overlap, and queue and copy lie within theirs.
    for tid in names:
        at = 0.0
        for each in (each for each in whole if each["tid"] == tid):
            assert each["ts"] >= at
            at = each["ts"] + each["dur"] - 1e-6
            inner = [
                part
                for part in slices
                if part["tid"] == tid
                and part["name"] in ("queue", "copy")
                and each["ts"] - 1e-6 <= part["ts"] < each["ts"] + each["dur"]
            ]
            total = sum(part["dur"] for part in inner)
            assert total == pytest.approx(each["dur"], abs=0.01)
    assert any(each["name"] == "copy" for each in slices)


def put_one(state: State, text: str) -> None:
    with kvzc.Engine("second") as engine:
        engine.put(np.zeros(64, np.uint8), kvzc.RemoteHandle.from_text(text)).wait(20)


def traced(state: State, path: str) -> None:
    os.environ["KVZC_TRACE"] = path


def test_processes_share_a_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "both.json"
    with kvzc.Engine() as owner, owner.register(np.zeros(64, np.uint8)) as region:
        monkeypatch.setenv("KVZC_TRACE", str(path))
        with Peer() as peer, kvzc.Engine("first") as engine:
            engine.put(np.zeros(64, np.uint8), region.handle()).wait(20)
            peer.call(traced, str(path))
            peer.call(put_one, region.handle().to_text())
        monkeypatch.setenv("KVZC_TRACE", str(tmp_path / "no" / "such" / "folder"))
        with pytest.raises(kvzc.SystemFailure, match=r"no/such/folder"):
            kvzc.Engine()
    events = events_in(path)
    processes = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert sorted(processes.values()) == ["kvzc first", "kvzc second"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(processes)
