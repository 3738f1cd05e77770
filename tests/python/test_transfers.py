"""Transfers: acceptance, waiting, pushing back, cancelling."""

import collections.abc
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import kvzc
import numpy as np
import pytest
import torch
from helpers import Peer, State, open_files, run_script, stop, stopped, until

MIB = 1 << 20
LARGE = 96 * MIB


@pytest.fixture
def small(engine: kvzc.Engine) -> Iterator[Any]:
    cache = kvzc.empty(8, "uint8")
    with engine.register(cache) as region:
        yield region.handle()


@pytest.fixture(scope="module")
def large() -> Any:
    return kvzc.empty(LARGE, "uint8")


ONES = np.ones(8, np.uint8)


def test_a_transfer_tells_about_itself(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((4, 8), "float32")
    label = object()
    with engine.register(cache) as region:
        before = time.monotonic_ns()
        target = region.handle()[:, ::2]
        transfer = engine.put(np.ones((4, 4), np.float32), target, label=label)
        transfer.wait()
        after = time.monotonic_ns()
    assert transfer.done
    assert transfer.quiet
    assert transfer.error is None
    assert transfer.nbytes == 64
    assert transfer.runs == 16
    assert transfer.transport == "shm"
    assert transfer.label is label
    assert before <= transfer.submitted_ns <= transfer.done_ns <= after
    assert "64 bytes, done" in repr(transfer)


def test_adjacent_pieces_are_one_run(engine: kvzc.Engine) -> None:
    """PERF-02: the cost is that of runs."""
    cache = kvzc.empty((8, 4, 4), "float32")
    local = np.ones((8, 4, 4), np.float32)
    with engine.register(cache) as region, engine.register(local) as source:
        handle = region.handle()
        for index, runs in [
            (..., 1),
            (slice(2, 6), 1),
            ([1, 2, 3, 6], 2),
            ([3, 2, 1], 3),
            ((slice(None), 1), 8),
            ((slice(None), slice(1, 3)), 8),
            ((slice(None), slice(None), slice(0, 2)), 32),
        ]:
            transfer = engine.put(source[index], handle[index])
            transfer.wait()
            assert transfer.runs == runs, index


def test_counters_count(engine: kvzc.Engine, small: Any) -> None:
    before = engine.stats()
    for _ in range(5):
        engine.put(ONES, small).wait()
    with engine.register(torch.zeros(2)) as closed:
        handle = closed.handle()
    with pytest.raises(kvzc.Revoked):
        engine.put(torch.ones(2), handle).wait()
    after = engine.stats()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    for name in ("peers", "queue_ns", "wait_ns"):  # The first of a process connects.
        grown.pop(name, None)
    assert grown == {
        "transfers_done": 5,
        "transfers_failed": 1,
        "transfers_failed_Revoked": 1,
        "bytes_done": 40,
        "runs_done": 5,
        "temporary_registrations": 6,
    }


# ---- waiting ----


@pytest.mark.parametrize("timeout", [None, 0, 0.0, 5, 1e12, math.inf, np.float64(3), True])
def test_waiting_for_what_is_done_returns_whatever_the_timeout(
    engine: kvzc.Engine, small: Any, timeout: Any
) -> None:
    transfer = engine.put(ONES, small)
    transfer.wait()
    transfer.wait(timeout)
    assert kvzc.wait([transfer], timeout) == [transfer]


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, -math.inf])
def test_a_timeout_that_is_no_time_is_a_value_error(
    engine: kvzc.Engine, small: Any, timeout: float
) -> None:
    with pytest.raises(ValueError, match="seconds"):
        engine.put(ONES, small, accept_timeout=timeout)
    with pytest.raises(ValueError, match="seconds"):
        engine.arrivals.wait(b"x", timeout=timeout)
    with pytest.raises(ValueError, match="seconds"):
        kvzc.wait([], timeout)
    with pytest.raises(ValueError, match="seconds"):
        kvzc.Engine(default_timeout=timeout)
    with pytest.raises(ValueError, match="seconds"):
        engine.connect(small, timeout)


def test_a_timeout_that_is_no_number_is_a_type_error(engine: kvzc.Engine, small: Any) -> None:
    for wrong in ("1", [1], object()):
        with pytest.raises(TypeError):
            engine.arrivals.wait(b"x", timeout=wrong)
        with pytest.raises(TypeError):
            engine.put(ONES, small, accept_timeout=wrong)


def test_a_wait_that_runs_out_leaves_the_transfer_running(large: Any) -> None:
    with kvzc.Engine(default_timeout=20) as engine, engine.register(large) as region:
        source = np.full(LARGE, 3, np.uint8)
        large[:] = 0
        transfer = engine.put(source, region.handle())
        with pytest.raises(kvzc.TimedOut, match="still running"):
            transfer.wait(0)
        with pytest.raises(TimeoutError):
            kvzc.wait([transfer], 0)
        transfer.wait()
        assert (large == 3).all()


def test_an_omitted_timeout_is_the_engines_default() -> None:
    with kvzc.Engine(default_timeout=0.05) as engine:
        assert engine.default_timeout == 0.05
        start = time.monotonic()
        with pytest.raises(kvzc.TimedOut):
            engine.arrivals.wait(b"never")
        assert time.monotonic() - start < 2


