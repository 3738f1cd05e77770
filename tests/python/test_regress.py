"""What reviews found, one test each, named for what broke."""

import contextlib
import math
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time

import kvzc
import numpy as np
import pytest
from helpers import Ended, Peer, State, run_script, stopped, until
from wire_client import (
    ATTACH,
    ATTACHED,
    KICK,
    REFUSE,
    WELCOME,
    HandleBytes,
    Holder,
    Owner,
    address,
    blob,
)

MIB = 1 << 20
ONES = np.ones(8, np.uint8)


@pytest.fixture(scope="module")
def owner(shared_peer: Peer) -> Peer:
    """The shared peer, for tests that leave it alive."""
    return shared_peer


def own(state: State, count: int = 1, nbytes: int = 8, arrival_depth: int = 65536) -> list[str]:
    """Makes an engine with `count` regions, in place of the one before."""
    if hasattr(state, "engine"):
        state.engine.close()
    state.engine = kvzc.Engine(default_timeout=20, arrival_depth=arrival_depth)
    state.caches = [kvzc.empty(nbytes, "uint8") for _ in range(count)]
    state.regions = [state.engine.register(cache) for cache in state.caches]
    return [region.handle().to_text() for region in state.regions]


def own_many(state: State, count: int) -> list[str]:
    """As own(), but all grants are of the same memory."""
    own(state)
    state.regions = [state.engine.register(state.caches[0]) for _ in range(count)]
    return [region.handle().to_text() for region in state.regions]


def close_region(state: State, index: int) -> None:
    state.regions[index].close()


def bytes_of(state: State, value: int) -> int:
    return int((state.caches[0] == value).sum())


def take(state: State, tag: bytes) -> str:
    """Takes an arrival and gives the name of its error."""
    return type(state.engine.arrivals.wait(tag).error).__name__


def polled(state: State) -> list[str]:
    return [repr(arrival) for arrival in state.engine.arrivals.poll()]


def limit_files(state: State, soft: int) -> int:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return before


def send(state: State, text: str, tag: bytes) -> None:
    with kvzc.Engine() as engine:
        engine.put(ONES, kvzc.RemoteHandle.from_text(text), notify=tag).wait(10)


def write_until_revoked(state: State, text: str, nbytes: int) -> None:
    state.engine = getattr(state, "engine", None) or kvzc.Engine(copy_threads=1)
    source = np.full(nbytes, 9, np.uint8)
    handle = kvzc.RemoteHandle.from_text(text)
    state.engine.put(source[:1], handle[:1], notify=b"begins").wait(10)
    with contextlib.suppress(kvzc.Revoked):
        while True:
            state.engine.put(source, handle).wait(20)


def handles_of(texts: list[str]) -> list[kvzc.RemoteHandle]:
    return [kvzc.RemoteHandle.from_text(text) for text in texts]


def went_well(ended: Ended, output: str) -> None:
    assert ended.status == 0, ended.output + ended.errors
    assert ended.output == output, ended.output + ended.errors
    assert ended.errors == ""


def name_of(error: object) -> str:
    return type(error).__name__


# ---- crashes ----

DROPPED_WHILE_QUEUED = """
import sys, threading
import kvzc
import numpy as np
nbytes = 256 << 10
owner = kvzc.Engine()
region = owner.register(kvzc.empty(nbytes, "uint8"))
text = region.handle().to_text()
source = np.ones(nbytes, np.uint8)
for _ in range(int(sys.argv[1])):
    with kvzc.Engine(copy_threads=2) as engine:
        handle = kvzc.RemoteHandle.from_text(text)
        transfers = [engine.put(source, handle) for _ in range(128)]
        def wait_and_drop():
            while transfers:
                try:
                    transfer = transfers.pop(0)
                except IndexError:
                    return
                transfer.wait(20)
        threads = [threading.Thread(target=wait_and_drop) for _ in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
print("done")
"""


def test_a_waiter_drops_a_large_put_while_the_control_thread_queues_it() -> None:
    went_well(run_script(DROPPED_WHILE_QUEUED, "500"), "done\n")


