"""Indices of regions and handles: what they take, what they refuse, and what comes out."""

from collections.abc import Iterator
from typing import Any

import kvzc
import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def region() -> Iterator[kvzc.Region]:
    with kvzc.Engine() as engine, engine.register(kvzc.empty((6, 4, 5), "float32")) as made:
        yield made


@pytest.fixture(scope="module", params=["local", "remote"])
def view(region: kvzc.Region, request: pytest.FixtureRequest) -> Any:
    """The same tests for both sides: they have one way of indexing."""
    return region if request.param == "local" else region.handle()


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    tensors = {
        "k.0": kvzc.empty((6, 4), "float32"),
        "v.0": kvzc.empty((6, 4), "float32"),
        "k.1": kvzc.empty((6, 4, 2), "float16"),
    }
    with kvzc.Engine() as engine, engine.register(tensors) as made:
        yield made.handle()


INDICES: list[Any] = [
    0,
    -1,
    -6,
    (2, 3, 4),
    (slice(None), 1),
    (..., 1),
    (1, ...),
    ...,
    (),
    (..., slice(1, 3)),
    slice(1, 5, 2),
    slice(None, None, -1),
    slice(4, None, -3),
    slice(-100, 100),
    slice(100, -100),
    slice(10**30, -(10**30), -1),
    slice(2**63 - 1, None),
    slice(None, None, 2**63 - 1),
    slice(None, None, -(2**63)),
    slice(None, None, -(2**63) + 1),
    slice(3, 3),
    [5, 0, 5, -1],
    [],
    (slice(None), [3, 3, 0], slice(None, None, 2)),
    np.int8(-1),
    np.uint64(5),
    np.array(3),
    np.array([1, -1]),
]


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_shape_and_nbytes_are_those_of_numpys_indexing(view: Any, index: Any) -> None:
    want = np.zeros((6, 4, 5), np.float32)[index]
    got = view[index]
    assert got.shape == want.shape
    assert got.nbytes == want.nbytes
    assert got.dtype == "float32"
    assert got.names == []


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("step", [1, 2, -1])
def test_integer_arrays_of_every_width_and_stride_are_block_lists(
    engine: kvzc.Engine, dtype: str, step: int
) -> None:
    cache = kvzc.empty(8, "int16")
    with engine.register(cache) as region:
        ids = np.array([5, 7, 0, 7, 2, 7], dtype)[::step]
        want = np.zeros(8, np.int16)
        ids = np.array(list(dict.fromkeys(ids.tolist())), dtype)  # A target names each once.
        values = np.arange(1, 1 + len(ids), dtype=np.int16)
        want[ids] = values
        spread = np.full(3 * len(ids), 1, dtype)
        spread[::3] = ids
        engine.put(values, region.handle()[spread[::3]]).wait()
        assert np.array_equal(cache, want)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_integer_tensors_are_block_lists(engine: kvzc.Engine, dtype: torch.dtype) -> None:
    cache = kvzc.empty(8, torch.int16)
    with engine.register(cache) as region:
        ids = torch.tensor([6, 1, 4], dtype=dtype)
        engine.put(torch.tensor([1, 2, 3], dtype=torch.int16), region.handle()[ids]).wait()
    assert cache.tolist() == [0, 2, 0, 0, 3, 0, 1, 0]


def test_ranges_integer_scalars_and_single_element_tensors_are_indices(view: Any) -> None:
    assert view[range(5, -1, -2)].shape == (3, 4, 5)
    assert view[range(0)].shape == (0, 4, 5)
    assert view[torch.tensor(3)].shape == (4, 5)
    assert view[np.int16(2), np.uint8(1)].shape == (5,)


