"""Registration: what is taken, what is refused, how long things live."""

import array
import gc
import mmap
import threading
import weakref
from typing import Any

import kvzc
import ml_dtypes
import numpy as np
import pytest
import torch


def test_registered_twice_and_closed_once_still_works(engine: kvzc.Engine) -> None:
    """REG-02: one registration with a count."""
    cache = kvzc.empty(8, torch.uint8)
    first, second = engine.register(cache), engine.register(cache)
    assert engine.stats()["storages"] == 1
    assert engine.stats()["regions"] == 2
    handle, other = second.handle(), first.handle()
    first.close()
    assert engine.stats()["storages"] == 1
    engine.put(torch.full((8,), 3, dtype=torch.uint8), handle).wait()
    assert cache.tolist() == [3] * 8
    with pytest.raises(kvzc.Revoked):
        engine.put(torch.zeros(8, dtype=torch.uint8), other).wait()
    second.close()
    assert engine.stats()["storages"] == 0
    with pytest.raises(kvzc.Revoked):
        engine.put(torch.zeros(8, dtype=torch.uint8), handle).wait()
    assert cache.tolist() == [3] * 8


def test_close_twice_is_one_close(engine: kvzc.Engine) -> None:
    """REG-04: a region is an identity, not an address."""
    cache = kvzc.empty(8, torch.uint8)
    first, second = engine.register(cache), engine.register(cache)
    first.close()
    first.close()
    with first:
        pass
    assert first.closed
    assert not second.closed
    assert engine.stats() | {"storages": 1, "regions": 1} == engine.stats()
    engine.put(torch.ones(8, dtype=torch.uint8), second.handle()).wait()
    second.close()
    assert engine.stats() | {"storages": 0, "regions": 0, "grants": 0} == engine.stats()


def test_a_storage_is_registered_once_whatever_the_view(engine: kvzc.Engine) -> None:
    """VIEW-03: views and base in any order."""
    base = kvzc.empty((8, 4), torch.float32)
    regions = [engine.register(view) for view in (base[4:], base, base.t(), base.view(-1)[3:9])]
    array_of_it = base.numpy()
    regions.append(engine.register(array_of_it[::-1]))
    regions.append(engine.register({"k": base[:4], "v": base[4:]}))
    assert engine.stats()["storages"] == 1
    for region in (regions[1], regions[0], *regions[2:]):
        region.close()
    assert engine.stats()["storages"] == 0


def test_an_ordinary_storage_is_registered_once_too(engine: kvzc.Engine) -> None:
    tensor, values = torch.zeros((8, 4)), np.zeros((8, 4))
    for views in ([tensor, tensor[4:], tensor.t()], [values, values[4:], values.T, values[::-1]]):
        regions = [engine.register(view) for view in views]
        assert engine.stats()["storages"] == 1
        for region in regions:
            region.close()
        assert engine.stats()["storages"] == 0


def test_overlapping_tensors_of_one_group_are_two_views_of_one_storage(engine: kvzc.Engine) -> None:
    """REG-03: adjacent or overlapping is a matter of targets, and those are checked per put."""
    cache = kvzc.empty(16, torch.uint8)
    with engine.register({"a": cache[0:8], "b": cache[4:12], "c": cache[8:16]}) as region:
        assert engine.stats()["storages"] == 1
        handle = region.handle()
        ones = torch.ones(8, dtype=torch.uint8)
        engine.put_many([(ones, handle["a"]), (ones * 2, handle["c"])]).wait()
        with pytest.raises(kvzc.InvalidArgument, match="share bytes"):
            engine.put_many([(ones, handle["a"]), (ones, handle["b"])])
    assert cache.tolist() == [1] * 8 + [2] * 8


@pytest.mark.parametrize(
    "empty",
    [torch.zeros(0), torch.zeros((3, 0, 2)), np.zeros(0), bytearray(), torch.ones(4)[4:]],
    ids=["torch", "torch3", "numpy", "bytearray", "slice"],
)
def test_zero_length_is_refused(engine: kvzc.Engine, empty: Any) -> None:
    with pytest.raises(kvzc.InvalidArgument, match=r"no bytes|nothing to register"):
        engine.register(empty)


def test_a_refused_group_leaves_nothing_registered_and_names_the_bad_entry(
    engine: kvzc.Engine,
) -> None:
    """REG-03: all or nothing."""
    good = torch.zeros(4)
    locked = np.zeros(4)
    locked.flags.writeable = False
    for bad in (torch.zeros(0), locked, torch.zeros(4, device="meta")):
        with pytest.raises(kvzc.InvalidArgument, match=r"'bad'|meta"):
            engine.register({"good": good, "bad": bad, "other": kvzc.empty(4, "uint8")})
    with pytest.raises(TypeError):
        engine.register({"good": good, "bad": 5})
    assert engine.stats() | {"storages": 0, "regions": 0} == engine.stats()
    # References that the attempts took are gone.
    last = weakref.ref(good)
    del good
    gc.collect()
    assert last() is None