DROPPED_AFTER_A_SUBINTERPRETER = """
import sys, time
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import kvzc
interpreters.destroy(interpreters.create())
engine = kvzc.Engine(copy_threads=2)
handle = kvzc.RemoteHandle.from_text(sys.argv[1])
engine.connect(handle)
for _ in range(200):
    transfer = engine.put(bytearray(4 << 20), handle)
    del transfer
    some = [object() for _ in range(1000)]
    time.sleep(0.002)
engine.close()
print("done")
"""


def test_a_subinterpreter_does_not_let_copying_threads_drop_objects_unlocked(owner: Peer) -> None:
    (text,) = owner.call(own, 1, 4 * MIB)
    went_well(run_script(DROPPED_AFTER_A_SUBINTERPRETER, text), "done\n")


def test_an_owner_that_names_a_fence_slot_beyond_its_board_is_an_error() -> None:
    ended = run_script(
        """
import sys, threading
sys.path.insert(0, sys.argv[1])
import kvzc
import numpy as np
from wire_client import ATTACH, HandleBytes, Owner
with kvzc.Engine("honest", default_timeout=5) as engine:
    region = engine.register(kvzc.empty(8, "uint8"))
    given = HandleBytes.of(region.handle()).owned_by("hostil", bytes(16))
    with Owner(given.engine) as owner, kvzc.Engine(default_timeout=5) as writer:
        def serve():
            owner.accept(given)
            owner.share(8)
            owner.answer_attach(owner.expect(ATTACH)[0], given.key, 0xFFFFFFF0)
        thread = threading.Thread(target=serve)
        thread.start()
        transfer = writer.put(np.ones(8, np.uint8), given.handle())
        thread.join()
        try:
            transfer.wait()
        except kvzc.Error as error:
            assert not isinstance(error, kvzc.TimedOut), error
            print("an error")
""".replace("honest", f"honest-{os.getpid()}").replace("hostil", f"hostil-{os.getpid()}"),
        os.path.dirname(__file__),
    )
    went_well(ended, "an error\n")


# ---- fork ----

CHILD_HELPS = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of fork() with threads.
import kvzc
import numpy as np
engine = kvzc.Engine(default_timeout=20, copy_threads=1)
handle = kvzc.RemoteHandle.from_text(sys.argv[1])
peer = engine.connect(handle)
source = np.ones(handle.nbytes, np.uint8)

def child(transfer, parent_is_done):
    was_running = not transfer.done
    parent_is_done.read()
    source[:] = 7  # The child's own copy.
    for call in (
        lambda: transfer.wait(3),
        lambda: transfer.cancel(3),
        lambda: kvzc.wait([transfer], 3),
    ):
        try:
            call()
        except kvzc.ForkedEngine:
            pass
        except BaseException as error:
            os._exit(3 if was_running else 0)
        else:
            os._exit(4 if was_running else 0)
    peer.lost, peer.error
    os._exit(11 if was_running else 0)

for _ in range(20):
    theirs, ours = os.pipe()
    transfer = engine.put(source, handle)
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        child(transfer, os.fdopen(theirs, "rb"))
    os.close(theirs)
    transfer.wait()
    os.close(ours)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        break
