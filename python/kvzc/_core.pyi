"""
The compiled core of kvzc.
"""

from __future__ import annotations
import collections.abc
import os
import typing

__all__: list[str] = [
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
    "NOW",
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
    "transports",
    "wait",
]

class Error(Exception):
    """
    The base of everything that kvzc raises.
    """

class InvalidArgument(Error, ValueError):
    """
    An argument that no call of this kind can take.

    The text says what was given and what is allowed.
    """

class OutOfRange(Error, IndexError):
    """
    An index, a block or an address beyond what there is.

    The text names the first one that is wrong, and the range.
    """

class LayoutMismatch(Error, ValueError):
    """
    Source and target differ in shape or dtype.

    Index both alike, or view(dtype) one of them: nothing is broadcast or converted.
    """

class BadHandle(Error, ValueError):
    """
    A handle or catalog that is truncated, damaged, forged or of a later version.

    Pass on exactly what to_bytes() or to_text() gave, and use one kvzc on both sides.
    """

class NotRegistered(Error, ValueError):
    """
    Memory outside every region, in a strict engine; or a grant of memory that is in no open region.

    Register its storage first.
    """

class StaleHandle(Error, ConnectionError):
    """
    A handle from an earlier life of its engine, which has restarted.

    Ask the owner for a fresh handle.
    """

class Revoked(Error, PermissionError):
    """
    A grant that its owner has taken back, or whose region is closed. Not one more byte of the transfer lands.

    Ask the owner for a new handle, or drop the request: it was probably aborted there.
    """

class AccessDenied(Error, PermissionError):
    """
    A user, a secret or an access that the owner does not allow.

    Have the owner grant it: access=, allow_users=, the same secret= on both sides.
    """

class TimedOut(Error, TimeoutError):
    """
    Not done in time. What was started goes on; what was not accepted was not posted.

    Wait again, cancel() it, or give more time.
    """

class WouldBlock(Error, BlockingIOError):
    """
    A full queue or inbox, and accept_timeout=0. Nothing was posted.

    Take what has ended or arrived, or let the call wait.
    """

class PeerLost(Error, ConnectionError):
    """
    The peer's process, engine or host is gone, or no way to it is left.

    Continue with another peer; a transfer's memory is free once .quiet is true.
    """

class Cancelled(Error, RuntimeError):
    """
    A transfer that was cancelled, by cancel() or its deadline. Not one more byte of it lands.

    None is needed: somebody asked for it.
    """

class Closed(Error, RuntimeError):
    """
    Use of an engine, region or queue that was closed.

    Make another one.
    """

class TransportUnavailable(Error, RuntimeError):
    """
    No transport that was asked for reaches the memory or the device.

    The text says why, and what would help; `kvzc info` lists what this machine can do.
    """

class Unsupported(Error, NotImplementedError):
    """
    Something that this version does not do.

    The text names what is done instead.
    """

class LimitExceeded(Error, OSError):
    """
    A limit of the machine: memory, locked memory, descriptors, threads, /dev/shm.

    The text says what was asked, what is allowed and how to raise it.
    """

class ForkedEngine(Error, RuntimeError):
    """
    Use of an engine or queue that belongs to the parent process.

    Make another one in the child, or start processes by spawn.
    """

class ProtocolError(Error, ConnectionError):
    """
    A peer that does not keep the protocol: another version, or not kvzc at all.

    Use one kvzc on both sides; see who listens at the address.
    """

class SystemFailure(Error, OSError):
    """
    A system call that failed for an unexpected reason.

    The text names the call's purpose and the system's word for it.
    """

