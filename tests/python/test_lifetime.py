"""Lifetimes: exit, collection, fork, and the death of either side."""

import contextlib
import gc
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import kvzc
import numpy as np
import pytest
from helpers import Peer, State, leftovers, mappings, open_files, run_script, stop, threads, until

MIB = 1 << 20
ONES = np.ones(8, np.uint8)


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Lets gc.collect() look only at what a test makes, not at all of torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# ---- the interpreter's end ----

# An engine in full use that is never closed: regions, a peer, transfers that run, arrivals.
IN_USE = """
import os, signal, sys, threading, time
import kvzc
import numpy as np
engine = kvzc.Engine()
cache = kvzc.empty(64 << 20, "uint8")
region = engine.register(cache)
handle = region.handle()
source = np.ones(64 << 20, np.uint8)
engine.put(source, handle, notify=b"one").wait()
kvzc.put(source[:8], handle[:8]).wait()
transfer = engine.put(source, handle, notify=b"two")
def blocked():
    for inbox in (engine.arrivals, kvzc.arrivals):
        threading.Thread(target=inbox.wait, args=(b"never", 2), daemon=True).start()
    time.sleep(0.1)
def put_for_ever():
    def work():
        while True:
            engine.put(source, handle).wait()
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.1)
def end(how):
    print("end", flush=True)
    how()
"""

