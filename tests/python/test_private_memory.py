"""Memory that other processes cannot map: the kernel copies there, or an error says what to do."""

import array
import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from types import SimpleNamespace
from typing import Any

import kvzc
import numpy as np
import pytest
import torch
from helpers import Peer, State, until
from hypothesis import given, settings
from hypothesis import strategies as st
from views import (
    MOST_ITEMS,
    NUMPY_DTYPES,
    Case,
    cases,
    dtype_name,
    expected,
    random_bytes,
    shapes,
)

MIB = 1 << 20
BLOCKS, BLOCK = 64, 1000  # 1000: most blocks begin within a cache line.
NBYTES = BLOCKS * BLOCK
GUARD = 64
SEEDS = st.integers(0, 2**32)
KINDS = ["torch", "numpy", "bytearray", "array", "mmap", "file", "shared_memory", "share_memory_"]


# ---- in the owner ----


def make(kind: str, nbytes: int) -> tuple[Any, np.ndarray, Any]:
    """Memory of a kind: the object to register, a view of its bytes, and what keeps it alive."""
    if kind in ("torch", "share_memory_"):
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        if kind == "share_memory_":
            tensor.share_memory_()
        return tensor, tensor.numpy(), None
    if kind == "shared_memory":
        segment = shared_memory.SharedMemory(create=True, size=nbytes)
        segment.unlink()
        return segment.buf[:nbytes], np.frombuffer(segment.buf, np.uint8, nbytes), segment
    if kind == "file":
        file = os.memfd_create("tests-file")  # Not sealed: it may shrink.
        os.ftruncate(file, nbytes)
        memory: Any = mmap.mmap(file, nbytes)
        return memory, np.frombuffer(memory, np.uint8), file
    memory = {
        "numpy": lambda: np.zeros(nbytes, np.uint8),
        "bytearray": lambda: bytearray(nbytes),
        "array": lambda: array.array("B", bytes(nbytes)),
        "mmap": lambda: mmap.mmap(-1, nbytes),
    }[kind]()
    return memory, np.frombuffer(memory, np.uint8), None


def own(state: State, kind: str, nbytes: int, seed: int | None = None) -> str:
    """Registers memory of a kind; gives its handle."""
    state.engine = getattr(state, "engine", None) or kvzc.Engine(default_timeout=20)
    memory, state.bytes, state.keep = make(kind, nbytes)
    if seed is not None:
        state.bytes[:] = random_bytes(seed, nbytes)
    state.region = state.engine.register(memory)
    assert state.region.path.startswith("private")
    text: str = state.region.handle().to_text()
    return text


def own_mapped(state: State, nbytes: int) -> str:
    state.mapped = kvzc.empty(nbytes, "uint8")
    state.mapped_region = state.engine.register(state.mapped)
    text: str = state.mapped_region.handle().to_text()
    return text


def fill(state: State, value: int) -> None:
    state.bytes[:] = value


def bytes_after(state: State, tag: bytes | None = None) -> bytes:
    if tag is not None:
        assert state.engine.arrivals.wait(tag).error is None
    memory: bytes = state.bytes.tobytes()
    return memory


def offer(state: State, case: Case, dtype: str, seed: int) -> str:
    """Fills the memory and registers the tensor that `case` describes."""
    if getattr(state, "part", None) is not None:
        state.part.close()
    state.bytes[:] = random_bytes(seed, len(state.bytes))
    state.part = state.engine.register(case.numpy_array(state.bytes, np.dtype(dtype)))
    text: str = state.part.handle().to_text()
    return text


def revoke(state: State) -> None:
    state.region.revoke(20)
    state.bytes[:] = 0xEE


def shrink(state: State) -> None:
    os.ftruncate(state.keep, 0)


def unmap(state: State, at: int, nbytes: int) -> None:
    address = state.bytes.ctypes.data + at
    assert ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0


def protect(state: State, flags: int) -> None:
    address = ctypes.c_void_p(state.bytes.ctypes.data)
    assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(len(state.bytes)), flags) == 0


def become(state: State, uid: int, dumpable: bool) -> None:
    """Goes on as another user; a process that does so is not dumpable unless it asks for it."""
    os.setgid(uid)
    os.setuid(uid)
    set_dumpable = 4  # PR_SET_DUMPABLE
    assert ctypes.CDLL(None).prctl(set_dumpable, int(dumpable), 0, 0, 0) == 0


def start_engine(state: State, allow: list[int]) -> None:
    state.engine = kvzc.Engine(default_timeout=20, allow_users=allow)


