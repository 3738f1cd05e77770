"""Tensors of any library, by DLPack: what is taken, what is refused, who keeps what alive."""

import ctypes
import gc
import weakref
from pathlib import Path
from typing import Any

import kvzc
import ml_dtypes
import numpy as np
import pytest
import torch
from dlpack_maker import (
    FAILS,
    FAILS_QUIETLY,
    ExchangeApi,
    ManagedOf,
    Producer,
    TensorOf,
    capsule,
    exchange_api_of,
    with_exchange_api,
)
from helpers import run_script, until
from views import NUMPY_DTYPES, TORCH_DTYPES, dtype_name, random_bytes

HAS_EXCHANGE_API = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


class Foreign:
    """An array of a library that kvzc does not know: nothing but DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)


class Old(Foreign):
    """The same from before DLPack 1.0."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.array.__dlpack__()


def test_a_producer_is_source_and_target_and_registered_memory(engine: kvzc.Engine) -> None:
    memory = random_bytes(1, 4 * 6 * 4).view(np.float32).reshape(4, 6)
    cache = kvzc.empty((4, 6), "float32")
    back = np.zeros((4, 6), np.float32)
    with engine.register(Foreign(cache)) as region, engine.register(Foreign(memory)) as local:
        handle = region.handle()
        assert (handle.dtype, handle.shape) == ("float32", (4, 6))
        engine.put(Foreign(memory), handle).wait()
        assert cache.tobytes() == memory.tobytes()
        engine.get(Foreign(back), handle).wait()
        assert back.tobytes() == memory.tobytes()
        cache[:] = 0
        engine.put(local[::2], handle[::2]).wait()
        assert np.array_equal(cache[::2], memory[::2], equal_nan=True) and not cache[1::2].any()


def test_memory_that_can_be_mapped_is_found_behind_a_producer(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((4, 6), "float32")
    with engine.register(cache) as region, engine.register(Foreign(cache[1:3])) as part:
        assert engine.stats()["storages"] == 1
        assert part.path == region.path
        engine.put(Foreign(cache[1]), region.handle()[3]).wait()
        assert engine.stats()["temporary_registrations"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a[::-1],
        lambda a: a[:, ::-2],
        lambda a: a[1:3, 2:5].T,
        lambda a: a[::2, ::3],
        lambda a: a[2:2],
        lambda a: a[1, 1:1],
        lambda a: a[3, 5, ...],
        lambda a: np.broadcast_to(a[:, 1:2], (4, 9)),
        lambda a: np.broadcast_to(a[0, 0], (2, 3)),
    ],
)
def test_strides_of_every_kind_are_numpys(engine: kvzc.Engine, make: Any) -> None:
    """Negative, skipping, transposed, none at all; 0 where something is broadcast."""
    view = make(np.arange(24, dtype=np.int32).reshape(4, 6))
    source = Foreign(view.view())
    target = np.full(view.shape, -1, np.int32)
    if view.size == 0:
        with pytest.raises(kvzc.InvalidArgument, match="no bytes"):
            engine.register(source)
        whole = kvzc.empty((4, 6), "int32")
        with engine.register(whole) as region:
            empty = region.handle()[2:2] if view.ndim == 2 else region.handle()[1, 1:1]
            engine.put(source, empty, notify=b"e").wait()
            assert engine.arrivals.wait(b"e").error is None
        return
    with engine.register(target) as region:
        engine.put(source, region.handle()).wait()
    assert np.array_equal(target, view)


def test_a_broadcast_target_is_refused(engine: kvzc.Engine) -> None:
    producer = Producer(np.zeros(8, np.uint8), (3, 4), (0, 1))
    with engine.register(producer) as region, pytest.raises(kvzc.InvalidArgument, match="overlaps"):
        engine.put(np.ones((3, 4), np.uint8), region.handle())
    assert not producer.memory.any()