def test_wait_returns_those_that_have_ended(engine: kvzc.Engine, small: Any) -> None:
    transfers = [engine.put(ONES, small) for _ in range(5)]
    assert kvzc.wait(each for each in transfers) == transfers
    assert kvzc.wait(transfers, return_when="first") == transfers
    assert kvzc.wait([]) == []
    assert kvzc.wait(iter(()), 0, "first") == []
    assert kvzc.wait((transfers[0], transfers[0])) == [transfers[0]] * 2
    with pytest.raises(ValueError, match="'all' or 'first'"):
        kvzc.wait(transfers, return_when="any")
    for wrong in (5, [5], [None]):
        with pytest.raises((TypeError, RuntimeError)):
            kvzc.wait(wrong)  # type: ignore[arg-type]


def test_wait_for_the_first_does_not_wait_for_the_rest(large: Any) -> None:
    """COMP-15: one slow transfer hides no finished one."""
    with kvzc.Engine(default_timeout=20) as engine, engine.register(large) as region:
        quick = kvzc.empty(8, "uint8")
        with engine.register(quick) as other:
            engine.connect(other.handle())
            slow = engine.put(np.ones(LARGE, np.uint8), region.handle())
            fast = engine.put(ONES, other.handle())
            first = kvzc.wait([slow, fast], return_when="first")
            assert fast in first
            slow.wait()
            with kvzc.Engine(faults=kvzc.Faults(completion_loss=1.0)) as lossy:
                endless = lossy.put(ONES, other.handle())
                assert kvzc.wait([endless, fast], return_when="first") == [fast]
                assert not endless.done
                endless.cancel()


def test_wait_raises_the_first_error_and_the_others_end_too(
    engine: kvzc.Engine, small: Any
) -> None:
    with engine.register(torch.zeros(8, dtype=torch.uint8)) as closed:
        handle = closed.handle()
    good, bad = engine.put(ONES, small), engine.put(ONES, handle)
    with pytest.raises(kvzc.Revoked):
        kvzc.wait([good, bad])
    assert good.done
    assert bad.done
    assert isinstance(bad.error, kvzc.Revoked)
    for _ in range(2):  # The end is one and stays.
        with pytest.raises(kvzc.Revoked):
            bad.wait(0)
    assert kvzc.wait([good]) == [good]


def test_two_threads_may_wait_for_one_transfer(large: Any) -> None:
    """COMP-16."""
    with kvzc.Engine(default_timeout=20) as engine, engine.register(large) as region:
        transfer = engine.put(np.full(LARGE, 9, np.uint8), region.handle())
        ends: list[Any] = []
        waiters = [threading.Thread(target=lambda: ends.append(transfer.wait())) for _ in range(4)]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join(20)
        assert ends == [None] * 4
        assert (large == 9).all()


# ---- several at once ----


def test_put_many_is_one_transfer(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((4, 8), "uint8")
    other = kvzc.empty(3, "float32")
    with engine.register({"a": cache, "b": other}) as region:
        handle = region.handle()
        pairs = [
            (ONES, handle["a", 0]),
            (np.full((2, 8), 2, np.uint8), handle["a", [3, 1]]),
            (torch.full((3,), 4.0), handle["b"]),
        ]
        transfer = engine.put_many((pair for pair in pairs), notify=b"all", label="x")
        transfer.wait()
        assert transfer.nbytes == 8 + 16 + 12
        assert transfer.label == "x"
        assert engine.arrivals.wait(b"all").error is None
        assert engine.stats()["arrivals_arrived"] == 1
    assert cache.tolist() == [[1] * 8, [2] * 8, [0] * 8, [2] * 8]
    assert other.tolist() == [4.0] * 3


class FreshPair:
    """A sequence whose items exist for as long as somebody looks at them."""

    def __init__(self, region: kvzc.Region, handle: kvzc.RemoteHandle) -> None:
        self.region, self.handle = region, handle

    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: int) -> object:
        return self.region[:4] if at == 0 else self.handle[4:]


