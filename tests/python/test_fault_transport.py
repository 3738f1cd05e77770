"""Trouble on demand: whatever happens on the way, the promises hold."""

import math
import time
from typing import Any

import kvzc
import numpy as np
import pytest
import torch
from helpers import Peer, State, open_files, threads, until
from views import random_bytes

MIB = 1 << 20
ONES = np.ones(8, np.uint8)
# Stripes of odd sizes that travel apart, in any order and late.
MIXED = {"stripe_bytes": 3001, "delay": 0.003, "reorder": True}


def troubled(**faults: Any) -> kvzc.Engine:
    return kvzc.Engine(default_timeout=20, faults=kvzc.Faults(**faults))


def own(state: State, nbytes: int) -> str:
    if hasattr(state, "engine"):
        state.engine.close()
    state.engine = kvzc.Engine(default_timeout=20)
    state.cache = kvzc.empty(nbytes, "uint8")
    state.region = state.engine.register(state.cache)
    text: str = state.region.handle().to_text()
    return text


def look_at_each_tag(state: State, sizes: list[int]) -> list[int]:
    """Gives the rounds whose bytes were not there when their tag was."""
    wrong = []
    for i, size in enumerate(sizes):
        arrival = state.engine.arrivals.wait(b"%d" % i)
        if arrival.error is not None or not (state.cache[:size] == i % 251 + 1).all():
            wrong.append(i)
        state.cache[:] = 0
        state.engine.notify(arrival.peer, b"seen %d" % i).wait()
    return wrong


def errors_of(state: State, tags: list[bytes]) -> list[str]:
    return [type(state.engine.arrivals.wait(tag).error).__name__ for tag in tags]


def handle_at(owner: Peer, nbytes: int) -> kvzc.RemoteHandle:
    return kvzc.RemoteHandle.from_text(owner.call(own, nbytes))


# ---- order and bytes ----


def test_bytes_stay_exact_whatever_their_order() -> None:
    cache = kvzc.empty((64, 1000), "uint8")
    local = random_bytes(1, 64_000).reshape(64, 1000)
    model = np.zeros((64, 1000), np.uint8)
    rng = np.random.default_rng(2)
    with troubled(**MIXED) as engine, engine.register(cache) as region:
        handle = region.handle()
        with engine.register(local) as source:
            for _ in range(20):
                to, come = rng.permutation(64)[:30].tolist(), rng.integers(0, 64, 30).tolist()
                engine.put(source[come, 3:900], handle[to, 50:947]).wait()
                model[to, 50:947] = local[come, 3:900]
                assert np.array_equal(cache, model)
                back = np.full((30, 1000), 0xEE, np.uint8)
                with engine.register(back) as target:
                    engine.get(target[:, :997], handle[come, 3:]).wait()
                assert np.array_equal(back[:, :997], model[come, 3:])
                assert (back[:, 997:] == 0xEE).all()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_tag_never_overtakes_its_data(shared_peer: Peer, seed: int) -> None:
    """COMP-04, COMP-05: over stripes that overtake each other."""
    nbytes = 1 << 18
    handle = handle_at(shared_peer, nbytes)
    rng = np.random.default_rng(seed)
    sizes = [int(2 ** rng.uniform(0, 18)) for _ in range(40)]
    with troubled(seed=seed, **MIXED) as engine:
        shared_peer.start(look_at_each_tag, sizes)
        for i, size in enumerate(sizes):
            source = np.full(size, i % 251 + 1, np.uint8)
            transfer = engine.put(source, handle[:size], notify=b"%d" % i)
            engine.arrivals.wait(b"seen %d" % i)
            transfer.wait()
    assert shared_peer.result() == []


def test_many_transfers_at_once_are_all_exact_and_told_once() -> None:
    cache = kvzc.empty((200, 5000), "uint8")
    with (
        kvzc.Engine(default_timeout=20) as owner,
        troubled(**MIXED) as engine,
        owner.register(cache) as region,
    ):
        handle = region.handle()
        transfers = [
            engine.put(np.full(5000, i + 1, np.uint8), handle[i], notify=b"t%d" % i)
            for i in range(200)
        ]
        kvzc.wait(transfers)
        tags: list[bytes] = []
        until(lambda: tags.extend(a.tag for a in owner.arrivals.poll()) or len(tags) >= 200)
        assert (cache == np.arange(1, 201, dtype=np.uint8)[:, None]).all()
        assert sorted(tags) == sorted(b"t%d" % i for i in range(200))
        assert owner.arrivals.poll() == []