def test_offsets_and_strides_are_read_as_the_header_says(engine: kvzc.Engine) -> None:
    memory = np.arange(64, dtype=np.uint8)
    sources = [
        (Producer(memory, (2, 3), None, byte_offset=5), memory[5:11].reshape(2, 3)),
        (Producer(memory, (2, 3), (8, 2), byte_offset=1), memory[1:17].reshape(2, 8)[:, :6:2]),
        (Producer(memory, (3,), (-4,), (0, 16, 1), byte_offset=20), memory.view("i2")[10:1:-4]),
        (Producer(memory, (), None, (2, 32, 1), byte_offset=8), memory.view("f4")[2]),
        (Producer(memory, (), (), (2, 64, 1)), memory.view("f8")[0]),
    ]
    for producer, want in sources:
        target = np.zeros(want.shape, want.dtype)
        with engine.register(target) as region:
            engine.put(producer, region.handle()).wait()
        assert target.tobytes() == want.tobytes()


CODES = [
    ((0, 8, 1), "int8"),
    ((0, 64, 1), "int64"),
    ((1, 16, 1), "uint16"),
    ((2, 16, 1), "float16"),
    ((2, 64, 1), "float64"),
    ((4, 16, 1), "bfloat16"),
    ((5, 32, 1), "complex32"),
    ((5, 128, 1), "complex128"),
    ((6, 8, 1), "bool"),
    ((7, 8, 1), "float8_e3m4"),
    ((8, 8, 1), "float8_e4m3"),
    ((9, 8, 1), "float8_e4m3b11fnuz"),
    ((10, 8, 1), "float8_e4m3fn"),
    ((11, 8, 1), "float8_e4m3fnuz"),
    ((12, 8, 1), "float8_e5m2"),
    ((13, 8, 1), "float8_e5m2fnuz"),
    ((14, 8, 1), "float8_e8m0fnu"),
    ((17, 4, 2), "float4_e2m1fn_x2"),
]


@pytest.mark.parametrize(("code", "name"), CODES, ids=str)
def test_dlpacks_types_have_the_same_names(
    engine: kvzc.Engine, code: tuple[int, int, int], name: str
) -> None:
    with engine.register(Producer(np.zeros(64, np.uint8), (3,), (1,), code)) as region:
        assert region.dtype == name
        assert region.nbytes == 3 * code[1] * code[2] // 8


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=dtype_name)
def test_torchs_own_producers_give_the_same_names(engine: kvzc.Engine, dtype: Any) -> None:
    tensor = kvzc.empty(4, dtype)
    with engine.register(Foreign(tensor)) as region:
        assert region.dtype == dtype_name(dtype)


@pytest.mark.parametrize(
    "code",
    [
        (0, 4, 1),
        (1, 1, 1),
        (2, 32, 4),
        (3, 64, 1),
        (15, 6, 1),
        (17, 4, 1),
        (10, 16, 1),
        (2, 128, 1),
    ],
    ids=str,
)
def test_other_types_are_refused_with_the_remedy(engine: kvzc.Engine, code: Any) -> None:
    producer = Producer(np.zeros(64, np.uint8), (2,), (1,), code)
    with pytest.raises(kvzc.Unsupported, match="bytes"):
        engine.register(producer)
    assert (producer.given, producer.returned) == (1, 1)


def test_read_only_is_a_source_and_no_target(engine: kvzc.Engine) -> None:
    source = np.arange(8, dtype=np.uint8)
    source.flags.writeable = False
    cache = kvzc.empty(8, "uint8")
    for producer in (Foreign(source), Producer(source, (8,), (1,), flags=1)):
        with engine.register(cache) as region:
            cache[:] = 0
            engine.put(producer, region.handle()).wait()
            assert cache.tolist() == list(range(8))
            with pytest.raises(kvzc.InvalidArgument, match="read-only"):
                engine.register(producer)
            with pytest.raises(kvzc.InvalidArgument, match="read-only"):
                engine.register({"a": cache, "b": producer})
            with pytest.raises(kvzc.InvalidArgument, match="read-only"):
                engine.get(producer, region.handle())