def test_put_many_holds_what_a_pair_makes_when_it_is_asked(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(8, "uint8")
    source = np.arange(8, dtype=np.uint8)
    collections.abc.Sequence.register(FreshPair)
    with engine.register(cache) as region, engine.register(source) as local:
        pairs: Any = [FreshPair(local, region.handle())]
        for _ in range(100):
            engine.put_many(pairs).wait()
    assert cache.tolist() == [0, 0, 0, 0, 0, 1, 2, 3]


def test_accept_timeout_is_one_time_for_all_that_is_waited_for() -> None:
    with kvzc.Engine(arrival_depth=1) as owner, kvzc.Engine() as writer:
        region = owner.register(owner.empty(8, "uint8"))
        target = kvzc.RemoteHandle.from_text(region.handle().to_text())
        writer.put(ONES, target, notify=b"fills the inbox").wait()
        queue = kvzc.CompletionQueue(1)
        writer.put(ONES, target, queue=queue).wait()
        room = threading.Timer(0.7, queue.poll)
        room.start()
        begun = time.monotonic()
        with pytest.raises(kvzc.TimedOut):
            writer.put(ONES, target, notify=b"next", queue=queue, accept_timeout=1)
        assert time.monotonic() - begun < 1.5
        room.join()


def test_put_many_refuses_targets_that_share_bytes(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(16, "uint8")
    with engine.register({"a": cache, "b": cache[4:12]}) as region:
        handle = region.handle()
        for one, two in [
            (handle["a", :8], handle["a", :8]),
            (handle["a", :8], handle["a", 7:15]),
            (handle["a", :8], handle["b"]),
            (handle["a", ::2], handle["b"]),
            (handle["a", [0, 4, 8, 15]], handle["a", [1, 2, 3, 15]]),
        ]:
            pairs = [
                (np.ones(one.shape, np.uint8), one),
                (np.ones(two.shape, np.uint8), two),
            ]
            with pytest.raises(kvzc.InvalidArgument, match="share bytes"):
                engine.put_many(pairs)
        assert not cache.any()
        # Interleaved and disjoint is fine.
        engine.put_many([(ONES, handle["a", ::2]), (ONES * 2, handle["a", 1::2])]).wait()
    assert cache.tolist() == [1, 2] * 8


def test_put_many_takes_one_handle(engine: kvzc.Engine, small: Any) -> None:
    other = engine.register(kvzc.empty(8, "uint8"))
    with pytest.raises(kvzc.InvalidArgument, match="one handle"):
        engine.put_many([(ONES, small), (ONES, other.handle())])
    other.close()
    again = kvzc.RemoteHandle.from_bytes(small.to_bytes())
    engine.put_many([(ONES[:4], small[:4]), (ONES[4:], again[4:])]).wait()


def test_put_many_of_nothing_or_of_nonsense_is_refused(engine: kvzc.Engine, small: Any) -> None:
    with pytest.raises(kvzc.InvalidArgument, match="nothing"):
        engine.put_many([])
    for wrong in (
        [ONES],
        [(ONES,)],
        [(ONES, small, 1)],
        [(small, ONES)],
        [(ONES, ONES)],
        5,
        ["ab"],
    ):
        with pytest.raises(TypeError):
            engine.put_many(wrong)  # type: ignore[arg-type]


def test_a_refused_put_posts_nothing(engine: kvzc.Engine) -> None:
    """COMP-06, COMP-08: no byte, no tag, no counter."""
    cache = kvzc.empty((2, 8), "uint8")
    with engine.register(cache) as region:
        handle = region.handle()
        engine.connect(handle)
        for pairs in (
            [(ONES, handle[0]), (ONES[:4], handle[1])],
            [(ONES, handle[0]), (ONES, handle[0])],
        ):
            with pytest.raises(kvzc.Error):
                engine.put_many(pairs, notify=b"t")
        time.sleep(0.05)
        assert engine.arrivals.poll() == []
        assert engine.stats()["transfers_running"] == 0
    assert not cache.any()


def test_a_put_from_the_same_bytes_is_refused_or_does_nothing_wrong(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(16, "uint8")
    cache[:] = np.arange(16)
    with engine.register(cache) as region:
        handle = region.handle()
        engine.put(cache[:8], handle[8:]).wait()
        assert cache.tolist() == [*range(8), *range(8)]
        for source, target in [
            (cache, handle),
            (cache[:8], handle[4:12]),
            (cache[4:12], handle[:8]),
            (cache[::-1], handle),
            (region[[0, 1, 2]], handle[[2, 3, 4]]),
        ]:
            with pytest.raises(kvzc.InvalidArgument, match="overlap"):
                engine.put(source, target).wait()
        assert cache.tolist() == [*range(8), *range(8)]


def test_a_swap_inside_one_allocation_is_refused(engine: kvzc.Engine) -> None:
    """The source of one pair is the target of another: what arrives would be a matter of luck."""
    cache = kvzc.empty(16, "uint8")
    cache[:] = np.arange(16)
    with engine.register(cache) as region:
        handle = region.handle()
        pairs = [(cache[:8], handle[8:]), (cache[8:], handle[:8])]
        with pytest.raises(kvzc.InvalidArgument, match="overlap"):
            engine.put_many(pairs).wait()
    assert cache.tolist() == list(range(16))


def test_an_empty_view_is_done_and_notifies(engine: kvzc.Engine, small: Any) -> None:
    transfer = engine.put(ONES[:0], small[:0], notify=b"nothing")
    transfer.wait()
    assert (transfer.nbytes, transfer.runs) == (0, 0)
    assert engine.arrivals.wait(b"nothing").error is None
    assert engine.put(ONES[:0], small[[]]).wait() is None


# ---- arguments ----


class Event:
    def query(self) -> bool:
        return True


def test_after_takes_streams_events_lists_or_now(engine: kvzc.Engine, small: Any) -> None:
    for right in (None, kvzc.NOW, Event(), [Event(), Event()], []):
        engine.put(ONES, small, after=right).wait()
    for wrong in (5, "now", [5], [Event(), None], object()):
        with pytest.raises(TypeError, match="after="):
            engine.put(ONES, small, after=wrong)
    assert repr(kvzc.NOW) == "kvzc.NOW"


class HostileEvent(Event):
    """Whoever waits for it on the host holds up the host."""

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")

    wait = elapsed_time = synchronize

    def query(self) -> bool:
        raise AssertionError("the host asks the device")


def test_nothing_is_synchronised_on_the_host(engine: kvzc.Engine, small: Any) -> None:
    for after in (HostileEvent(), [HostileEvent(), HostileEvent()]):
        transfers = [
            engine.put(ONES, small, after=after),
            engine.get(bytearray(8), small, after=after),
            engine.put_many([(ONES, small)], after=after),
        ]
        kvzc.wait(transfers)
        transfers[0].wait_on(HostileEvent())


def test_the_clock_of_each_time_is_named() -> None:
    for said in (kvzc.Transfer.submitted_ns, kvzc.Arrival.arrived_ns):
        assert "CLOCK_MONOTONIC" in (said.__doc__ or "")


def test_arguments_of_the_wrong_kind_say_what_is_right(engine: kvzc.Engine, small: Any) -> None:
    with pytest.raises(TypeError, match=r"source.*target"):
        engine.put(small, ONES)
    with pytest.raises(TypeError, match="Remote"):
        engine.put(ONES, ONES)
    with pytest.raises(TypeError, match="bytes"):
        engine.put(ONES, small, notify="text")
    with pytest.raises(TypeError):
        engine.put(ONES, small, b"tag")  # type: ignore[misc]


def test_module_functions_act_on_the_default_engine() -> None:
    cache = kvzc.empty(8, "uint8")
    with kvzc.register(cache) as region:
        handle = region.handle()
        assert handle.engine == kvzc.default_engine().name
        assert kvzc.connect(handle).name == handle.engine
        kvzc.put(ONES, handle, notify=b"m").wait()
        kvzc.put_many([(ONES, handle)], notify=b"m").wait()
        assert len(kvzc.arrivals.wait(b"m", 2)) == 2
    kvzc.default_engine().close()
    assert not kvzc.default_engine().closed


def test_use_of_a_closed_engine_is_an_error() -> None:
    cache = kvzc.empty(8, "uint8")
    with kvzc.Engine() as other, other.register(cache) as region:
        engine = kvzc.Engine()
        handle = region.handle()
        engine.close()
        engine.close()
        assert engine.closed
        for use in (
            lambda: engine.register(cache),
            lambda: engine.put(ONES, handle),
            lambda: engine.put_many([(ONES, handle)]),
            lambda: engine.connect(handle),
            lambda: engine.arrivals.wait(b"x"),
            lambda: engine.arrivals.poll(),
            lambda: engine.arrivals.forget(b"x"),
            lambda: engine.arrivals.fileno(),
        ):
            with pytest.raises(kvzc.Closed):
                use()


# ---- pushing back ----


def full_inbox(state: State, depth: int) -> str:
    state.engine = kvzc.Engine(arrival_depth=depth)
    state.cache = kvzc.empty(8, "uint8")
    state.region = state.engine.register(state.cache)
    text: str = state.region.handle().to_text()
    return text


def poll_after(state: State, seconds: float) -> tuple[list[bytes], list[int]]:
    time.sleep(seconds)
    before = state.cache.tolist()  # The poll makes room for who waits to overwrite it.
    return [each.tag for each in state.engine.arrivals.poll(2)], before


def all_tags(state: State, count: int) -> list[bytes]:
    out: list[bytes] = []
    until(lambda: out.extend(a.tag for a in state.engine.arrivals.poll()) or len(out) >= count)
    time.sleep(0.05)
    out.extend(each.tag for each in state.engine.arrivals.poll())
    return out


def test_a_full_inbox_pushes_the_sender_back_and_drops_nothing(peer: Peer) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(full_inbox, 4))
    with kvzc.Engine(default_timeout=5) as engine:
        for i in range(4):
            engine.put(ONES * i, handle, notify=b"%d" % i).wait()
        running = engine.stats()["transfers_running"]
        start = time.monotonic()
        with pytest.raises(kvzc.WouldBlock, match="inbox"):
            engine.put(ONES * 99, handle, notify=b"no", accept_timeout=0)
        assert time.monotonic() - start < 1
        start = time.monotonic()
        with pytest.raises(kvzc.TimedOut, match="nothing was posted"):
            engine.put(ONES * 99, handle, notify=b"no", accept_timeout=0.3)
        assert 0.25 < time.monotonic() - start < 3
        assert engine.stats()["transfers_running"] == running
        engine.put(ONES * 7, handle).wait()  # Without a tag there is no need of room.

        # The receiver polls, and the sender that waits goes on.
        peer.start(poll_after, 0.3)
        start = time.monotonic()
        engine.put(ONES * 8, handle, notify=b"4", accept_timeout=10).wait()
        assert time.monotonic() - start > 0.2
        assert peer.result() == ([b"0", b"1"], [7] * 8)
        engine.put(ONES * 9, handle, notify=b"5", accept_timeout=5).wait()
        assert peer.call(all_tags, 4) == [b"2", b"3", b"4", b"5"]


def test_the_own_inbox_pushes_back_too_and_a_poll_in_another_thread_frees_it() -> None:
    with kvzc.Engine(arrival_depth=4, default_timeout=10) as engine:
        region = engine.register(kvzc.empty(8, "uint8"))
        handle = region.handle()
        for _ in range(4):
            engine.put(ONES, handle, notify=b"t").wait()
        with pytest.raises(kvzc.WouldBlock):
            engine.put(ONES, handle, notify=b"t", accept_timeout=0)
        timer = threading.Timer(0.2, lambda: engine.arrivals.wait(b"t", 3))
        timer.start()
        engine.put(ONES, handle, notify=b"t").wait()
        timer.join()
        assert len(engine.arrivals.wait(b"t", 2)) == 2


def close_region(state: State) -> None:
    state.region.close()


def three_puts_into_room_for_one(
    peer: Peer, writer: kvzc.Engine, **last: Any
) -> list[kvzc.Transfer]:
    """They are accepted before the connection stands, when nobody can tell that it is full."""
    handle = kvzc.RemoteHandle.from_text(peer.call(full_inbox, 1))
    with stopped(peer):
        transfers = [writer.put(ONES, handle, notify=b"t") for _ in range(2)]
        transfers.append(writer.put(ONES, handle, notify=b"t", **last))
    transfers[0].wait()
    return transfers


def test_a_transfer_that_waits_for_room_ends_when_its_engine_closes(peer: Peer) -> None:
    writer = kvzc.Engine(default_timeout=10)
    transfers = three_puts_into_room_for_one(peer, writer)
    start = time.monotonic()
    writer.close()
    assert time.monotonic() - start < 2
    assert all(transfer.done for transfer in transfers)


def test_a_transfer_that_waits_for_room_ends_when_its_handle_is_revoked(peer: Peer) -> None:
    with kvzc.Engine(default_timeout=10) as writer:
        transfers = three_puts_into_room_for_one(peer, writer)
        peer.call(close_region)
        with pytest.raises(kvzc.Revoked):
            transfers[2].wait()


def test_no_more_transfers_run_than_the_engine_was_made_for(large: Any) -> None:
    """COMP-09, COMP-10: every accepted one is done exactly once."""
    with kvzc.Engine(max_transfers=4, default_timeout=20) as engine:
        region = engine.register(large)
        handle = region.handle()
        engine.connect(handle)
        source = np.arange(MIB, dtype=np.uint32).view(np.uint8)
        blocked = 0
        transfers = []
        for i in range(20):
            target = handle[4 * MIB * i : 4 * MIB * (i + 1)]
            try:
                transfer = engine.put(source, target, accept_timeout=0)
            except kvzc.WouldBlock:
                blocked += 1
                transfer = engine.put(source, target)
            transfers.append(transfer)
            assert engine.stats()["transfers_running"] <= 4
        kvzc.wait(transfers)
        assert blocked > 0
        assert engine.stats()["transfers_done"] == 21  # With the connect().
        assert (large[: 80 * MIB].reshape(20, -1) == source).all()


# ---- cancelling ----


def test_nothing_lands_after_cancel_returned(large: Any) -> None:
    with kvzc.Engine(default_timeout=20) as engine, engine.register(large) as region:
        source = np.full(LARGE, 5, np.uint8)
        engine.connect(region.handle())
        cancelled = 0
        for round_ in range(20):
            large[:] = 0
            transfer = engine.put(source, region.handle(), notify=b"%d" % round_)
            time.sleep(0.0005 * (round_ % 5))
            transfer.cancel()
            large[:] = 1  # What another request would do with the memory.
            assert transfer.quiet
            assert transfer.done
            time.sleep(0.002)
            assert (large == 1).all()
            arrival = engine.arrivals.wait(b"%d" % round_)
            if transfer.error is None:
                assert arrival.error is None
                continue
            cancelled += 1
            assert isinstance(transfer.error, kvzc.Cancelled)
            assert isinstance(arrival.error, kvzc.Cancelled)
            with pytest.raises(kvzc.Cancelled):
                transfer.wait()
        assert cancelled > 0
        assert engine.stats()["transfers_cancelled"] == cancelled
        assert engine.stats()["transfers_running"] == 0


def test_cancelling_what_is_done_changes_nothing(engine: kvzc.Engine, small: Any) -> None:
    transfer = engine.put(ONES, small)
    transfer.wait()
    transfer.cancel()
    transfer.cancel(0)
    assert transfer.error is None


def test_a_transfer_that_waits_for_a_connection_can_be_cancelled() -> None:
    """The owner is stopped, which is not death."""
    with Peer() as owner:
        handle = kvzc.RemoteHandle.from_text(owner.call(full_inbox, 4))
        stop(owner)
        with kvzc.Engine() as engine:
            transfer = engine.put(ONES, handle)
            with pytest.raises(kvzc.TimedOut):
                transfer.wait(0.2)
            assert not transfer.done
            assert transfer.transport is None
            assert transfer.done_ns is None
            assert transfer.error is None
            transfer.cancel(5)
            assert isinstance(transfer.error, kvzc.Cancelled)
            owner.signal(signal.SIGCONT)
            engine.put(ONES * 2, handle).wait(10)
            assert owner.call(poll_after, 0)[1] == [2] * 8


# ---- deadlines ----


def test_a_deadline_cancels_by_itself_and_the_tag_says_so(engine: kvzc.Engine, peer: Peer) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(full_inbox, 4))
    with stopped(peer):
        start = time.monotonic()
        transfer = engine.put(ONES, handle, notify=b"late", deadline=0.2)
        with pytest.raises(kvzc.Cancelled, match="deadline"):
            transfer.wait(20)
        assert 0.15 < time.monotonic() - start < 5
        assert transfer.quiet
        assert isinstance(transfer.error, kvzc.Cancelled)
    assert peer.call(take_error, b"late") == "Cancelled"
    assert peer.call(poll_after, 0) == ([], [0] * 8)
    assert engine.stats() | {"transfers_cancelled": 1, "transfers_running": 0} == engine.stats()


def take_error(state: State, tag: bytes) -> str:
    return type(state.engine.arrivals.wait(tag).error).__name__


def test_a_deadline_that_is_now_does_not_wait_for_a_peer_that_does_not_answer(peer: Peer) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(full_inbox, 100))
    with kvzc.Engine(default_timeout=10, connect_timeout=4) as engine:
        start = time.monotonic()
        with stopped(peer):
            transfers = [
                engine.put(ONES, handle, deadline=deadline, notify=b"t")
                for deadline in [0, 0.0, 1e-9, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3]
            ]
            for transfer in transfers:
                with pytest.raises(kvzc.Cancelled, match="deadline"):
                    transfer.wait()
            assert time.monotonic() - start < 3
        for _ in transfers:
            assert peer.call(take_error, b"t") == "Cancelled"
    assert peer.call(poll_after, 0) == ([], [0] * 8)