engine.put(source[:1], handle[:1], notify=b"after").wait()
engine.close()
print(status)
"""


def test_a_forked_child_does_not_copy_for_a_running_transfer(owner: Peer) -> None:
    (text,) = owner.call(own, 1, 64 * MIB)
    went_well(run_script(CHILD_HELPS, text), "11\n")
    assert owner.call(bytes_of, 1) == 64 * MIB  # Not one byte of the child's.
    assert owner.call(take, b"after") == "NoneType"
    assert owner.call(polled) == []


# ---- the fence ----


def test_a_second_close_waits_for_a_stopped_writer_too(engine: kvzc.Engine, peer: Peer) -> None:
    nbytes = 32 * MIB
    cache = kvzc.empty(nbytes, "uint8")
    for _ in range(20):
        region = engine.register(cache)
        peer.start(write_until_revoked, region.handle().to_text(), nbytes)
        engine.arrivals.wait(b"begins")
        time.sleep(0.03)
        with stopped(peer):
            try:
                region.close(0.1)
            except kvzc.TimedOut:
                with pytest.raises(kvzc.TimedOut, match=str(peer.pid)):
                    region.close(0.1)
                with pytest.raises(kvzc.TimedOut):
                    region.close(0)
                caught = True
            else:
                caught = False  # It was between two chunks.
        peer.result()
        region.close(10)
        if caught:
            cache[:] = 0
            time.sleep(0.02)
            assert not cache.any()
            return
    pytest.fail("the writer was never stopped in a chunk")


def test_a_lost_peer_that_still_lives_is_waited_for(engine: kvzc.Engine) -> None:
    region = engine.register(kvzc.empty(8, "uint8"))
    given = HandleBytes.of(region.handle())
    with Holder(region.handle()) as holder:
        holder.attach(given)
        holder.mark_busy(holder.fence_slot)
        holder.publish(b"here")
        holder.ask_attach(given)
        other = engine.arrivals.wait(b"here").peer
        holder.send(WELCOME, b"\0")  # Out of order, so the engine gives it up.
        until(lambda: other.lost)
        why = str(other.error)
        for _ in range(2):
            with pytest.raises(kvzc.TimedOut, match=str(os.getpid())):
                region.close(0.1)
        holder.mark_idle()
        region.close(10)

    # What was first the matter is told for ever, though the connection has ended since.
    assert str(other.error) == why

    # A thread that has ended writes no more, whatever its mark says.
    region = engine.register(kvzc.empty(8, "uint8"))
    with Holder(region.handle()) as holder:
        holder.attach(HandleBytes.of(region.handle()))
        marker = threading.Thread(target=holder.mark_busy, args=(holder.fence_slot,))
        marker.start()
        marker.join()
        region.close(10)


# ---- one bad thing harms others ----


@pytest.mark.parametrize("harm", ["revoked", "forged"])
def test_a_handle_that_is_refused_does_not_harm_others_of_its_engine(
    owner: Peer, engine: kvzc.Engine, harm: str
) -> None:
    bad, good = handles_of(owner.call(own, 2))
    if harm == "revoked":
        owner.call(close_region, 0)
    else:
        bad = HandleBytes.of(bad).with_key(bytes(32)).handle()
    with stopped(owner):  # So that both wait for the connection, which the bad one opens.
        first, second = engine.put(ONES, bad), engine.put(ONES, good)
    with pytest.raises(kvzc.Revoked if harm == "revoked" else kvzc.BadHandle):
        first.wait()
    second.wait()
    engine.put(ONES, good).wait()


def test_transfers_that_wait_for_one_slow_peer_do_not_keep_others_waiting(
    owner: Peer, engine: kvzc.Engine, peer: Peer
) -> None:
    slow = handles_of(peer.call(own, 8, 8, 1))
    (other,) = handles_of(owner.call(own))
    with stopped(peer):
        transfers = [
            engine.put(ONES, handle, notify=b"x", accept_timeout=0)
            for handle in slow
            for _ in range(1024)
        ]
    until(lambda: any(transfer.done for transfer in transfers))
    started, worked = time.monotonic(), time.process_time()
    engine.connect(other, timeout=5)
    time.sleep(0.4)
    worked, took = time.process_time() - worked, time.monotonic() - started
    assert worked < took / 2
    assert sum(transfer.done for transfer in transfers) == 1
    peer.kill()
    started = time.monotonic()
    with pytest.raises(kvzc.PeerLost):
        kvzc.wait(transfers, 10)
    until(lambda: all(transfer.done for transfer in transfers))
    assert time.monotonic() - started < 5
    assert [name_of(t.error) for t in transfers].count("PeerLost") == len(transfers) - 1


def test_a_kick_that_meets_a_full_socket_is_sent_again() -> None:
    name = f"kick-{os.getpid()}"
    incarnation = os.urandom(16)
    with kvzc.Engine(f"{name}-a", default_timeout=10) as engine:
        region = engine.register(kvzc.empty(8, "uint8"))
        given = HandleBytes.of(region.handle())
        ours = given.owned_by(f"{name}-b", incarnation)
        with Holder(region.handle(), incarnation=incarnation, arrival_depth=2) as holder:
            transfer = engine.put(ONES, ours.handle())
            holder.share(8)
            holder.answer_attach(holder.expect(ATTACH)[0], ours.key)
            transfer.wait()
            holder.attach(given)
            for request in range(2000):  # Whose answers nobody reads.
                holder.ask_attach(given, request)
            until(lambda: holder.unread() == 0)
            for _ in range(2):
                engine.put(ONES, ours.handle(), notify=b"t", accept_timeout=0).wait()
            with pytest.raises(kvzc.WouldBlock):
                engine.put(ONES, ours.handle(), notify=b"t", accept_timeout=0)
            for _ in range(2000):
                kind, _, _ = holder.receive()
                assert kind == ATTACHED
            with pytest.raises(kvzc.WouldBlock):
                engine.put(ONES, ours.handle(), notify=b"t", accept_timeout=0)
            holder.expect(KICK)


def test_whatever_a_peer_says_its_tags_are_looked_at(engine: kvzc.Engine) -> None:
    """Its kick may have met a full socket; what filled the socket did not."""
    time.sleep(1.2)  # An engine looks by itself after a second, and then every ten.
    with engine.register(kvzc.empty(8, "uint8")) as region:
        given = HandleBytes.of(region.handle())
        with Holder(region.handle()) as holder:
            holder.attach(given)
            holder.publish(b"t")
            holder.attach(given)
            until(lambda: holder.consumed() == holder.published(), 4)


def test_three_thousand_handles_of_one_engine_may_be_used_at_once(
    peer: Peer, engine: kvzc.Engine
) -> None:
    handles = handles_of(peer.call(own_many, 3000))
    with stopped(peer):
        transfers = [engine.put(ONES, handle) for handle in handles]
    kvzc.wait(transfers, 20)


def test_an_engine_asks_no_more_at_once_than_its_peer_answers(engine: kvzc.Engine) -> None:
    """Two that both ask without reading would lose each other."""
    count = 2000
    name = f"asks-{os.getpid()}"
    with kvzc.Engine(f"{name}-a") as real, real.register(kvzc.empty(8, "uint8")) as region:
        given = HandleBytes.of(region.handle()).owned_by(f"{name}-b", bytes(16))
        with Owner(given.engine) as owner:
            transfers = [
                engine.put(ONES, given.with_grant(grant).handle()) for grant in range(1, count + 1)
            ]
            owner.accept(given.with_grant(1))
            owner.share(8)
            asked = []
            owner.socket.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                while True:
                    asked.append(owner.expect(ATTACH)[0])
            assert len(asked) < 512
            owner.socket.settimeout(10)
            for answered in range(count):
                if answered == len(asked):
                    asked.append(owner.expect(ATTACH)[0])
                owner.answer_attach(asked[answered], given.key)
            kvzc.wait(transfers, 10)


def flood(there: bytes) -> subprocess.Popen[bytes]:
    code = """