def test_private_memory_is_striped_too() -> None:
    target = torch.zeros(100_000)
    source = torch.rand(100_000)
    with troubled(**MIXED) as engine, engine.register(target) as region:
        engine.put(source, region.handle(), notify=b"t").wait()
        assert torch.equal(target, source)
        assert engine.arrivals.wait(b"t").error is None


def fails(engine: kvzc.Engine, handle: kvzc.RemoteHandle) -> bool:
    transfer = engine.put(ONES, handle)
    until(lambda: transfer.done)
    return transfer.error is not None


def test_the_same_seed_makes_the_same_trouble() -> None:
    def ends(seed: int) -> list[bool]:
        with (
            troubled(seed=seed, post_failure=0.5) as engine,
            engine.register(kvzc.empty(8, "uint8")) as region,
        ):
            return [fails(engine, region.handle()) for _ in range(60)]

    first = ends(7)
    assert 10 < sum(first) < 50
    assert ends(7) == first
    assert ends(8) != first


# ---- failures ----


@pytest.mark.parametrize("direction", ["put", "get"])
def test_a_post_that_fails_moves_nothing_and_tells_both_sides(
    shared_peer: Peer, direction: str
) -> None:
    """COMP-02, LEAK-08."""
    handle = handle_at(shared_peer, 8)
    with troubled(post_failure=1.0) as engine:
        local = ONES.copy() * 5
        start = engine.put if direction == "put" else engine.get
        for i in range(20):
            transfer = start(local, handle, notify=b"%d" % i)
            for _ in range(2):
                with pytest.raises(kvzc.SystemFailure, match="injected"):
                    transfer.wait()
            assert isinstance(transfer.error, OSError)
            assert transfer.quiet
        assert engine.stats()["transfers_failed"] == 20
        assert engine.stats()["transfers_running"] == 0
    assert shared_peer.call(errors_of, [b"%d" % i for i in range(20)]) == ["SystemFailure"] * 20
    assert (local == 5).all()
    assert shared_peer.call(bytes_of) == bytes(8)


def bytes_of(state: State) -> bytes:
    memory: bytes = state.cache.tobytes()
    return memory


def test_a_stripe_that_fails_is_told_to_both_sides_and_nothing_comes_later(
    shared_peer: Peer,
) -> None:
    nbytes = 1 << 16
    handle = handle_at(shared_peer, nbytes)
    partly = 0
    with troubled(stripe_failure=1.0, **MIXED) as engine:
        for i in range(10):
            transfer = engine.put(np.full(nbytes, i + 1, np.uint8), handle, notify=b"%d" % i)
            with pytest.raises(kvzc.SystemFailure, match="injected"):
                transfer.wait()
            assert shared_peer.call(errors_of, [b"%d" % i]) == ["SystemFailure"]
            there = shared_peer.call(bytes_of)
            partly += 0 < there.count(i + 1) < nbytes
            time.sleep(0.005)
            assert shared_peer.call(bytes_of) == there
    assert partly > 0


def test_some_failures_among_many_leave_every_other_transfer_right() -> None:
    """COMP-08, LEAK-07: and statuses sum up."""
    count = 300
    cache = kvzc.empty((count, 100), "uint8")
    with kvzc.Engine(default_timeout=20) as owner, owner.register(cache) as region:
        handle = region.handle()
        with troubled(post_failure=0.2, stripe_failure=0.1, **MIXED) as engine:
            transfers = [
                engine.put(np.full(100, 7, np.uint8), handle[i], notify=b"%d" % i)
                for i in range(count)
            ]
            until(lambda: all(transfer.done for transfer in transfers))
            stats = engine.stats()
            failed = sum(transfer.error is not None for transfer in transfers)
            assert 0 < failed < count
            assert stats["transfers_done"] + stats["transfers_failed"] == count
            assert stats | {"transfers_failed": failed, "transfers_running": 0} == stats
            for i, transfer in enumerate(transfers):
                arrival = owner.arrivals.wait(b"%d" % i)
                assert type(arrival.error) is type(transfer.error)
                if transfer.error is None:
                    assert (cache[i] == 7).all()