@pytest.mark.parametrize(
    "locked",
    [b"bytes", memoryview(b"bytes"), np.frombuffer(b"bytes", np.uint8)],
    ids=["bytes", "memoryview", "numpy"],
)
def test_read_only_memory_is_no_region_but_a_source(engine: kvzc.Engine, locked: Any) -> None:
    with pytest.raises(kvzc.InvalidArgument, match="read-only"):
        engine.register(locked)
    cache = kvzc.empty(5, "uint8")
    with engine.register(cache) as region:
        engine.put(locked, region.handle()).wait()
    assert cache.tobytes() == b"bytes"


@pytest.mark.parametrize(
    "source",
    [
        bytearray(b"\1\2\3\4"),
        memoryview(bytearray(b"\1\0\2\0\3\0\4\0"))[::2],
        array.array("B", [1, 2, 3, 4]),
        np.array([4, 3, 2, 1], np.uint8)[::-1],
        torch.tensor([1, 2, 3, 4], dtype=torch.uint8),
        torch.nn.Parameter(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), requires_grad=False),
    ],
    ids=["bytearray", "strided memoryview", "array", "numpy", "torch", "parameter"],
)
@pytest.mark.parametrize("registered", [False, True])
def test_every_kind_of_buffer_is_a_source(
    engine: kvzc.Engine, source: Any, registered: bool
) -> None:
    cache = kvzc.empty(4, "uint8")
    with engine.register(cache) as region:
        if registered:
            with engine.register(source) as local:
                engine.put(local, region.handle()).wait()
        else:
            engine.put(source, region.handle()).wait()
    assert cache.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(("code", "dtype"), [*zip("bhiqBHILQfd", [
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "uint64",
    "float32", "float64"], strict=True)])  # fmt: skip
def test_buffers_keep_their_type(engine: kvzc.Engine, code: str, dtype: str) -> None:
    with engine.register(array.array(code, [1, 2, 3])) as region:
        assert region.dtype == dtype
        assert region.shape == (3,)


def test_an_mmap_is_a_region(engine: kvzc.Engine) -> None:
    with mmap.mmap(-1, 4096) as memory, engine.register(memory) as region:
        assert region.nbytes == 4096
        with pytest.raises(BufferError):
            memory.close()  # LIFE-15: what is registered is not unmapped.


