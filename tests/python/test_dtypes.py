"""Element types: who means the same by a name, and what NumPy's other types are."""

from typing import Any

import kvzc
import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import Peer, State
from views import random_bytes

# What only ml_dtypes has, besides what torch has too (test_put_properties.py).
ML_DTYPES = [ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz]

TOKEN = np.dtype([("id", "i4"), ("score", "f8"), ("tag", "S3")])
RECORDS: list[Any] = [
    TOKEN,
    np.dtype([("id", "i4"), ("score", "f8"), ("tag", "S3")], align=True),
    np.dtype([("scale", ml_dtypes.bfloat16), ("values", ml_dtypes.float8_e4m3fn, (16,))]),
    np.dtype([("outer", [("a", ">i2"), ("b", "c16")]), ("when", "M8[ns]")]),
    np.dtype("S7"),
    np.dtype("U4"),
    np.dtype("V12"),
    np.dtype("M8[ns]"),
    np.dtype("m8[25s]"),
]


@pytest.mark.parametrize("dtype", [np.dtype(each) for each in ML_DTYPES], ids=str)
def test_types_that_only_ml_dtypes_has_arrive_as_they_were(
    engine: kvzc.Engine, dtype: np.dtype[Any]
) -> None:
    cache = kvzc.empty((4, 64), dtype)
    assert cache.dtype == dtype
    with engine.register(cache) as region:
        assert region.handle().dtype == dtype.name
        local = random_bytes(3, 256).view(dtype).reshape(4, 64)
        engine.put(local, region.handle()).wait()
    assert cache.tobytes() == local.tobytes()


@pytest.mark.parametrize("dtype", RECORDS, ids=str)
def test_numpys_other_types_move_as_their_bytes(engine: kvzc.Engine, dtype: np.dtype[Any]) -> None:
    local = random_bytes(5, 24 * dtype.itemsize).view(dtype).reshape(4, 6)
    cache = kvzc.empty((5, 6), dtype)
    assert cache.dtype == dtype
    with engine.register(cache) as region:
        handle = kvzc.RemoteHandle.from_text(region.handle().to_text())
        assert handle.shape == (5, 6)
        assert handle.nbytes == cache.nbytes
        assert handle.dtype.startswith(f"record{dtype.itemsize}-")
        engine.put(local[::-1, ::2], handle[[3, 0, 1, 4], 1::2]).wait()
        back = np.zeros((4, 3), dtype)
        engine.get(back, handle[[3, 0, 1, 4], 1::2]).wait()
    # As bytes: to NumPy what lies between the fields is nobody's.
    came, sent, returned = (
        each.view(np.uint8).reshape(*each.shape, dtype.itemsize) for each in (cache, local, back)
    )
    assert np.array_equal(came[[3, 0, 1, 4], 1::2], sent[::-1, ::2])
    assert np.array_equal(returned, sent[::-1, ::2])
    assert not came[2].any() and not came[:, ::2].any()


