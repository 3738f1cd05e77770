"""kvzc.empty: memory that peers can map, or an error at once."""

import gc
from typing import Any

import kvzc
import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import mappings, open_files, run_script
from views import NUMPY_DTYPES, TORCH_DTYPES, dtype_name


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=dtype_name)
def test_a_torch_dtype_gives_a_zeroed_torch_tensor(dtype: torch.dtype) -> None:
    tensor = kvzc.empty((3, 2), dtype)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == dtype
    assert tensor.shape == (3, 2)
    assert tensor.is_contiguous()
    assert not tensor.view(torch.uint8).any()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=dtype_name)
def test_a_numpy_dtype_or_its_name_gives_a_zeroed_array(dtype: torch.dtype) -> None:
    name = dtype_name(dtype)
    for spelling in (name, np.dtype(name), np.dtype(name).type):
        array = kvzc.empty((3, 2), spelling)
        assert type(array) is np.ndarray
        assert array.dtype == np.dtype(name)
        assert array.shape == (3, 2)
        assert array.flags.writeable
        assert not array.view(np.uint8).any()


def test_ml_dtypes_are_numpy_dtypes() -> None:
    assert kvzc.empty(4, ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        (5, (5,)),
        (np.int64(5), (5,)),
        ((), ()),
        ([2, 3], (2, 3)),
        ((1,) * 20, (1,) * 20),
        (torch.Size([4, 1]), (4, 1)),
        ((np.int32(2), 3), (2, 3)),
        (range(1, 4), (1, 2, 3)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", ["float32", torch.float32], ids=str)
def test_shapes(shape: Any, want: tuple[int, ...], dtype: Any) -> None:
    made = kvzc.empty(shape, dtype)
    assert tuple(made.shape) == want
    made[...] = 3
    assert float(made.sum()) == 3 * made.size if isinstance(made, np.ndarray) else True


@pytest.mark.parametrize("shape", [0, (0,), (4, 0, 3)])
@pytest.mark.parametrize("dtype", ["float32", torch.float32], ids=str)
def test_zero_bytes_are_refused(shape: Any, dtype: Any) -> None:
    with pytest.raises(kvzc.InvalidArgument, match="0 bytes"):
        kvzc.empty(shape, dtype)


@pytest.mark.parametrize("shape", [-1, (4, -1), (-1, -1), (-(2**63), -2)])
def test_negative_extents_are_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="negative"):
        kvzc.empty(shape, "float32")


@pytest.mark.parametrize(
    "shape",
    [2**63 - 1, (2**32, 2**32), (2**33, 2**33), (2**62, 4), (3,) * 60, 2**64, 2**70, (2**70, 0)],
    ids=repr,
)
def test_more_bytes_than_64_bits_are_refused(shape: Any) -> None:
    with pytest.raises((kvzc.LimitExceeded, kvzc.InvalidArgument)):
        kvzc.empty(shape, "float64")


HUGE = """
import os, time
import kvzc
# If this is not refused it is this process that the kernel ends, not the test.
with open("/proc/self/oom_score_adj", "w") as score:
    score.write("1000")
kvzc.empty(4096, "uint8")
before = os.listdir("/proc/self/fd")
for nbytes in (2**62, 2**50, 2**45):
    start = time.monotonic()
    try:
        kvzc.empty(nbytes, "uint8")
    except kvzc.LimitExceeded as refused:
        assert str(nbytes) in str(refused), refused
        assert time.monotonic() - start < 1
    else:
        raise SystemExit("got memory that cannot be there")
assert os.listdir("/proc/self/fd") == before
assert not any("memfd:kvzc-memory" in line for line in open("/proc/self/maps"))
kvzc.empty(4096, "uint8")[:] = 1
"""


def test_more_memory_than_the_machine_has_is_refused_at_once_and_nothing_leaks() -> None:
    ended = run_script(HUGE)
    assert ended.status == 0, (ended.status, ended.errors)


@pytest.mark.parametrize("dtype", [torch.quint8, "object", "i4,O", "longdouble", ">i4"])
def test_types_that_kvzc_does_not_move_are_refused(dtype: Any) -> None:
    with pytest.raises(kvzc.Unsupported, match=r"dtype|byte order"):
        kvzc.empty(2, dtype)


@pytest.mark.parametrize("device", ["cuda", "npu:0", "meta", ""])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(kvzc.Unsupported, match="cpu"):
        kvzc.empty(4, torch.float32, device)


def test_torch_works_on_it_in_place() -> None:
    tensor = kvzc.empty((64, 64), torch.float32)
    address = tensor.data_ptr()
    tensor.normal_().mul_(2).clamp_(-1, 1)
    tensor[3].copy_(torch.arange(64))
    torch.matmul(tensor, tensor, out=tensor[:])
    tensor.requires_grad_(True)
    assert tensor.data_ptr() == address
    assert torch.isfinite(tensor).all()


def test_each_call_gives_memory_of_its_own() -> None:
    a, b = kvzc.empty(4096, "uint8"), kvzc.empty(4096, "uint8")
    a[:] = 1
    assert not b.any()


def test_memory_is_given_back_with_the_last_view_of_it() -> None:
    files, mapped = open_files(), mappings()
    tensor = kvzc.empty(1 << 20, torch.uint8)
    view = tensor[5:].view(-1)
    del tensor
    assert mappings() == mapped + 1
    view[:] = 7
    del view
    gc.collect()
    assert (open_files(), mappings()) == (files, mapped)


def test_memory_outlives_the_engine_that_made_and_used_it() -> None:
    engine = kvzc.Engine()
    cache = engine.empty((4, 4), torch.float32)
    region = engine.register(cache)
    engine.put(torch.ones((4, 4)), region.handle()).wait()
    engine.close()
    del engine, region
    gc.collect()
    assert cache.sum() == 16
    cache += 1
    with kvzc.Engine() as other, other.register(cache) as region:
        other.put(torch.zeros((4, 4)), region.handle()).wait()
    assert cache.sum() == 0


FEW_FILES = """
import gc, os, resource
import kvzc
import numpy as np
kvzc.empty(4096, "uint8")
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
before = sorted(os.listdir("/proc/self/fd"))
kept = []
try:
    while True:
        kept.append(kvzc.empty(4096, "uint8"))
except kvzc.LimitExceeded as refused:
    assert "ulimit -n" in str(refused), refused
assert len(kept) >= 5
try:
    kvzc.Engine()
except kvzc.LimitExceeded as refused:
    assert "ulimit -n" in str(refused), refused
else:
    raise SystemExit("an engine without descriptors")
kept.clear()
gc.collect()
assert sorted(os.listdir("/proc/self/fd")) == before
with kvzc.Engine() as engine, engine.register(kvzc.empty(8, "uint8")) as region:
    engine.put(np.ones(8, np.uint8), region.handle()).wait()
"""


def test_too_many_open_files_is_an_error_with_a_remedy_and_passes() -> None:
    ended = run_script(FEW_FILES)
    assert ended.status == 0, ended.errors


FULL_AT_CONNECT = """
import os, resource
import kvzc
import numpy as np
with kvzc.Engine(default_timeout=5, connect_timeout=2) as engine:
    cache = kvzc.empty(8, "uint8")
    region = engine.register(cache)
    handle = region.handle()
    kept = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    try:
        while True:
            kept.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for free in range(6):
        try:
            engine.put(np.ones(8, np.uint8), handle).wait(10)
        except (kvzc.LimitExceeded, kvzc.TimedOut, kvzc.PeerLost) as refused:
            print(free, type(refused).__name__, refused)
        os.close(kept.pop())
    for file in kept:
        os.close(file)
    engine.put(np.ones(8, np.uint8), handle).wait()
    assert cache.all()
"""


def test_too_many_open_files_fails_a_put_and_a_later_one_goes_well() -> None:
    ended = run_script(FULL_AT_CONNECT)
    assert ended.status == 0, ended.output + ended.errors
    assert ended.output.startswith("0 LimitExceeded"), ended.output