def test_what_is_done_in_time_is_done(engine: kvzc.Engine, small: Any) -> None:
    transfers = [engine.put(ONES, small, deadline=0.1, notify=b"t") for _ in range(20)]
    target = np.zeros(8, np.uint8)
    transfers.append(engine.get(target, small, deadline=0.1, notify=b"t"))
    transfers.append(engine.notify(small, b"t", deadline=0.1))
    kvzc.wait(transfers)
    time.sleep(0.2)
    assert all(transfer.error is None for transfer in transfers)
    assert {a.error for a in engine.arrivals.wait(b"t", len(transfers))} == {None}
    assert target.tolist() == [1] * 8
    assert engine.stats()["transfers_cancelled"] == 0


def test_a_deadline_in_mid_copy_leaves_both_sides_at_rest(large: Any) -> None:
    source = np.full(LARGE, 5, np.uint8)
    caught = 0
    with (
        kvzc.Engine(default_timeout=20, copy_threads=1) as engine,
        engine.register(large) as region,
    ):
        handle = region.handle()
        engine.connect(handle)
        for round_ in range(30):
            transfer = engine.put(
                source, handle, deadline=0.0005 * (1 + round_ % 6), notify=b"%d" % round_
            )
            until(lambda transfer=transfer: transfer.done)
            large[:] = 1
            arrival = engine.arrivals.wait(b"%d" % round_)
            assert type(arrival.error) is type(transfer.error)
            if transfer.error is not None:
                assert "deadline" in str(transfer.error)
                caught += 1
            time.sleep(0.001)
            assert (large == 1).all()
            if caught == 3:
                break
        assert caught > 0
        assert engine.stats()["transfers_running"] == 0