# ---- completions that are lost ----


def test_a_lost_completion_is_a_timeout_until_it_is_cancelled(shared_peer: Peer) -> None:
    """REG-16: a silent transfer ends in a time-out, and never in silence."""
    handle = handle_at(shared_peer, 8)
    with troubled(completion_loss=1.0) as engine:
        transfer = engine.put(ONES, handle, notify=b"t")
        for _ in range(2):
            with pytest.raises(kvzc.TimedOut, match="still running"):
                transfer.wait(0.1)
        assert not transfer.done
        assert not transfer.quiet
        assert transfer.error is None
        assert transfer.done_ns is None
        with pytest.raises(kvzc.TimedOut):
            kvzc.wait([transfer], 0.05, "first")
        transfer.cancel(5)
        assert transfer.done
        assert transfer.quiet
        assert isinstance(transfer.error, kvzc.Cancelled)
        with pytest.raises(kvzc.Cancelled):
            transfer.wait()
        assert engine.stats() | {"transfers_running": 0, "transfers_cancelled": 1} == engine.stats()
    assert shared_peer.call(errors_of, [b"t"]) == ["Cancelled"]


def test_a_deadline_ends_what_lost_its_completion(shared_peer: Peer) -> None:
    handle = handle_at(shared_peer, 8)
    with troubled(completion_loss=1.0) as engine:
        start = time.monotonic()
        transfers = [engine.put(ONES, handle, notify=b"t", deadline=0.2) for _ in range(20)]
        for transfer in transfers:
            with pytest.raises(kvzc.Cancelled, match="deadline"):
                transfer.wait()
        assert 0.15 < time.monotonic() - start < 5
    assert shared_peer.call(errors_of, [b"t"] * 20) == ["Cancelled"] * 20


def test_a_lost_completion_ends_with_its_grant_or_its_peer() -> None:
    with troubled(completion_loss=1.0) as engine, Peer() as owner:
        transfer = engine.put(ONES, handle_at(owner, 8))
        with pytest.raises(kvzc.TimedOut):
            transfer.wait(0.1)
        owner.kill()
        start = time.monotonic()
        with pytest.raises(kvzc.PeerLost):
            transfer.wait()
        assert time.monotonic() - start < 2
        until(lambda: transfer.done)


# ---- peers that fall silent ----


def test_a_peer_that_vanishes_is_lost_within_the_detection_time() -> None:
    with kvzc.Engine(default_timeout=20) as owner:
        region = owner.register(kvzc.empty(8, "uint8"))
        handle = region.handle()
        with troubled(vanish_after=3, detection=0.3) as engine:
            other = engine.connect(handle)
            start = time.monotonic()
            with pytest.raises(kvzc.PeerLost):
                for _ in range(10):
                    engine.put(ONES, handle, notify=b"t").wait()
            assert time.monotonic() - start < 5
            until(lambda: other.lost)
            for use in (
                lambda: engine.put(ONES, handle).wait(),
                lambda: engine.get(bytearray(8), handle).wait(),
                lambda: engine.arrivals.wait(b"never", peer=other),
                lambda: other.notify(b"t").wait(),
            ):
                start = time.monotonic()
                with pytest.raises(kvzc.PeerLost):
                    use()
                assert time.monotonic() - start < 2
            until(lambda: engine.stats()["transfers_running"] == 0)
        region.close(5)


def test_a_silent_peer_that_is_never_detected_hangs_nobody() -> None:
    with kvzc.Engine(default_timeout=20) as owner, owner.register(kvzc.empty(8, "uint8")) as region:
        handle = region.handle()
        with troubled(vanish_after=1, detection=math.inf) as engine:
            engine.put(ONES, handle).wait()
            transfers = [engine.put(ONES, handle, notify=b"t") for _ in range(5)]
            with pytest.raises(kvzc.TimedOut):
                kvzc.wait(transfers, 0.2)
            transfers[0].cancel(5)
            assert isinstance(transfers[0].error, kvzc.Cancelled)
            late = engine.put(ONES, handle, deadline=0.1)
            with pytest.raises(kvzc.Cancelled, match="deadline"):
                late.wait()
            start = time.monotonic()
            engine_closes(engine, 1)
            assert time.monotonic() - start < 5
        assert all(transfer.done for transfer in transfers)
        assert owner.arrivals.poll() == []