class Engine:
    """
    One participant: it owns registrations, transports, threads and the roads to its peers.

    name: others see it in errors and handles; unique on this host. Default: a random one.
    transports: names to use, for example ['shm']; default: all that this machine can run.
    default_timeout: seconds, wherever a timeout is left out.
    strict: refuse sources outside every region, instead of registering them for one transfer.
    arrival_ttl: seconds until a tag that nobody takes is dropped.
    arrival_depth: tags of one peer that may be untaken here before its puts are pushed back.
    allow_users: user names or ids that may connect besides this process's own.
    copy_threads: threads for large copies; 0 chooses by the number of cores.
    max_transfers: transfers that may run at once before put() pushes back.
    max_grants: handles that may be alive at once.
    connect_timeout: seconds for one attempt to reach a peer.
    listen: "host:port" at which engines on other hosts reach this one, for example
        "0.0.0.0:7000"; port 0: any that is free. Default: none, no port is open.
    advertise: "host:port" that handles name instead, where others see another address (NAT).
    secret: bytes or str, 16 or more, that all engines which may meet over a network share. Both
        sides prove that they know it; it never travels. It keeps strangers out, and does not
        encrypt: the network itself is trusted.
    peer_timeout: whole seconds, 2 or more, after which a host that answers nothing is lost. A
        process that is only busy or stopped still answers: its kernel does.
    rdma: an Rdma, to choose RDMA devices and how they are used.
    trace: a file that is appended what transfers did when, for Perfetto (ui.perfetto.dev): a lane
        per peer and direction, time in queues and in copies apart. Engines and processes may share
        one. Default: the environment variable KVZC_TRACE, if that is set.
    faults: a Faults, to make trouble on demand in tests.
    """
    def __enter__(self) -> Engine: ...
    def __exit__(self, type: typing.Any, value: typing.Any, traceback: typing.Any) -> None: ...
    def __init__(
        self,
        name: str | None = None,
        *,
        transports: collections.abc.Sequence[str] | None = None,
        default_timeout: typing.SupportsFloat | typing.SupportsIndex = 30.0,
        strict: bool = False,
        arrival_ttl: typing.SupportsFloat | typing.SupportsIndex = 300.0,
        arrival_depth: typing.SupportsInt | typing.SupportsIndex = 65536,
        allow_users: collections.abc.Iterable[str | int] = (),
        copy_threads: typing.SupportsInt | typing.SupportsIndex = 0,
        max_transfers: typing.SupportsInt | typing.SupportsIndex = 16384,
        max_grants: typing.SupportsInt | typing.SupportsIndex = 131072,
        connect_timeout: typing.SupportsFloat | typing.SupportsIndex = 10.0,
        listen: str | None = None,
        advertise: str | None = None,
        secret: bytes | str | None = None,
        peer_timeout: typing.SupportsInt | typing.SupportsIndex = 5,
        rdma: Rdma | None = None,
        trace: os.PathLike[str] | str | bytes | None = None,
        faults: Faults | None = None,
    ) -> None: ...
    def __reduce__(self) -> typing.Any: ...
    def __repr__(self) -> str: ...
    def catalog(self) -> Catalog:
        """
        Gives a Catalog of all regions that are open now, for callers that exchange raw addresses.

        Opt-in, since it holds the keys of them all. What is registered later needs a fresh one; what
        is closed later is refused as Revoked. Raises LimitExceeded, Closed.
        """
    def close(self, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None) -> None:
        """
        Ends everything: transfers, handles, peers, threads. Idempotent. Raises TimedOut when
        something did not come to rest in time; everything is closed all the same.
        """
    def connect(
        self, handle: RemoteView, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None
    ) -> Peer:
        """
        Reaches the engine behind a handle and fetches what puts through it need.

        A put does this by itself, without blocking; connecting before spares the first put the wait.
        Returns the Peer. Raises PeerLost, StaleHandle, Revoked, AccessDenied, BadHandle, TimedOut.
        """
    def empty(
        self, shape: int | tuple[int, ...], dtype: typing.Any, device: str = "cpu"
    ) -> typing.Any:
        """
        Allocates memory that other processes on this host can map: the target of fast puts.

        shape: an int or a tuple of ints. dtype: a torch dtype gives a torch tensor, a NumPy dtype or
        its name a NumPy array. The memory is a sealed memfd, zeroed, and allocated at once, so that
        a shortage is an error here and never a SIGBUS later.

        Raises LimitExceeded with the limit and the remedy, InvalidArgument for 0 bytes.
        """
    def explain(
        self, handle: RemoteView, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None
    ) -> str:
        """
        Says in words which transport carries transfers through a handle, which way the bytes go, and
        why no better transport does. Reaches the peer first, as connect() does.

        Raises PeerLost, StaleHandle, Revoked, AccessDenied, BadHandle, TimedOut.
        """
    def get(
        self,
        target: typing.Any,
        source: RemoteView,
        *,
        after: typing.Any = None,
        notify: bytes | None = None,
        label: typing.Any = None,
        deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
        accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
        queue: CompletionQueue | None = None,
    ) -> Transfer:
        """
        Reads the memory behind `source` into `target`; the other side's program takes no part.

        target: a Region or LocalView, or what register() takes. It is kept alive until the transfer
            ends, and holds the bytes once that is done.
        source: a RemoteHandle or a part of one, of equal shape and dtype, granted for 'get'.
        notify: a tag that arrives at the source's engine after the last byte was read.

        Everything else as in put().
        """
    def get_many(
        self,
        pairs: collections.abc.Iterable[tuple[typing.Any, typing.Any]],
        *,
        after: typing.Any = None,
        notify: bytes | None = None,
        label: typing.Any = None,
        deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
        accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
        queue: CompletionQueue | None = None,
    ) -> Transfer:
        """
        Reads several (target, source) pairs as one transfer, with one notify after all bytes.
        All sources come from one handle, and no byte may be in two targets. Otherwise as get().
        """
    def notify(
        self,
        target: Peer | RemoteView,
        tag: bytes,
        *,
        deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
        accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
    ) -> Transfer:
        """
        Sends a tag of up to 240 bytes without data, to the engine behind a handle or to a Peer.

        Returns a Transfer. Raises PeerLost, StaleHandle, Revoked, WouldBlock, TimedOut, Closed.
        """
    def peer_stats(self) -> list[dict[str, typing.Any]]:
        """
        What has moved to and from each peer that was ever connected: a list of dicts, one per peer
        and transport, with its name, incarnation and transport, whether it is connected, and for
        'put' and 'get' the transfers done, failed and cancelled; of those done the bytes, the runs,
        'ns' from acceptance to the end (of those up to 1 KiB every sixteenth is timed and stands for the
        others) and 'queue_ns' of it until the transport was asked; and
        histograms [(least, count)] by powers of two, 'by_bytes' and 'by_ns'. Beyond 1,024 of them
        the rest is counted together, under an empty name.
        """
    def plan(
        self,
        source_group: typing.Any,
        target_group: typing.Any,
        *,
        block_axis: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> Plan:
        """
        Checks and cuts two groups once, so that blocks of them can be moved again and again.

        source_group, target_group: one is local (a Region, its view, or a tensor), the other a
            RemoteHandle or a part of one. Their tensors are paired in order: layers. Dtypes and shapes
            must be equal but for the size of the block axis.
        block_axis: the axis that blocks are counted along, in every tensor.

        Returns a Plan. Raises LayoutMismatch, InvalidArgument where tensors of a side share bytes,
        OutOfRange, Unsupported where the block axis was indexed with a list.
        """
    def put(
        self,
        source: typing.Any,
        target: RemoteView,
        *,
        after: typing.Any = None,
        notify: bytes | None = None,
        label: typing.Any = None,
        deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
        accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
        queue: CompletionQueue | None = None,
    ) -> Transfer:
        """
        Writes `source` into the memory behind `target`; the other side's program takes no part.

        source: a Region or LocalView, or what register() takes, also read-only. It may be reused
            once the transfer is done, and is kept alive until then. It need not be registered;
            memory outside every region is counted in stats()['temporary_registrations'].
        target: a RemoteHandle or a part of one, of equal shape and dtype.
        after: what the source must wait for on its device, or kvzc.NOW; nothing on CPU memory.
        notify: a tag of up to 240 bytes that arrives at the target's engine after every byte.
        label: any object; comes back as Transfer.label, also from a queue.
        deadline: seconds from now after which the transfer is cancelled by itself.
        accept_timeout: seconds to wait while queues or the target's inbox are full; 0 raises
            WouldBlock instead, with nothing posted. Default: the engine's default_timeout.
        queue: a CompletionQueue that gives the transfer back when it has ended.

        Returns a Transfer. Raises LayoutMismatch, InvalidArgument (overlapping targets), PeerLost,
        StaleHandle, Revoked, AccessDenied, WouldBlock, TimedOut, Closed. What is only known once the
        peer is reached is raised by Transfer.wait().
        """
    def put_many(
        self,
        pairs: collections.abc.Iterable[tuple[typing.Any, typing.Any]],
        *,
        after: typing.Any = None,
        notify: bytes | None = None,
        label: typing.Any = None,
        deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
        accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
        queue: CompletionQueue | None = None,
    ) -> Transfer:
        """
        Writes several (source, target) pairs as one transfer, with one notify after all bytes.
        All targets come from one handle, and no byte may be in two of them. Otherwise as put().
        """
    def register(self, obj: typing.Any) -> Region:
        """
        Registers memory, so that peers can be given handles to it.

        obj: a torch CPU tensor, a NumPy array, a CPU tensor of any library that has DLPack, a
            writable buffer, or a dict of names to such: one group with one handle. A non-contiguous
            tensor keeps its shape and strides. The objects are kept alive until the region is closed;
            a storage that is registered twice is registered once.

        dtypes: those of torch and NumPy, ml_dtypes' bfloat16 and float8 (the same names, the same
        types). NumPy's structured types, strings and times move as their bytes: both sides need the
        same dtype, names and offsets of fields included.

        Returns a Region. Raises InvalidArgument (empty, read-only, meta), Unsupported (dtype, device,
        layout), LimitExceeded, Closed.
        """
    def resolve(
        self,
        catalog: Catalog,
        address: typing.SupportsInt | typing.SupportsIndex,
        nbytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> RemoteView:
        """
        Gives the owner's bytes at this address of its own as uint8[nbytes]: the target of a put, the
        source of a get. Raises OutOfRange, naming them, when they are not within one region of the
        catalog.
        """
    def stats(self) -> dict[str, int]:
        """
        A snapshot of the engine's counters. Nanoseconds: 'queue_ns', from acceptance until the
        transport was asked, of all transfers that are done; 'wait_ns', 'arrival_wait_ns' and
        'accept_wait_ns', what the program's threads have waited for transfers (beyond a first look
        at each, and what they copied themselves), for tags, and to have a transfer accepted.
        """
    def wait(
        self,
        transfers: collections.abc.Iterable[Transfer],
        timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
        return_when: str = "all",
    ) -> list[Transfer]:
        """
        Waits for several transfers and returns those that have ended.

        return_when: 'all' or 'first'. Raises the first error of those that ended, or
        TimedOut, and then those that run go on.
        """
    @property
    def addresses(self) -> list[str]:
        """
        Where engines on other hosts reach it, "host:port" each, as its handles say; [] when it
        does not listen.
        """
    @property
    def arrivals(self) -> Arrivals:
        """
        The tags that peers have sent to this engine.
        """
    @property
    def closed(self) -> bool:
        """
        Whether close() was called.
        """
    @property
    def default_timeout(self) -> float:
        """
        Seconds.
        """
    @property
    def incarnation(self) -> str:
        """
        Random per start, as 32 hexadecimal digits.
        """
    @property
    def name(self) -> str:
        """
        Its name, given or random.
        """

class Transfer:
    """
    One accepted put, get or notify, until its one end: done, failed or cancelled.

    Dropping it does not stop it.
    """
    def __await__(self) -> typing.Any:
        """
        Waits on an event loop that keeps running. Raises the transfer's own error, and PeerLost
        as wait() does. A task that is cancelled meanwhile leaves the transfer running.
        """
    def __eq__(self, arg0: typing.Any) -> typing.Any:
        """
        The same transfer, whoever gave it: put() or a queue.
        """
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    def cancel(self, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None) -> None:
        """
        Stops it and returns when it is quiet: as Cancelled, or done if it was faster. What was
        not begun is dropped; what was begun is bounded and waited for. Raises TimedOut when it
        is not quiet in time; it is still running then, and its memory is not to be used.
        """
    def wait(self, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None) -> None:
        """
        Returns once every byte is readable at the target, by anyone who is told of it.

        timeout: seconds; None is the engine's default, math.inf waits for ever. Raises the
        transfer's own error; TimedOut, and then the transfer is still running; PeerLost, also
        when the transfer is not quiet yet (.quiet says so).
        """
    def wait_on(self, stream: typing.Any) -> None:
        """
        Has a device's stream wait for the transfer, not the host. On CPU memory, which is all that
        this version moves, it does nothing, so that calling code is one for both.
        """
    @property
    def _lost(self) -> typing.Any:
        """
        Why the peer that it goes to is lost, or None.
        """
    @property
    def done(self) -> bool:
        """
        Whether it has ended, in whatever way.
        """
    @property
    def done_ns(self) -> int | None:
        """
        When it ended, on the same clock; None before. Up to 1 KiB, of those that were over when the
        call returned, mostly the same as submitted_ns: a look at the clock takes longer than they.
        """
    @property
    def error(self) -> typing.Any:
        """
        The error that it ended with, or None.
        """
    @property
    def label(self) -> typing.Any:
        """
        What the caller gave as label=.
        """
    @property
    def nbytes(self) -> int:
        """
        Size of all its parts in bytes.
        """
    @property
    def quiet(self) -> bool:
        """
        Whether not one more byte of it can move, on either side. Until then its memory is kept,
        also when its peer is lost.
        """
    @property
    def runs(self) -> int:
        """
        Number of pieces that are contiguous on both sides.
        """
    @property
    def submitted_ns(self) -> int:
        """
        When it was accepted: CLOCK_MONOTONIC, as time.monotonic_ns().
        """
    @property
    def transport(self) -> str | None:
        """
        Name of the transport that carries it; None until one is chosen.
        """

class CompletionQueue:
    """
    Gives back the transfers that were started with queue=, as they end.

    depth: how many may be running or not taken yet; a put beyond that is pushed back, so that
        no end is ever lost. One queue may serve several engines and threads.

    There are no callbacks: they would run on kvzc's threads, hold up its other transfers and
    meet the caller's locks. A queue gives the same to whoever has time for it.
    """
    def __aiter__(self) -> typing.Any:
        """
        Gives transfers as they end, on an event loop that keeps running.
        """
    def __enter__(self) -> CompletionQueue: ...
    def __exit__(self, type: typing.Any, value: typing.Any, traceback: typing.Any) -> None: ...
    def __init__(self, depth: typing.SupportsInt | typing.SupportsIndex = 16384) -> None: ...
    def __repr__(self) -> str: ...
    def _add(self, transfer: Transfer, label: typing.Any) -> None:
        """
        Takes in a transfer that runs already.
        """
    def close(self) -> None:
        """
        Forgets what it holds; transfers that run go on. Waits end with Closed. Idempotent.
        """
    def fileno(self) -> int:
        """
        A descriptor that is readable while poll() gives something; for select and event loops.
        It belongs to the queue.
        """
    def poll(self, max: typing.SupportsInt | typing.SupportsIndex = 64) -> list[Transfer]:
        """
        Takes up to `max` transfers that have ended, in that order; never waits. Look at .error:
        a transfer that failed raises nothing here. Raises Closed.
        """
    def wait(
        self,
        timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
        *,
        max: typing.SupportsInt | typing.SupportsIndex = 64,
    ) -> list[Transfer]:
        """
        Takes up to `max` transfers as soon as one has ended, helping with the copying meanwhile.

        timeout: seconds; None is 30, math.inf waits for ever. Raises TimedOut, Closed.
        """
    @property
    def closed(self) -> bool:
        """
        Whether close() was called.
        """
    @property
    def depth(self) -> int:
        """
        How many may be running or not taken yet.
        """
    @property
    def ended(self) -> int:
        """
        Those that have ended and were not taken.
        """
    @property
    def running(self) -> int:
        """
        Those that have not ended.
        """

class Plan:
    """
    Two groups of tensors that are made of blocks: see Engine.plan().

    It keeps its memory alive. Any thread may use it.
    """
    def __repr__(self) -> str: ...
    def get(
        self,
        source_blocks: typing.Any,
        target_blocks: typing.Any,
        *,
        layers: typing.Any | None = None,
        after: typing.Any = None,
        notify: bytes | None = None,
        label: typing.Any = None,
        deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
        accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
        queue: CompletionQueue | None = None,
    ) -> Transfer:
        """
        Reads blocks of the remote side into blocks of the local one: block source_blocks[i] of the
        remote side goes to target_blocks[i] here. Everything else as in Plan.put().
        """
    def put(
        self,
        source_blocks: typing.Any,
        target_blocks: typing.Any,
        *,
        layers: typing.Any | None = None,
        after: typing.Any = None,
        notify: bytes | None = None,
        label: typing.Any = None,
        deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
        accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
        queue: CompletionQueue | None = None,
    ) -> Transfer:
        """
        Writes blocks of the local side into blocks of the remote one: block source_blocks[i] goes to
        target_blocks[i], in each of the layers, as one transfer.

        source_blocks, target_blocks: block ids, 0 or more; a NumPy array of int64 is
            the quickest. No target block may be named twice.
        layers: a number, a name, a slice, or a list of numbers or names; None: all.

        Everything else as in put(). Returns a Transfer. Raises OutOfRange naming the entry,
        InvalidArgument, and what put() raises.
        """
    @property
    def block_nbytes(self) -> int:
        """
        Bytes of one block of all layers.
        """
    @property
    def block_pieces(self) -> int:
        """
        Pieces that are contiguous on both sides, in one block of all layers.
        """
    @property
    def layers(self) -> list[str]:
        """
        Names of the tensors, in order, as the remote side has them; [''] for one alone.
        """
    @property
    def local_blocks(self) -> int:
        """
        Blocks of each local tensor.
        """
    @property
    def remote_blocks(self) -> int:
        """
        Blocks of each remote tensor.
        """

class _SharedBuffer:
    """
    Memory that other processes can map; what empty() builds on.
    """

class RemoteView:
    """
    A part of what a handle grants: the target of a put, the source of a get. Made by indexing
    a handle.
    """
    def __getitem__(self, key: typing.Any) -> RemoteView:
        """
        The part that an index selects. Copies nothing, also with a list of block ids, where torch's
        own indexing would copy.

        Integers, slices of any step, '...', and on each axis at most one list, range or
        one-dimensional array of integers (block ids). Several lists act each on its own axis, as
        numpy.ix_ does. In a group, first a name, a list of names or a slice.

        Raises OutOfRange (an IndexError) beyond the shape, Closed for a closed region.
        """
    def __repr__(self) -> str: ...
    def notify(
        self,
        tag: bytes,
        *,
        engine: Engine | None = None,
        deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
        accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
    ) -> Transfer:
        """
        Sends a tag of up to 240 bytes without data to the engine that owns the memory, from
        `engine` or the default one. Returns a Transfer. Raises as put() does.
        """
    def permute(self, *args: int | collections.abc.Iterable[int]) -> RemoteView:
        """
        The same memory with its axes in another order, as torch's Tensor.permute(*dims). Copies
        nothing, also after an index with lists; in a group it applies to every tensor.

        So caches of different layouts go into each other, whichever side is permuted: blocks of
        [heads, tokens, dim] (HND) come out of blocks of [tokens, heads, dim] (NHD) by
        put(local[ids].permute(0, 2, 1, 3), handle[remote_ids]).

        Every axis is given once, apart or as one tuple; negative ones count from the end. Raises
        InvalidArgument (a ValueError), OutOfRange (an IndexError), Closed for a closed region.
        """
    def view(self, dtype: typing.Any) -> RemoteView:
        """
        The same bytes as elements of another type, as torch's Tensor.view(dtype). Copies and
        converts nothing; in a group it applies to every tensor.

        Where the sizes of the elements differ the last axis grows or shrinks: it must be
        contiguous, and its bytes a multiple of the new size.

        dtype: a torch dtype, whatever NumPy makes a dtype of, or a name as .dtype gives it. Raises
        InvalidArgument (a ValueError) with the remedy, Unsupported for types that kvzc does not
        move, Closed for a closed region.
        """
    @property
    def access(self) -> str:
        """
        What it grants: 'put', 'get' or 'both'.
        """
    @property
    def dtype(self) -> str:
        """
        Name of the element type, as in torch and NumPy: 'bfloat16'. Of other NumPy types, such
        as structured ones, 'record', the bytes of an element, and a fingerprint of the dtype.
        Raises InvalidArgument for a group.
        """
    @property
    def names(self) -> list[str]:
        """
        Names of a group's tensors, in order; empty for a single tensor.
        """
    @property
    def nbytes(self) -> int:
        """
        Size of all elements in bytes.
        """
    @property
    def shape(self) -> tuple[int, ...]:
        """
        Extents of the tensor. Raises InvalidArgument for a group.
        """

class RemoteHandle(RemoteView):
    """
    A grant of another engine's memory. Whoever has its bytes may use it, so they travel by a
    channel that you trust; nothing of the key shows in repr or str.
    """
    @staticmethod
    def from_bytes(data: bytes) -> RemoteHandle:
        """
        Reads what to_bytes() gave. Raises BadHandle (a ValueError).
        """
    @staticmethod
    def from_text(text: str) -> RemoteHandle:
        """
        Reads what to_text() gave. Raises BadHandle (a ValueError).
        """
    def __getstate__(self) -> bytes: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, arg0: bytes) -> None: ...
    def to_bytes(self) -> bytes:
        """
        Gives the handle as bytes, versioned and complete.
        """
    def to_text(self) -> str:
        """
        Gives the handle as text that fits into URLs and JSON.
        """
    @property
    def engine(self) -> str:
        """
        Name of the engine that owns the memory.
        """

class Grant:
    """
    A right that was given out: to put, to get, or both, in one view of a region.

    A context manager: leaving it revokes the grant. Dropping it does not.
    """
    def __enter__(self) -> Grant: ...
    def __exit__(self, type: typing.Any, value: typing.Any, traceback: typing.Any) -> None: ...
    def __reduce__(self) -> typing.Any: ...
    def __repr__(self) -> str: ...
    def close(self, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None) -> None:
        """
        The same as revoke().
        """
    def handle(self) -> RemoteHandle:
        """
        Gives the handle for the other side: just this view, with its own key. Raises Revoked.
        """
    def revoke(
        self,
        timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
        *,
        force: bool = False,
    ) -> None:
        """
        Returns once no put or get through it touches the memory, so that its blocks may be given to
        somebody else. Transfers that run through it end as Revoked at their senders; other grants,
        transfers and peers go on. Idempotent.

        timeout: seconds, by default the engine's. A peer that does not leave in time: TimedOut names
            it. The grant is revoked all the same, but the memory is in quarantine (see stats()):
            do not use it before a later revoke() has returned.
        force: cut such a peer off instead: its transfers fail, its connection closes, and not one
            more byte of it lands; it stays lost to this engine until it makes another engine. Raises
            Unsupported, with the reason, where that cannot be had.
        """
    @property
    def access(self) -> str:
        """
        'put', 'get' or 'both'.
        """
    @property
    def dtype(self) -> str:
        """
        Name of the element type, as in torch and NumPy: 'bfloat16'. Of other NumPy types, such
        as structured ones, 'record', the bytes of an element, and a fingerprint of the dtype.
        Raises InvalidArgument for a group.
        """
    @property
    def names(self) -> list[str]:
        """
        Names of a group's tensors, in order; empty for a single tensor.
        """
    @property
    def nbytes(self) -> int:
        """
        Size of all elements in bytes.
        """
    @property
    def revoked(self) -> bool:
        """
        Whether it holds no more.
        """
    @property
    def shape(self) -> tuple[int, ...]:
        """
        Extents of the tensor. Raises InvalidArgument for a group.
        """

class LocalView:
    """
    A part of a region: the source of a put, the target of a get, what a grant covers. Made by
    indexing a region; copies nothing.
    """
    def __getitem__(self, key: typing.Any) -> LocalView:
        """
        The part that an index selects. Copies nothing, also with a list of block ids, where torch's
        own indexing would copy.

        Integers, slices of any step, '...', and on each axis at most one list, range or
        one-dimensional array of integers (block ids). Several lists act each on its own axis, as
        numpy.ix_ does. In a group, first a name, a list of names or a slice.

        Raises OutOfRange (an IndexError) beyond the shape, Closed for a closed region.
        """
    def __repr__(self) -> str: ...
    def grant(self, access: str = "both") -> Grant:
        """
        Gives out a right to just this part: 'put', 'get' or 'both'. It has its own key and is
        revoked alone; making one costs microseconds, a hundred thousand may be alive.

        Returns a Grant, whose handle() goes to the other side. The grant holds until revoke(), or
        until the region is closed, also when the Grant object is dropped. Raises Closed,
        LimitExceeded.
        """
    def permute(self, *args: int | collections.abc.Iterable[int]) -> LocalView:
        """
        The same memory with its axes in another order, as torch's Tensor.permute(*dims). Copies
        nothing, also after an index with lists; in a group it applies to every tensor.

        So caches of different layouts go into each other, whichever side is permuted: blocks of
        [heads, tokens, dim] (HND) come out of blocks of [tokens, heads, dim] (NHD) by
        put(local[ids].permute(0, 2, 1, 3), handle[remote_ids]).

        Every axis is given once, apart or as one tuple; negative ones count from the end. Raises
        InvalidArgument (a ValueError), OutOfRange (an IndexError), Closed for a closed region.
        """
    def view(self, dtype: typing.Any) -> LocalView:
        """
        The same bytes as elements of another type, as torch's Tensor.view(dtype). Copies and
        converts nothing; in a group it applies to every tensor.

        Where the sizes of the elements differ the last axis grows or shrinks: it must be
        contiguous, and its bytes a multiple of the new size.

        dtype: a torch dtype, whatever NumPy makes a dtype of, or a name as .dtype gives it. Raises
        InvalidArgument (a ValueError) with the remedy, Unsupported for types that kvzc does not
        move, Closed for a closed region.
        """
    @property
    def dtype(self) -> str:
        """
        Name of the element type, as in torch and NumPy: 'bfloat16'. Of other NumPy types, such
        as structured ones, 'record', the bytes of an element, and a fingerprint of the dtype.
        Raises InvalidArgument for a group.
        """
    @property
    def names(self) -> list[str]:
        """
        Names of a group's tensors, in order; empty for a single tensor.
        """
    @property
    def nbytes(self) -> int:
        """
        Size of all elements in bytes.
        """
    @property
    def shape(self) -> tuple[int, ...]:
        """
        Extents of the tensor. Raises InvalidArgument for a group.
        """

class Region:
    """
    Memory registered with an engine: one tensor or a group of named ones.

    It keeps the memory alive until close(), and is a context manager. A region that is
    collected is closed too, without anybody waiting: keep it while peers may write.
    """
    def __enter__(self) -> Region: ...
    def __exit__(self, type: typing.Any, value: typing.Any, traceback: typing.Any) -> None: ...
    def __getitem__(self, key: typing.Any) -> LocalView:
        """
        The part that an index selects. Copies nothing, also with a list of block ids, where torch's
        own indexing would copy.

        Integers, slices of any step, '...', and on each axis at most one list, range or
        one-dimensional array of integers (block ids). Several lists act each on its own axis, as
        numpy.ix_ does. In a group, first a name, a list of names or a slice.

        Raises OutOfRange (an IndexError) beyond the shape, Closed for a closed region.
        """
    def __reduce__(self) -> typing.Any: ...
    def __repr__(self) -> str: ...
    def close(self, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None) -> None:
        """
        Revokes the region's grants, waits until no peer touches it through them, and lets the
        memory go. Idempotent. Raises TimedOut when a peer was still within after `timeout`
        seconds: the grants are revoked, and the engine keeps the memory until that peer is out
        of it.
        """
    def grant(self, access: str = "both") -> Grant:
        """
        Gives out a right to just this part: 'put', 'get' or 'both'. It has its own key and is
        revoked alone; making one costs microseconds, a hundred thousand may be alive.

        Returns a Grant, whose handle() goes to the other side. The grant holds until revoke(), or
        until the region is closed, also when the Grant object is dropped. Raises Closed,
        LimitExceeded.
        """
    def handle(self) -> RemoteHandle:
        """
        Gives a handle of the whole region, for put and get. Its bytes are the right to write:
        pass them on by a channel that you trust. Raises Closed.
        """
    def permute(self, *args: int | collections.abc.Iterable[int]) -> LocalView:
        """
        The same memory with its axes in another order, as torch's Tensor.permute(*dims). Copies
        nothing, also after an index with lists; in a group it applies to every tensor.

        So caches of different layouts go into each other, whichever side is permuted: blocks of
        [heads, tokens, dim] (HND) come out of blocks of [tokens, heads, dim] (NHD) by
        put(local[ids].permute(0, 2, 1, 3), handle[remote_ids]).

        Every axis is given once, apart or as one tuple; negative ones count from the end. Raises
        InvalidArgument (a ValueError), OutOfRange (an IndexError), Closed for a closed region.
        """
    def revoke(
        self,
        timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
        *,
        force: bool = False,
    ) -> None:
        """
        Returns once no put or get through it touches the memory, so that its blocks may be given to
        somebody else. Transfers that run through it end as Revoked at their senders; other grants,
        transfers and peers go on. Idempotent.

        timeout: seconds, by default the engine's. A peer that does not leave in time: TimedOut names
            it. The grant is revoked all the same, but the memory is in quarantine (see stats()):
            do not use it before a later revoke() has returned.
        force: cut such a peer off instead: its transfers fail, its connection closes, and not one
            more byte of it lands; it stays lost to this engine until it makes another engine. Raises
            Unsupported, with the reason, where that cannot be had.
        """
    def view(self, dtype: typing.Any) -> LocalView:
        """
        The same bytes as elements of another type, as torch's Tensor.view(dtype). Copies and
        converts nothing; in a group it applies to every tensor.

        Where the sizes of the elements differ the last axis grows or shrinks: it must be
        contiguous, and its bytes a multiple of the new size.

        dtype: a torch dtype, whatever NumPy makes a dtype of, or a name as .dtype gives it. Raises
        InvalidArgument (a ValueError) with the remedy, Unsupported for types that kvzc does not
        move, Closed for a closed region.
        """
    @property
    def closed(self) -> bool:
        """
        Whether close() was called.
        """
    @property
    def dtype(self) -> str:
        """
        Name of the element type, as in torch and NumPy: 'bfloat16'. Of other NumPy types, such
        as structured ones, 'record', the bytes of an element, and a fingerprint of the dtype.
        Raises InvalidArgument for a group.
        """
    @property
    def names(self) -> list[str]:
        """
        Names of a group's tensors, in order; empty for a single tensor.
        """
    @property
    def nbytes(self) -> int:
        """
        Size of all elements in bytes.
        """
    @property
    def path(self) -> str:
        """
        In words: how peers reach this memory, and what would make it faster.
        """
    @property
    def shape(self) -> tuple[int, ...]:
        """
        Extents of the tensor. Raises InvalidArgument for a group.
        """

class _Now:
    def __repr__(self) -> str: ...

class Memory:
    """
    Memory of this process that is known by numbers alone, as uint8[nbytes].

    address, nbytes: all of it must be mapped; whether it can be written is looked up.
    device: 'cpu' in this version.
    owner: an object that keeps it mapped; held as long as kvzc uses the memory. Without one
        that is the caller's to see to, until the region is closed or the transfer has ended.

    For register(), and for put() and get(). Raises InvalidArgument naming the first byte that is
    not mapped.
    """
    def __init__(
        self,
        address: typing.SupportsInt | typing.SupportsIndex,
        nbytes: typing.SupportsInt | typing.SupportsIndex,
        device: str = "cpu",
        owner: typing.Any = None,
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def address(self) -> int:
        """
        Where it begins.
        """
    @property
    def device(self) -> str:
        """
        Where it is.
        """
    @property
    def nbytes(self) -> int:
        """
        Size in bytes.
        """
    @property
    def owner(self) -> typing.Any:
        """
        What keeps it mapped, or None.
        """
    @property
    def writable(self) -> bool:
        """
        Whether it can be written.
        """

class Catalog:
    """
    All memory that an engine had registered when it was made: see Engine.catalog(). Whoever has
    its bytes may put into and get from all of it, so they travel by a channel that you trust.
    """
    @staticmethod
    def from_bytes(data: bytes) -> Catalog:
        """
        Reads what to_bytes() gave. Raises BadHandle (a ValueError).
        """
    @staticmethod
    def from_text(text: str) -> Catalog:
        """
        Reads what to_text() gave. Raises BadHandle (a ValueError).
        """
    def __repr__(self) -> str: ...
    def resolve(
        self,
        address: typing.SupportsInt | typing.SupportsIndex,
        nbytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> RemoteView:
        """
        Gives the owner's bytes at this address of its own as uint8[nbytes]: the target of a put, the
        source of a get. Raises OutOfRange, naming them, when they are not within one region of the
        catalog.
        """
    def to_bytes(self) -> bytes:
        """
        Gives the catalog as bytes, versioned and complete.
        """
    def to_text(self) -> str:
        """
        Gives the catalog as text that fits into URLs and JSON.
        """
    @property
    def engine(self) -> str:
        """
        Name of the engine that owns it.
        """
    @property
    def ranges(self) -> list[tuple[int, int]]:
        """
        (address, nbytes) of all it holds, in order; none lies within another.
        """

class Peer:
    """
    Another engine, as this one knows it.
    """
    def __repr__(self) -> str: ...
    def notify(
        self,
        tag: bytes,
        *,
        deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
        accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
    ) -> Transfer:
        """
        Sends a tag of up to 240 bytes without data. Returns a Transfer. Raises PeerLost,
        WouldBlock, TimedOut, Closed.
        """
    @property
    def address(self) -> str | None:
        """
        The other end of the connection, "host:port"; None when it is on this host.
        """
    @property
    def error(self) -> typing.Any:
        """
        Why it is lost, or None.
        """
    @property
    def incarnation(self) -> str:
        """
        Random per start of that engine, as 32 hexadecimal digits.
        """
    @property
    def lost(self) -> bool:
        """
        Whether it is known to be gone.
        """
    @property
    def name(self) -> str:
        """
        The name that its engine was made with.
        """
    @property
    def pid(self) -> int:
        """
        Its process, or 0 when that is in another pid namespace or on another host.
        """
    @property
    def uid(self) -> int:
        """
        Its user id; 0 when it is on another host.
        """

class Arrival:
    """
    A tag that has come in.
    """
    def __repr__(self) -> str: ...
    @property
    def arrived_ns(self) -> int:
        """
        When this engine saw it: CLOCK_MONOTONIC, as time.monotonic_ns().
        """
    @property
    def error(self) -> typing.Any:
        """
        None, and every byte is readable; or why the sender's transfer failed.
        """
    @property
    def peer(self) -> Peer:
        """
        Who sent it.
        """
    @property
    def tag(self) -> bytes:
        """
        The tag, as its sender gave it.
        """

class Arrivals:
    """
    The tags that peers have sent to an engine.

    A tag that somebody waits for is not given to poll().
    """
    def __aiter__(self) -> typing.Any:
        """
        Gives arrivals as poll() does, on an event loop that keeps running.
        """
    def fileno(self) -> int:
        """
        A descriptor that is readable when poll() may give something; for select and event
        loops. It belongs to the engine.
        """
    def forget(self, tag: bytes) -> None:
        """
        Discards the arrivals of `tag`, those to come too, for arrival_ttl seconds or until
        somebody waits for it.
        """
    def poll(self, max: typing.SupportsInt | typing.SupportsIndex = 64) -> list[Arrival]:
        """
        Takes up to `max` arrivals, the oldest first; never waits.
        """
    @typing.overload
    def wait(
        self,
        tag: bytes,
        *,
        peer: Peer | None = None,
        timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
    ) -> Arrival:
        """
        Takes one arrival of `tag`: when it returns, its bytes are readable unless .error says
        otherwise. With `peer`, only from that peer, and PeerLost when it is gone. Raises
        TimedOut after `timeout` seconds (None: the engine's default), Closed.
        """
    @typing.overload
    def wait(
        self,
        tag: bytes,
        count: typing.SupportsInt | typing.SupportsIndex,
        *,
        peer: Peer | None = None,
        timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
    ) -> list[Arrival]:
        """
        Takes `count` arrivals of `tag` together, in the order in which they came.
        """

class Faults:
    """
    Trouble on demand, for tests of programs that must live with it: Engine(faults=Faults(...)).

    What kvzc promises stays promised: a notify never overtakes its data, a transfer ends once,
    and not one byte moves after the end. Chances are 0 to 1, drawn from one seeded sequence.

    seed: of the random numbers.
    stripe_bytes: transfers are cut into stripes of at most this size, which travel apart; 0: not.
    delay: stripes, ends and tags are held back for a random time up to this, in seconds.
    reorder: stripes begin in random order.
    post_failure: chance that a transfer fails at once (SystemFailure) with nothing moved.
    stripe_failure: chance that it fails after some of its stripes have moved.
    completion_loss: chance that its end is never told: it runs until it is cancelled, its
        deadline passes, or the peer is lost.
    vanish_after: after this many transfers to a peer, that peer falls silent; 0: never.
    detection: seconds until a silent peer is reported lost; math.inf: never.
    """
    def __init__(
        self,
        *,
        seed: typing.SupportsInt | typing.SupportsIndex = 1,
        stripe_bytes: typing.SupportsInt | typing.SupportsIndex = 0,
        delay: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        reorder: bool = False,
        post_failure: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        stripe_failure: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        completion_loss: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        vanish_after: typing.SupportsInt | typing.SupportsIndex = 0,
        detection: typing.SupportsFloat | typing.SupportsIndex = 1.0,
    ) -> None: ...
    def __repr__(self) -> str: ...

class Rdma:
    """
    How RDMA devices are used: Engine(rdma=Rdma(devices=["mlx5_0", "mlx5_1"])).

    devices: names, as `ibv_devices` lists them. Each is a rail: the first here goes to the first
        of the peer, and so on. None: every device with an active port.
    gid_index: the address to use, as `kvzc info` lists them; None chooses: RoCE v2, IPv4, the one
        that is nearest to the peer's.
    traffic_class, service_level: 0 to 255 and 0 to 15, as the network's operator says (PFC, ECN).
    ack_timeout: a packet is sent again after 4.096 microseconds times 2 to the power of this
        (1 to 31), and `retries` times (0 to 7), before the peer's port counts as gone.
    queue_depth: work requests under way per peer and device, 64 to 8192.
    request_bytes: a longer run of bytes is cut into requests of this size.
    outstanding_bytes: bytes under way per peer and device; a cancel waits for these.
    stripe_bytes: transfers from this size on go over all rails at once.
    always_flush: read back after each write, even where the peer's device acknowledges only what
        is visible.

    Raises ValueError for what is out of range.
    """
    def __init__(
        self,
        *,
        devices: collections.abc.Sequence[str] | None = None,
        gid_index: typing.SupportsInt | typing.SupportsIndex | None = None,
        traffic_class: typing.SupportsInt | typing.SupportsIndex = 0,
        service_level: typing.SupportsInt | typing.SupportsIndex = 0,
        ack_timeout: typing.SupportsInt | typing.SupportsIndex = 14,
        retries: typing.SupportsInt | typing.SupportsIndex = 7,
        queue_depth: typing.SupportsInt | typing.SupportsIndex = 256,
        request_bytes: typing.SupportsInt | typing.SupportsIndex = 1048576,
        outstanding_bytes: typing.SupportsInt | typing.SupportsIndex = 8388608,
        stripe_bytes: typing.SupportsInt | typing.SupportsIndex = 262144,
        always_flush: bool = False,
    ) -> None: ...
    def __repr__(self) -> str: ...

def _close_all() -> None:
    """
    Closes every engine of this process, in a second at most.
    """

def _is_sharable(
    address: typing.SupportsInt | typing.SupportsIndex,
    nbytes: typing.SupportsInt | typing.SupportsIndex,
) -> bool:
    """
    Whether these bytes lie in memory that other processes can map.
    """

def connect(
    handle: RemoteView, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None
) -> Peer:
    """
    Reaches the engine behind a handle and fetches what puts through it need.

    A put does this by itself, without blocking; connecting before spares the first put the wait.
    Returns the Peer. Raises PeerLost, StaleHandle, Revoked, AccessDenied, BadHandle, TimedOut.
    """

def default_engine() -> Engine:
    """
    The engine that the module-level functions act on, made at first use.
    """

def empty(shape: int | tuple[int, ...], dtype: typing.Any, device: str = "cpu") -> typing.Any:
    """
    Allocates memory that other processes on this host can map: the target of fast puts.

    shape: an int or a tuple of ints. dtype: a torch dtype gives a torch tensor, a NumPy dtype or
    its name a NumPy array. The memory is a sealed memfd, zeroed, and allocated at once, so that
    a shortage is an error here and never a SIGBUS later.

    Raises LimitExceeded with the limit and the remedy, InvalidArgument for 0 bytes.
    """

def explain(
    handle: RemoteView, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None
) -> str:
    """
    Says in words which transport carries transfers through a handle, which way the bytes go, and
    why no better transport does. Reaches the peer first, as connect() does.

    Raises PeerLost, StaleHandle, Revoked, AccessDenied, BadHandle, TimedOut.
    """

def get(
    target: typing.Any,
    source: RemoteView,
    *,
    after: typing.Any = None,
    notify: bytes | None = None,
    label: typing.Any = None,
    deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
    accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
    queue: CompletionQueue | None = None,
) -> Transfer:
    """
    Reads the memory behind `source` into `target`; the other side's program takes no part.

    target: a Region or LocalView, or what register() takes. It is kept alive until the transfer
        ends, and holds the bytes once that is done.
    source: a RemoteHandle or a part of one, of equal shape and dtype, granted for 'get'.
    notify: a tag that arrives at the source's engine after the last byte was read.

    Everything else as in put().
    """

def get_many(
    pairs: collections.abc.Iterable[tuple[typing.Any, typing.Any]],
    *,
    after: typing.Any = None,
    notify: bytes | None = None,
    label: typing.Any = None,
    deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
    accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
    queue: CompletionQueue | None = None,
) -> Transfer:
    """
    Reads several (target, source) pairs as one transfer, with one notify after all bytes.
    All sources come from one handle, and no byte may be in two targets. Otherwise as get().
    """

def plan(
    source_group: typing.Any,
    target_group: typing.Any,
    *,
    block_axis: typing.SupportsInt | typing.SupportsIndex = 0,
) -> Plan:
    """
    Checks and cuts two groups once, so that blocks of them can be moved again and again.

    source_group, target_group: one is local (a Region, its view, or a tensor), the other a
        RemoteHandle or a part of one. Their tensors are paired in order: layers. Dtypes and shapes
        must be equal but for the size of the block axis.
    block_axis: the axis that blocks are counted along, in every tensor.

    Returns a Plan. Raises LayoutMismatch, InvalidArgument where tensors of a side share bytes,
    OutOfRange, Unsupported where the block axis was indexed with a list.
    """

def put(
    source: typing.Any,
    target: RemoteView,
    *,
    after: typing.Any = None,
    notify: bytes | None = None,
    label: typing.Any = None,
    deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
    accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
    queue: CompletionQueue | None = None,
) -> Transfer:
    """
    Writes `source` into the memory behind `target`; the other side's program takes no part.

    source: a Region or LocalView, or what register() takes, also read-only. It may be reused
        once the transfer is done, and is kept alive until then. It need not be registered;
        memory outside every region is counted in stats()['temporary_registrations'].
    target: a RemoteHandle or a part of one, of equal shape and dtype.
    after: what the source must wait for on its device, or kvzc.NOW; nothing on CPU memory.
    notify: a tag of up to 240 bytes that arrives at the target's engine after every byte.
    label: any object; comes back as Transfer.label, also from a queue.
    deadline: seconds from now after which the transfer is cancelled by itself.
    accept_timeout: seconds to wait while queues or the target's inbox are full; 0 raises
        WouldBlock instead, with nothing posted. Default: the engine's default_timeout.
    queue: a CompletionQueue that gives the transfer back when it has ended.

    Returns a Transfer. Raises LayoutMismatch, InvalidArgument (overlapping targets), PeerLost,
    StaleHandle, Revoked, AccessDenied, WouldBlock, TimedOut, Closed. What is only known once the
    peer is reached is raised by Transfer.wait().
    """

def put_many(
    pairs: collections.abc.Iterable[tuple[typing.Any, typing.Any]],
    *,
    after: typing.Any = None,
    notify: bytes | None = None,
    label: typing.Any = None,
    deadline: typing.SupportsFloat | typing.SupportsIndex | None = None,
    accept_timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
    queue: CompletionQueue | None = None,
) -> Transfer:
    """
    Writes several (source, target) pairs as one transfer, with one notify after all bytes.
    All targets come from one handle, and no byte may be in two of them. Otherwise as put().
    """

def register(obj: typing.Any) -> Region:
    """
    Registers memory, so that peers can be given handles to it.

    obj: a torch CPU tensor, a NumPy array, a CPU tensor of any library that has DLPack, a
        writable buffer, or a dict of names to such: one group with one handle. A non-contiguous
        tensor keeps its shape and strides. The objects are kept alive until the region is closed;
        a storage that is registered twice is registered once.

    dtypes: those of torch and NumPy, ml_dtypes' bfloat16 and float8 (the same names, the same
    types). NumPy's structured types, strings and times move as their bytes: both sides need the
    same dtype, names and offsets of fields included.

    Returns a Region. Raises InvalidArgument (empty, read-only, meta), Unsupported (dtype, device,
    layout), LimitExceeded, Closed.
    """

def transports() -> list[tuple[str, bool, str]]:
    """
    Lists (name, available, reason) of every transport, the preferred first.
    """

def wait(
    transfers: collections.abc.Iterable[Transfer],
    timeout: typing.SupportsFloat | typing.SupportsIndex | None = None,
    return_when: str = "all",
) -> list[Transfer]:
    """
    Waits for several transfers and returns those that have ended.

    return_when: 'all' or 'first'. Raises the first error of those that ended, or
    TimedOut, and then those that run go on.
    """

NOW: _Now
__version__: str = "0.1.0"
arrivals: Arrivals