def test_ten_thousand_deadlines_leave_nothing(engine: kvzc.Engine, small: Any) -> None:
    engine.connect(small)
    before = engine.stats()
    files = open_files()
    for _ in range(10_000):
        engine.put(ONES, small, deadline=60).wait()
    after = engine.stats()
    assert after["transfers_done"] - before["transfers_done"] == 10_000
    assert after["transfers_running"] == after["transfers_cancelled"] == 0
    assert open_files() == files


def test_a_thousand_deadlines_pass_at_once_and_in_any_order(
    engine: kvzc.Engine, peer: Peer
) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(full_inbox, 4))
    seconds = np.random.default_rng(1).uniform(0.05, 0.4, 1000)
    with stopped(peer):
        called, transfers = [], []
        for each in seconds:  # Which count from the call, not from the acceptance.
            called.append(time.monotonic_ns())
            transfers.append(engine.put(ONES, handle, deadline=each))
        until(lambda: all(transfer.done for transfer in transfers))
        assert {str(transfer.error) for transfer in transfers} == {str(transfers[0].error)}
        lateness = [
            (t.done_ns or 0) - begun - each * 1e9
            for t, begun, each in zip(transfers, called, seconds, strict=True)
        ]
        assert min(lateness) >= -1e6  # Never early.
    assert engine.stats() | {"transfers_running": 0, "transfers_cancelled": 1000} == engine.stats()
    engine.put(ONES, handle).wait()