def move(state: State, text: str, direction: str, nbytes: int) -> str:
    """Puts or gets all; gives the error's name and text, or '' when it went well."""
    handle = kvzc.RemoteHandle.from_text(text)
    local = np.full(nbytes, 7, np.uint8)
    try:
        if direction == "put":
            state.engine.put(local, handle).wait()
        else:
            state.engine.get(local, handle).wait()
    except kvzc.Error as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def two(shared_peer: Peer) -> Iterator[SimpleNamespace]:
    with kvzc.Engine(default_timeout=20) as engine:
        yield SimpleNamespace(engine=engine, owner=shared_peer, count=0)


def own_at(two: SimpleNamespace, *args: Any) -> kvzc.RemoteHandle:
    return kvzc.RemoteHandle.from_text(two.owner.call(own, *args))


# ---- the bytes ----


@pytest.mark.parametrize("kind", KINDS)
def test_scattered_blocks_of_every_kind_of_memory_can_be_put_and_got(
    two: SimpleNamespace, kind: str
) -> None:
    handle = own_at(two, kind, NBYTES, 5)
    model = random_bytes(5, NBYTES).reshape(BLOCKS, BLOCK)
    # As blocks, through the only axis that raw buffers have.
    rng = np.random.default_rng(6)
    for round_ in range(3):
        chosen = rng.permutation(BLOCKS)[: 20 + round_]
        local = random_bytes(round_, len(chosen) * BLOCK).reshape(-1, BLOCK)
        pairs = [(local[i], handle[b * BLOCK : (b + 1) * BLOCK]) for i, b in enumerate(chosen)]
        transfer = two.engine.put_many(pairs, notify=b"put")
        transfer.wait()
        assert transfer.transport == "shm"
        model[chosen] = local
        assert two.owner.call(bytes_after, b"put") == model.tobytes()

        chosen = rng.permutation(BLOCKS)[:20]
        back = np.full((40, BLOCK), 0xEE, np.uint8)
        two.engine.get_many(
            (back[2 * i], handle[b * BLOCK : (b + 1) * BLOCK]) for i, b in enumerate(chosen)
        ).wait()
        assert np.array_equal(back[::2], model[chosen])
        assert (back[1::2] == 0xEE).all()


@settings(max_examples=60)
@given(st.data(), st.sampled_from(NUMPY_DTYPES), shapes(), SEEDS, st.booleans())
def test_any_view_of_private_memory_is_written_and_read_exactly(
    two: SimpleNamespace,
    data: st.DataObject,
    dtype: torch.dtype,
    shape: Any,
    seed: int,
    registered: bool,
) -> None:
    nbytes = 16 * MOST_ITEMS
    if two.count == 0:
        two.owner.call(own, "numpy", nbytes)
    two.count += 1
    there, here = data.draw(cases(shape, unique=True)), data.draw(cases(shape, unique=True))
    local = random_bytes(seed + 1, here.items * dtype.itemsize + 2 * GUARD)
    within = local[GUARD:-GUARD]
    tensor = here.torch_tensor(torch.from_numpy(within), dtype)
    text = two.owner.call(offer, there, dtype_name(dtype), seed)
    view = kvzc.RemoteHandle.from_text(text)[there.index]
    remote = random_bytes(seed, nbytes)
    with two.engine.register(tensor) as region:
        two.engine.put(region[here.index], view, notify=b"t").wait()
        after = expected(there, remote, here, within, dtype.itemsize)
        assert two.owner.call(bytes_after, b"t") == after.tobytes()
        # Back into other memory, shifted so that nothing fits by chance.
        whole = random_bytes(seed + 2, len(local))
        back = whole.copy()
        target = here.torch_tensor(torch.from_numpy(back[GUARD:-GUARD]), dtype)
        with contextlib.ExitStack() as closing:
            if registered:
                closing.enter_context(two.engine.register(target))
            with two.engine.register(target) as to:
                two.engine.get(to[here.index], view).wait()
    whole[GUARD:-GUARD] = expected(here, whole[GUARD:-GUARD], there, after, dtype.itemsize)
    assert np.array_equal(back, whole)