import ast, socket, sys
there = ast.literal_eval(sys.argv[1])
while True:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.setblocking(False)
        try:
            one.connect(there)
        except OSError:
            pass
"""
    return subprocess.Popen([sys.executable, "-S", "-c", code, repr(there)])


def reaches(engine: kvzc.Engine, handle: kvzc.RemoteHandle) -> bool:
    try:
        engine.connect(handle, timeout=5)
    except kvzc.TimedOut:  # "Try again."
        return False
    return True


def test_half_open_connections_do_not_keep_an_honest_peer_out(owner: Peer) -> None:
    (handle,) = handles_of(owner.call(own))
    with contextlib.ExitStack() as ending:
        for _ in range(2):
            process = flood(address(handle.engine))
            ending.callback(process.wait)
            ending.callback(process.kill)
        idle = []
        for _ in range(100):
            one = ending.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            one.setblocking(False)
            with contextlib.suppress(OSError):
                one.connect(address(handle.engine))
            idle.append(one)
        time.sleep(0.3)
        for _ in range(3):
            with kvzc.Engine() as engine:
                until(lambda engine=engine: reaches(engine, handle))


# ---- every transfer ends ----


def test_an_engine_that_closes_at_once_ends_transfers_that_wait_for_room(owner: Peer) -> None:
    (handle,) = handles_of(owner.call(own, 1, 8, 1))
    engine = kvzc.Engine()
    with stopped(owner):
        transfers = [engine.put(ONES, handle, notify=b"x") for _ in range(5)]
    until(lambda: any(transfer.done for transfer in transfers))
    with contextlib.suppress(kvzc.TimedOut):
        engine.close(0)
    until(lambda: all(transfer.done for transfer in transfers), 2)
    assert engine.stats()["transfers_running"] == 0
    assert sorted(name_of(transfer.error) for transfer in transfers) == ["Closed"] * 4 + [
        "NoneType"
    ]


@pytest.mark.parametrize("tag", [None, b"x"])
def test_a_transfer_to_a_stopped_peer_is_cancelled_at_once(
    owner: Peer, engine: kvzc.Engine, tag: bytes | None
) -> None:
    (handle,) = handles_of(owner.call(own))
    with stopped(owner):
        transfer = engine.put(ONES, handle, notify=tag)
        transfer.cancel(2)
        assert isinstance(transfer.error, kvzc.Cancelled)
        assert transfer.quiet
    if tag:
        assert owner.call(take, tag) == "Cancelled"


def test_the_tag_of_a_transfer_that_is_cancelled_while_it_waits_for_room_arrives(
    owner: Peer, engine: kvzc.Engine
) -> None:
    (handle,) = handles_of(owner.call(own, 1, 8, 1))
    with stopped(owner):
        transfers = [engine.put(ONES, handle, notify=b"%d" % i) for i in range(3)]
    until(lambda: transfers[0].done)
    transfers[1].cancel(2)
    assert isinstance(transfers[1].error, kvzc.Cancelled)
    ends = [owner.call(take, b"%d" % i) for i in range(3)]
    assert ends == ["NoneType", "Cancelled", "NoneType"]
    transfers[2].wait()


def test_a_tag_whose_waiter_gave_up_makes_the_descriptor_readable(
    owner: Peer, engine: kvzc.Engine
) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        descriptor = engine.arrivals.fileno()
        assert engine.arrivals.poll() == []
        gave_up = []

        def wait_for_two() -> None:
            try:
                engine.arrivals.wait(b"x", 2, timeout=1.5)
            except kvzc.TimedOut as error:
                gave_up.append(error)

        waiter = threading.Thread(target=wait_for_two)
        waiter.start()
        time.sleep(0.2)  # It waits by now.
        owner.call(send, region.handle().to_text(), b"x")
        until(lambda: engine.stats()["arrivals_arrived"] == 1)
        engine.arrivals.poll()
        waiter.join()
        assert gave_up
        assert select.select([descriptor], [], [], 5)[0]
        assert [arrival.tag for arrival in engine.arrivals.poll()] == [b"x"]


# ---- shortages pass ----

# What follows runs with a limit on its memory, which new threads' stacks meet first.
LIMITED = """
import resource, signal, sys, time
import kvzc
import numpy as np
def limit_memory(more):
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, -1))
def no_limit():
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
engine = kvzc.Engine(default_timeout=20, copy_threads=1)
handle = kvzc.RemoteHandle.from_text(sys.argv[1])
source = np.full(handle.nbytes, 5, np.uint8)
engine.connect(handle)
"""

NO_THREADS = (
    LIMITED
    + """
