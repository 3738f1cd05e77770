"""kvzc: zero-copy transport under LLM prefill/decode disaggregation.

The three lines::

    region = kvzc.register(kv_cache)                 # decode side; send region.handle().to_text()
    handle = kvzc.RemoteHandle.from_text(text)       # prefill side
    kvzc.put(local[layer, blocks], handle[layer, remote_blocks], notify=b"req-17/3").wait(2.0)

and on the decode side ``kvzc.arrivals.wait(b"req-17/3", timeout=2.0)`` returns when those bytes
can be read. The functions here act on a default engine, made at first use; each is a method of
:class:`Engine` too.
"""

import atexit as _atexit
import sys as _sys

# Before the core: for want of one that such an interpreter can load, the reason would not show.
if "t" in _sys.abiflags:
    raise ImportError(
        "this is a free-threaded Python, for which kvzc is not made yet: its bindings lean on the "
        "GIL, and their tests have not passed without it. Use the ordinary build of the same "
        "version (python3.13, not python3.13t)"
    )

from ._core import (
    NOW,
    AccessDenied,
    Arrival,
    Arrivals,
    BadHandle,
    Cancelled,
    Catalog,
    Closed,
    CompletionQueue,
    Engine,
    Error,
    Faults,
    ForkedEngine,
    Grant,
    InvalidArgument,
    LayoutMismatch,
    LimitExceeded,
    LocalView,
    Memory,
    NotRegistered,
    OutOfRange,
    Peer,
    PeerLost,
    Plan,
    ProtocolError,
    Rdma,
    Region,
    RemoteHandle,
    RemoteView,
    Revoked,
    StaleHandle,
    SystemFailure,
    TimedOut,
    Transfer,
    TransportUnavailable,
    Unsupported,
    WouldBlock,
    __version__,
    _close_all,
    arrivals,
    connect,
    default_engine,
    empty,
    explain,
    get,
    get_many,
    plan,
    put,
    put_many,
    register,
    wait,
)
from .tensors import share

# Before the interpreter goes: threads end, and waits that daemon threads sit in wake.
_atexit.register(_close_all)

__all__ = [
    "NOW",
    "AccessDenied",
    "Arrival",
    "Arrivals",
    "BadHandle",
    "Cancelled",
    "Catalog",
    "Closed",
    "CompletionQueue",
    "Engine",
    "Error",
    "Faults",
    "ForkedEngine",
    "Grant",
    "InvalidArgument",
    "LayoutMismatch",
    "LimitExceeded",
    "LocalView",
    "Memory",
    "NotRegistered",
    "OutOfRange",
    "Peer",
    "PeerLost",
    "Plan",
    "ProtocolError",
    "Rdma",
    "Region",
    "RemoteHandle",
    "RemoteView",
    "Revoked",
    "StaleHandle",
    "SystemFailure",
    "TimedOut",
    "Transfer",
    "TransportUnavailable",
    "Unsupported",
    "WouldBlock",
    "__version__",
    "arrivals",
    "connect",
    "default_engine",
    "empty",
    "explain",
    "get",
    "get_many",
    "plan",
    "put",
    "put_many",
    "register",
    "share",
    "wait",
]
