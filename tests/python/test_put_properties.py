"""A put between two views is an indexed assignment, and touches no other byte."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import kvzc
import numpy as np
import pytest
import torch
from helpers import Peer, State
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

MOST_BYTES = 16 * MOST_ITEMS  # Of one case's memory.
TARGET_BYTES = 4 * MOST_BYTES
SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def here() -> Iterator[SimpleNamespace]:
    """An engine that puts to itself, and memory for its targets with guard bytes all round."""
    with kvzc.Engine(default_timeout=10) as engine:
        memory = kvzc.empty(TARGET_BYTES, torch.uint8)
        # One registration for all examples, so that none of them maps the memory anew.
        with engine.register(memory):
            yield SimpleNamespace(engine=engine, memory=memory)


def modulo(size: int) -> Callable[[int], int]:
    """What makes block ids equal, negative ones too."""
    return lambda i: i % size


def fill(memory: torch.Tensor, seed: int) -> np.ndarray:
    """Random bytes into all of the memory; gives a copy of them."""
    values = random_bytes(seed, len(memory))
    memory.copy_(torch.from_numpy(values))
    return values


def put_and_compare(
    here: SimpleNamespace, target: Case, source: Case, dtype: torch.dtype, seed: int, local: Any
) -> None:
    """Puts `local`, which is `source` filled with bytes of `seed + 1`, and looks at every byte."""
    before = fill(here.memory, seed)
    source_bytes = random_bytes(seed + 1, source.items * dtype.itemsize)
    whole = expected(target, before, source, source_bytes, dtype.itemsize)
    with here.engine.register(target.torch_tensor(here.memory, dtype)) as region:
        view = region.handle()[target.index]
        transfer = here.engine.put(local, view)
        transfer.wait()
        assert transfer.nbytes == view.nbytes == target.positions().size * dtype.itemsize
    assert np.array_equal(here.memory.numpy(), whole)


@given(st.data(), st.sampled_from(TORCH_DTYPES), shapes(), SEEDS)
def test_a_put_from_a_registered_tensor_is_an_indexed_assignment(
    here: SimpleNamespace, data: st.DataObject, dtype: torch.dtype, shape: Any, seed: int
) -> None:
    target = data.draw(cases(shape, unique=True))
    source = data.draw(cases(shape, unique=False))
    memory = torch.from_numpy(random_bytes(seed + 1, source.items * dtype.itemsize))
    with here.engine.register(source.torch_tensor(memory, dtype)) as region:
        local = region[source.index]
        assert local.shape == tuple(shape)
        put_and_compare(here, target, source, dtype, seed, local)


@given(st.data(), st.sampled_from(TORCH_DTYPES), shapes(), SEEDS)
def test_a_put_from_a_plain_torch_view_is_an_indexed_assignment(
    here: SimpleNamespace, data: st.DataObject, dtype: torch.dtype, shape: Any, seed: int
) -> None:
    target = data.draw(cases(shape, unique=True))
    source = data.draw(cases(shape, unique=False, torch_index=True))
    memory = torch.from_numpy(random_bytes(seed + 1, source.items * dtype.itemsize))
    local = source.torch_tensor(memory, dtype)[source.index]
    put_and_compare(here, target, source, dtype, seed, local)


@given(st.data(), st.sampled_from(NUMPY_DTYPES), shapes(), SEEDS, st.booleans())
def test_a_put_from_a_numpy_array_is_an_indexed_assignment(
    here: SimpleNamespace,
    data: st.DataObject,
    dtype: torch.dtype,
    shape: Any,
    seed: int,
    registered: bool,
) -> None:
    target = data.draw(cases(shape, unique=True))
    source = data.draw(
        cases(shape, unique=False, negative_strides=True, torch_index=not registered)
    )
    memory = random_bytes(seed + 1, source.items * dtype.itemsize)
    array = source.numpy_array(memory, np.dtype(dtype_name(dtype)))
    if not registered:
        # Indexing all axes with integers gives a scalar, which is no view of anything.
        local = array[source.index] if shape else array[(*source.plain, None)].reshape(())
        put_and_compare(here, target, source, dtype, seed, local)
        return
    with here.engine.register(array) as region:
        put_and_compare(here, target, source, dtype, seed, region[source.index])


@given(st.data(), st.sampled_from(TORCH_DTYPES), shapes(), SEEDS)
def test_a_put_equals_torchs_own_assignment(
    here: SimpleNamespace, data: st.DataObject, dtype: torch.dtype, shape: Any, seed: int
) -> None:
    """The same as above with torch instead of our model, where torch knows the index."""
    target = data.draw(cases(shape, unique=True, torch_index=True))
    source = data.draw(cases(shape, unique=False, torch_index=True))
    fill(here.memory, seed)
    memory = torch.from_numpy(random_bytes(seed + 1, source.items * dtype.itemsize))
    values = source.torch_tensor(memory, dtype)[source.index]
    model = here.memory.clone()
    # As integers: a float's assignment may change the bits of a NaN.
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize)
    if words is None:
        model_view = target.torch_tensor(model, dtype)[target.index]
        torch.view_as_real(model_view).view(torch.int64).copy_(
            torch.view_as_real(values).view(torch.int64)
        )
    else:
        target.torch_tensor(model, words)[target.index] = source.torch_tensor(memory, words)[
            source.index
        ]
    with here.engine.register(target.torch_tensor(here.memory, dtype)) as region:
        here.engine.put(values, region.handle()[target.index]).wait()
    assert torch.equal(here.memory, model)


@given(st.data(), SEEDS, st.integers(2, 12), st.integers(1, 12))
def test_block_lists_on_both_sides_are_torchs_index_assignment(
    here: SimpleNamespace, data: st.DataObject, seed: int, blocks: int, chosen: int
) -> None:
    chosen = min(chosen, blocks)
    ids = st.integers(-blocks, blocks - 1)
    source_ids = data.draw(st.lists(ids, min_size=chosen, max_size=chosen))
    target_ids = data.draw(
        st.lists(ids, min_size=chosen, max_size=chosen, unique_by=modulo(blocks))
    )
    fill(here.memory, seed)
    cache = here.memory[64:].view(torch.int32)[: 2 * blocks * 48].view(2, blocks, 4, 12)
    model = cache.clone()
    local = torch.from_numpy(random_bytes(seed, model.nbytes)).view(torch.int32).view_as(model)
    model[:, target_ids] = local[:, source_ids]
    with here.engine.register(cache) as region, here.engine.register(local) as from_region:
        here.engine.put(from_region[:, source_ids], region.handle()[:, target_ids]).wait()
    assert torch.equal(cache, model)


@given(st.data(), SEEDS)
def test_several_lists_act_each_on_its_own_axis_as_numpy_ix(
    here: SimpleNamespace, data: st.DataObject, seed: int
) -> None:
    def lists(unique: bool) -> list[list[int]]:
        return [
            data.draw(st.lists(st.integers(0, size - 1), min_size=n, max_size=n, unique=unique))
            for size, n in zip((5, 4, 3), counts, strict=True)
        ]

    counts = [data.draw(st.integers(1, size)) for size in (5, 4, 3)]
    fill(here.memory, seed)
    cache = here.memory[:480].view(torch.int64).view(5, 4, 3)
    local = random_bytes(seed + 1, 480).view(np.int64).reshape(5, 4, 3)
    from_ids, to_ids = lists(False), lists(True)
    model = cache.numpy().copy()
    model[np.ix_(*to_ids)] = local[np.ix_(*from_ids)]
    with here.engine.register(cache) as region, here.engine.register(local) as from_region:
        here.engine.put(from_region[tuple(from_ids)], region.handle()[tuple(to_ids)]).wait()
    assert np.array_equal(cache.numpy(), model)


@given(st.data(), SEEDS)
def test_indexing_twice_is_indexing_what_came_out(
    here: SimpleNamespace, data: st.DataObject, seed: int
) -> None:
    """A view of a view, also of one that a list made."""
    rows = data.draw(
        st.lists(st.integers(-6, 5), min_size=1, max_size=6, unique_by=lambda i: i % 6)
    )
    second = data.draw(
        st.one_of(
            st.lists(
                st.integers(-len(rows), len(rows) - 1),
                max_size=len(rows),
                unique_by=modulo(len(rows)),
            ),
            st.builds(
                slice, st.integers(-7, 7), st.integers(-7, 7), st.sampled_from([1, 2, -1, -3])
            ),
            st.integers(-len(rows), len(rows) - 1),
        )
    )
    fill(here.memory, seed)
    cache = here.memory[:240].view(torch.int64).view(6, 5)
    model = cache.numpy().copy()
    chosen = np.arange(6)[rows][second]
    values = torch.arange(model[chosen].size).view(model[chosen].shape)
    model[chosen] = values.numpy()
    with here.engine.register(cache) as region:
        view = region.handle()[rows][second]
        assert view.shape == values.shape
        here.engine.put(values, view).wait()
    assert np.array_equal(cache.numpy(), model)


@settings(max_examples=60)
@given(st.data(), SEEDS, st.booleans())
def test_a_put_between_groups_is_one_assignment_per_tensor(
    here: SimpleNamespace, data: st.DataObject, seed: int, several_storages: bool
) -> None:
    shape_list = data.draw(st.lists(shapes(), min_size=1, max_size=4))
    names = [f"layer.{i}" for i in range(len(shape_list))]
    dtypes = [data.draw(st.sampled_from(TORCH_DTYPES)) for _ in names]
    items = [dtype.itemsize for dtype in dtypes]
    targets = [data.draw(cases(shape, unique=True)) for shape in shape_list]
    sources = [data.draw(cases(shape, unique=False)) for shape in shape_list]
    parts = [here.memory[i * MOST_BYTES : (i + 1) * MOST_BYTES] for i in range(len(names))]
    if several_storages:
        parts = [kvzc.empty(MOST_BYTES, torch.uint8) for _ in names]
    befores = [fill(part, seed + i) for i, part in enumerate(parts)]
    from_bytes = [
        random_bytes(seed + 10 + i, case.items * items[i]) for i, case in enumerate(sources)
    ]
    wholes = [
        expected(targets[i], befores[i], sources[i], from_bytes[i], items[i])
        for i in range(len(names))
    ]
    to_group = {name: targets[i].torch_tensor(parts[i], dtypes[i]) for i, name in enumerate(names)}
    from_group = {
        name: sources[i].torch_tensor(torch.from_numpy(from_bytes[i]), dtypes[i])
        for i, name in enumerate(names)
    }
    with here.engine.register(to_group) as region, here.engine.register(from_group) as local:
        handle = region.handle()
        here.engine.put_many(
            (local[(name, *sources[i].index)], handle[(name, *targets[i].index)])
            for i, name in enumerate(names)
        ).wait()
    for part, whole in zip(parts, wholes, strict=True):
        assert np.array_equal(part.numpy(), whole)


def test_an_index_of_a_group_reaches_every_tensor_that_its_first_part_names(
    engine: kvzc.Engine,
) -> None:
    names = [f"{kind}.{layer}" for layer in range(4) for kind in "kv"]
    cache = {name: kvzc.empty((6, 3), torch.int32) for name in names}
    local = {name: torch.full((6, 3), 1 + i, dtype=torch.int32) for i, name in enumerate(names)}
    with engine.register(cache) as region, engine.register(local) as from_region:
        handle = region.handle()
        engine.put(from_region[["k.1", "v.3"], [5, 0]], handle[["k.1", "v.3"], [1, 2]]).wait()
        for i, name in enumerate(names):
            want = torch.zeros((6, 3), dtype=torch.int32)
            want[[1, 2]] = 1 + i if name in ("k.1", "v.3") else 0
            assert torch.equal(cache[name], want), name
        engine.put(from_region[::2, 4], handle[::2, 4]).wait()
        assert [int(cache[name][4, 1]) for name in names] == [1, 0, 3, 0, 5, 0, 7, 0]
        engine.put(from_region, handle).wait()
        assert all(torch.equal(cache[name], local[name]) for name in names)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=dtype_name)
def test_every_byte_pattern_arrives_as_it_was(engine: kvzc.Engine, dtype: torch.dtype) -> None:
    """NaN payloads, -0.0, bools other than 0 and 1: bits, not values."""
    # Every pair of bytes in every place of an item, so all 16-bit floats and all signs of others.
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    local = torch.from_numpy(np.concatenate([pairs, pairs[::-1]]).copy()).view(dtype)
    cache = kvzc.empty(tuple(local.shape), dtype)
    with engine.register(cache) as region:
        assert region.handle().dtype == dtype_name(dtype)
        engine.put(local, region.handle()).wait()
    assert torch.equal(cache.view(torch.uint8), local.view(torch.uint8))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=dtype_name)
def test_torch_and_numpy_mean_the_same_types(engine: kvzc.Engine, dtype: torch.dtype) -> None:
    local = random_bytes(1, 64 * dtype.itemsize)
    cache = kvzc.empty(64, dtype)
    with engine.register(cache) as region:
        engine.put(local.view(np.dtype(dtype_name(dtype))), region.handle()).wait()
    assert np.array_equal(cache.view(torch.uint8).numpy(), local)


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 4097, (128 << 10) + 1, (1 << 20) - 1, 5 << 20])
@pytest.mark.parametrize("offset", [0, 1, 31])
def test_sizes_round_every_way_of_copying(engine: kvzc.Engine, nbytes: int, offset: int) -> None:
    memory = kvzc.empty(nbytes + 128, torch.uint8)
    before = fill(memory, nbytes)
    values = random_bytes(offset, nbytes + 7)
    with engine.register(memory) as region:
        target = region.handle()[offset : offset + nbytes]
        engine.put(torch.from_numpy(values)[7:], target).wait()
    before[offset : offset + nbytes] = values[7:]
    assert np.array_equal(memory.numpy(), before)


def test_a_view_of_a_view_is_not_shifted_twice(engine: kvzc.Engine) -> None:
    """VIEW-04: base(4x5)[1:3, 1:4], row by row."""
    base = kvzc.empty((4, 5), torch.int32)
    with engine.register(base[1:3, 1:4]) as region:
        handle = region.handle()
        for row in range(2):
            engine.put(torch.tensor([7, 8, 9], dtype=torch.int32) + 10 * row, handle[row]).wait()
    assert base.tolist() == [[0] * 5, [0, 7, 8, 9, 0], [0, 17, 18, 19, 0], [0] * 5]


def test_a_target_that_is_not_contiguous_is_written_in_place(engine: kvzc.Engine) -> None:
    """VIEW-02: no hidden copy of y[:, ::2]."""
    y = kvzc.empty((3, 6), torch.int32)
    with engine.register(y[:, ::2]) as region:
        engine.put(torch.ones((3, 3), dtype=torch.int32), region.handle()).wait()
    assert y.tolist() == [[1, 0] * 3] * 3


# ---- the same between two processes ----


def owner_start(state: State, nbytes: int) -> None:
    state.engine = kvzc.Engine(default_timeout=10)
    state.memory = kvzc.empty(nbytes, "uint8")
    state.base = state.engine.register(state.memory)
    state.region = None


def owner_offer(state: State, case: Case, dtype: str, seed: int) -> str:
    """Fills the memory and registers the tensor that `case` describes."""
    if state.region is not None:
        state.region.close()
    state.memory[:] = random_bytes(seed, len(state.memory))
    state.region = state.engine.register(case.numpy_array(state.memory, np.dtype(dtype)))
    text: str = state.region.handle().to_text()
    return text


def owner_bytes_after(state: State, tag: bytes) -> bytes:
    """All the memory, once the tag is here."""
    arrival = state.engine.arrivals.wait(tag)
    assert arrival.error is None
    memory: bytes = state.memory.tobytes()
    return memory


@pytest.fixture(scope="module")
def two(shared_peer: Peer) -> Iterator[SimpleNamespace]:
    shared_peer.call(owner_start, MOST_BYTES)
    with kvzc.Engine(default_timeout=10) as engine:
        yield SimpleNamespace(engine=engine, owner=shared_peer, count=0)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(NUMPY_DTYPES), shapes(), SEEDS)
def test_between_processes_the_bytes_are_there_when_the_tag_is(
    two: SimpleNamespace, data: st.DataObject, dtype: torch.dtype, shape: Any, seed: int
) -> None:
    target = data.draw(cases(shape, unique=True))
    source = data.draw(cases(shape, unique=False))
    memory = torch.from_numpy(random_bytes(seed + 1, source.items * dtype.itemsize))
    text = two.owner.call(owner_offer, target, dtype_name(dtype), seed)
    handle = kvzc.RemoteHandle.from_text(text)
    two.count += 1
    tag = b"%d" % two.count
    with two.engine.register(source.torch_tensor(memory, dtype)) as region:
        two.engine.put(region[source.index], handle[target.index], notify=tag).wait()
    after = two.owner.call(owner_bytes_after, tag)
    before = random_bytes(seed, MOST_BYTES)
    whole = expected(target, before, source, memory.numpy(), dtype.itemsize)
    assert np.array_equal(np.frombuffer(after, np.uint8), whole)