@pytest.mark.parametrize(
    ("what", "error", "match"),
    [
        (torch.zeros(4, device="meta"), kvzc.InvalidArgument, "meta"),
        (torch.eye(3).to_sparse(), kvzc.Unsupported, "sparse"),
        (torch.zeros(3, dtype=torch.complex64).conj(), kvzc.InvalidArgument, "resolve_conj"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, kvzc.InvalidArgument, "resolve_neg"),
        (np.zeros(3, object), kvzc.Unsupported, "object"),
        (np.zeros(3, "i4,O"), kvzc.Unsupported, "addresses of this process"),
        (np.zeros(3, np.longdouble), kvzc.Unsupported, "uint8"),
        (np.zeros(3, "i4,g"), kvzc.Unsupported, "uint8"),
        (np.zeros(3, ml_dtypes.int4), kvzc.Unsupported, "one per byte"),
        (np.zeros(3, ml_dtypes.float6_e2m3fn), kvzc.Unsupported, "one per byte"),
        (np.zeros(3, "V0"), kvzc.InvalidArgument, "without bytes"),
        (np.zeros(3, ">M8[s]"), kvzc.Unsupported, "byte order"),
        (np.zeros(3, ">i4"), kvzc.Unsupported, "byte order"),
        (np.zeros(3, ">f8"), kvzc.Unsupported, "byte order"),
        ([1, 2, 3], TypeError, "list"),
        (5, TypeError, "int"),
        (None, TypeError, "NoneType"),
        ("text", TypeError, "str"),
        (np.float32(1), kvzc.InvalidArgument, "read-only"),
        ({}, kvzc.InvalidArgument, "nothing to register"),
        ({1: torch.zeros(3)}, TypeError, "names"),
        ({"": torch.zeros(3)}, TypeError, "non-empty"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:20].replace("\n", ""),
)
def test_what_cannot_be_moved_is_refused_with_the_reason(
    engine: kvzc.Engine, what: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        engine.register(what)
    assert engine.stats()["storages"] == 0


def test_a_tensor_that_lost_its_storage_is_refused(engine: kvzc.Engine) -> None:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(kvzc.Error):
        engine.register(tensor)


def test_use_of_a_closed_region_is_an_error(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(8, torch.uint8)
    region = engine.register(cache)
    view = region[:4]
    region.close()
    for use in (region.handle, lambda: region[0], lambda: engine.put(region, region)):
        with pytest.raises((kvzc.Closed, TypeError)):
            use()
    assert region.shape == (8,)
    assert region.path == "closed"
    assert "closed" in repr(region)
    # A view that was made before keeps its memory, as a source: nothing dangles.
    with engine.register(kvzc.empty(4, torch.uint8)) as other:
        engine.put(view, other.handle()).wait()


def test_the_object_lives_until_the_region_closes_and_no_longer(engine: kvzc.Engine) -> None:
    """VIEW-07: also when only a view was registered."""

    class Tensor(torch.Tensor):
        pass

    base = torch.zeros(8).as_subclass(Tensor)
    view = base[4:]
    watched = weakref.ref(view)
    region = engine.register(view)
    del view
    gc.collect()
    assert watched() is not None
    region.close()
    gc.collect()
    assert watched() is None


def test_every_object_of_a_storage_that_is_registered_twice_may_be_dropped(
    engine: kvzc.Engine,
) -> None:
    values = np.arange(8, dtype=np.uint8)
    first = engine.register(values)
    second = engine.register(values[2:])
    first.close()
    del values
    gc.collect()
    cache = kvzc.empty(6, "uint8")
    with engine.register(cache) as region:
        engine.put(second, region.handle()).wait()
    assert cache.tolist() == [2, 3, 4, 5, 6, 7]
    second.close()


def test_the_source_lives_while_its_transfer_runs_and_no_longer(engine: kvzc.Engine) -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    cache = kvzc.empty(64 << 20, "uint8")
    with engine.register(cache) as region:
        source = np.full(64 << 20, 7, np.uint8).view(Array)
        watched = weakref.ref(source)
        transfer = engine.put(source, region.handle())
        del source
        gc.collect()
        was_running = not transfer.done
        alive = watched() is not None
        assert alive or not was_running
        transfer.wait()
        assert (cache == 7).all()
        gc.collect()
        kvzc.wait([transfer])
        assert watched() is None


def test_a_region_that_is_collected_is_closed(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(8, "uint8")
    handle = engine.register(cache).handle()
    gc.collect()
    with pytest.raises(kvzc.Revoked):
        engine.put(np.zeros(8, np.uint8), handle).wait()


def test_a_strict_engine_refuses_memory_outside_every_region() -> None:
    with kvzc.Engine(strict=True) as engine:
        cache = kvzc.empty(8, torch.uint8)
        with engine.register(cache) as region:
            source = torch.ones(8, dtype=torch.uint8)
            with pytest.raises(
                kvzc.NotRegistered, match=r"strict.*nearest registered memory is 0x"
            ):
                engine.put(source, region.handle())
            with engine.register(source):
                engine.put(source, region.handle()).wait()
                engine.put(source[2:4], region.handle()[:2]).wait()
            with pytest.raises(kvzc.NotRegistered):
                engine.put(source, region.handle())
        assert engine.stats()["temporary_registrations"] == 0
        assert cache.tolist() == [1] * 8


def test_memory_outside_every_region_is_counted(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(8, torch.uint8)
    with engine.register(cache) as region:
        engine.put(torch.ones(8, dtype=torch.uint8), region.handle()).wait()
        assert engine.stats()["temporary_registrations"] == 1
        assert engine.stats()["storages"] == 1


def test_a_region_says_how_peers_reach_it_and_what_would_be_faster(engine: kvzc.Engine) -> None:
    with engine.register(torch.zeros(8)) as region:
        assert region.path.startswith("private")
        assert "kvzc.empty" in region.path
        assert "kvzc.share" in region.path
        engine.put(torch.ones(8), region.handle()).wait()
    with engine.register(kvzc.empty(8, torch.float32)) as region:
        assert region.path.startswith("mapped")
    mixed = {"a": kvzc.empty(8, "uint8"), "b": np.zeros(8)}
    with engine.register(mixed) as region:
        assert region.path.startswith("private")


def test_many_registrations_leave_nothing(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((64, 16), torch.float32)
    for _ in range(300):
        with engine.register(cache[3:]) as region:
            engine.put(torch.ones(16), region.handle()[0]).wait()
    wanted = {"regions": 0, "storages": 0, "grants": 0, "transfers_running": 0}
    assert engine.stats() | wanted == engine.stats()


def register_until_closed(
    engine: kvzc.Engine, cache: Any, started: threading.Barrier, surprises: list[BaseException]
) -> None:
    started.wait()
    try:
        while True:
            with engine.register(cache) as region:
                region.handle()
    except kvzc.Closed:
        pass
    except BaseException as surprise:
        surprises.append(surprise)


def test_threads_may_register_while_the_engine_closes() -> None:
    """LIFE-05."""
    cache = kvzc.empty(64, "uint8")
    for _ in range(20):
        engine = kvzc.Engine()
        started = threading.Barrier(5)
        surprises: list[BaseException] = []
        workers = [
            threading.Thread(target=register_until_closed, args=(engine, cache, started, surprises))
            for _ in range(4)
        ]
        for worker in workers:
            worker.start()
        started.wait()
        engine.close()
        for worker in workers:
            worker.join(10)
            assert not worker.is_alive()
        assert surprises == []
        assert engine.stats() | {"regions": 0, "storages": 0} == engine.stats()