# How the program ends, the status, and what it may say to stderr.
ENDS = {
    "return": ("end(lambda: None)", 0, ""),
    "sys.exit": ("end(lambda: sys.exit(7))", 7, ""),
    "exception": ("end(lambda: 1 / 0)", 1, "ZeroDivisionError"),
    "os._exit": ("end(lambda: os._exit(5))", 5, ""),
    "SIGTERM": ("end(lambda: os.kill(os.getpid(), signal.SIGTERM)); time.sleep(60)", -15, ""),
    "SIGKILL": ("end(lambda: os.kill(os.getpid(), signal.SIGKILL)); time.sleep(60)", -9, ""),
    "threads in blocked waits": ("blocked(); end(lambda: sys.exit(3))", 3, ""),
    "threads in blocked waits, exception": (
        "blocked(); end(lambda: 1 / 0)",
        1,
        "ZeroDivisionError",
    ),
    "a thread that puts": ("put_for_ever(); end(lambda: sys.exit(4))", 4, ""),
    "deleted in a wrong order": (
        "del engine, cache, source; end(lambda: sys.exit(2))",
        2,
        "",
    ),
    "a cycle": (
        "class A: pass\na = A(); a.a = a; a.all = [engine, region, handle, transfer]; "
        "del engine, region, handle, transfer; end(lambda: None)",
        0,
        "",
    ),
    "atexit uses it": (
        "import atexit\natexit.register(lambda: transfer.wait() or region.close())\n"
        "end(lambda: None)",
        0,
        "",
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_program_that_never_closes_ends_as_it_would_without_kvzc(how: str) -> None:
    """LIFE-06, LIFE-07."""
    code, status, says = ENDS[how]
    before = leftovers()
    ended = run_script(IN_USE + code)
    assert ended.status == status, ended
    assert ended.output == "end\n"
    assert ended.exit_s < 2
    assert leftovers() == before
    if not says and "thread" not in how:
        assert ended.errors == ""
    assert says in ended.errors
    # What daemon threads were told when their engine closed under them.
    in_threads = re.findall(r"^kvzc\.\w+", ended.errors, re.MULTILINE)
    assert set(in_threads) <= {"kvzc.Closed", "kvzc.Cancelled", "kvzc.Revoked", "kvzc.PeerLost"}
    assert "terminate" not in ended.errors
    assert "Fatal" not in ended.errors


def test_a_handle_at_module_level_of_an_engine_that_is_gone_hurts_nobody() -> None:
    ended = run_script(
        "import kvzc\n"
        "h = kvzc.Engine().register(kvzc.empty(8, 'uint8')).handle()\n"
        "t = None\n"
        "def f():\n"
        "    global t\n"
        "    e = kvzc.Engine()\n"
        "    t = e.put(b'12345678', h)\n"
        "f()\n"
        "import gc; gc.collect()\n"
        "print(t.done)\n"
        "try: t.wait(5)\n"
        "except kvzc.Error as e: print(type(e).__name__)\n"
    )
    assert ended.status == 0, ended.errors


# ---- any order ----


def everything() -> dict[str, Any]:
    engine = kvzc.Engine(default_timeout=5)
    cache = kvzc.empty(2 * MIB, "uint8")
    region = engine.register(cache)
    handle = region.handle()
    view, target = region[:MIB], handle[MIB:]
    transfer = engine.put(view, target, notify=b"t")
    return {
        "engine": engine,
        "cache": cache,
        "region": region,
        "handle": handle,
        "view": view,
        "target": target,
        "transfer": transfer,
        "arrivals": engine.arrivals,
    }


def test_things_may_be_dropped_in_every_order() -> None:
    before = threads(), mappings()
    kept: dict[str, Any] = {}
    orders = list(itertools.permutations(["engine", "cache", "region", "handle", "transfer"]))
    for order in orders[::3]:
        kept = everything()
        for name in order:
            del kept[name]
            if name in ("engine", "transfer"):
                gc.collect()
        kept.clear()
    gc.collect()
    until(lambda: (threads(), mappings()) == before)


@pytest.mark.parametrize("order", list(itertools.permutations(["engine", "region", "other"])))
def test_things_may_be_closed_in_every_order(order: tuple[str, ...]) -> None:
    with kvzc.Engine() as other:
        kept = everything() | {"other": other}
        source = other.register(np.ones(MIB, np.uint8))
        transfer = other.put(source, kept["target"])
        for name in order:
            kept[name].close()
            kept[name].close()
        assert kept["transfer"].done
        try:
            transfer.wait(5)
        except kvzc.Error as error:
            assert isinstance(error, kvzc.Revoked | kvzc.PeerLost | kvzc.Closed | kvzc.Cancelled)
        source.close()
        for use in (kept["region"].handle, kept["arrivals"].poll):
            with pytest.raises(kvzc.Closed):
                use()
        assert repr(kept["engine"]).endswith("closed>")
        assert repr(kept["transfer"])


def test_a_transfer_outlives_what_its_caller_drops() -> None:
    """Dropping the engine is closing it: the transfer ends, done or with a named error."""
    for _ in range(20):
        transfer = everything()["transfer"]
        gc.collect()
        try:
            transfer.wait(5)
        except kvzc.Error as error:
            assert not isinstance(error, kvzc.TimedOut)
        assert transfer.quiet


def test_two_engines_in_one_process_do_not_disturb_each_other() -> None:
    with kvzc.Engine(default_timeout=5) as a, kvzc.Engine(default_timeout=5) as b:
        cache = kvzc.empty(8, "uint8")
        with a.register(cache) as of_a, b.register(cache) as of_b:
            a.put(ONES, of_b.handle(), notify=b"to b").wait()
            b.put(ONES * 2, of_a.handle(), notify=b"to a").wait()
            assert b.arrivals.wait(b"to b").peer.name == a.name
            assert a.arrivals.wait(b"to a").peer.name == b.name
            assert cache.tolist() == [2] * 8
            at_b = of_b.handle()
            lost = a.connect(at_b)
            b.close()
            until(lambda: lost.lost)
            with pytest.raises((kvzc.PeerLost, kvzc.Revoked)):
                a.put(ONES, at_b).wait()
            a.put(ONES * 3, of_a.handle()).wait()
        assert cache.tolist() == [3] * 8


CLOSE_AFTER_LARGE = """
import kvzc
import numpy as np
cache = kvzc.empty(200_000, "uint8")
source = np.ones(200_000, np.uint8)
for _ in range(1000):
    with kvzc.Engine() as engine, engine.register(cache) as region:
        engine.put(source, region.handle()).wait()
print("done")
"""


def test_an_engine_may_close_as_soon_as_a_large_put_is_done() -> None:
    """Its waiter may have copied everything before a copying thread came to look."""
    ended = run_script(CLOSE_AFTER_LARGE)
    assert ended.status == 0, ended.errors
    assert ended.output == "done\n"


def test_opening_and_closing_leaves_nothing() -> None:
    cache = kvzc.empty(8, "uint8")

    def round_trip() -> None:
        with kvzc.Engine(default_timeout=5) as engine, engine.register(cache) as region:
            engine.put(ONES, region.handle(), notify=b"t").wait()
            engine.arrivals.wait(b"t")

    for _ in range(3):
        round_trip()
    gc.collect()
    before = open_files(), mappings(), threads(), len(os.listdir("/proc/self/task"))
    for _ in range(200):
        round_trip()
    gc.collect()
    until(
        lambda: (open_files(), mappings(), threads(), len(os.listdir("/proc/self/task"))) == before
    )
    assert leftovers() == set()


def test_collected_engines_leave_nothing() -> None:
    cache = kvzc.empty(8, "uint8")
    before = open_files(), mappings(), threads()
    for _ in range(50):
        engine = kvzc.Engine()
        engine.put(ONES, engine.register(cache).handle())
    del engine
    gc.collect()
    until(lambda: (open_files(), mappings(), threads()) == before)


# ---- fork ----

FORK = """
import gc, os, sys, time
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of fork() with threads.
import kvzc
import numpy as np
engine = kvzc.Engine(default_timeout=5)
cache = kvzc.empty(8, "uint8")
region = engine.register(cache)
handle = region.handle()
grant = region[:4].grant()
ones = np.ones(8, np.uint8)
engine.put(ones, handle, notify=b"t").wait()
large = engine.register(kvzc.empty(1 << 20, "uint8"))
engine.put(np.ones(1 << 20, np.uint8), large.handle()).wait()  # By threads of its own.
running = engine.put(ones, handle)
kvzc.put(ones, handle).wait()

def refused(call):
    try:
        call()
    except kvzc.ForkedEngine as error:
        assert "spawn" in str(error)
    else:
        raise SystemExit(f"the child may use the engine: {call}")

def child():
    for call in (
        lambda: engine.put(ones, handle),
        lambda: engine.put_many([(ones, handle)]),
        lambda: engine.get(ones, handle),
        lambda: engine.get_many([(ones, handle)]),
        lambda: engine.notify(handle, b"t"),
        lambda: handle.notify(b"t", engine=engine),
        lambda: engine.register(cache),
        lambda: engine.connect(handle),
        lambda: engine.arrivals.wait(b"t", timeout=1),
        lambda: engine.arrivals.poll(),
        lambda: engine.arrivals.forget(b"t"),
        lambda: engine.arrivals.fileno(),
        lambda: region.handle(),
        lambda: region.grant(),
        lambda: region.revoke(),
        lambda: grant.handle(),
        lambda: grant.revoke(),
        lambda: region.close(),
        lambda: kvzc.put(ones, handle),
        lambda: kvzc.register(cache),
        lambda: kvzc.arrivals.poll(),
    ):
        refused(call)
    engine.stats()
    repr(engine), repr(region), repr(handle), repr(running)

for way in range(4):
    pid = os.fork()
    if pid == 0:
        child()
        if way == 0:
            os._exit(11)
        if way == 1:
            sys.exit(11)
        if way == 2:
            del engine, region, handle, running, large
            gc.collect()
            sys.exit(11)
        # An engine of its own works.
        with kvzc.Engine(default_timeout=5) as own:
            mine = kvzc.empty(8, "uint8")
            with own.register(mine) as here:
                own.put(ones, here.handle(), notify=b"c").wait()
                own.arrivals.wait(b"c")
                assert mine.all()
        sys.exit(11)
    deadline = time.monotonic() + 20
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise SystemExit(f"the child hangs at its end, way {way}")
        time.sleep(0.005)
    assert os.waitstatus_to_exitcode(status) == 11, (way, status)
    # The parent goes on, with all that it had; and LIFE-10: its writes are seen.
    cache[:] = 0
    ones[:] = way + 2
    engine.put(ones, handle, notify=b"after").wait()
    engine.arrivals.wait(b"after")
    assert cache.tolist() == [way + 2] * 8
region.close()
engine.close()
print("parent done")
"""


def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on() -> None:
    """LIFE-10, LIFE-11."""
    ended = run_script(FORK)
    assert ended.status == 0, ended.output + ended.errors
    assert ended.output == "parent done\n"
    assert ended.errors == ""


def owner_start(state: State, nbytes: int, arrival_depth: int = 65536) -> str:
    state.engine = kvzc.Engine(default_timeout=20, arrival_depth=arrival_depth)
    state.cache = kvzc.empty(nbytes, "uint8")
    state.region = state.engine.register(state.cache)
    text: str = state.region.handle().to_text()
    return text


FORKS_WHILE_IT_WAITS = """
import os
import signal
import threading
import warnings

import kvzc

warnings.simplefilter("ignore", DeprecationWarning)
engine = kvzc.Engine()
region = engine.register(engine.empty((8,), "uint8"))
target = region.handle()
children = []


def on_signal(*args: object) -> None:
    pid = os.fork()
    if pid != 0:
        children.append(pid)


def go_on() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    while not children:
        pass
    print("status", os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]), flush=True)
    target.notify(b"late", engine=engine)


signal.signal(signal.SIGUSR1, on_signal)
parent = os.getpid()
thread = threading.Timer(0.2, go_on)
thread.start()
try:
    engine.arrivals.wait(b"late", timeout=20)
except kvzc.Error as error:
    assert os.getpid() != parent, error
    os._exit(7)
assert os.getpid() == parent
thread.join()
print("arrived", flush=True)
"""


def test_a_signal_handler_may_fork_while_its_thread_waits_for_a_tag() -> None:
    ended = run_script(FORKS_WHILE_IT_WAITS)
    assert (ended.status, ended.errors) == (0, "")
    assert ended.output.split() == ["status", "7", "arrived"]


def fork_and_leave_a_child(state: State, seconds: float) -> int:
    """Forks a child that keeps what it inherited for a while."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    return pid


def own_engine(state: State, name: str) -> None:
    state.engine = kvzc.Engine(name)


def test_a_forked_child_does_not_keep_its_parents_name(engine: kvzc.Engine) -> None:
    name = f"forks-{os.getpid()}"
    with Peer() as first, Peer() as second:
        first.call(own_engine, name)
        child = first.call(fork_and_leave_a_child, 30)
        try:
            first.kill()
            second.call(own_engine, name)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("target_dies", [True, False])
def test_a_forked_child_does_not_keep_its_parents_connections_alive(
    engine: kvzc.Engine, peer: Peer, target_dies: bool
) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(owner_start, 8))
    engine.put(ONES, handle).wait()
    child = peer.call(fork_and_leave_a_child, 30)
    try:
        other = engine.connect(handle)
        peer.kill()
        with pytest.raises(kvzc.PeerLost):
            if target_dies:
                deadline = time.monotonic() + 2
                while time.monotonic() < deadline:
                    engine.put(ONES, handle).wait()
                    time.sleep(0.01)
            else:
                engine.arrivals.wait(b"never", peer=other, timeout=2)
        os.kill(child, 0)  # It is alive all that time.
    finally:
        os.kill(child, signal.SIGKILL)


# ---- death of either side ----


def write_for_ever(state: State, text: str, nbytes: int) -> None:
    engine = kvzc.Engine()
    handle = kvzc.RemoteHandle.from_text(text)
    source = np.full(nbytes, 7, np.uint8)
    engine.put(source[:1], handle[:1], notify=b"begins").wait()
    while True:
        engine.put(source, handle).wait()


def test_a_writer_killed_in_mid_transfer_is_lost_and_leaves_nothing(
    engine: kvzc.Engine,
) -> None:
    """COMP-14: and its bytes have stopped when it is reported lost."""
    nbytes = 64 * MIB
    cache = kvzc.empty(nbytes, "uint8")
    before = engine.stats()
    files, mapped = open_files(), mappings()
    with engine.register(cache) as region:
        for _ in range(3):
            with Peer() as writer:
                writer.start(write_for_ever, region.handle().to_text(), nbytes)
                other = engine.arrivals.wait(b"begins").peer
                time.sleep(0.05)
                writer.kill()
                start = time.monotonic()
                with pytest.raises(kvzc.PeerLost):
                    engine.arrivals.wait(b"never", peer=other, timeout=20)
                assert time.monotonic() - start < 2
                cache[:] = 1
                time.sleep(0.02)
                assert (cache == 1).all()
        start = time.monotonic()
    assert time.monotonic() - start < 2  # Closing waits for nobody who is dead.
    after = engine.stats()
    for name in ("regions", "storages", "grants", "peers", "transfers_running", "arrivals_pending"):
        assert after[name] == before[name], name
    until(lambda: (open_files(), mappings()) == (files, mapped))


def test_a_target_killed_in_mid_transfer_ends_the_transfer_and_the_next(
    engine: kvzc.Engine, peer: Peer
) -> None:
    nbytes = 64 * MIB
    handle = kvzc.RemoteHandle.from_text(peer.call(owner_start, nbytes))
    source = np.ones(nbytes, np.uint8)
    engine.put(source, handle).wait()
    other = engine.connect(handle)
    transfer = engine.put(source, handle, notify=b"t")
    peer.kill()
    killed = time.monotonic()
    with contextlib.suppress(kvzc.PeerLost):  # Or it was faster.
        transfer.wait(5)
    with pytest.raises(kvzc.PeerLost) as raised:
        while True:
            engine.put(ONES, handle[:8]).wait(5)
    assert time.monotonic() - killed < 2
    assert str(peer.pid) in str(raised.value)
    start = time.monotonic()
    with pytest.raises(kvzc.PeerLost):
        engine.put(ONES, handle[:8]).wait()
    assert time.monotonic() - start < 0.5
    assert other.lost
    assert engine.stats()["transfers_running"] == 0
    assert engine.stats()["peers"] == 0
    del handle, transfer
    until(lambda: mappings_of("kvzc-memory") == 0)


def mappings_of(label: str) -> int:
    with open("/proc/self/maps") as maps:
        return sum(label in line for line in maps)


def test_a_writer_that_waits_for_room_learns_of_the_targets_death(peer: Peer) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(owner_start, 8, 2))
    with kvzc.Engine() as engine:
        for _ in range(2):
            engine.put(ONES, handle, notify=b"t").wait()
        threading.Timer(0.3, peer.signal, [signal.SIGKILL]).start()
        start = time.monotonic()
        with pytest.raises(kvzc.PeerLost):
            engine.put(ONES, handle, notify=b"t", accept_timeout=20).wait(20)
        assert time.monotonic() - start < 0.3 + 2


def test_a_put_to_an_engine_that_is_gone_fails_at_once(engine: kvzc.Engine) -> None:
    with kvzc.Engine() as other:
        region = other.register(kvzc.empty(8, "uint8"))
        handle = region.handle()
    start = time.monotonic()
    with pytest.raises(kvzc.PeerLost, match="no engine listens"):
        engine.put(ONES, handle).wait()
    with pytest.raises(kvzc.PeerLost):
        engine.connect(handle)
    assert time.monotonic() - start < 2


def test_other_peers_go_on_when_one_dies(engine: kvzc.Engine) -> None:
    with Peer() as dies, Peer() as lives:
        first = kvzc.RemoteHandle.from_text(dies.call(owner_start, 8))
        second = kvzc.RemoteHandle.from_text(lives.call(owner_start, 8))
        engine.put(ONES, first).wait()
        engine.put(ONES, second).wait()
        dies.kill()
        for _ in range(100):
            engine.put(ONES, second).wait()
        with pytest.raises(kvzc.PeerLost):
            while True:
                engine.put(ONES, first).wait()
        engine.put(ONES, second).wait()


def test_a_stopped_writer_cannot_hold_up_the_owner_for_ever(engine: kvzc.Engine) -> None:
    """SIGSTOP is not death: close() says TimedOut at worst, and in time."""
    nbytes = 64 * MIB
    cache = kvzc.empty(nbytes, "uint8")
    with Peer() as writer:
        region = engine.register(cache)
        writer.start(write_for_ever, region.handle().to_text(), nbytes)
        engine.arrivals.wait(b"begins")
        time.sleep(0.05)
        stop(writer)
        start = time.monotonic()
        try:
            region.close(0.5)
        except kvzc.TimedOut as error:
            assert str(writer.pid) in str(error)  # It names who is still there.
        assert time.monotonic() - start < 3
        assert region.closed
        writer.signal(signal.SIGCONT)
        writer.kill()
