"""A get is an indexed read into local memory, and touches no other byte."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
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
    TORCH_DTYPES,
    Case,
    cases,
    dtype_name,
    expected,
    random_bytes,
    shapes,
)

MIB = 1 << 20
LARGE = 64 * MIB
MOST_BYTES = 16 * MOST_ITEMS
GUARD = 64  # Bytes on either side of a local target.
SEEDS = st.integers(0, 2**32)
ONES = np.ones(8, np.uint8)


@pytest.fixture(scope="module")
def here() -> Iterator[SimpleNamespace]:
    """An engine that gets from itself, and the memory of its sources."""
    with kvzc.Engine(default_timeout=10) as engine:
        memory = kvzc.empty(MOST_BYTES, torch.uint8)
        with engine.register(memory):
            yield SimpleNamespace(engine=engine, memory=memory)


class Local:
    """The memory of a local target between guards, and what is to be in it after the get."""

    def __init__(self, target: Case, dtype: torch.dtype, seed: int) -> None:
        self.target, self.itemsize = target, dtype.itemsize
        nbytes = target.items * dtype.itemsize
        self.memory = random_bytes(seed, nbytes + 2 * GUARD)
        self.before = self.memory.copy()
        self.within = self.memory[GUARD : GUARD + nbytes]

    def check(self, source: Case, source_bytes: np.ndarray) -> None:
        whole = self.before.copy()
        whole[GUARD:-GUARD] = expected(
            self.target, whole[GUARD:-GUARD], source, source_bytes, self.itemsize
        )
        assert np.array_equal(self.memory, whole)


def get_and_compare(
    here: SimpleNamespace,
    source: Case,
    dtype: torch.dtype,
    seed: int,
    local: Local,
    target: Any,
) -> None:
    """Gets `source`, filled with bytes of `seed`, into `target` and looks at every byte."""
    values = random_bytes(seed, MOST_BYTES)
    here.memory.copy_(torch.from_numpy(values))
    with here.engine.register(source.torch_tensor(here.memory, dtype)) as region:
        view = region.handle()[source.index]
        transfer = here.engine.get(target, view)
        transfer.wait()
        assert transfer.nbytes == view.nbytes
    local.check(source, values)
    assert np.array_equal(here.memory.numpy(), values)


@given(st.data(), st.sampled_from(TORCH_DTYPES), shapes(), SEEDS)
def test_a_get_into_a_registered_tensor_is_an_indexed_read(
    here: SimpleNamespace, data: st.DataObject, dtype: torch.dtype, shape: Any, seed: int
) -> None:
    source = data.draw(cases(shape, unique=False))
    target = data.draw(cases(shape, unique=True))
    local = Local(target, dtype, seed + 1)
    tensor = target.torch_tensor(torch.from_numpy(local.within), dtype)
    with here.engine.register(tensor) as region:
        get_and_compare(here, source, dtype, seed, local, region[target.index])


@given(st.data(), st.sampled_from(TORCH_DTYPES), shapes(), SEEDS)
def test_a_get_into_a_plain_torch_view_is_an_indexed_read(
    here: SimpleNamespace, data: st.DataObject, dtype: torch.dtype, shape: Any, seed: int
) -> None:
    source = data.draw(cases(shape, unique=False))
    target = data.draw(cases(shape, unique=True, torch_index=True))
    local = Local(target, dtype, seed + 1)
    tensor = target.torch_tensor(torch.from_numpy(local.within), dtype)
    get_and_compare(here, source, dtype, seed, local, tensor[target.index])


@given(st.data(), st.sampled_from(NUMPY_DTYPES), shapes(), SEEDS)
def test_a_get_into_a_numpy_array_is_an_indexed_read(
    here: SimpleNamespace, data: st.DataObject, dtype: torch.dtype, shape: Any, seed: int
) -> None:
    source = data.draw(cases(shape, unique=False))
    target = data.draw(cases(shape, unique=True, negative_strides=True, torch_index=True))
    local = Local(target, dtype, seed + 1)
    array = target.numpy_array(local.within, np.dtype(dtype_name(dtype)))
    # Indexing all axes with integers gives a scalar, which is no view of anything.
    view = array[target.index] if shape else array[(*target.plain, None)].reshape(())
    get_and_compare(here, source, dtype, seed, local, view)


@settings(max_examples=60)
@given(st.data(), SEEDS)
def test_a_get_of_several_is_one_read_each(
    here: SimpleNamespace, data: st.DataObject, seed: int
) -> None:
    shape_list = data.draw(st.lists(shapes(), min_size=1, max_size=4))
    dtypes = [data.draw(st.sampled_from(TORCH_DTYPES)) for _ in shape_list]
    sources = [data.draw(cases(shape, unique=False)) for shape in shape_list]
    targets = [data.draw(cases(shape, unique=True)) for shape in shape_list]
    locals_ = [Local(*each, seed + i) for i, each in enumerate(zip(targets, dtypes, strict=True))]
    values = random_bytes(seed + 99, MOST_BYTES)
    here.memory.copy_(torch.from_numpy(values))
    group = {  # All in the same bytes: what is read may overlap.
        str(i): source.torch_tensor(here.memory, dtypes[i]) for i, source in enumerate(sources)
    }
    into = {
        str(i): target.torch_tensor(torch.from_numpy(locals_[i].within), dtypes[i])
        for i, target in enumerate(targets)
    }
    with here.engine.register(group) as region, here.engine.register(into) as local:
        handle = region.handle()
        here.engine.get_many(
            (local[(str(i), *targets[i].index)], handle[(str(i), *sources[i].index)])
            for i in range(len(targets))
        ).wait()
    for each, source in zip(locals_, sources, strict=True):
        each.check(source, values)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=dtype_name)
def test_every_byte_pattern_is_read_as_it_was(engine: kvzc.Engine, dtype: torch.dtype) -> None:
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    cache = kvzc.empty(len(pairs) // dtype.itemsize, dtype)
    cache.view(torch.uint8).copy_(torch.from_numpy(pairs))
    local = torch.zeros(len(cache), dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
    with engine.register(cache) as region:
        engine.get(local, region.handle()).wait()
    assert torch.equal(local.view(torch.uint8), torch.from_numpy(pairs))


@pytest.mark.parametrize("nbytes", [1, 63, 65, 4097, (128 << 10) + 1, (1 << 20) - 1, 5 << 20])
@pytest.mark.parametrize("offset", [0, 1, 31])
def test_sizes_round_every_way_of_copying(engine: kvzc.Engine, nbytes: int, offset: int) -> None:
    cache = kvzc.empty(nbytes + 128, "uint8")
    cache[:] = random_bytes(nbytes, nbytes + 128)
    local = np.full(nbytes + 64, 0xEE, np.uint8)
    with engine.register(cache) as region:
        engine.get(local[7 : 7 + nbytes], region.handle()[offset : offset + nbytes]).wait()
    assert np.array_equal(local[7 : 7 + nbytes], cache[offset : offset + nbytes])
    assert (local[:7] == 0xEE).all()
    assert (local[7 + nbytes :] == 0xEE).all()


# ---- every kind of target ----


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(8, dtype=torch.uint8),
        lambda: np.zeros(8, np.uint8),
        lambda: bytearray(8),
        lambda: memoryview(bytearray(8)),
        lambda: kvzc.empty(8, "uint8"),
        lambda: kvzc.empty(8, torch.uint8),
        lambda: np.zeros(16, np.uint8)[::-2],
        lambda: torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False),
    ],
    ids=["torch", "numpy", "bytearray", "memoryview", "empty", "empty torch", "strided", "param"],
)
@pytest.mark.parametrize("registered", [False, True])
def test_every_writable_thing_is_a_target(engine: kvzc.Engine, make: Any, registered: bool) -> None:
    cache = kvzc.empty(8, "uint8")
    cache[:] = range(1, 9)
    target = make()
    with engine.register(cache) as region:
        if registered:
            with engine.register(target) as local:
                engine.get(local, region.handle()).wait()
                engine.get(local[:4], region.handle()[4:]).wait()
        else:
            engine.get(target, region.handle()).wait()
    got = target.tolist() if hasattr(target, "tolist") else list(target)
    assert got == ([5, 6, 7, 8, 5, 6, 7, 8] if registered else [1, 2, 3, 4, 5, 6, 7, 8])


def test_a_read_only_target_is_refused(engine: kvzc.Engine) -> None:
    locked = np.zeros(8, np.uint8)
    locked.flags.writeable = False
    with engine.register(kvzc.empty(8, "uint8")) as region:
        for target in (bytes(8), memoryview(bytes(8)), locked, np.frombuffer(bytes(8), np.uint8)):
            with pytest.raises(kvzc.InvalidArgument, match="read-only"):
                engine.get(target, region.handle())
            with pytest.raises(kvzc.InvalidArgument, match="read-only"):
                engine.get_many([(target, region.handle())])


def test_a_target_that_overlaps_itself_is_refused(engine: kvzc.Engine) -> None:
    with engine.register(kvzc.empty((3, 4), "uint8")) as region:
        for target in (
            torch.zeros(4, dtype=torch.uint8).expand(3, 4),
            torch.zeros(8, dtype=torch.uint8).as_strided((3, 4), (2, 1)),
        ):
            with pytest.raises(kvzc.InvalidArgument):
                engine.get(target, region.handle())
            assert not target.any()


def test_the_wrong_order_is_a_type_error_that_says_the_right_one(engine: kvzc.Engine) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        handle = region.handle()
        for wrong in (
            lambda: engine.get(handle, ONES),
            lambda: engine.get(handle[:4], ONES[:4]),
            lambda: engine.get(ONES, ONES),
        ):
            with pytest.raises(TypeError, match=r"target.*source"):
                wrong()
        with pytest.raises(TypeError, match=r"get\(target, source\)"):
            engine.get_many([(handle, ONES)])
        with pytest.raises(TypeError, match=r"\(target, source\)"):
            engine.get_many([(ONES,)])
        with pytest.raises(TypeError, match="bytes"):
            engine.get(ONES, handle, notify="text")  # type: ignore[arg-type]


def test_shapes_and_dtypes_must_be_equal(engine: kvzc.Engine) -> None:
    with engine.register(kvzc.empty((2, 4), "uint8")) as region:
        for target in (ONES, np.zeros((4, 2), np.uint8), np.zeros((2, 4), np.int8), bytearray(8)):
            with pytest.raises(kvzc.LayoutMismatch):
                engine.get(target, region.handle())


# ---- several at once ----


def test_get_many_is_one_transfer(engine: kvzc.Engine) -> None:
    group = {"a": kvzc.empty((4, 8), "uint8"), "b": kvzc.empty(3, "float32")}
    group["a"][:] = np.arange(4)[:, None]
    group["b"][:] = 7
    one, two, three = np.zeros(8, np.uint8), np.zeros((2, 8), np.uint8), torch.zeros(3)
    with engine.register(group) as region:
        handle = region.handle()
        pairs = [(one, handle["a", 1]), (two, handle["a", [3, 1]]), (three, handle["b"])]
        transfer = engine.get_many((pair for pair in pairs), notify=b"all", label="x")
        transfer.wait()
        assert transfer.nbytes == 8 + 16 + 12
        assert transfer.label == "x"
        assert engine.arrivals.wait(b"all").error is None
        assert engine.stats()["arrivals_arrived"] == 1
    assert one.tolist() == [1] * 8
    assert two.tolist() == [[3] * 8, [1] * 8]
    assert three.tolist() == [7.0] * 3


def test_no_byte_is_in_two_targets_but_a_source_may_be_read_twice(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(16, "uint8")
    cache[:] = range(16)
    local = np.zeros(16, np.uint8)
    with engine.register(cache) as region:
        handle = region.handle()
        for one, two in [
            (local[:8], local[:8]),
            (local[:8], local[7:15]),
            (local[::2], local[8:]),
        ]:
            with pytest.raises(kvzc.InvalidArgument, match="share bytes"):
                engine.get_many([(one, handle[:8]), (two, handle[8:])])
        assert not local.any()
        engine.get_many([(local[::2], handle[:8]), (local[1::2], handle[:8])]).wait()
    assert local.tolist() == [i // 2 for i in range(16)]


def test_get_many_takes_one_handle_and_at_least_one_pair(engine: kvzc.Engine) -> None:
    with (
        engine.register(kvzc.empty(8, "uint8")) as region,
        engine.register(kvzc.empty(8, "uint8")) as other,
    ):
        pairs = [(bytearray(8), region.handle()), (bytearray(8), other.handle())]
        with pytest.raises(kvzc.InvalidArgument, match="one handle"):
            engine.get_many(pairs)
    with pytest.raises(kvzc.InvalidArgument, match="nothing"):
        engine.get_many([])
    for wrong in (5, ["ab"], [ONES], [(ONES, ONES)]):
        with pytest.raises(TypeError):
            engine.get_many(wrong)  # type: ignore[arg-type]


def test_what_is_read_is_not_written_by_the_same_get(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(200, "uint8")
    cache[:] = range(200)
    other = np.zeros(100, np.uint8)
    with engine.register(cache) as region:
        handle = region.handle()
        for pairs in (
            [(cache[:100], handle[50:150])],
            [(cache[50:150], handle[:100])],
            [(cache[:8], handle[8:16]), (cache[8:16], handle[:8])],
            # Found only by who remembers the first pair when he looks at the second.
            [(other, handle[:100]), (cache[50:60], handle[10:20])],
        ):
            with pytest.raises(kvzc.InvalidArgument, match="overlap"):
                engine.get_many(pairs).wait()
        engine.get(cache[:100], handle[100:]).wait()
    assert cache.tolist() == [*range(100, 200)] * 2


def test_an_empty_get_is_done_and_notifies(engine: kvzc.Engine) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        transfer = engine.get(bytearray(), region.handle()[:0], notify=b"nothing")
        transfer.wait()
        assert (transfer.nbytes, transfer.runs) == (0, 0)
        assert engine.arrivals.wait(b"nothing").error is None


# ---- its life ----


def test_a_get_tells_about_itself_and_is_counted(engine: kvzc.Engine) -> None:
    with engine.register(kvzc.empty((4, 8), "float32")) as region:
        before = engine.stats()
        label = object()
        transfer = engine.get(
            np.ones((4, 4), np.float32), region.handle()[:, ::2], label=label, after=kvzc.NOW
        )
        transfer.wait()
        assert transfer.done
        assert transfer.quiet
        assert transfer.error is None
        assert (transfer.nbytes, transfer.runs, transfer.transport) == (64, 16, "shm")
        assert transfer.label is label
        after = engine.stats()
        grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        for name in ("peers", "queue_ns", "wait_ns"):  # It connects.
            grown.pop(name, None)
        assert grown == {
            "grants": 1,
            "transfers_done": 1,
            "bytes_done": 64,
            "runs_done": 16,
            "temporary_registrations": 1,
        }


def test_module_functions_act_on_the_default_engine() -> None:
    cache = kvzc.empty(8, "uint8")
    cache[:] = 3
    one, two = bytearray(8), bytearray(8)
    with kvzc.register(cache) as region:
        kvzc.get(one, region.handle(), notify=b"g").wait()
        kvzc.get_many([(two, region.handle())], notify=b"g").wait()
        assert len(kvzc.arrivals.wait(b"g", 2)) == 2
    assert one == two == bytes([3] * 8)
    kvzc.default_engine().close()


def test_a_strict_engine_refuses_targets_outside_every_region() -> None:
    with kvzc.Engine(strict=True) as engine:
        target = np.zeros(8, np.uint8)
        with engine.register(kvzc.empty(8, "uint8")) as region:
            with pytest.raises(kvzc.NotRegistered, match="strict"):
                engine.get(target, region.handle())
            with engine.register(target):
                engine.get(target, region.handle()).wait()


def test_use_of_what_is_closed_is_an_error(engine: kvzc.Engine) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        handle = region.handle()
        with kvzc.Engine() as other:
            pass
        for use in (
            lambda: other.get(bytearray(8), handle),
            lambda: other.get_many([(bytearray(8), handle)]),
            lambda: other.notify(handle, b"t"),
        ):
            with pytest.raises(kvzc.Closed):
                use()
        local = engine.register(bytearray(8))
        local.close()
        with pytest.raises(kvzc.Closed):
            engine.get(local, handle)
    with pytest.raises(kvzc.Revoked):
        engine.get(bytearray(8), handle).wait()


def test_the_target_lives_while_its_transfer_runs_and_no_longer(engine: kvzc.Engine) -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    with engine.register(kvzc.empty(LARGE, "uint8")) as region:
        target = np.zeros(LARGE, np.uint8).view(Array)
        watched = weakref.ref(target)
        transfer = engine.get(target, region.handle())
        del target
        gc.collect()
        was_running = not transfer.done
        assert watched() is not None or not was_running
        transfer.wait()
        gc.collect()
        kvzc.wait([transfer])
        assert watched() is None


def test_nothing_is_read_after_cancel_returned() -> None:
    cache = kvzc.empty(LARGE, "uint8")
    local = np.zeros(LARGE, np.uint8)
    cancelled = 0
    with (
        kvzc.Engine(default_timeout=20, copy_threads=1) as engine,
        engine.register(cache) as region,
    ):
        engine.connect(region.handle())
        for round_ in range(20):
            cache[:] = 5
            transfer = engine.get(local, region.handle(), notify=b"%d" % round_)
            time.sleep(0.0005 * (round_ % 5))
            transfer.cancel()
            local[:] = 1
            cache[:] = 6
            assert transfer.quiet
            time.sleep(0.002)
            assert (local == 1).all()
            arrival = engine.arrivals.wait(b"%d" % round_)
            if transfer.error is not None:
                cancelled += 1
                assert isinstance(transfer.error, kvzc.Cancelled)
                assert isinstance(arrival.error, kvzc.Cancelled)
                if cancelled == 3:
                    return
    assert cancelled > 0


def test_many_threads_get_at_once(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((8, 1000), "int64")
    cache[:] = np.arange(8000).reshape(8, 1000)
    wrong: list[int] = []

    def work(row: int) -> None:
        for i in range(100):
            local = np.zeros(1000, np.int64)
            engine.get(local, handle[(row + i) % 8]).wait()
            if not np.array_equal(local, cache[(row + i) % 8]):
                wrong.append(row)

    with engine.register(cache) as region:
        handle = region.handle()
        workers = [threading.Thread(target=work, args=(row,)) for row in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
    assert wrong == []


# ---- between two processes ----


def owner_start(state: State, nbytes: int) -> str:
    state.engine = kvzc.Engine(default_timeout=20)
    state.memory = kvzc.empty(nbytes, "uint8")
    state.region = state.engine.register(state.memory)
    text: str = state.region.handle().to_text()
    return text


def owner_fill(state: State, seed: int) -> None:
    state.memory[:] = random_bytes(seed, len(state.memory))


def owner_overwrite_at_each_tag(state: State, rounds: int) -> None:
    """As an owner does that gives its blocks to the next request when the tag is here."""
    for i in range(rounds):
        assert state.engine.arrivals.wait(b"read %d" % i).error is None
        state.memory[:] = i % 250 + 2


def last_byte(engine: kvzc.Engine, handle: kvzc.RemoteView) -> int:
    got = bytearray(1)
    engine.get(got, handle[-1:]).wait()
    return got[0]


def test_the_tag_reaches_the_owner_after_the_last_byte_was_read(
    engine: kvzc.Engine, shared_peer: Peer
) -> None:
    handle = kvzc.RemoteHandle.from_text(shared_peer.call(owner_start, 2 * MIB))
    rng = np.random.default_rng(11)
    sizes = [int(2 ** rng.uniform(0, 16)) for _ in range(150)]
    sizes += [int(rng.integers(128 << 10, 2 * MIB)) for _ in range(50)]
    rng.shuffle(sizes)
    shared_peer.start(owner_overwrite_at_each_tag, len(sizes))
    local = np.zeros(2 * MIB, np.uint8)
    for i, size in enumerate(sizes):
        want = (i - 1) % 250 + 2 if i else 0
        until(lambda want=want: last_byte(engine, handle) == want)
        engine.get(local[:size], handle[:size], notify=b"read %d" % i).wait()
        assert (local[:size] == want).all(), i
    shared_peer.result()


@settings(max_examples=40)
@given(st.data(), st.sampled_from(NUMPY_DTYPES), shapes(), SEEDS)
def test_between_processes_the_bytes_are_those_of_the_owner(
    here: SimpleNamespace,
    shared_peer: Peer,
    data: st.DataObject,
    dtype: torch.dtype,
    shape: Any,
    seed: int,
) -> None:
    if not hasattr(here, "base"):
        here.base = kvzc.RemoteHandle.from_text(shared_peer.call(owner_start, MOST_BYTES))
    shared_peer.call(owner_fill, seed)
    source = data.draw(cases(shape, unique=False))
    target = data.draw(cases(shape, unique=True))
    local = Local(target, dtype, seed + 1)
    tensor = target.torch_tensor(torch.from_numpy(local.within), dtype)
    handle = kvzc.RemoteHandle.from_text(shared_peer.call(owner_offer, source, dtype_name(dtype)))
    with here.engine.register(tensor) as region:
        here.engine.get(region[target.index], handle[source.index]).wait()
    local.check(source, random_bytes(seed, MOST_BYTES))


def owner_offer(state: State, case: Case, dtype: str) -> str:
    if getattr(state, "part", None) is not None:
        state.part.close()
    state.part = state.engine.register(case.numpy_array(state.memory, np.dtype(dtype)))
    text: str = state.part.handle().to_text()
    return text