OTHERS: list[Any] = [
    [("id", "i4"), ("score", "f8"), ("tag", "S4")],
    [("id", "u4"), ("score", "f8"), ("tag", "S3")],
    [("id", ">i4"), ("score", "f8"), ("tag", "S3")],
    [("name", "i4"), ("score", "f8"), ("tag", "S3")],
    [("score", "f8"), ("id", "i4"), ("tag", "S3")],
    [("id", "i4"), ("score", "f8"), ("tag", "V3")],
    [("id", "i4"), ("score", "f4", (2,)), ("tag", "S3")],
    [("id", "i4"), ("more", [("score", "f8"), ("tag", "S3")])],
    {"names": ["id", "score", "tag"], "formats": ["i4", "f8", "S3"], "offsets": [0, 4, 12]},
    {
        "names": ["id", "score", "tag"],
        "formats": ["i4", "f8", "S3"],
        "offsets": [8, 0, 12],
        "itemsize": 15,
    },
    "V15",
    "S15",
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_records_are_equal_by_names_types_offsets_and_size(engine: kvzc.Engine, other: Any) -> None:
    """The simplest rule that is sound: what NumPy calls the same fields at the same places."""
    other = np.dtype(other)
    cache = kvzc.empty(4, TOKEN)
    with engine.register(cache) as region:
        if other == TOKEN:
            engine.put(np.zeros(4, other), region.handle()).wait()
            return
        with pytest.raises(kvzc.LayoutMismatch, match="record15-"):
            engine.put(np.zeros(4, other), region.handle())


def test_the_shape_of_a_field_is_part_of_the_type(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(4, [("m", "i4", (2, 3))])
    with engine.register(cache) as region:
        engine.put(np.zeros(4, [("m", "i4", (2, 3))]), region.handle()).wait()
        for shape in ((3, 2), (6,), (1, 2, 3)):
            with pytest.raises(kvzc.LayoutMismatch):
                engine.put(np.zeros(4, [("m", "i4", shape)]), region.handle())


def test_titles_alignment_flags_and_record_arrays_change_no_type(engine: kvzc.Engine) -> None:
    same = [
        np.dtype([(("a title", "id"), "i4"), ("score", "f8"), ("tag", "S3")]),
        np.dtype((np.record, TOKEN)),
        np.dtype(TOKEN, metadata={"unit": "m"}),
    ]
    cache = kvzc.empty(4, TOKEN)
    with engine.register(cache) as region:
        for number, dtype in enumerate(same, start=1):
            local = np.zeros(4, dtype)
            local["id"] = number
            engine.put(local, region.handle()).wait()
            assert cache["id"].tolist() == [number] * 4


def test_bytes_are_the_way_between_a_record_and_those_who_do_not_have_it(
    engine: kvzc.Engine,
) -> None:
    cache = kvzc.empty(4, TOKEN)
    with engine.register(cache) as region:
        handle = region.handle()
        local = torch.from_numpy(random_bytes(7, 60)).view(4, 15)
        for row in range(4):
            engine.put(local[row], handle[row : row + 1].view(torch.uint8)).wait()
        assert cache.tobytes() == local.numpy().tobytes()
        # And back: the name is the type.
        assert handle.view("uint8").view(handle.dtype).shape == (4,)
        assert handle.view("uint8").view(TOKEN).dtype == handle.dtype
        with pytest.raises(kvzc.LayoutMismatch):
            engine.put(local.view(-1), handle)


def owner_start(state: State) -> str:
    state.engine = kvzc.Engine(default_timeout=10)
    state.cache = kvzc.empty(3, TOKEN)
    state.region = state.engine.register(state.cache)
    text: str = state.region.handle().to_text()
    return text


def owner_ids(state: State) -> list[tuple[int, float, bytes]]:
    state.engine.arrivals.wait(b"t")
    out: list[tuple[int, float, bytes]] = state.cache.tolist()
    return out


def test_a_record_is_the_same_in_another_process(engine: kvzc.Engine, peer: Peer) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(owner_start))
    local = np.array([(1, 0.5, b"abc"), (-2, 1e300, b"d"), (3, 0.0, b"")], TOKEN)
    with pytest.raises(kvzc.LayoutMismatch):
        engine.put(local.view("V15"), handle)
    engine.put(local, handle, notify=b"t").wait()
    assert peer.call(owner_ids) == local.tolist()


def test_a_put_of_subclasses_keeps_its_meaning(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(4, torch.float32)
    with engine.register(cache) as region:
        engine.put(torch.nn.Parameter(torch.ones(4)), region.handle()).wait()
        assert cache.tolist() == [1] * 4
        named = torch.full((4,), 2.0).as_subclass(Named)
        engine.put(named, region.handle()).wait()
        assert cache.tolist() == [2] * 4


class Named(torch.Tensor):
    pass