def test_unversioned_tensors_may_be_read_only_so_they_are_sources(engine: kvzc.Engine) -> None:
    source = np.arange(8, dtype=np.uint8)
    cache = kvzc.empty(8, "uint8")
    for producer in (Old(source), Producer(source, (8,), (1,), is_versioned=False)):
        with engine.register(cache) as region:
            cache[:] = 0
            engine.put(producer, region.handle()).wait()
            assert cache.tolist() == list(range(8))
            with pytest.raises(kvzc.InvalidArgument, match="unversioned"):
                engine.register(producer)
            with pytest.raises(kvzc.InvalidArgument, match="unversioned"):
                engine.get(producer, region.handle())


def test_a_copy_is_neither_asked_for_nor_taken(engine: kvzc.Engine) -> None:
    producer = Producer(np.zeros(8, np.uint8), (8,), (1,))
    with engine.register(producer):
        assert producer.arguments == [{"max_version": (1, 0), "copy": False}]
    copied = Producer(np.zeros(8, np.uint8), (8,), (1,), flags=2)
    with pytest.raises(kvzc.Unsupported, match="copy"):
        engine.register(copied)
    assert (copied.given, copied.returned) == (1, 1)


def test_padded_elements_and_later_versions_are_refused_and_given_back(
    engine: kvzc.Engine,
) -> None:
    memory = np.zeros(8, np.uint8)
    for producer, match in [
        (Producer(memory, (8,), (1,), (17, 4, 2), flags=4), "padded"),
        (Producer(memory, (8,), (1,), major=2), "version 2"),
        (Producer(memory, (-1,), (1,)), "negative"),
        (Producer(memory, (2**40, 2**40), (1, 1)), "64 bits"),
        (Producer(memory, (2,), (2**62,), (2, 64, 1)), "64 bits"),
        (Producer(memory, (2,), (1,), is_null=True), "no address"),
    ]:
        with pytest.raises(kvzc.Error, match=match):
            engine.register(producer)
        assert (producer.given, producer.returned) == (1, 1)


