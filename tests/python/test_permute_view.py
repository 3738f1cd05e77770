"""permute() and view(dtype): the same memory seen otherwise, on whichever side."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kvzc
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from views import random_bytes

SEEDS = st.integers(0, 2**32 - 1)
MOST_BYTES = 6**4 * 16
# NumPy and kvzc agree on all; records of odd sizes have tests of their own.
DTYPES = [np.dtype(each) for each in ["u1", "i2", "f4", "f8", "c16", "M8[us]", "S4"]]


@pytest.fixture(scope="module")
def here() -> Iterator[SimpleNamespace]:
    with kvzc.Engine(default_timeout=10) as engine:
        yield SimpleNamespace(engine=engine, memory=kvzc.empty(MOST_BYTES, "uint8"))


def tuple_of(draw: Any, shape: tuple[int, ...]) -> tuple[slice | int, ...]:
    index: list[slice | int] = []
    for size in shape:
        if size > 0 and draw(st.integers(0, 5)) == 0:
            index.append(draw(st.integers(-size, size - 1)))
            continue
        bounds = st.none() | st.integers(-size - 1, size + 1)
        step = draw(st.sampled_from([None, 1, 1, 2, -1, -2]))
        whole = draw(st.booleans())
        index.append(slice(None) if whole else slice(draw(bounds), draw(bounds), step))
    return tuple(index)


def change(draw: Any, array: np.ndarray, view: Any) -> tuple[np.ndarray, Any]:
    """Does one and the same to both, which refuse the same."""
    kind = draw(st.sampled_from(["index", "permute", "view", "view"]))
    if kind == "index":
        index = tuple_of(draw, array.shape)
        # A number out of a NumPy array is no view of it any more.
        return array[(*index, ...)], view[index]
    if kind == "permute":
        order = draw(st.permutations(range(array.ndim)))
        dims = [dim - array.ndim if draw(st.booleans()) else dim for dim in order]
        return array.transpose(dims), view.permute(dims) if draw(st.booleans()) else view.permute(
            *dims
        )
    dtype = draw(st.sampled_from(DTYPES))
    spelt = draw(st.sampled_from([dtype, dtype.str]))
    try:
        seen = array.view(dtype)
    except ValueError:
        with pytest.raises(kvzc.InvalidArgument):
            view.view(spelt)
        return array, view
    return seen, view.view(spelt)


def start(draw: Any, memory: np.ndarray, seed: int) -> np.ndarray:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    memory[:] = random_bytes(seed, len(memory))
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return memory[:nbytes].view(dtype).reshape(shape)


@settings(max_examples=300)
@given(st.data(), SEEDS)
def test_a_put_into_what_was_permuted_viewed_and_indexed_is_numpys_assignment(
    here: SimpleNamespace, data: st.DataObject, seed: int
) -> None:
    model = np.empty(MOST_BYTES, np.uint8)
    want = start(data.draw, model, seed)
    here.memory[:] = model
    cache = here.memory[: want.nbytes].view(want.dtype).reshape(want.shape)
    with here.engine.register(cache) as region:
        view = region.handle()
        for _ in range(data.draw(st.integers(1, 5))):
            want, view = change(data.draw, want, view)
            assert view.shape == want.shape
            assert view.nbytes == want.nbytes
        values = random_bytes(seed + 1, want.nbytes).view(want.dtype).reshape(want.shape)
        want[...] = values
        here.engine.put(values, view).wait()
    assert np.array_equal(here.memory, model)


@settings(max_examples=300)
@given(st.data(), SEEDS)
def test_a_put_from_what_was_permuted_viewed_and_indexed_is_numpys_copy(
    here: SimpleNamespace, data: st.DataObject, seed: int
) -> None:
    want = start(data.draw, np.empty(MOST_BYTES, np.uint8), seed)
    with here.engine.register(want) as local:
        view = local
        for _ in range(data.draw(st.integers(1, 5))):
            want, view = change(data.draw, want, view)
        target = np.zeros(max(want.nbytes, 1), np.uint8)
        target = target[: want.nbytes].view(want.dtype).reshape(want.shape)
        if want.size == 0:
            assert view.nbytes == 0
            return
        with here.engine.register(target) as region:
            here.engine.put(view, region.handle()).wait()
    assert target.tobytes() == want.tobytes()


def ids_of(draw: Any, count: int, size: int) -> list[int]:
    return draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count, unique=True))


@given(st.data(), SEEDS, st.sampled_from(["source", "target", "before the index"]))
def test_blocks_of_nhd_go_into_blocks_of_hnd(
    here: SimpleNamespace, data: st.DataObject, seed: int, who: str
) -> None:
    blocks, heads, tokens, dim = 6, 3, 4, 5
    nhd = random_bytes(seed, blocks * heads * tokens * dim * 2).view("<f2")
    nhd = nhd.reshape(blocks, tokens, heads, dim)
    hnd = here.memory[: nhd.nbytes].view("<f2").reshape(blocks, heads, tokens, dim)
    hnd.view(np.uint8)[:] = random_bytes(seed + 1, hnd.nbytes).reshape(*hnd.shape[:-1], -1)
    count = data.draw(st.integers(1, blocks))
    source_ids = ids_of(data.draw, count, blocks)
    target_ids = ids_of(data.draw, count, blocks)
    want = hnd.copy()
    want[target_ids] = nhd[source_ids].transpose(0, 2, 1, 3)
    with here.engine.register(nhd) as local, here.engine.register(hnd) as region:
        handle = region.handle()
        if who == "source":
            pair = local[source_ids].permute(0, 2, 1, 3), handle[target_ids]
        elif who == "target":
            pair = local[source_ids], handle[target_ids].permute(0, 2, 1, 3)
        else:
            pair = local.permute(0, 2, 1, 3)[source_ids], handle[target_ids]
        here.engine.put(*pair).wait()
        assert hnd.tobytes() == want.tobytes()
        # And the other way, by a get from the same two views.
        nhd.view(np.uint8)[:] = 0
        here.engine.get(*pair).wait()
    assert nhd[source_ids].tobytes() == hnd[target_ids].transpose(0, 2, 1, 3).tobytes()


@given(st.data(), SEEDS)
def test_several_lists_are_permuted_with_their_axes(
    here: SimpleNamespace, data: st.DataObject, seed: int
) -> None:
    sizes = (4, 3, 5)
    lists = [ids_of(data.draw, data.draw(st.integers(1, size)), size) for size in sizes]
    order = data.draw(st.permutations(range(3)))
    cache = here.memory[:240].view("<i4").reshape(sizes)
    cache[:] = 0
    want = cache.copy()
    values = random_bytes(seed, 4 * len(lists[0]) * len(lists[1]) * len(lists[2])).view("<i4")
    values = values.reshape([len(lists[axis]) for axis in order])
    want.transpose(order)[np.ix_(*[lists[axis] for axis in order])] = values
    with here.engine.register(cache) as region:
        here.engine.put(values, region.handle()[tuple(lists)].permute(*order)).wait()
    assert np.array_equal(cache, want)


def test_a_grant_of_a_permuted_view_is_that_view(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((4, 3, 2, 8), "float16")
    with engine.register(cache) as region:
        view = region[[2, 0]].permute(0, 2, 1, 3).view("uint8")
        text = view.grant("put").handle().to_text()
        handle = kvzc.RemoteHandle.from_text(text)
        assert handle.shape == (2, 2, 3, 16)
        assert handle.dtype == "uint8"
        values = random_bytes(1, 2 * 2 * 3 * 16).reshape(2, 2, 3, 16)
        engine.put(values, handle).wait()
    assert np.array_equal(cache[[2, 0]].transpose(0, 2, 1, 3).copy().view(np.uint8), values)
    assert not cache[[1, 3]].any()


def test_a_group_is_permuted_and_viewed_tensor_by_tensor(engine: kvzc.Engine) -> None:
    names = [f"{kind}.{layer}" for layer in range(3) for kind in "kv"]
    nhd = {name: torch.randn(5, 4, 2, 8).to(torch.bfloat16) for name in names}
    hnd = {name: kvzc.empty((5, 2, 4, 8), torch.bfloat16) for name in names}
    with engine.register(nhd) as local, engine.register(hnd) as region:
        handle = region.handle()
        engine.put(
            local[:, [4, 1]].permute(0, 2, 1, 3).view(torch.int16),
            handle[:, [0, 3]].view(torch.int16),
        ).wait()
        for name in names:
            assert torch.equal(hnd[name][[0, 3]], nhd[name][[4, 1]].permute(0, 2, 1, 3)), name
            assert not hnd[name][[1, 2, 4]].any()
        viewed = handle.view(torch.uint8)
        assert viewed.names == names
        assert viewed["v.2"].shape == (5, 2, 4, 16)
    mixed = {"k": kvzc.empty((4, 2), "uint8"), "v": kvzc.empty(3, "uint8")}
    with engine.register(mixed) as region:
        with pytest.raises(kvzc.InvalidArgument, match="'v'"):
            region.handle().permute(1, 0)
        with pytest.raises(kvzc.InvalidArgument, match="'v'"):
            region.view("uint16")


@pytest.fixture(scope="module", params=["region", "view", "handle", "remote view"])
def seen(here: SimpleNamespace, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The same on both sides, whole or indexed."""
    with here.engine.register(kvzc.empty((6, 4, 10), "float32")) as region:
        whole = region if request.param in ("region", "view") else region.handle()
        yield whole if request.param in ("region", "handle") else whole[:]