def test_a_deadline_ends_a_transfer_that_waits_for_room(peer: Peer) -> None:
    with kvzc.Engine(default_timeout=10) as writer:
        transfers = three_puts_into_room_for_one(peer, writer, deadline=0.3)
        with pytest.raises(kvzc.Cancelled, match="deadline"):
            transfers[2].wait()
        ends = [peer.call(take_error, b"t") for _ in transfers]
        assert sorted(ends) == ["Cancelled", "NoneType", "NoneType"]


@pytest.mark.parametrize("deadline", [-1, -0.001, math.nan, -math.inf])
def test_a_deadline_that_is_no_time_is_a_value_error(
    engine: kvzc.Engine, small: Any, deadline: float
) -> None:
    for use in (
        lambda: engine.put(ONES, small, deadline=deadline),
        lambda: engine.get(bytearray(8), small, deadline=deadline),
        lambda: engine.put_many([(ONES, small)], deadline=deadline),
        lambda: engine.get_many([(bytearray(8), small)], deadline=deadline),
        lambda: engine.notify(small, b"t", deadline=deadline),
        lambda: small.notify(b"t", deadline=deadline, engine=engine),
    ):
        with pytest.raises(ValueError, match="seconds"):
            use()
    with pytest.raises(TypeError):
        engine.put(ONES, small, deadline="1")  # type: ignore[arg-type]
    assert engine.stats()["transfers_done"] == 0
    engine.put(ONES, small, deadline=math.inf).wait()