def engine_closes(engine: kvzc.Engine, timeout: float) -> None:
    """It may say that something was still running; it is closed all the same."""
    try:
        engine.close(timeout)
    except kvzc.TimedOut:
        assert engine.closed


# ---- the end ----


@pytest.mark.parametrize(
    "faults",
    [
        MIXED,
        {"delay": 0.5, "stripe_bytes": 1000},
        {"post_failure": 0.5, "stripe_failure": 0.5, **MIXED},
        {"completion_loss": 1.0, **MIXED},
        {"vanish_after": 5, "detection": 60, **MIXED},
        {"vanish_after": 5, "detection": 0.01, **MIXED},
    ],
    ids=str,
)
def test_an_engine_closes_with_all_of_it_under_way(faults: dict[str, Any]) -> None:
    cache = kvzc.empty(1 << 16, "uint8")
    files, names = open_files(), threads()
    with kvzc.Engine(default_timeout=20) as owner:
        region = owner.register(cache)
        engine = troubled(**faults)
        source = np.full(1 << 16, 5, np.uint8)
        transfers = [engine.put(source, region.handle(), notify=b"t") for _ in range(20)]
        time.sleep(0.01)
        start = time.monotonic()
        engine_closes(engine, 0.5)
        assert time.monotonic() - start < 10
        assert all(transfer.done for transfer in transfers)
        assert engine.stats()["transfers_running"] == 0
        cache[:] = 9
        time.sleep(0.02)
        assert (cache == 9).all()
        region.close(5)
    del transfers, engine, owner, region  # They keep what is left of a closed engine.
    until(lambda: (open_files(), threads()) == (files, names))


def test_revoking_holds_against_stripes_that_are_late() -> None:
    cache = kvzc.empty(1 << 16, "uint8")
    source = np.full(1 << 16, 5, np.uint8)
    with (
        kvzc.Engine(default_timeout=20) as owner,
        owner.register(cache) as region,
        troubled(stripe_bytes=500, delay=0.05, reorder=True) as engine,
    ):
        for round_ in range(10):
            grant = region.grant("put")
            transfer = engine.put(source, grant.handle(), notify=b"%d" % round_)
            time.sleep(0.005)
            grant.revoke()
            cache[:] = 9
            with pytest.raises(kvzc.Revoked):
                transfer.wait()
            assert isinstance(owner.arrivals.wait(b"%d" % round_).error, kvzc.Revoked)
            assert (cache == 9).all()


def test_cancelling_holds_against_stripes_that_are_late() -> None:
    cache = kvzc.empty(1 << 16, "uint8")
    source = np.full(1 << 16, 5, np.uint8)
    with (
        troubled(stripe_bytes=500, delay=0.05, reorder=True) as engine,
        engine.register(cache) as region,
    ):
        for _ in range(10):
            transfer = engine.put(source, region.handle())
            time.sleep(0.005)
            transfer.cancel(5)
            cache[:] = 9
            assert isinstance(transfer.error, kvzc.Cancelled)
            time.sleep(0.06)
            assert (cache == 9).all()


# ---- arguments ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"post_failure": -0.1},
        {"post_failure": 1.1},
        {"stripe_failure": math.nan},
        {"completion_loss": 2},
        {"delay": -1},
        {"delay": math.nan},
        {"detection": -1},
        {"detection": math.nan},
    ],
    ids=str,
)
def test_a_chance_or_a_time_that_is_none_is_a_value_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        troubled(**wrong)


def test_trouble_is_given_as_faults() -> None:
    for wrong in (5, {"delay": 1}, "delay"):
        with pytest.raises(TypeError):
            kvzc.Engine(faults=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        kvzc.Faults(1)  # type: ignore[call-arg]
    assert "seed=3" in repr(kvzc.Faults(seed=3))
    with kvzc.Engine(faults=None):
        pass