@pytest.mark.parametrize("offset", [0, 1, 4095])
@pytest.mark.parametrize("nbytes", [1, 4097, (256 << 10) + 1, 9 * MIB + 5])
def test_large_and_odd_sizes(two: SimpleNamespace, nbytes: int, offset: int) -> None:
    handle = own_at(two, "numpy", nbytes + 8192)
    two.owner.call(fill, 0xEE)
    source = random_bytes(nbytes, nbytes)
    part = handle[offset : offset + nbytes]
    two.engine.put(source, part, notify=b"t").wait()
    there = np.frombuffer(two.owner.call(bytes_after, b"t"), np.uint8)
    assert np.array_equal(there[offset : offset + nbytes], source)
    assert (there[:offset] == 0xEE).all()
    assert (there[offset + nbytes :] == 0xEE).all()
    back = np.zeros(nbytes, np.uint8)
    two.engine.get(back, part).wait()
    assert np.array_equal(back, source)


def test_more_runs_than_one_call_of_the_kernel_takes(two: SimpleNamespace) -> None:
    handle = own_at(two, "numpy", 200_000)
    two.owner.call(fill, 0)
    transfer = two.engine.put(np.arange(100_000).astype(np.uint8), handle[::2], notify=b"t")
    transfer.wait()
    assert transfer.runs == 100_000
    there = np.frombuffer(two.owner.call(bytes_after, b"t"), np.uint8)
    assert np.array_equal(there[::2], np.arange(100_000).astype(np.uint8))
    assert not there[1::2].any()


def test_an_engines_own_private_memory(engine: kvzc.Engine) -> None:
    target = torch.zeros((4, 8), dtype=torch.bfloat16)
    source = torch.arange(32, dtype=torch.bfloat16).view(4, 8)
    with engine.register(target) as region:
        engine.put(source[[3, 1]], region.handle()[[0, 2]]).wait()
        back = torch.zeros((2, 8), dtype=torch.bfloat16)
        engine.get(back, region.handle()[[2, 0]]).wait()
        with pytest.raises(kvzc.InvalidArgument, match="overlap"):
            engine.put(target[:2], region.handle()[1:3]).wait()
    assert torch.equal(target[[0, 2]], source[[3, 1]])
    assert not target[[1, 3]].any()
    assert torch.equal(back, source[[1, 3]])


def test_a_group_of_both_kinds_is_one_transfer(two: SimpleNamespace) -> None:
    two.owner.call(own, "numpy", 64)
    group = kvzc.RemoteHandle.from_text(two.owner.call(own_group))
    local = {"mapped": np.full(64, 3, np.uint8), "private": np.full(64, 4, np.uint8)}
    with two.engine.register(local) as region:
        two.engine.put(region, group, notify=b"t").wait()
    assert two.owner.call(bytes_after, b"t") == bytes([4]) * 64
    back = np.zeros(64, np.uint8)
    two.engine.get(back, group["mapped"]).wait()
    assert (back == 3).all()


def own_group(state: State) -> str:
    state.mapped = kvzc.empty(64, "uint8")
    state.group = state.engine.register({"mapped": state.mapped, "private": state.bytes})
    text: str = state.group.handle().to_text()
    return text


# ---- the fence ----


@pytest.mark.parametrize("direction", ["put", "get"])
def test_after_revoke_nothing_moves(two: SimpleNamespace, direction: str) -> None:
    nbytes = 16 * MIB
    handle = own_at(two, "numpy", nbytes)
    two.owner.call(fill, 1)
    local = np.full(nbytes, 7, np.uint8)
    start = two.engine.put if direction == "put" else two.engine.get
    start(local, handle).wait()
    two.owner.start(revoke)
    with pytest.raises(kvzc.Revoked):
        while True:
            start(local, handle).wait()
    two.owner.result()
    assert two.owner.call(bytes_after).strip(b"\xee") == b""
    assert not (local == 0xEE).any()


# ---- memory that went away at the owner ----


@pytest.mark.parametrize("direction", ["put", "get"])
def test_memory_that_was_truncated_while_registered_is_an_error_and_no_crash(
    two: SimpleNamespace, direction: str
) -> None:
    handle = own_at(two, "file", MIB, 1)
    start = two.engine.put if direction == "put" else two.engine.get
    local = np.zeros(MIB, np.uint8)
    start(local, handle).wait()
    two.owner.call(shrink)
    for part, target in ((local, handle), (local[:8], handle[-8:])):
        transfer = start(part, target, notify=b"t")
        with pytest.raises(kvzc.SystemFailure, match="truncated"):
            transfer.wait()
        assert two.owner.call(error_of, b"t") == "SystemFailure"
    # Neither side is the worse for it.
    start(local, own_at(two, "numpy", MIB)).wait()


def error_of(state: State, tag: bytes) -> str:
    return type(state.engine.arrivals.wait(tag).error).__name__


