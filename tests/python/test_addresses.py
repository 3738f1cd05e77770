"""Memory by its address: kvzc.Memory, and catalogs of an engine's memory."""

import ctypes
import gc
import hashlib
import mmap
import pickle
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import kvzc
import numpy as np
import pytest
from helpers import Peer, State
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_client import blob, varint


@pytest.fixture
def engines() -> Iterator[tuple[kvzc.Engine, kvzc.Engine]]:
    with kvzc.Engine() as owner, kvzc.Engine() as writer:
        yield owner, writer


def address_of(array: Any) -> int:
    return int(array.ctypes.data)


def memory_of(array: Any) -> kvzc.Memory:
    return kvzc.Memory(address_of(array), array.nbytes, owner=array)


def test_memory_is_a_source_a_region_and_a_target(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    there, here = np.zeros(1000, np.int64), np.arange(1000, dtype=np.int64)
    with owner.register(memory_of(there)) as region:
        handle = kvzc.RemoteHandle.from_bytes(region.handle().to_bytes())
        assert handle.shape == (8000,)
        writer.put(memory_of(here), handle).wait(20)
        assert (there == here).all()
        back = np.zeros(500, np.int64)
        writer.get(memory_of(back), handle[4000:]).wait(20)
        assert (back == here[500:]).all()


def test_memory_in_a_registered_storage_is_found(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    there, here = np.zeros(64, np.uint8), np.arange(256, dtype=np.uint8)
    with owner.register(there) as region, writer.register(here):
        before = writer.stats()["temporary_registrations"]
        writer.put(kvzc.Memory(address_of(here) + 32, 64), region.handle()).wait(20)
        assert writer.stats()["temporary_registrations"] == before
    assert (there == here[32:96]).all()


def test_its_owner_is_kept_as_long_as_it_is_used() -> None:
    class Owner:
        def __init__(self) -> None:
            self.pages = mmap.mmap(-1, 8192)

    keeper = Owner()
    gone = weakref.ref(keeper)
    address = ctypes.addressof(ctypes.c_char.from_buffer(keeper.pages))
    with kvzc.Engine() as engine:
        region = engine.register(kvzc.Memory(address, 8192, owner=keeper))
        del keeper
        gc.collect()
        assert gone() is not None
        region.close()
    del region
    gc.collect()
    kvzc.Engine().close()  # Whoever has the GIL next lets go.
    assert gone() is None


def test_refuses_what_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"16 bytes at 0x10 those from 0x10 on are not mapped"):
        kvzc.Memory(16, 16)
    with pytest.raises(ValueError, match=r"are no memory"):
        kvzc.Memory(4096, 0)
    with pytest.raises(ValueError, match=r"below 2\*\*64"):
        kvzc.Memory(2**64 - 8, 16)
    with pytest.raises(TypeError):
        kvzc.Memory(-1, 16)
    with pytest.raises(kvzc.Unsupported, match=r"'npu:0'"):
        kvzc.Memory(4096, 16, "npu:0")
    pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    middle = ctypes.c_void_p(begin + mmap.PAGESIZE)
    assert libc.mprotect(middle, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    with pytest.raises(ValueError, match=rf"from {begin + mmap.PAGESIZE:#x} on"):
        kvzc.Memory(begin, 3 * mmap.PAGESIZE)
    kvzc.Memory(begin, mmap.PAGESIZE)
    assert libc.mprotect(middle, ctypes.c_size_t(mmap.PAGESIZE), 1) == 0
    both = kvzc.Memory(begin, 3 * mmap.PAGESIZE)
    assert not both.writable
    with kvzc.Engine() as engine, pytest.raises(kvzc.InvalidArgument, match="read-only"):
        engine.register(both)
    assert libc.mprotect(middle, ctypes.c_size_t(mmap.PAGESIZE), 3) == 0


# --- Catalogs ---


def test_a_catalog_finds_every_region_by_its_address(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    one, two = np.zeros(4096, np.uint8), owner.empty((2, 4096), "uint8")
    with owner.register(one), owner.register({"k": two[0], "v": two[1]}):
        catalog = kvzc.Catalog.from_text(owner.catalog().to_text())
        assert catalog.engine == owner.name
        # K and V follow each other in one storage: one range.
        assert sorted(catalog.ranges) == sorted([(address_of(one), 4096), (address_of(two), 8192)])
        target = writer.resolve(catalog, address_of(two) + 4000, 200)
        assert target.shape == (200,)
        writer.put(np.full(200, 5, np.uint8), target).wait(20)
        assert (two.reshape(-1)[4000:4200] == 5).all()
        assert two.sum() == 1000
        source = catalog.resolve(address_of(two) + 4100, 100)
        back = np.zeros(100, np.uint8)
        writer.get(back, source).wait(20)
        assert (back == 5).all()
        assert catalog.resolve(address_of(one), 4096).shape == (4096,)


def test_a_range_that_is_not_there_is_refused_and_named(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    memory = np.zeros(3000, np.uint8)
    begin = address_of(memory)
    with owner.register(memory[1000:2000]):
        catalog = owner.catalog()
        (found,) = catalog.ranges
        begin, nbytes = found
        catalog.resolve(begin, nbytes)
        for address, size in [
            (begin - 1, 10),
            (begin + nbytes - 9, 10),
            (begin + nbytes, 1),
            (0, 1),
        ]:
            with pytest.raises(IndexError, match=rf"{address:#x} \({size} bytes\).*{begin:#x}"):
                writer.resolve(catalog, address, size)
        for ahead in (0, 1, 10):  # The end of the last two, counted in 64 bits, is within.
            with pytest.raises(IndexError):
                catalog.resolve(begin + ahead, 2**64 - 1)
        with pytest.raises(ValueError, match="0 bytes"):
            catalog.resolve(begin, 0)
    assert owner.catalog().ranges == []
    with pytest.raises(IndexError, match="fresh catalog"):
        owner.catalog().resolve(begin, 1)


def test_closing_one_region_leaves_the_others(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    one, two = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    closed = owner.register(one)
    with owner.register(two):
        catalog = owner.catalog()
        for array in (one, two):
            writer.put(np.ones(64, np.uint8), catalog.resolve(address_of(array), 64)).wait(20)
        closed.close()
        with pytest.raises(kvzc.Revoked):
            writer.put(np.ones(64, np.uint8), catalog.resolve(address_of(one), 64)).wait(20)
        writer.put(np.full(64, 2, np.uint8), catalog.resolve(address_of(two), 64)).wait(20)
        assert (two == 2).all()
        assert len(owner.catalog().ranges) == 1


def test_a_storage_in_several_regions_is_there_once(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, _ = engines
    memory = owner.empty((100,), "uint8")
    parts = [owner.register(memory[10:20]), owner.register(memory), owner.register(memory[15:30])]
    assert owner.catalog().ranges == [(address_of(memory), 100)]
    parts[1].close()
    ranges = owner.catalog().ranges
    assert ranges == [(address_of(memory) + 10, 10), (address_of(memory) + 15, 15)]
    assert owner.catalog().resolve(address_of(memory) + 15, 15).nbytes == 15


def test_neighbours_of_one_region_are_one_range_whatever_lies_between(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, _ = engines
    memory = owner.empty((100,), "uint8")
    begin = address_of(memory)
    with owner.register({"a": memory[:50], "b": memory[50:]}), owner.register(memory[40:60]):
        assert owner.catalog().ranges == [(begin, 100)]
        assert owner.catalog().resolve(begin + 30, 40).nbytes == 40


def test_repr_gives_no_key_away_and_no_pickle(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, _ = engines
    with owner.register(np.zeros(8, np.uint8)):
        catalog = owner.catalog()
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(catalog)
        assert repr(catalog) == f"<kvzc.Catalog of 1 ranges of engine '{owner.name}'>"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_catalogs_are_refused(data: st.DataObject) -> None:
    with kvzc.Engine() as owner, owner.register(np.zeros(64, np.uint8)):
        good = owner.catalog().to_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip", "grow"]))
    bad = bytearray(good)
    if kind == "cut":
        bad = bad[:at]
    elif kind == "flip":
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        bad[at:at] = b"\0"
    with pytest.raises(kvzc.BadHandle):
        kvzc.Catalog.from_bytes(bytes(bad))


def forged(handle: bytes, ranges: list[tuple[int, int, int, int, int]]) -> bytes:
    """A catalog of one handle: (address, nbytes, handle, storage, offset) each, and a checksum."""
    body = blob(b"owner") + varint(1) + blob(handle) + varint(len(ranges))
    for address, nbytes, number, storage, offset in ranges:
        body += struct.pack("<Q", address)
        body += varint(nbytes) + varint(number) + varint(storage) + varint(offset)
    head = b"KVZK" + struct.pack("<BBHI", 1, 0, 0, 12 + len(body) + 8)
    return head + body + hashlib.sha256(head + body).digest()[:8]


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 65, 0, 0, 0)],  # Longer than its storage,
        [(0, 1, 0, 0, 64)],  # beyond it,
        [(0, 2**63, 0, 0, 2**63)],  # around it.
        [(0, 8, 1, 0, 0)],  # Of no handle, of no storage.
        [(0, 8, 0, 1, 0)],
        [(0, 0, 0, 0, 0)],
        [(2**64 - 4, 8, 0, 0, 0)],  # Beyond all addresses.
        [(8, 8, 0, 0, 0), (8, 16, 0, 0, 8)],  # In no order; one within the other.
        [(0, 32, 0, 0, 0), (8, 8, 0, 0, 8)],
    ],
)
def test_forged_catalogs_are_refused(ranges: list[tuple[int, int, int, int, int]]) -> None:
    with kvzc.Engine() as owner, owner.register(np.zeros(64, np.uint8)) as region:
        handle = region.handle().to_bytes()
    good = kvzc.Catalog.from_bytes(forged(handle, [(0, 32, 0, 0, 0), (32, 32, 0, 0, 32)]))
    assert good.ranges == [(0, 32), (32, 32)]
    with pytest.raises(kvzc.BadHandle):
        kvzc.Catalog.from_bytes(forged(handle, ranges))


def own(state: State) -> tuple[str, int]:
    state.engine = kvzc.Engine()
    state.memory = np.zeros(4096, np.uint8)
    state.region = state.engine.register(state.memory)
    return state.engine.catalog().to_text(), address_of(state.memory)


def seen(state: State, begin: int, end: int) -> bytes:
    assert state.engine.arrivals.wait(b"t", timeout=20).error is None
    return bytes(state.memory[begin:end])


def test_between_processes(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    _, writer = engines
    with Peer() as peer:
        text, address = peer.call(own)
        target = writer.resolve(kvzc.Catalog.from_text(text), address + 100, 50)
        writer.put(memory_of(np.full(50, 9, np.uint8)), target, notify=b"t").wait(20)
        assert peer.call(seen, 99, 151) == b"\0" + b"\x09" * 50 + b"\0"
