"""Grants: rights to parts of a region, given out and taken back one by one."""

import gc
import math
import pickle
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kvzc
import numpy as np
import pytest
import torch
from helpers import mappings, until
from hypothesis import given, settings
from hypothesis import strategies as st
from views import TORCH_DTYPES, Case, cases, expected, random_bytes, shapes

MIB = 1 << 20
SEEDS = st.integers(0, 2**32)


def ones(*shape: int, value: int = 1) -> np.ndarray:
    return np.full(shape, value, np.uint8)


@pytest.fixture(scope="module")
def lasting() -> Iterator[kvzc.Engine]:
    """One engine for all examples of a property."""
    with kvzc.Engine(default_timeout=10) as made:
        yield made


@pytest.fixture
def rows(engine: kvzc.Engine) -> Iterator[Any]:
    """Eight rows of four bytes, registered, with a shorthand for what lies in them."""
    cache = kvzc.empty((8, 4), "uint8")
    with engine.register(cache) as region:
        yield SimpleNamespace(cache=cache, region=region, first=lambda: cache[:, 0].tolist())


# ---- what a grant reaches ----


@pytest.mark.parametrize(
    ("index", "want"),
    [
        (slice(2, 5), [2, 3, 4]),
        (6, [6]),
        ([5, 1, 3], [5, 1, 3]),
        (slice(None, None, -3), [7, 4, 1]),
        (range(0, 8, 4), [0, 4]),
        (np.array([-1, 0]), [7, 0]),
        (..., list(range(8))),
        (([7, 2], slice(0, 1)), [7, 2]),
    ],
    ids=str,
)
def test_a_grant_reaches_its_view_and_nothing_else(
    engine: kvzc.Engine, rows: Any, index: Any, want: list[int]
) -> None:
    view = rows.region[index]
    grant = view.grant()
    handle = kvzc.RemoteHandle.from_text(grant.handle().to_text())
    assert handle.shape == grant.shape == view.shape
    assert handle.nbytes == grant.nbytes == view.nbytes
    values = np.broadcast_to(
        (np.arange(len(want), dtype=np.uint8) + 1).reshape(-1, *[1] * (len(view.shape) - 1)),
        view.shape if isinstance(index, tuple) or len(view.shape) == 2 else (1, 4),
    ).reshape(view.shape)
    engine.put(values, handle).wait()
    model = np.zeros(8, np.uint8)
    model[want] = np.arange(len(want)) + 1
    assert rows.first() == model.tolist()
    back = np.zeros(view.shape, np.uint8)
    engine.get(back, handle).wait()
    assert np.array_equal(back, values)


