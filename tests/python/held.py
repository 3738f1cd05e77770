"""Memory that stands in the way: a copy out of it stops in its middle until the test lets it go on.

Nothing else makes it certain that a transfer runs: a large one may be over before the next line.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct

import numpy as np
import pytest

PAGE = mmap.PAGESIZE
_SYSCALL = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1  # Needs no privilege; faults of the kernel's own copying are not held.
_API, _REGISTER = 0xC018AA3F, 0xC020AA00
_VERSION, _MISSING = 0xAA, 1


class Held:
    """An array of ones whose first page is not there before release().

    Whoever reads that page, a copy thread as a rule, stands until then, and finds zeros. A close
    of its engine gives up after its time-out and leaves it there: release() comes first.
    """

    def __init__(self, nbytes: int) -> None:
        assert nbytes > PAGE and nbytes % PAGE == 0
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)  # A huge page would bring the first one along.
        self.array = np.frombuffer(self._memory, np.uint8)
        self.array[PAGE:] = 1
        libc = ctypes.CDLL(None, use_errno=True)
        number = _SYSCALL.get(platform.machine(), -1)
        self._faults = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if self._faults < 0:
            pytest.skip(f"no userfaultfd here: {os.strerror(ctypes.get_errno())}")
        fcntl.ioctl(self._faults, _API, struct.pack("<QQQ", _VERSION, 0, 0))
        first_page = struct.pack("<QQQQ", self.array.ctypes.data, PAGE, _MISSING, 0)
        fcntl.ioctl(self._faults, _REGISTER, first_page)

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def wait_for_reader(self) -> None:
        """Returns once somebody stands at the first page."""
        poller = select.poll()
        poller.register(self._faults, select.POLLIN)
        assert poller.poll(10_000), "nobody has read the first page"

    def release(self) -> None:
        """Lets whoever stands there go on, and everybody after them."""
        if self._faults >= 0:
            os.close(self._faults)
            self._faults = -1
