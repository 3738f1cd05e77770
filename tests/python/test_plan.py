"""Plans: blocks of two groups, checked and cut once."""

from collections.abc import Iterator
from typing import Any

import kvzc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

LAYERS = 3


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[kvzc.Engine, kvzc.Engine]]:
    with kvzc.Engine() as owner, kvzc.Engine() as writer:
        yield owner, writer


def random_like(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(1, 1 << 30, shape, np.int32)


def group(shape: tuple[int, ...], seed: int | None = None) -> dict[str, Any]:
    """One tensor per layer, zeros or random ones."""
    return {
        f"layer.{i}": np.zeros(shape, np.int32) if seed is None else random_like(shape, seed + i)
        for i in range(LAYERS)
    }


BLOCK_SHAPES = [
    ((10,), (4, 3)),  # Blocks first, as they lie.
    ((2, 10), (5,)),  # K and V before the blocks.
    ((3, 10), ()),  # Blocks last.
]


@pytest.mark.parametrize(("before", "after"), BLOCK_SHAPES)
@pytest.mark.parametrize("direction", ["put", "get"])
def test_moves_what_numpy_would(
    engines: tuple[kvzc.Engine, kvzc.Engine],
    before: tuple[int, ...],
    after: tuple[int, ...],
    direction: str,
) -> None:
    owner, writer = engines
    axis = len(before) - 1
    there_shape = (*before[:-1], 7, *after)
    source_here = direction == "put"
    here = group((*before, *after), 1 if source_here else None)
    there = group(there_shape, None if source_here else 1)
    expected = {name: tensor.copy() for name, tensor in (there if source_here else here).items()}
    with owner.register(there) as region, writer.register(here) as local:
        plan = writer.plan(local, region.handle(), block_axis=axis)
        assert (plan.local_blocks, plan.remote_blocks) == (10, 7)
        assert plan.layers == list(here)
        here_ids, there_ids = np.array([3, 4, 9, 0]), np.array([5, 6, 1, 0])
        layers = ["layer.2", "layer.0"]
        if source_here:
            transfer = plan.put(here_ids, there_ids, layers=layers, notify=b"n", label="l")
        else:
            transfer = plan.get(there_ids, here_ids, layers=layers, label="l")
        transfer.wait(20)
        assert transfer.label == "l"
        if source_here:
            assert owner.arrivals.wait(b"n", timeout=20).error is None
        for name in layers:
            into, out_of = (
                np.moveaxis(expected[name], axis, 0),
                np.moveaxis((here if source_here else there)[name], axis, 0),
            )
            into[there_ids if source_here else here_ids] = out_of[
                here_ids if source_here else there_ids
            ]
        for name, tensor in expected.items():
            assert ((there if source_here else here)[name] == tensor).all(), name


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_layouts_and_blocks(data: st.DataObject) -> None:
    """Strided, transposed and reversed tensors, any axis: as NumPy assigns."""
    rank = data.draw(st.integers(1, 4))
    axis = data.draw(st.integers(0, rank - 1))
    sizes = [data.draw(st.integers(1, 5)) for _ in range(rank)]

    def tensor(blocks: int, seed: int) -> Any:
        shape = [*sizes[:axis], blocks, *sizes[axis + 1 :]]
        order = data.draw(st.permutations(range(rank)))
        steps = [data.draw(st.sampled_from([1, 1, 2, -1, -2])) for _ in range(rank)]
        base = random_like(tuple(shape[i] * abs(steps[i]) for i in order), seed)
        turned = base.transpose(np.argsort(order))
        return turned[tuple(slice(None, None, step) for step in steps)]

    here, there = tensor(data.draw(st.integers(1, 9)), 1), tensor(data.draw(st.integers(1, 9)), 2)
    count = data.draw(st.integers(0, there.shape[axis]))
    target = data.draw(st.permutations(range(there.shape[axis])))[:count]
    source = [data.draw(st.integers(0, here.shape[axis] - 1)) for _ in range(count)]
    expected = there.copy()
    np.moveaxis(expected, axis, 0)[target] = np.moveaxis(here, axis, 0)[source]
    with kvzc.Engine() as owner, kvzc.Engine() as writer, owner.register(there) as region:
        plan = writer.plan(here, region.handle(), block_axis=axis - rank)
        plan.put(source, target).wait(20)
        assert (there == expected).all()


def test_neighbours_become_one_run(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    with owner.register(group((16, 8))) as region, writer.register(group((16, 8), 5)) as local:
        plan = writer.plan(local, region.handle())
        assert plan.block_pieces == LAYERS
        assert plan.block_nbytes == LAYERS * 8 * 4
        ids = np.array([2, 3, 4, 9])
        transfer = plan.put(ids, ids + 1)
        transfer.wait(20)
        assert transfer.runs == 2 * LAYERS
        assert transfer.nbytes == 4 * plan.block_nbytes


@pytest.mark.parametrize(
    "kind", [np.int64, np.int32, np.uint8, np.int16, np.uint64, "list", "strided", "torch"]
)
def test_ids_of_any_integer_kind(engines: tuple[kvzc.Engine, kvzc.Engine], kind: Any) -> None:
    owner, writer = engines
    there, here = np.zeros((8, 4), np.int32), random_like((8, 4), 3)
    ids: Any = np.array([6, 1, 3])
    if kind == "list":
        ids = ids.tolist()
    elif kind == "strided":
        ids = np.array([6, 0, 1, 0, 3, 0])[::2]
    elif kind == "torch":
        ids = pytest.importorskip("torch").tensor([6, 1, 3])
    else:
        ids = ids.astype(kind)
    with owner.register(there) as region:
        writer.plan(here, region.handle()).put(ids, ids).wait(20)
    assert (there[[6, 1, 3]] == here[[6, 1, 3]]).all()
    assert (there[[0, 2, 4, 5, 7]] == 0).all()


def test_ids_may_change_once_the_call_has_returned(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    there, here = np.zeros((4, 1 << 20), np.uint8), np.ones((4, 1 << 20), np.uint8)
    ids = np.array([1, 2])
    with owner.register(there) as region:
        transfer = writer.plan(here, region.handle()).put(ids, ids)
        ids[:] = 1 << 40
        transfer.wait(20)
    assert there.any(axis=1).tolist() == [False, True, True, False]


def test_refuses_wrong_blocks(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    there = np.zeros((4, 8), np.int32)
    with owner.register(there) as region:
        plan = writer.plan(random_like((6, 8), 1), region.handle())
        before = writer.stats()["transfers_running"]
        with pytest.raises(IndexError, match=r"entry 1 of the local blocks is 6.*0 to 5"):
            plan.put([0, 6], [0, 1])
        with pytest.raises(IndexError, match=r"entry 0 of the remote blocks is -1"):
            plan.put([0], np.array([-1]))
        with pytest.raises(ValueError, match=r"block 2 is named twice"):
            plan.put([0, 1], [2, 2])
        with pytest.raises(ValueError, match=r"2 local blocks and 1 remote"):
            plan.put([0, 1], [2])
        with pytest.raises(IndexError, match=r"layer 1 is out of range"):
            plan.put([0], [0], layers=1)
        with pytest.raises(IndexError, match=r"no layer 'x'"):
            plan.put([0], [0], layers="x")
        with pytest.raises(ValueError, match=r"layer 0 is named twice"):
            plan.put([0], [0], layers=[0, -1])
        with pytest.raises(TypeError):
            plan.put([0.5], [0])
        with pytest.raises(TypeError, match=r"list or an array"):
            plan.put(3, [0])
        # What is read may be read twice.
        plan.put([5, 5], [0, 1]).wait(20)
        assert (there[0] == there[1]).all()
        assert there[0].any()
        assert not there[2:].any()
        assert writer.stats()["transfers_running"] == before


def test_refuses_groups_that_do_not_match(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    base = np.zeros((4, 8), np.int32)
    with owner.register({"a": base[:, :4], "b": base[:, 4:]}) as region:
        handle = region.handle()
        with pytest.raises(kvzc.LayoutMismatch, match=r"1 tensors and the remote 2"):
            writer.plan(base, handle)
        with pytest.raises(kvzc.LayoutMismatch, match=r"tensor 'a'.*int32\[4, 8\]"):
            writer.plan(writer.register({"a": base, "b": base.copy()}), handle)
        with pytest.raises(IndexError, match=r"block_axis 2"):
            writer.plan(np.zeros((4, 4), np.int32), handle["a"], block_axis=2)
        with pytest.raises(kvzc.Unsupported, match=r"block axis was indexed"):
            writer.plan(np.zeros((2, 4), np.int32), handle["a", [0, 1]])
        with pytest.raises(TypeError, match=r"a local side"):
            writer.plan(base, base)
        # Interleaved layers share no byte.
        here = {"a": random_like((4, 4), 1), "b": random_like((4, 4), 2)}
        writer.plan(writer.register(here), handle).put([0, 3], [3, 1]).wait(20)
        assert (base[3] == np.concatenate([here["a"][0], here["b"][0]])).all()
    with owner.register({"a": base, "b": base[2:]}) as region:
        other = {"a": np.zeros((4, 8), np.int32), "b": np.zeros((4, 8), np.int32)}
        with pytest.raises(kvzc.LayoutMismatch):  # Two and four blocks.
            writer.plan(writer.register(other), region.handle())
    with (
        owner.register({"a": base, "b": base}) as region,
        pytest.raises(ValueError, match=r"'a': shares bytes with tensor 'b'"),
    ):
        writer.plan(writer.register(other), region.handle())


def test_refuses_local_tensors_that_share_bytes(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    """Also where each is a storage of its own."""
    owner, writer = engines
    memory = memoryview(bytearray(160))
    with owner.register({"a": np.ones(100, np.uint8), "b": np.ones(100, np.uint8)}) as region:
        local = writer.register({"a": memory[:100], "b": memory[60:160]})
        with pytest.raises(ValueError, match=r"shares bytes"):
            writer.plan(region.handle(), local)
        apart = writer.register({"a": memory[:80], "b": memory[80:160]})
        writer.plan(region.handle()[:, :80], apart).get([3], [5]).wait(20)
        assert bytes(memory).count(1) == 2


def test_a_few_blocks_of_very_many(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    there = np.zeros(1 << 20, np.uint8)
    with owner.register(there) as region:
        plan = writer.plan(np.ones(1 << 20, np.uint8), region.handle())
        plan.put([7, 8, 900_000], [1, 1 << 19, (1 << 20) - 1]).wait(20)
        with pytest.raises(ValueError, match=r"block 77 is named twice"):
            plan.put([1, 2, 3], [77, 5, 77])
    assert np.flatnonzero(there).tolist() == [1, 1 << 19, (1 << 20) - 1]


def test_too_many_runs_are_refused_before_they_are_made(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    there, here = np.zeros((4096, 2 * 4097), np.uint8), np.ones((4096, 4097), np.uint8)
    with owner.register(there[:, ::2]) as region:
        plan = writer.plan(here, region.handle())
        assert plan.block_pieces == 4097
        ids = np.arange(4096)
        with pytest.raises(kvzc.LimitExceeded, match=r"16777216"):
            plan.put(ids, ids)
        plan.put(ids[:2], ids[:2]).wait(20)
        assert there.sum() == 2 * 4097
    assert writer.stats()["transfers_running"] == 0


def test_no_blocks_are_done_at_once_and_tell(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    with owner.register(np.zeros((4, 8), np.int32)) as region:
        plan = writer.plan(np.zeros((4, 8), np.int32), region.handle())
        assert plan.put([], []).done
        plan.put([], [], notify=b"none").wait(20)
        assert owner.arrivals.wait(b"none", timeout=20).error is None


def test_a_revoked_grant_and_one_to_get(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    there = np.zeros((4, 8), np.int32)
    with owner.register(there) as region:
        grant = region[1:].grant(access="get")
        plan = writer.plan(np.ones((4, 8), np.int32), grant.handle())
        with pytest.raises(kvzc.AccessDenied):
            plan.put([0], [0])
        plan.get([0], [0]).wait(20)
        grant.revoke(timeout=20)
        with pytest.raises(kvzc.Revoked):
            plan.get([0], [0]).wait(20)
    assert not there.any()


def test_the_default_engine_plans_too() -> None:
    with kvzc.Engine() as owner, owner.register(np.zeros((2, 4), np.int32)) as region:
        plan = kvzc.plan(np.ones((2, 4), np.int32), region.handle())
        plan.put([0], [1]).wait(20)
        assert "1 layers, 2 local and 2 remote blocks of 16 bytes" in repr(plan)
