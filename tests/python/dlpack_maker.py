"""DLPack tensors made by hand, to say what no library says: the structures of dlpack.h 1.3."""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


class Unversioned(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]


ManagedOf = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
TensorOf = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))


class ExchangeApi(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_tensor_of", ManagedOf),
        ("object_of", ctypes.c_void_p),
        ("tensor_of", TensorOf),
        ("current_stream", ctypes.c_void_p),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

NAMES = (b"dltensor", b"dltensor_versioned", b"dlpack_exchange_api")  # Capsules only refer to them.


def capsule(structure: ctypes.Structure, name: bytes) -> Any:
    return _new_capsule(ctypes.addressof(structure), NAMES[NAMES.index(name)], None)


def exchange_api_of(cls: type) -> ExchangeApi:
    address = _capsule_pointer(cls.__dlpack_c_exchange_api__, b"dlpack_exchange_api")  # type: ignore[attr-defined]
    return ExchangeApi.from_address(address)


class Producer:
    """A CPU tensor over `memory`, with everything that DLPack can say of it."""

    def __init__(
        self,
        memory: np.ndarray,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dtype: tuple[int, int, int] = (1, 8, 1),
        *,
        byte_offset: int = 0,
        flags: int = 0,
        major: int = 1,
        device: int = 1,
        is_null: bool = False,
        is_versioned: bool = True,
    ) -> None:
        self.given = 0  # How many managed tensors were made,
        self.returned = 0  # and given back,
        self.strange_threads = 0  # how many of them by threads that Python did not start.
        self.device = device
        self.is_versioned = is_versioned
        self.arguments: list[dict[str, Any]] = []
        self.memory = memory
        count = len(shape)
        self._shape = (ctypes.c_int64 * count)(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * count)(*strides)
        self.tensor = Tensor(
            None if is_null else memory.ctypes.data,
            Device(device, 0),
            count,
            DataType(*dtype),
            self._shape,
            self._strides,
            byte_offset,
        )
        self.major = major
        self.flags = flags
        self._alive: dict[int, ctypes.Structure] = {}
        self._deleter = Deleter(self._take_back)

    def _take_back(self, address: int) -> None:
        del self._alive[address]
        # ctypes takes the GIL for whoever calls; these threads cannot have had it.
        self.strange_threads += isinstance(threading.current_thread(), threading._DummyThread)
        self.returned += 1

    def managed(self) -> ctypes.Structure:
        made: ctypes.Structure
        if self.is_versioned:
            made = Versioned(self.major, 3, None, self._deleter, self.flags, self.tensor)
        else:
            made = Unversioned(self.tensor, None, self._deleter)
        self._alive[ctypes.addressof(made)] = made
        self.given += 1
        return made

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **arguments: Any) -> Any:
        self.arguments.append(arguments)
        name = b"dltensor_versioned" if self.is_versioned else b"dltensor"
        return capsule(self.managed(), name)


def with_exchange_api(producer: Producer, *, major: int = 1, managed_tensor_of: Any = None) -> Any:
    """An object of a new type that offers the C exchange API, and nothing else of DLPack."""

    def give(_: Any, out: Any) -> int:
        out[0] = ctypes.addressof(producer.managed())
        return 0

    api = ExchangeApi(
        major, 3, None, None, managed_tensor_of or ManagedOf(give), None, TensorOf(), None
    )
    made = type("Fast", (), {"__dlpack_c_exchange_api__": capsule(api, b"dlpack_exchange_api")})
    made.kept = (api, producer)  # type: ignore[attr-defined]
    return made()


# Two functions that fail: one with a Python error (TypeError, for what has no length), one without.
FAILS = ManagedOf(ctypes.cast(ctypes.pythonapi.PyObject_Size, ctypes.c_void_p).value)
FAILS_QUIETLY = ManagedOf(lambda _, out: -1)