def dense(shape: tuple[int, ...]) -> Case:
    """A contiguous tensor, whole."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    items = max(math.prod(shape), 1)
    return Case(items, 0, list(shape), strides, (...,), [slice(None)] * len(shape))


@settings(max_examples=60)
@given(st.data(), st.sampled_from(TORCH_DTYPES), shapes(), SEEDS)
def test_any_view_can_be_granted_for_put_and_for_get(
    lasting: kvzc.Engine, data: st.DataObject, dtype: torch.dtype, shape: Any, seed: int
) -> None:
    granted, plain = data.draw(cases(shape, unique=True)), dense(shape)
    memory = kvzc.empty(granted.items * dtype.itemsize, torch.uint8)
    before = random_bytes(seed, len(memory))
    memory.copy_(torch.from_numpy(before))
    values = random_bytes(seed + 1, plain.items * dtype.itemsize)
    back = values.copy()
    local, target = (plain.torch_tensor(torch.from_numpy(each), dtype) for each in (values, back))
    with lasting.register(granted.torch_tensor(memory, dtype)) as region:
        put, get = (region[granted.index].grant(access).handle() for access in ("put", "get"))
        assert put.shape == tuple(shape)
        lasting.put(local, put).wait()
        back[:] ^= 0xFF if local.numel() else 0
        lasting.get(target, get).wait()
    assert np.array_equal(memory.numpy(), expected(granted, before, plain, values, dtype.itemsize))
    assert np.array_equal(back, values)


def test_a_granted_handle_is_sliced_within_its_view(engine: kvzc.Engine, rows: Any) -> None:
    handle = rows.region[[6, 2, 4]].grant().handle()
    engine.put(ones(4, value=9), handle[1]).wait()
    engine.put(ones(2, 4, value=7), handle[[2, 0]]).wait()
    assert rows.first() == [0, 0, 9, 0, 7, 0, 7, 0]
    for beyond in (3, -4, [0, 3]):
        with pytest.raises(kvzc.OutOfRange):
            handle[beyond]


def test_a_view_of_a_view_can_be_granted(engine: kvzc.Engine, rows: Any) -> None:
    grant = rows.region[[1, 3, 5, 7]][1:3][::-1].grant("put")
    engine.put(np.arange(1, 9, dtype=np.uint8).reshape(2, 4), grant.handle()).wait()
    assert rows.first() == [0, 0, 0, 5, 0, 1, 0, 0]


def test_a_grant_of_ten_thousand_blocks_in_any_order(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((20_000, 8), "uint8")
    ids = np.random.default_rng(3).permutation(20_000)[:10_000]
    values = np.arange(80_000, dtype=np.uint32).astype(np.uint8).reshape(10_000, 8)
    with engine.register(cache) as region, region[ids].grant("put") as grant:
        handle = kvzc.RemoteHandle.from_bytes(grant.handle().to_bytes())
        engine.put(values, handle).wait()
    model = np.zeros((20_000, 8), np.uint8)
    model[ids] = values
    assert np.array_equal(cache, model)


def test_a_handle_of_a_part_is_as_small_as_that_of_the_whole(rows: Any) -> None:
    for view in (rows.region, rows.region[1:7:2], rows.region[3, 1]):
        assert len(view.grant().handle().to_bytes()) <= 1024


# ---- what it says ----


@pytest.mark.parametrize("access", ["put", "get", "both"])
def test_a_grant_tells_about_itself(rows: Any, access: str) -> None:
    grant = rows.region[2:5].grant(access)
    handle = grant.handle()
    assert grant.access == handle.access == handle[0].access == access
    assert grant.shape == (3, 4)
    assert grant.dtype == handle.dtype == "uint8"
    assert grant.names == []
    assert grant.nbytes == 12
    assert not grant.revoked
    assert access in repr(grant)
    assert "revoked" not in repr(grant)
    grant.revoke()
    assert grant.revoked
    assert "revoked" in repr(grant)
    assert grant.shape == (3, 4)  # It is still known what it was.


def test_put_and_get_are_granted_unless_one_is_named(rows: Any) -> None:
    assert rows.region.grant().access == "both"
    assert rows.region[0].grant().access == "both"
    assert rows.region.handle().access == "both"
    for wrong in ("write", "", "Put", "put,get"):
        with pytest.raises(ValueError, match="'put', 'get' or 'both'"):
            rows.region.grant(wrong)
    for wrong in (None, 5):
        with pytest.raises(TypeError):
            rows.region.grant(wrong)


def test_the_wrong_access_is_denied_before_anything_moves(engine: kvzc.Engine, rows: Any) -> None:
    put, get = rows.region.grant("put").handle(), rows.region.grant("get").handle()
    local = ones(8, 4)
    before = engine.stats()
    for use in (
        lambda: engine.put(local, get, notify=b"no"),
        lambda: engine.put_many([(local, get)]),
        lambda: engine.get(local, put, notify=b"no"),
        lambda: engine.get_many([(local[0], put[0])]),
    ):
        with pytest.raises(kvzc.AccessDenied, match="access=") as raised:
            use()
        assert isinstance(raised.value, PermissionError)
    changed = {"temporary_registrations"}
    after = engine.stats()
    assert {name for name in after if after[name] != before[name]} <= changed
    assert engine.arrivals.poll() == []
    assert not rows.cache.any()
    engine.put(local, put).wait()
    engine.get(local, get).wait()


def test_each_grant_has_a_key_of_its_own(rows: Any) -> None:
    view = rows.region[:2]
    first, second = view.grant(), view.grant()
    assert first.handle().to_bytes() == first.handle().to_bytes()
    datas = {grant.handle().to_bytes() for grant in (first, second)}
    datas.add(rows.region.handle().to_bytes())
    assert len({data[38:70] for data in datas}) == 3
    key = first.handle().to_bytes()[38:70]
    for text in (repr(first), str(first), repr(first.handle())):
        assert key.hex() not in text


def test_a_grant_is_not_pickled_and_says_what_to_do(rows: Any) -> None:
    with pytest.raises(TypeError, match=r"grant\.handle\(\)"):
        pickle.dumps(rows.region.grant())


# ---- groups ----


def test_a_grant_of_a_group_holds_only_the_tensors_that_were_picked(engine: kvzc.Engine) -> None:
    group = {name: kvzc.empty((4, 2), "uint8") for name in "abcd"}
    other = engine.register(kvzc.empty(8, "uint8"))
    with engine.register(group) as region, kvzc.Engine(default_timeout=10) as reader:
        both = region[["d", "b"]].grant().handle()
        assert both.names == ["d", "b"]
        assert both.nbytes == 16
        one = region["c", [3, 1]].grant().handle()
        assert one.shape == (2, 2)
        for absent in ("a", "c", ["b", "a"]):
            with pytest.raises(kvzc.Error):
                both[absent]
        reader.connect(other.handle())  # The connection itself maps something too.
        before = mappings()
        reader.connect(one)
        assert mappings() == before + 1  # Nothing else of the group is even mapped.
        reader.connect(both)
        assert mappings() == before + 3
        reader.put(ones(2, 2, value=5), one).wait()
        reader.put_many(
            [(ones(4, 2, value=i), both[name]) for i, name in enumerate("bd", 6)]
        ).wait()
        assert [each[:, 0].tolist() for each in group.values()] == [
            [0] * 4, [6] * 4, [0, 5, 0, 5], [7] * 4,
        ]  # fmt: skip


def test_an_index_behind_the_names_acts_on_each_granted_tensor(engine: kvzc.Engine) -> None:
    group = {name: kvzc.empty((4, 2), "uint8") for name in "kv"}
    local = {name: ones(2, 2, value=i) for i, name in enumerate("kv", 1)}
    with engine.register(group) as region, engine.register(local) as source:
        handle = region[:, [2, 0]].grant("put").handle()
        assert handle.names == ["k", "v"]
        assert handle["v"].shape == (2, 2)
        engine.put(source, handle).wait()
    assert [each[:, 0].tolist() for each in group.values()] == [[1, 0, 1, 0], [2, 0, 2, 0]]


# ---- revoking ----


def test_revoking_one_grant_leaves_all_others(engine: kvzc.Engine, rows: Any) -> None:
    view = rows.region[:2]
    first, second, whole = view.grant(), view.grant(), rows.region.handle()
    old = first.handle()
    engine.put(ones(2, 4), old).wait()
    first.revoke()
    for use in (
        lambda: engine.put(ones(2, 4), old).wait(),
        lambda: engine.get(ones(2, 4), old).wait(),
        first.handle,
    ):
        with pytest.raises(kvzc.Revoked) as raised:
            use()
        assert isinstance(raised.value, PermissionError)
    engine.put(ones(2, 4, value=2), second.handle()).wait()
    engine.put(ones(8, 4, value=3), whole).wait()
    assert rows.first() == [3] * 8
    assert engine.arrivals.poll() == []


def test_a_revoked_handle_carries_no_tag_either(engine: kvzc.Engine, rows: Any) -> None:
    """Also where there is no byte to move, and the holder had used it before."""
    grant = rows.region[:2].grant()
    handle = grant.handle()
    engine.put(ones(2, 4), handle).wait()
    grant.revoke()
    for use in (
        lambda: engine.notify(handle, b"t").wait(),
        lambda: engine.put(ones(0, 4), handle[:0], notify=b"t").wait(),
        lambda: engine.connect(handle),
    ):
        with pytest.raises(kvzc.Revoked):
            use()
    assert all(arrival.error is not None for arrival in engine.arrivals.poll())


def test_a_revoked_handle_is_refused_to_who_never_used_it_before(rows: Any) -> None:
    grant = rows.region[0].grant()
    text = grant.handle().to_text()
    grant.revoke()
    with kvzc.Engine(default_timeout=10) as writer, pytest.raises(kvzc.Revoked):
        writer.put(ones(4), kvzc.RemoteHandle.from_text(text)).wait()
    assert not rows.cache.any()


def test_revoking_is_idempotent_and_leaving_the_block_revokes(
    engine: kvzc.Engine, rows: Any
) -> None:
    with rows.region[0].grant() as grant:
        assert not grant.revoked
        handle = grant.handle()
    assert grant.revoked
    for _ in range(2):
        grant.revoke()
        grant.revoke(0)
        grant.revoke(1, force=True)
        grant.close()
        grant.close(0.5)
    with pytest.raises(kvzc.Revoked):
        engine.put(ones(4), handle).wait()
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            rows.region.grant().revoke(wrong)
        with pytest.raises(ValueError, match="seconds"):
            rows.region.revoke(wrong)


def test_a_revoked_region_gives_out_new_grants(engine: kvzc.Engine, rows: Any) -> None:
    part, handle = rows.region[:2].grant(), rows.region.handle()
    other = engine.register(rows.cache)  # The same memory, but another region.
    kept = other.handle()
    rows.region.revoke()
    rows.region.revoke()
    assert part.revoked
    assert not rows.region.closed
    for old in (handle, kvzc.RemoteHandle.from_bytes(handle.to_bytes())):
        with pytest.raises(kvzc.Revoked):
            engine.put(ones(8, 4), old).wait()
    fresh = rows.region.handle()
    assert fresh.to_bytes() != handle.to_bytes()
    engine.put(ones(8, 4, value=2), fresh).wait()
    engine.put(ones(2, 4, value=3), rows.region[:2].grant("put").handle()).wait()
    engine.put(ones(4, value=4), kept[7]).wait()
    assert rows.first() == [3, 3, 2, 2, 2, 2, 2, 4]
    other.close()


def test_a_closed_region_takes_all_its_grants_along(engine: kvzc.Engine) -> None:
    region = engine.register(kvzc.empty((8, 4), "uint8"))
    view = region[0]
    grants = [region.grant(), view.grant("get")]
    region.close()
    for use in (region.grant, view.grant, region.handle):
        with pytest.raises(kvzc.Closed):
            use()
    for grant in grants:
        assert grant.revoked
        with pytest.raises(kvzc.Revoked):
            grant.handle()
        grant.revoke()
    region.revoke()
    assert engine.stats()["grants"] == 0


def test_a_grant_outlives_its_object(engine: kvzc.Engine, rows: Any) -> None:
    handle = rows.region[3].grant().handle()
    gc.collect()
    engine.put(ones(4), handle).wait()
    assert rows.first()[3] == 1
    assert engine.stats()["grants"] == 1


def test_a_grant_holds_on_to_no_region(engine: kvzc.Engine) -> None:
    region = engine.register(kvzc.empty(8, "uint8"))
    grant = region[:4].grant()
    del region
    gc.collect()
    until(lambda: grant.revoked)
    assert engine.stats() | {"grants": 0, "regions": 0, "storages": 0} == engine.stats()


def test_grants_of_a_closed_engine() -> None:
    engine = kvzc.Engine()
    region = engine.register(kvzc.empty(8, "uint8"))
    grant, view = region.grant(), region[:4]
    engine.close()
    for use in (region.grant, view.grant, grant.handle):
        with pytest.raises(kvzc.Closed):
            use()
    grant.revoke()
    region.revoke()
    assert grant.revoked


@pytest.mark.parametrize("direction", ["put", "get"])
def test_transfers_that_run_through_a_revoked_grant_end_and_touch_nothing_more(
    direction: str,
) -> None:
    nbytes = 64 * MIB
    cache = kvzc.empty(nbytes, "uint8")
    local = np.zeros(nbytes, np.uint8)
    caught = 0
    with (
        kvzc.Engine(default_timeout=20) as owner,
        kvzc.Engine(default_timeout=20, copy_threads=1) as user,
        owner.register(cache) as region,
    ):
        for round_ in range(40):
            cache[:] = 0
            local[:] = 3
            grant = region[:].grant(direction)
            handle = grant.handle()
            user.connect(handle)
            move = user.put if direction == "put" else user.get
            args = (local, handle)
            transfer = move(*args, notify=b"%d" % round_)
            time.sleep(0.0005 * (round_ % 8))
            grant.revoke()
            cache[:] = 9  # The blocks now belong to another request.
            arrival = owner.arrivals.wait(b"%d" % round_)
            if transfer.error is None:
                transfer.wait()
                assert arrival.error is None
            else:
                caught += 1
                with pytest.raises(kvzc.Revoked):
                    transfer.wait()
                assert isinstance(arrival.error, kvzc.Revoked)
            assert (cache == 9).all()
            assert not (local == 9).any()
            if caught >= 2:
                return
    pytest.fail("no grant was revoked in mid-transfer")


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_tag_of_a_transfer_whose_grant_went_before_it_was_reached_arrives(
    engine: kvzc.Engine, rows: Any, cancelled: bool
) -> None:
    """COMP-02: who counts tags must learn of every transfer that was accepted."""
    with kvzc.Engine(default_timeout=10) as writer:
        writer.connect(rows.region.handle())
        for i in range(200):
            grant = rows.region[0].grant("put")
            transfer = writer.put(ones(4), grant.handle(), notify=b"%d" % i)
            if cancelled:
                transfer.cancel()
            grant.revoke()
            arrival = engine.arrivals.wait(b"%d" % i, timeout=2)
            until(lambda transfer=transfer: transfer.done)
            assert type(arrival.error) is type(transfer.error)


def test_other_transfers_go_on_while_a_grant_is_revoked(engine: kvzc.Engine) -> None:
    nbytes = 32 * MIB
    cache = kvzc.empty((2, nbytes), "uint8")
    local = ones(nbytes, value=7)
    with engine.register(cache) as region:
        doomed, other = region[0].grant(), region[1].grant()
        transfers = [engine.put(local, each.handle()) for each in (doomed, other)]
        doomed.revoke()
        transfers[1].wait()
        assert (cache[1] == 7).all()
        assert transfers[0].error is None or isinstance(transfers[0].error, kvzc.Revoked)


# ---- many of them ----


def test_a_hundred_thousand_grants_are_alive_at_once(engine: kvzc.Engine) -> None:
    count = 100_000
    cache = kvzc.empty((count, 8), "uint8")
    with engine.register(cache) as region:
        start = time.monotonic()
        grants = [region[i].grant("put") for i in range(count)]
        made = time.monotonic() - start
        assert made < 20  # Microseconds each, on a machine that others use too.
        assert engine.stats()["grants"] == count
        some = np.random.default_rng(5).permutation(count)[:200].tolist()
        transfers = [engine.put(ones(8), grants[i].handle()) for i in some]
        kvzc.wait(transfers)
        start = time.monotonic()
        for grant in grants[::2]:
            grant.revoke()
        assert time.monotonic() - start < 20
        assert engine.stats()["grants"] == count // 2
        for i in some[:20]:
            transfer = engine.put(ones(8, value=2), grants[i].handle()) if i % 2 else None
            if transfer is None:
                assert grants[i].revoked
                continue
            transfer.wait()
        model = np.zeros(count, np.uint8)
        model[some] = 1
        model[[i for i in some[:20] if i % 2]] = 2
        assert np.array_equal(cache[:, 0], model)
    assert all(grant.revoked for grant in grants)
    assert engine.stats() | {"grants": 0, "quarantined_bytes": 0} == engine.stats()


def test_more_grants_than_the_engine_was_made_for_are_refused_until_some_are_revoked() -> None:
    with kvzc.Engine(max_grants=4, default_timeout=10) as engine:
        region = engine.register(kvzc.empty((4, 4), "uint8"))
        grants = [region[i].grant() for i in range(4)]
        for use in (region.grant, region.handle, region[0].grant):
            with pytest.raises(kvzc.LimitExceeded, match="max_grants"):
                use()
        olds = []
        for i in range(50):  # A place that is used again never lets an old handle in.
            olds.append(grants[i % 4].handle())
            grants[i % 4].revoke()
            grants[i % 4] = region[i % 4].grant()
            engine.put(ones(4, value=i), grants[i % 4].handle()).wait()
        for old in olds:
            with pytest.raises(kvzc.Revoked):
                engine.put(ones(4, value=99), old).wait()
        region.close()


def test_the_grants_are_counted(engine: kvzc.Engine, rows: Any) -> None:
    assert engine.stats()["grants"] == 0
    rows.region.handle()
    rows.region.handle()
    assert engine.stats()["grants"] == 1  # One for all handles of the whole.
    with rows.region[0].grant(), rows.region.grant():
        assert engine.stats()["grants"] == 3
    assert engine.stats()["grants"] == 1
    rows.region.revoke()
    assert engine.stats() | {"grants": 0, "quarantined_bytes": 0} == engine.stats()


def test_threads_grant_use_and_revoke_at_once(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((8, 64), "uint8")
    surprises: list[BaseException] = []

    def work(row: int) -> None:
        try:
            for i in range(150):
                with region[row].grant() as grant:
                    engine.put(ones(64, value=i), grant.handle()).wait()
        except BaseException as surprise:
            surprises.append(surprise)

    with engine.register(cache) as region:
        workers = [threading.Thread(target=work, args=(row,)) for row in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
    assert surprises == []
    assert (cache == 149).all()
    assert engine.stats() | {"grants": 0, "transfers_running": 0} == engine.stats()