# ---- tags without data ----


def test_a_tag_can_be_sent_alone_in_three_ways(engine: kvzc.Engine, peer: Peer) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(full_inbox, 100))
    other = engine.connect(handle)
    sends = [
        lambda tag: engine.notify(handle, tag),
        lambda tag: engine.notify(handle[2:4], tag),
        lambda tag: engine.notify(other, tag),
        lambda tag: handle.notify(tag, engine=engine),
        lambda tag: handle[:0].notify(tag, engine=engine),
        lambda tag: other.notify(tag),
    ]
    for i, send in enumerate(sends):
        transfer = send(b"%d" % i)
        transfer.wait()
        assert (transfer.nbytes, transfer.runs) == (0, 0)
        assert transfer.error is None
    assert peer.call(all_tags, len(sends)) == [b"%d" % i for i in range(len(sends))]
    assert peer.call(poll_after, 0)[1] == [0] * 8


def test_a_tag_goes_back_to_whoever_sent_one(engine: kvzc.Engine, peer: Peer) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        peer.call(full_inbox, 100)
        peer.call(send_and_await_answer, region.handle().to_text())
        sender = engine.arrivals.wait(b"question").peer
        assert sender.pid == peer.pid
        sender.notify(b"answer").wait()
        assert peer.call(take_error, b"answer") == "NoneType"


def send_and_await_answer(state: State, text: str) -> None:
    kvzc.RemoteHandle.from_text(text).notify(b"question", engine=state.engine).wait(10)


def test_a_tag_comes_after_those_before_it(engine: kvzc.Engine, small: Any) -> None:
    with kvzc.Engine(default_timeout=10) as writer:
        owner = writer.connect(small)
        for i in range(200):
            writer.put(ONES, small, notify=b"data %d" % i).wait()
            owner.notify(b"tag %d" % i).wait()
        tags = [arrival.tag for _ in range(10) for arrival in engine.arrivals.poll()]
    assert tags == [b"%s %d" % (word, i) for i in range(200) for word in (b"data", b"tag")]


@pytest.mark.parametrize("access", ["put", "get", "both"])
def test_a_tag_needs_no_particular_access(engine: kvzc.Engine, access: str) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        handle = region.grant(access).handle()
        engine.notify(handle, b"t").wait()
        assert engine.arrivals.wait(b"t").error is None


def test_a_tag_goes_from_the_default_engine_when_none_is_named() -> None:
    with kvzc.register(kvzc.empty(8, "uint8")) as region:
        handle = region.handle()
        handle.notify(b"n").wait()
        assert kvzc.arrivals.wait(b"n", timeout=5).peer.name == kvzc.default_engine().name
    kvzc.default_engine().close()


def test_what_is_no_tag_or_no_target_is_refused(engine: kvzc.Engine, small: Any) -> None:
    me = engine.connect(small)
    for tag in (b"x" * 241, b"x" * 5000):
        for use in (lambda t: engine.notify(small, t), me.notify, small.notify):
            with pytest.raises(kvzc.InvalidArgument, match="240"):
                use(tag)
    for wrong in ("text", 5, None, bytearray(b"t")):
        for use in (lambda t: engine.notify(small, t), me.notify, small.notify):
            with pytest.raises(TypeError):
                use(wrong)
    for wrong in (5, None, "engine", ONES, engine):
        with pytest.raises(TypeError):
            engine.notify(wrong, b"t")  # type: ignore[arg-type]
    assert engine.arrivals.poll() == []
    kvzc.default_engine().close()


def test_tags_alone_are_pushed_back_too(peer: Peer) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(full_inbox, 3))
    with kvzc.Engine(default_timeout=5) as engine:
        other = engine.connect(handle)
        for i in range(3):
            other.notify(b"%d" % i).wait()
        for send in (lambda **how: other.notify(b"no", **how), lambda **how: handle.notify(
            b"no", engine=engine, **how
        )):  # fmt: skip
            with pytest.raises(kvzc.WouldBlock, match="inbox"):
                send(accept_timeout=0)
            with pytest.raises(kvzc.TimedOut, match="nothing was posted"):
                send(accept_timeout=0.1)
        assert engine.stats()["transfers_running"] == 0
        peer.start(poll_after, 0.2)
        other.notify(b"3", accept_timeout=10).wait()
        peer.result()
        assert peer.call(all_tags, 2) == [b"2", b"3"]