def test_other_devices_are_refused_before_anything_is_asked(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(8, "uint8")
    with engine.register(cache) as region:
        for device in (2, 10, 13):
            producer = Producer(np.zeros(8, np.uint8), (8,), (1,), device=device)
            for start in (
                lambda what=producer: engine.register(what),
                lambda what=producer: engine.put(what, region.handle()),
                lambda what=producer: engine.get(what, region.handle()),
            ):
                with pytest.raises(kvzc.Unsupported, match=f"CPU.*{device}"):
                    start()
            assert producer.given == 0
    # It may also be found out late.
    liar = Producer(np.zeros(8, np.uint8), (8,), (1,), device=2)
    liar.device = 1
    with pytest.raises(kvzc.Unsupported, match="CPU"):
        engine.register(liar)
    assert (liar.given, liar.returned) == (1, 1)


def test_what_the_library_raises_is_what_comes_out(engine: kvzc.Engine) -> None:
    class Refusing(Foreign):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(BufferError, match="not today"):
        engine.register(Refusing(np.zeros(3)))

    class Used(Foreign):
        capsule = Producer(np.zeros(8, np.uint8), (8,), (1,)).__dlpack__()

        def __dlpack__(self, **arguments: Any) -> Any:
            return self.capsule

    engine.register(Used(np.zeros(3))).close()
    for what in (Used(np.zeros(3)), with_exchange_api(Producer(np.zeros(1), (1,), (1,)), major=2)):
        with pytest.raises(TypeError):
            engine.register(what)
    producer = Producer(np.zeros(8, np.uint8), (8,), (1,))
    with pytest.raises(TypeError, match="has no len"):
        engine.register(with_exchange_api(producer, managed_tensor_of=FAILS))
    with pytest.raises(kvzc.Unsupported, match="no reason"):
        engine.register(with_exchange_api(producer, managed_tensor_of=FAILS_QUIETLY))


# ---- keeping alive ----


def test_a_registered_tensor_is_given_back_once_after_the_close(engine: kvzc.Engine) -> None:
    producer = Producer(np.zeros(8, np.uint8), (8,), (1,))
    region = engine.register(producer)
    gc.collect()
    assert (producer.given, producer.returned) == (1, 0)
    engine.put(np.arange(8, dtype=np.uint8), region.handle()).wait()
    assert producer.memory.tolist() == list(range(8))
    region.close()
    until(lambda: producer.returned == 1)
    gc.collect()
    assert (producer.given, producer.returned) == (1, 1)


def test_a_source_is_kept_until_its_transfer_has_ended(engine: kvzc.Engine) -> None:
    array = np.full(1 << 20, 7, np.uint8)
    gone = weakref.ref(array)
    cache = kvzc.empty(1 << 20, "uint8")
    with engine.register(cache) as region:
        transfer = engine.put(Foreign(array), region.handle())
        del array
        gc.collect()
        transfer.wait()
        assert (cache == 7).all()
        del transfer
        until(lambda: gc.collect() is not None and gone() is None)


def test_deleters_hold_the_gil_whoever_lets_go(engine: kvzc.Engine) -> None:
    """Large transfers that nobody waits for end on threads of the engine, which have no GIL."""
    nbytes = 8 << 20
    cache = kvzc.empty(nbytes, "uint8")
    producer = Producer(np.ones(nbytes, np.uint8), (nbytes,), (1,))
    with engine.register(cache) as region:
        handle = region.handle()
        for number in range(30):
            engine.put(producer, handle, notify=b"%d" % number)
            if number % 3 == 0:
                until(lambda: engine.stats()["transfers_running"] == 0)
        until(lambda: producer.returned == producer.given == 30)
    assert producer.strange_threads == 0
    assert (cache == 1).all()


AT_EXIT = """
import sys
sys.path.insert(0, sys.argv[1])
import kvzc, numpy as np
from dlpack_maker import Producer
engine = kvzc.Engine()
producer = Producer(np.zeros(1 << 20, np.uint8), (1 << 20,), (1,))
region = engine.register(producer)
other = engine.register(kvzc.empty(1 << 20, "uint8"))
transfer = engine.put(producer, other.handle())
print("end", flush=True)
"""


def test_a_program_that_ends_with_tensors_registered_ends_well() -> None:
    ended = run_script(AT_EXIT, str(Path(__file__).parent))
    assert (ended.status, ended.output, ended.errors) == (0, "end\n", "")


# ---- the C exchange API ----


def test_the_exchange_api_of_any_type_is_used(engine: kvzc.Engine) -> None:
    producer = Producer(np.arange(8, dtype=np.uint8), (2, 4), (4, 1))
    fast = with_exchange_api(producer)
    with engine.register(fast) as region:
        assert region.shape == (2, 4)
        assert (producer.given, producer.returned, producer.arguments) == (1, 0, [])
        target = kvzc.empty((2, 4), "uint8")
        with engine.register(target) as other:
            engine.put(fast, other.handle()).wait()
        assert np.array_equal(target, producer.memory.reshape(2, 4))
    until(lambda: producer.returned == producer.given == 2)
    producer.flags = 1
    with pytest.raises(kvzc.InvalidArgument, match="read-only"):
        engine.register(fast)


def test_an_older_exchange_api_is_found_behind_a_later_one(engine: kvzc.Engine) -> None:
    producer = Producer(np.arange(8, dtype=np.uint8), (8,), (1,))

    def never(_: Any, out: Any) -> int:
        raise AssertionError("a later version must not be called")

    def now(_: Any, out: Any) -> int:
        out[0] = ctypes.addressof(producer.managed())
        return 0

    older = ExchangeApi(1, 0, None, None, ManagedOf(now), None, TensorOf(), None)
    later = ExchangeApi(
        2, 0, ctypes.addressof(older), None, ManagedOf(never), None, TensorOf(), None
    )
    made: Any = type("Later", (), {})
    made.__dlpack_c_exchange_api__ = capsule(later, b"dlpack_exchange_api")
    with engine.register(made()) as region:
        assert region.shape == (8,)
    # With __dlpack__ beside a version that nobody reads, that is the way.
    alone = ExchangeApi(2, 0, None, None, ManagedOf(never), None, TensorOf(), None)
    both: Any = type("Both", (Foreign,), {})
    both.__dlpack_c_exchange_api__ = capsule(alone, b"dlpack_exchange_api")
    with engine.register(both(np.zeros(8, np.uint8))) as region:
        assert region.shape == (8,)


def tensors() -> list[torch.Tensor]:
    base = torch.arange(240, dtype=torch.int32).view(4, 3, 20)
    return [
        base,
        base[1:3, :, ::3],
        base.permute(2, 0, 1),
        base[2, 1, 5],
        base[:, :0],
        base[:1].expand(5, 3, 20),
        torch.nn.Parameter(torch.ones(3)),
        torch.zeros(0),
        torch.ones(4, requires_grad=True),
        *[torch.zeros((2, 3), dtype=dtype) for dtype in NUMPY_DTYPES],
    ]


def test_torch_tensors_are_the_same_with_and_without_the_exchange_api(
    engine: kvzc.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved() -> list[tuple[str, bytes]]:
        out = []
        for tensor in tensors():
            if tensor.numel() == 0:
                with pytest.raises(kvzc.InvalidArgument, match="no bytes"):
                    engine.register(tensor)
                continue
            target = torch.zeros(tensor.shape, dtype=tensor.dtype)
            with engine.register(target) as region, engine.register(tensor) as local:
                engine.put(tensor, region.handle()).wait()
                assert engine.stats()["storages"] == 2
                out.append((repr(local), target.reshape(-1).view(torch.uint8).numpy().tobytes()))
        return out

    want = moved()
    assert want[0][1] == torch.arange(240, dtype=torch.int32).numpy().tobytes()
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    assert moved() == want


@pytest.mark.parametrize("with_api", [True, False])
def test_torch_tensors_that_hold_other_numbers_are_refused_either_way(
    engine: kvzc.Engine, monkeypatch: pytest.MonkeyPatch, with_api: bool
) -> None:
    """The exchange API tells nothing of lazy conjugates and negatives."""
    if not with_api:
        monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    z = torch.zeros(3, dtype=torch.complex64)
    for tensor, match in [
        (z.conj(), "resolve_conj"),
        (z.conj().imag, "resolve_neg"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.zeros(3, 3).to_sparse(), "sparse"),
    ]:
        with pytest.raises(kvzc.Error, match=match):
            engine.register(tensor)


@pytest.mark.skipif(not HAS_EXCHANGE_API, reason="torch before 2.10 has no exchange API")
def test_torchs_exchange_api_is_what_plain_tensors_are_read_by(
    engine: kvzc.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = exchange_api_of(torch.Tensor)
    seen: list[type] = []

    def watched(tensor: Any, out: Any) -> int:
        seen.append(type(tensor))
        return int(theirs.tensor_of(tensor, out))

    ours = ExchangeApi(1, 3, None, None, theirs.managed_tensor_of, None, TensorOf(watched), None)
    monkeypatch.setattr(
        torch.Tensor, "__dlpack_c_exchange_api__", capsule(ours, b"dlpack_exchange_api")
    )
    cache = kvzc.empty(4, torch.float32)
    with engine.register(cache) as region:
        engine.put(torch.ones(4), region.handle()).wait()
        engine.put(torch.nn.Parameter(torch.ones(4)), region.handle()).wait()
        assert seen == [torch.Tensor, torch.Tensor, torch.nn.Parameter]
        # A subclass may keep its elements elsewhere, so it is asked itself.
        engine.put(torch.ones(4).as_subclass(Named), region.handle()).wait()
    assert len(seen) == 3


class Named(torch.Tensor):
    pass


def test_bfloat16_of_numpy_is_what_numpys_own_dlpack_cannot_say(engine: kvzc.Engine) -> None:
    """NumPy arrays are read as such, so ml_dtypes' types pass."""
    local = np.ones(4, ml_dtypes.bfloat16)
    with pytest.raises((BufferError, TypeError)):
        local.__dlpack__()
    cache = kvzc.empty(4, torch.bfloat16)
    with engine.register(cache) as region:
        engine.put(local, region.handle()).wait()
    assert cache.tolist() == [1] * 4