@pytest.mark.parametrize("direction", ["put", "get"])
def test_memory_that_was_unmapped_while_registered_is_an_error(
    two: SimpleNamespace, direction: str
) -> None:
    handle = own_at(two, "mmap", 4 * MIB)
    start = two.engine.put if direction == "put" else two.engine.get
    local = np.zeros(4 * MIB, np.uint8)
    start(local, handle).wait()
    two.owner.call(unmap, MIB, MIB)  # A hole in the middle.
    with pytest.raises(kvzc.SystemFailure, match="unmapped"):
        start(local, handle).wait()
    start(local[:MIB], handle[:MIB]).wait()
    # Somebody new asks for it.
    with kvzc.Engine(default_timeout=20) as other, pytest.raises(kvzc.Error) as raised:
        other.put(local, kvzc.RemoteHandle.from_bytes(handle.to_bytes())).wait()
    assert not isinstance(raised.value, kvzc.TimedOut)


def test_memory_that_was_made_read_only_can_be_read_and_not_written(two: SimpleNamespace) -> None:
    handle = own_at(two, "mmap", MIB)
    local = np.zeros(MIB, np.uint8)
    two.owner.call(protect, mmap.PROT_READ)
    with pytest.raises(kvzc.SystemFailure, match="may not be written"):
        two.engine.put(local, handle).wait()
    two.engine.get(local, handle).wait()
    two.owner.call(protect, mmap.PROT_READ | mmap.PROT_WRITE)
    two.engine.put(local, handle).wait()


def test_an_owner_that_dies_while_its_private_memory_is_written(engine: kvzc.Engine) -> None:
    with Peer() as owner:
        handle = kvzc.RemoteHandle.from_text(owner.call(own, "numpy", 32 * MIB))
        source = np.ones(32 * MIB, np.uint8)
        engine.put(source, handle).wait()
        transfer = engine.put(source, handle)
        owner.kill()
        start = time.monotonic()
        with contextlib.suppress(kvzc.PeerLost):
            transfer.wait()
        with pytest.raises(kvzc.PeerLost):
            while True:
                engine.put(source, handle).wait()
        assert time.monotonic() - start < 2
        until(lambda: engine.stats()["transfers_running"] == 0)


# ---- who may not reach it ----

NOBODY = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@as_root
@pytest.mark.parametrize("direction", ["put", "get"])
def test_another_users_private_memory_is_refused_with_reason_and_remedies(
    direction: str,
) -> None:
    with Peer() as owner, Peer() as writer:
        owner.call(start_engine, [NOBODY])
        writer.call(become, NOBODY, True)
        writer.call(start_engine, [os.getuid()])
        text = owner.call(own, "numpy", 64)
        said = writer.call(move, text, direction, 64)
        assert said.startswith("TransportUnavailable")
        assert f"the owner runs as user id {os.getuid()}, this process as {NOBODY}" in said
        for remedy in ("run both as one user", "CAP_SYS_PTRACE", "kvzc.empty", "kvzc.share"):
            assert remedy in said
        assert owner.call(bytes_after) == bytes(64)
        # What can be mapped needs no such right, also after the refusal.
        assert writer.call(move, owner.call(own_mapped, 64), direction, 64) == ""
        assert writer.call(move, text, direction, 64) == said


@as_root
@pytest.mark.parametrize("direction", ["put", "get"])
def test_a_process_that_is_not_dumpable_is_refused_with_reason_and_remedies(
    direction: str,
) -> None:
    with Peer() as owner, Peer() as writer:
        for one, dumpable in ((owner, False), (writer, True)):
            one.call(become, NOBODY, dumpable)
            one.call(start_engine, [])
        text = owner.call(own, "torch", 64)
        said = writer.call(move, text, direction, 64)
        assert said.startswith("TransportUnavailable")
        for word in ("not dumpable", "PR_SET_DUMPABLE", "kvzc.empty", "kvzc.share"):
            assert word in said
        assert writer.call(move, owner.call(own_mapped, 64), direction, 64) == ""
        # Two of the same user that are dumpable reach each other.
        owner.call(become, NOBODY, True)
        assert writer.call(move, owner.call(own, "torch", 64), direction, 64) == ""


@as_root
def test_a_right_that_was_lost_after_connecting_is_an_error_of_the_same_kind() -> None:
    with Peer() as owner, Peer() as writer:
        for one in (owner, writer):
            one.call(become, NOBODY, True)
            one.call(start_engine, [])
        text = owner.call(own, "torch", 64)
        assert writer.call(move, text, "put", 64) == ""
        owner.call(become, NOBODY, False)
        assert writer.call(move, text, "put", 64).startswith("TransportUnavailable")
