"""Random views for property tests, and a model of which bytes they mean.

A `Case` is one side of a put: memory, a strided tensor in it, and an index. It is drawn backwards,
from the shape that is to come out, so that two sides always match.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

TORCH_DTYPES = [
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]
# NumPy has all of them but two, because this module imports ml_dtypes.
assert ml_dtypes.bfloat16
NUMPY_DTYPES = [
    dtype for dtype in TORCH_DTYPES if dtype not in (torch.complex32, torch.float4_e2m1fn_x2)
]

MOST_ITEMS = 4096  # Of the memory that a case lies in.


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Case:
    """A tensor of `sizes` and `strides` (in items) at item `offset` of `items` items, indexed."""

    items: int
    offset: int
    sizes: list[int]
    strides: list[int]
    index: tuple[Any, ...]  # As written: may hold '...', and leave the last axes out.
    plain: list[Any]  # The same, spelt out: an int, a slice or a list of ints per axis.

    def has_lists(self) -> bool:
        return any(isinstance(each, list) for each in self.plain)

    def positions(self) -> np.ndarray:
        """The item number of each element that the index selects, in its shape."""
        out = np.full(self.sizes, self.offset)
        for axis, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            shape = [1] * len(self.sizes)
            shape[axis] = size
            out = out + np.arange(size).reshape(shape) * stride
        axis = 0
        for each in self.plain:  # One axis after the other: lists are orthogonal, as in numpy.ix_.
            out = out[(slice(None),) * axis + (each,)]
            axis += 0 if isinstance(each, int) else 1
        return out

    def torch_tensor(self, memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor before indexing, in the uint8 tensor `memory`."""
        typed = memory[: self.items * dtype.itemsize].view(dtype)
        # torch counts the offset from the storage, we from the memory.
        offset = typed.storage_offset() + self.offset
        return torch.as_strided(typed, self.sizes, self.strides, offset)

    def numpy_array(self, memory: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        return np.ndarray(
            self.sizes,
            dtype,
            buffer=memory,
            offset=self.offset * dtype.itemsize,
            strides=[stride * dtype.itemsize for stride in self.strides],
        )


def expected(
    target: Case, target_bytes: np.ndarray, source: Case, source_bytes: np.ndarray, itemsize: int
) -> np.ndarray:
    """The whole target memory after a put: what is outside the view is as before."""
    out = target_bytes.copy()
    to = out[: target.items * itemsize].reshape(target.items, itemsize)
    come = source_bytes[: source.items * itemsize].reshape(source.items, itemsize)
    to[target.positions().ravel()] = come[source.positions().ravel()]
    return out


def _spell_list(draw: DrawFn, ids: list[int]) -> Any:
    """A list of block ids as programs have it."""
    kind = draw(st.sampled_from(["list", "numpy", "torch", "range"]))
    if kind == "numpy":
        dtype = draw(st.sampled_from(["i1", "i2", "i4", "i8"]))
        spread = draw(st.integers(1, 3))
        wide = np.full((len(ids), spread), -99, dtype)
        wide[:, 0] = ids
        return wide[:, 0]
    if kind == "torch":
        dtype = draw(st.sampled_from([torch.int8, torch.int16, torch.int32, torch.int64]))
        return torch.tensor(ids, dtype=dtype)
    steps = {b - a for a, b in itertools.pairwise(ids)}
    if kind == "range" and len(ids) > 1 and len(steps) == 1 and steps != {0}:
        return range(ids[0], ids[-1] + (1 if ids[-1] > ids[0] else -1), steps.pop())
    return list(ids)


def _axis(draw: DrawFn, count: int, unique: bool, torch_index: bool) -> tuple[int, Any]:
    """An axis and an index that selects `count` of it."""
    kinds = ["all", "slice"] if torch_index else ["all", "all", "slice", "slice", "list"]
    kind = draw(st.sampled_from(kinds))
    if kind == "list":
        size = draw(st.integers(max(count, 1), max(count, 1) + 3))
        ids = st.integers(-size, size - 1)
        key = (lambda i: i % size) if unique else None
        return size, draw(
            st.lists(ids, min_size=count, max_size=count, unique_by=key)
            if unique
            else st.lists(ids, min_size=count, max_size=count)
        )
    if kind == "all" and count > 0:
        return count, slice(None)
    step = draw(st.sampled_from([1, 2, 3] if torch_index else [1, 2, 3, -1, -2, -3]))
    if count == 0:
        size = draw(st.integers(1, 4))
        at = draw(st.integers(0, size))
        return size, slice(at, at, step)
    span = (count - 1) * abs(step) + 1
    before = draw(st.integers(0, 2))
    size = before + span + draw(st.integers(0, 2))
    first, last = (before, before + span - 1) if step > 0 else (before + span - 1, before)
    stop: int | None = last + (1 if step > 0 else -1)
    if stop is not None and stop < 0:
        stop = None
    elif draw(st.booleans()) and 0 <= (stop or 0) < size:
        stop = (stop or 0) - size
    start = first - size if draw(st.booleans()) else first
    return size, slice(start, stop, step)


def _spell(draw: DrawFn, plain: list[Any]) -> tuple[Any, ...]:
    """The index as a program writes it."""
    index = [_spell_list(draw, each) if isinstance(each, list) else each for each in plain]
    whole = [isinstance(each, slice) and each == slice(None) for each in index]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(index)))
        end = at
        while end < len(index) and whole[end]:
            end += 1
        return (*index[:at], ..., *index[end:])
    while index and whole[-1] and draw(st.booleans()):
        index.pop()
        whole.pop()
    return tuple(index)


@st.composite
def shapes(draw: DrawFn) -> tuple[int, ...]:
    """Shapes of 0 to 4 axes, seldom empty."""
    return tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 1, 2, 3, 5, 0]), max_size=4)))


@st.composite
def cases(
    draw: DrawFn,
    shape: tuple[int, ...],
    *,
    unique: bool,
    negative_strides: bool = False,
    torch_index: bool = False,
) -> Case:
    """One side of a put whose indexed shape is `shape`.

    unique: no item twice, as a target needs. torch_index: only what torch's own indexing takes
    without copying.
    """
    sizes: list[int] = []
    plain: list[Any] = []
    for count in shape:
        size, each = _axis(draw, count, unique, torch_index)
        sizes.append(size)
        plain.append(each)
    while len(sizes) < 5 and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(sizes)))
        size = draw(st.integers(1, 4))
        sizes.insert(at, size)
        plain.insert(at, draw(st.integers(-size, size - 1)))

    strides = [0] * len(sizes)
    step = draw(st.integers(1, 3))  # 1: the innermost axis is dense.
    step = 1 if step == 3 else step
    low = high = 0
    for axis in draw(st.permutations(range(len(sizes)))):
        stride = step
        if not unique and draw(st.integers(0, 5)) == 0:
            stride = 0  # As expand() gives.
        elif negative_strides and draw(st.booleans()):
            stride = -step
        strides[axis] = stride
        reach = (sizes[axis] - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
        step = step * sizes[axis] + (draw(st.integers(1, 3)) if draw(st.booleans()) else 0)
    offset = draw(st.integers(0, 5)) - low
    items = offset + high + 1 + draw(st.integers(0, 5))
    assume(items <= MOST_ITEMS)
    return Case(items, offset, sizes, strides, _spell(draw, plain), plain)


def random_bytes(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)