def test_permute_takes_what_torchs_permute_takes(seen: Any) -> None:
    for dims in [(2, 0, 1), (-1, -3, 1), ((2, 0, 1),), ([0, 1, 2],), (torch.Size([1, 0, 2]),)]:
        want = torch.empty(6, 4, 10).permute(*dims).shape
        assert seen.permute(*dims).shape == tuple(want)
    assert seen.permute(np.int64(1), np.int8(0), 2).shape == (4, 6, 10)


@pytest.mark.parametrize(
    ("dims", "error", "match"),
    [
        ((), kvzc.InvalidArgument, "3 axes"),
        ((0, 1), kvzc.InvalidArgument, "3 axes"),
        ((0, 1, 2, 0), kvzc.InvalidArgument, "3 axes"),
        ((0, 1, 1), kvzc.InvalidArgument, "twice"),
        ((0, 1, -2), kvzc.InvalidArgument, "twice"),
        ((0, 1, 3), kvzc.OutOfRange, "axis 3"),
        ((0, 1, -4), kvzc.OutOfRange, "axis -4"),
        ((0, 1, 2**70), kvzc.OutOfRange, "axis"),
        ((0, 1, 2.0), TypeError, "float"),
        (("k", "v", "q"), TypeError, "str"),
        (((0, 1), 2), TypeError, "tuple"),
    ],
    ids=str,
)
def test_other_axes_are_refused(seen: Any, dims: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        seen.permute(*dims)


@pytest.mark.parametrize(
    ("dtype", "name", "shape"),
    [
        (torch.uint8, "uint8", (6, 4, 40)),
        (torch.bfloat16, "bfloat16", (6, 4, 20)),
        (torch.int32, "int32", (6, 4, 10)),
        ("float64", "float64", (6, 4, 5)),
        ("float8_e4m3fn", "float8_e4m3fn", (6, 4, 40)),
        (np.float16, "float16", (6, 4, 20)),
        (float, "float64", (6, 4, 5)),
        ("<i2", "int16", (6, 4, 20)),
    ],
    ids=str,
)
def test_view_rescales_the_last_axis(seen: Any, dtype: Any, name: str, shape: Any) -> None:
    got = seen.view(dtype)
    assert (got.dtype, got.shape, got.nbytes) == (name, shape, seen.nbytes)
    assert got.view("float32").shape == (6, 4, 10)


@pytest.mark.parametrize(
    ("make", "dtype", "error", "match"),
    [
        (lambda v: v, "complex128", kvzc.InvalidArgument, "40 bytes, no multiple of 16"),
        (lambda v: v[..., ::2], "uint8", kvzc.InvalidArgument, "not contiguous; take the view"),
        (lambda v: v[..., ::-1], "uint8", kvzc.InvalidArgument, "not contiguous"),
        (lambda v: v[..., [0, 1]], "uint8", kvzc.InvalidArgument, "not contiguous"),
        (lambda v: v.permute(2, 1, 0), "uint8", kvzc.InvalidArgument, "not contiguous"),
        (lambda v: v[0, 0, 0], "uint8", kvzc.InvalidArgument, "no axis"),
        (lambda v: v, object, kvzc.Unsupported, "addresses"),
        (lambda v: v, ">f4", kvzc.Unsupported, "byte order"),
        (lambda v: v, torch.qint8, kvzc.Unsupported, "qint8"),
        (lambda v: v, None, TypeError, "None"),
        (lambda v: v, "flot32", TypeError, "flot32"),
    ],
)
def test_view_refuses_with_the_reason(
    seen: Any, make: Any, dtype: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make(seen).view(dtype)


def test_an_expanded_target_stays_refused_however_it_is_turned(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(4, torch.float32)
    with engine.register(cache.expand(3, 4)) as region:
        handle = region.handle()
        for target in [handle, handle.permute(1, 0), handle.view(torch.uint8)]:
            with pytest.raises(kvzc.InvalidArgument, match="overlaps"):
                engine.put(np.zeros(target.shape, target.dtype), target)
    assert not cache.any()


def test_a_closed_region_has_no_views(engine: kvzc.Engine) -> None:
    region = engine.register(kvzc.empty((2, 3), "uint8"))
    region.close()
    for make in (lambda: region.permute(1, 0), lambda: region.view("int8")):
        with pytest.raises(kvzc.Closed):
            make()


def test_nothing_is_copied(engine: kvzc.Engine) -> None:
    """A GiB seen 10 000 ways takes no time and no memory."""
    with engine.register(torch.zeros(1 << 20, dtype=torch.uint8).expand(1024, 1 << 20)) as local:
        views = [local.permute(1, 0) for _ in range(5000)]
        views += [local.view(torch.int32) for _ in range(5000)]
        assert sum(each.nbytes for each in views) == 10_000 << 30