def test_a_tag_to_whoever_is_gone_is_an_error(engine: kvzc.Engine, peer: Peer) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(full_inbox, 3))
    other = engine.connect(handle)
    peer.kill()
    until(lambda: other.lost)
    for use in (
        lambda: other.notify(b"t").wait(),
        lambda: engine.notify(other, b"t").wait(),
        lambda: handle.notify(b"t", engine=engine).wait(),
    ):
        start = time.monotonic()
        with pytest.raises(kvzc.PeerLost):
            use()
        assert time.monotonic() - start < 2
    with kvzc.Engine() as closed, closed.register(kvzc.empty(8, "uint8")) as region:
        me = closed.connect(region.handle())
    for use in (lambda: me.notify(b"t"), lambda: closed.notify(me, b"t")):
        with pytest.raises(kvzc.Closed):
            use()


# ---- the interpreter goes on ----

CTRL_C = """
import sys, time
import kvzc
import numpy as np
{setup}
try:
    start = time.monotonic()
    print("waiting", flush=True)
    {wait}
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start, flush=True)
"""


@pytest.mark.parametrize(
    ("setup", "wait"),
    [
        ("", "kvzc.arrivals.wait(b'never', timeout=float('inf'))"),
        (
            "e = kvzc.Engine(arrival_depth=1)\n"
            "h = e.register(kvzc.empty(8, 'uint8'))\nh0 = h.handle()\n"
            "e.put(np.ones(8, np.uint8), h0, notify=b't').wait()",
            "e.put(np.ones(8, np.uint8), h0, notify=b't', accept_timeout=float('inf'))",
        ),
    ],
    ids=["arrivals", "put"],
)
def test_ctrl_c_ends_a_wait(setup: str, wait: str) -> None:
    ended = run_script(CTRL_C.format(setup=setup, wait=wait), signal_at=("waiting", signal.SIGINT))
    assert ended.status == 0, ended.errors
    word, seconds = ended.output.split()[1:]
    assert word == "interrupted"
    assert float(seconds) < 0.5


class Counter:
    """A Python thread that counts as long as it gets the GIL."""

    def __init__(self) -> None:
        self.count = 0
        self.longest = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            self.count += 1
            now = time.monotonic()
            self.longest = max(self.longest, now - last)
            last = now
            time.sleep(0.0005)

    def __enter__(self) -> "Counter":
        self._thread.start()
        until(lambda: self.count > 3)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def test_other_threads_run_during_a_long_wait(engine: kvzc.Engine) -> None:
    with Counter() as counter:
        before = counter.count
        with pytest.raises(kvzc.TimedOut):
            engine.arrivals.wait(b"never", timeout=0.5)
        assert counter.count - before > 50


def test_other_threads_run_during_large_copies(large: Any) -> None:
    with kvzc.Engine(default_timeout=20) as engine, engine.register(large) as region:
        source = np.ones(LARGE, np.uint8)
        handle = region.handle()
        with Counter() as counter:
            until_s = time.monotonic() + 1
            before = counter.count
            copies = 0
            while time.monotonic() < until_s:
                engine.put(source, handle).wait()
                copies += 1
            assert copies > 1
            # Were the GIL held for a copy, the thread would run about once per copy.
            assert counter.count - before > 3 * copies


def test_a_wait_takes_no_processor_time(engine: kvzc.Engine) -> None:
    before = time.process_time()
    with pytest.raises(kvzc.TimedOut):
        engine.arrivals.wait(b"never", timeout=1)
    assert time.process_time() - before < 0.3


def test_many_threads_put_at_once(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((8, 1000), "int64")
    with engine.register(cache) as region:
        handle = region.handle()

        def work(row: int) -> None:
            for i in range(200):
                engine.put(np.full(1000, 1000 * row + i), handle[row], notify=b"t%d" % row).wait()

        workers = [threading.Thread(target=work, args=(row,)) for row in range(8)]
        for worker in workers:
            worker.start()
        for row, worker in enumerate(workers):
            worker.join(60)
            assert len(engine.arrivals.wait(b"t%d" % row, 200)) == 200
        assert (cache == 1000 * np.arange(8)[:, None] + 199).all()
        assert engine.stats()["transfers_done"] == 1600


def test_a_hundred_thousand_runs_are_one_put(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((100_000, 2), "int32")
    with engine.register(cache) as region:
        transfer = engine.put(np.arange(100_000, dtype=np.int32), region.handle()[:, 1])
        transfer.wait()
        assert transfer.runs == 100_000
    assert (cache[:, 1] == np.arange(100_000)).all()
    assert not cache[:, 0].any()


def test_a_transfer_of_too_many_pieces_is_refused_before_its_list_eats_the_memory() -> None:
    with kvzc.Engine() as engine:
        side = 5000
        region = engine.register(kvzc.empty((side, side), "uint8"))
        source = np.zeros((side, side), np.uint8)
        with pytest.raises(kvzc.LimitExceeded, match="contiguous"):
            engine.put(source.T, region.handle())
        engine.put(source, region.handle()).wait()