@pytest.mark.parametrize(
    "index",
    [
        6,
        -7,
        (0, 4),
        (0, 0, -6),
        [0, 6],
        [-7],
        (slice(None), [0, 4]),
        range(7),
        np.array([6], np.uint8),
        np.array([-7], np.int8),
        np.array([127], np.int8),
        torch.tensor([6]),
        (0, 0, 0, 0),
        (..., 0, 0, 0, 0),
        2**62,
        -(2**63),
        2**63,
        -(2**70),
        [2**70],
        np.uint64(2**64 - 1),
        np.array([2**64 - 1], np.uint64),
        np.array([2**63], np.uint64),
        torch.tensor([2**63 - 1]),
    ],
    ids=repr,
)
def test_beyond_the_shape_is_an_index_error(view: Any, index: Any) -> None:
    with pytest.raises(IndexError) as raised:
        view[index]
    assert isinstance(raised.value, kvzc.OutOfRange)


@pytest.mark.parametrize(
    "index",
    [
        True,
        (0, False),
        [True] * 6,
        [0, True],
        np.bool_(True),
        np.ones(6, bool),
        torch.ones(6, dtype=torch.bool),
        torch.tensor(True),
        np.array(True),
        None,
        (None, 0),
        1.0,
        [1.0],
        np.float32(1),
        np.array([1.0]),
        torch.tensor([1.0]),
        torch.tensor(1.0),
        "k.0",
        ["k.0"],
        b"ab".hex,
        {1},
        object(),
        [[0, 1]],
        np.zeros((1, 1), int),
        torch.zeros((2, 2), dtype=torch.int64),
        slice(None, None, 0),
        slice("a", None),
        (..., ...),
        torch.zeros(2, dtype=torch.int64, device="meta"),
        torch.zeros((), dtype=torch.int64, device="meta"),
    ],
    ids=repr,
)
def test_what_is_no_index_is_refused(view: Any, index: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        view[index]
    assert len(str(raised.value)) > 15  # It says why.


def test_a_mask_is_refused_with_the_remedy(view: Any) -> None:
    with pytest.raises(TypeError, match="nonzero"):
        view[torch.ones(6, dtype=torch.bool)]


def test_a_device_index_is_refused_because_it_would_synchronise(view: Any) -> None:
    with pytest.raises(TypeError, match="CPU"):
        view[torch.zeros(2, dtype=torch.int64, device="meta")]


def test_indexing_copies_nothing(region: kvzc.Region) -> None:
    """10 000 blocks of 1 GiB, many times over: bytes would show."""
    with kvzc.Engine() as engine:
        local = engine.register(torch.zeros(1 << 20, dtype=torch.uint8).expand(1024, 1 << 20))
        views = [local[list(range(1024))] for _ in range(100)]
        assert sum(each.nbytes for each in views) == 100 << 30
        local.close()


def test_a_list_given_later_changed_changes_no_view(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(4, "uint8")
    with engine.register(cache) as region:
        ids = np.array([0, 1])
        target = region.handle()[ids]
        ids[:] = [2, 99]
        engine.put(np.array([7, 8], np.uint8), target).wait()
    assert cache.tolist() == [7, 8, 0, 0]


def test_more_elements_than_64_bits_are_refused(engine: kvzc.Engine) -> None:
    with engine.register(np.zeros((2, 2, 2, 2, 2), np.float64)) as region:
        many = [0] * (1 << 16)
        with pytest.raises(IndexError, match="64 bits"):
            region[many, many, many, many]


def test_a_group_is_indexed_by_name_first(group: Any) -> None:
    assert group.names == ["k.0", "v.0", "k.1"]
    assert group.nbytes == 6 * 4 * 4 * 2 + 6 * 4 * 2 * 2
    assert group["k.1"].shape == (6, 4, 2)
    assert group["k.1"].dtype == "float16"
    assert group["k.1"].names == []
    assert group["k.1", [1, 2], ..., 0].shape == (2, 4)
    assert group[["k.1", "k.0"]].names == ["k.1", "k.0"]
    assert group[["v.0"]].names == ["v.0"]
    assert group[::2].names == ["k.0", "k.1"]
    assert group[::-1].names == ["k.1", "v.0", "k.0"]
    assert group[..., 0].nbytes == 6 * 4 * 2 + 6 * 4 * 2
    assert group[:, 3].names == group.names
    assert group[()].names == group.names
    assert group[:2][["v.0"], 5].nbytes == 16


def test_a_group_has_no_shape_or_dtype_of_its_own(group: Any) -> None:
    with pytest.raises(kvzc.InvalidArgument, match="name"):
        _ = group.shape
    with pytest.raises(kvzc.InvalidArgument, match="name"):
        _ = group.dtype


@pytest.mark.parametrize("index", ["k.2", ["k.0", "x"], ("k.0", 6), (slice(None), [6])], ids=repr)
def test_beyond_a_group_is_an_index_error(group: Any, index: Any) -> None:
    with pytest.raises(IndexError):
        group[index]


@pytest.mark.parametrize("index", [0, [0, 1], (None,), slice(0, 0), [], ["k.0", 1]], ids=repr)
def test_what_names_no_tensor_of_a_group_is_refused(group: Any, index: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        group[index]


def test_an_error_in_a_group_names_the_tensor(group: Any) -> None:
    with pytest.raises(kvzc.OutOfRange, match=r"'k\.0'"):
        group[["k.1", "k.0"], 0, 0, 0]


@pytest.mark.parametrize("ids", [[0, 0], [1, -5], np.array([2, 3, 2])], ids=repr)
def test_a_target_names_no_block_twice(engine: kvzc.Engine, ids: Any) -> None:
    cache = kvzc.empty((6, 2), "uint8")
    cache[:] = 5
    with engine.register(cache) as region:
        source = np.zeros((len(ids), 2), np.uint8)
        with pytest.raises(kvzc.InvalidArgument, match="twice"):
            engine.put(source, region.handle()[ids])
    assert (cache == 5).all()


def test_a_target_that_overlaps_itself_is_refused(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(64, torch.uint8)
    for shape, strides in [((3, 4), (0, 1)), ((3, 4), (2, 1)), ((4, 4), (3, 3))]:
        with engine.register(torch.as_strided(cache, shape, strides)) as region:
            source = torch.ones(shape, dtype=torch.uint8)
            with pytest.raises(kvzc.InvalidArgument, match="overlap"):
                engine.put(source, region.handle())
    # Interleaved without overlap is fine: rows of 3 at 0, 7, 14 and columns 9 apart do not meet.
    with engine.register(torch.as_strided(cache, (3, 2, 3), (7, 24, 1))) as region:
        engine.put(torch.ones((3, 2, 3), dtype=torch.uint8), region.handle()).wait()
    assert int(cache.sum()) == 18


def test_shapes_and_dtypes_must_be_equal(engine: kvzc.Engine) -> None:
    """DTYP-01: also where the bytes would fit."""
    cache = kvzc.empty((4, 8), torch.float8_e4m3fn)
    with engine.register(cache) as region:
        handle = region.handle()
        for source in [
            torch.zeros((4, 8), dtype=torch.bfloat16),
            torch.zeros((4, 8), dtype=torch.uint8),
            torch.zeros((4, 8), dtype=torch.float8_e5m2),
            torch.zeros((4, 4), dtype=torch.float16),
            torch.zeros((32,), dtype=torch.float8_e4m3fn),
            torch.zeros((1, 4, 8), dtype=torch.float8_e4m3fn),
            torch.zeros((8, 4), dtype=torch.float8_e4m3fn),
            torch.zeros((1, 8), dtype=torch.float8_e4m3fn),
        ]:
            with pytest.raises(kvzc.LayoutMismatch):
                engine.put(source, handle)
    assert not cache.view(torch.uint8).any()


def test_a_group_and_a_tensor_do_not_match(engine: kvzc.Engine) -> None:
    cache = {"a": kvzc.empty(4, "uint8"), "b": kvzc.empty(4, "uint8")}
    with engine.register(cache) as region, engine.register(np.zeros(4, np.uint8)) as local:
        with pytest.raises(kvzc.LayoutMismatch):
            engine.put(local, region.handle())
        engine.put(local, region.handle()["a"]).wait()


def test_repr_says_what_and_where(region: kvzc.Region) -> None:
    handle = region.handle()
    assert "float32[6, 4, 5]" in repr(region)
    assert "float32[6, 4, 5]" in repr(handle)
    assert "float32[2, 4, 5]" in repr(region[:2])
    assert handle.engine in repr(handle[0])