limit_memory(1 << 20)
try:
    transfer = engine.put(source, handle, notify=b"x")
    transfer.wait()
    refused = ""
    try:
        kvzc.Engine()
    except kvzc.LimitExceeded:
        refused = "LimitExceeded"
finally:
    no_limit()
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
assert engine.stats()["transfers_running"] == 0
engine.put(source, handle).wait()
start = time.monotonic()
engine.close(3)
assert time.monotonic() - start < 2
print(refused)
"""
)


def test_without_threads_a_put_is_slower_and_an_engine_is_refused(owner: Peer) -> None:
    (text,) = owner.call(own, 1, 32 * MIB)
    went_well(run_script(NO_THREADS, text), "LimitExceeded\n")
    assert owner.call(bytes_of, 5) == 32 * MIB
    assert owner.call(take, b"x") == "NoneType"
    assert owner.call(polled) == []


NO_MEMORY = (
    LIMITED
    + """
limit_memory(16 << 20)
try:
    engine.put(source[::2], handle[::2])
except kvzc.LimitExceeded:
    print("refused")
finally:
    no_limit()
assert engine.stats()["transfers_running"] == 0
engine.put(source[:8], handle[:8]).wait()
start = time.monotonic()
engine.close(3)
assert time.monotonic() - start < 2
"""
)


def test_a_list_of_runs_that_does_not_fit_into_memory_is_refused(owner: Peer) -> None:
    (text,) = owner.call(own, 1, 8 * MIB)
    went_well(run_script(NO_MEMORY, text), "refused\n")


NO_FILES = """
import os, resource, sys
import kvzc
import numpy as np
engine = kvzc.Engine(default_timeout=10)
source = np.ones(8, np.uint8)
handles = [kvzc.RemoteHandle.from_text(text) for text in sys.argv[1:]]
engine.put(source, handles[0]).wait()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    engine.put(source, handles[1]).wait()
except kvzc.LimitExceeded:
    print("refused")
for file in taken:
    os.close(file)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
for handle in handles:
    engine.put(source, handle).wait()
print("done")
"""


def test_a_writers_shortage_of_descriptors_passes(owner: Peer) -> None:
    went_well(run_script(NO_FILES, *owner.call(own, 3)), "refused\ndone\n")


def test_an_owners_shortage_of_descriptors_passes(owner: Peer, engine: kvzc.Engine) -> None:
    texts = owner.call(own, 2)
    first, second = handles_of(texts)
    engine.put(ONES, first).wait()
    soft = owner.call(limit_files, 3)
    try:
        with pytest.raises(kvzc.Error):
            engine.put(ONES, second).wait()
    finally:
        owner.call(limit_files, soft)
    for handle in (second, first, *handles_of(texts)):
        engine.put(ONES, handle).wait()


# ---- words from outside, and arguments ----


def test_a_refusal_that_is_not_utf8_is_an_error_with_a_name() -> None:
    name = f"text-{os.getpid()}"
    with kvzc.Engine(f"{name}-a", default_timeout=5) as engine:
        region = engine.register(kvzc.empty(8, "uint8"))
        given = HandleBytes.of(region.handle()).owned_by(f"{name}-b", bytes(16))
        with Owner(given.engine) as hostile:

            def refuse() -> None:
                hostile.hear()
                hostile.send(REFUSE, bytes([9]) + blob(b"\xff\xfe no"))

            server = threading.Thread(target=refuse)
            server.start()
            transfer = engine.put(ONES, given.handle())
            server.join()
            with pytest.raises(kvzc.Error) as raised:
                transfer.wait()
            assert not isinstance(raised.value, kvzc.TimedOut)
            assert str(transfer.error) == str(raised.value)


def test_a_name_that_is_not_utf8_does_not_get_in(engine: kvzc.Engine) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        with (
            pytest.raises(ConnectionError),
            Holder(region.handle(), name=b"\xff\xfe"),
        ):
            pass
        with Holder(region.handle(), name="ünï".encode()) as holder:
            holder.publish(b"t")
            assert engine.arrivals.wait(b"t").peer.name == "ünï"


def test_a_peer_by_its_name_is_a_type_error(engine: kvzc.Engine) -> None:
    for count in ((), (2,)):
        with pytest.raises(TypeError):
            engine.arrivals.wait(b"x", *count, peer="bob", timeout=0)


def test_an_unknown_user_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="no-such-user"):
        kvzc.Engine(allow_users=["no-such-user"])


def test_no_transports_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="transports"):
        kvzc.Engine(transports=[])


@pytest.mark.parametrize("timeout", [-1, math.nan])
def test_a_timeout_that_is_none_is_refused_after_the_end_too(
    engine: kvzc.Engine, timeout: float
) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        transfer = engine.put(ONES, region.handle())
        transfer.wait()
        with pytest.raises(ValueError):
            transfer.wait(timeout)


def test_an_empty_put_to_a_peer_that_does_not_answer_is_done_at_once(
    owner: Peer, engine: kvzc.Engine
) -> None:
    (handle,) = handles_of(owner.call(own))
    with stopped(owner):
        transfer = engine.put(ONES[:0], handle[:0])
        assert transfer.done
        assert transfer.error is None
