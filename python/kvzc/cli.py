"""The command ``kvzc``: what this machine can do (``info``), and a real split (``demo``)."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from textwrap import wrap
from typing import Any

from kvzc.demo import run as demo

_MIB = 1 << 20
_GIB = 1 << 30
# A cgroup of version 1 without a limit reports the largest number of whole pages.
_NO_CGROUP_LIMIT = 1 << 60

_TRANSPORTS = {
    "shm": ("shared memory, one host", "part of kvzc"),
    "tcp": ("sockets, any network", "part of kvzc"),
    "rdma": (
        "InfiniBand and RoCE",
        "rdma-core: libibverbs1 and ibverbs-providers on Debian and Ubuntu, "
        "libibverbs on Fedora and RHEL",
    ),
    "ascend": (
        "Ascend NPUs",
        "the Ascend driver (HDK) and the CANN toolkit or runtime, from hiascend.com",
    ),
}


@dataclass(frozen=True)
class TransportInfo:
    """One transport: can it be used here, and if not, why, and which package brings it."""

    name: str
    fabric: str
    available: bool | None
    reason: str
    package: str


@dataclass(frozen=True)
class Limit:
    """One limit of this machine or process. ``value`` is None where it cannot be known."""

    name: str
    value: Any
    text: str
    remark: str = ""


class Machine:
    """Where ``info`` gets its facts. Each method gives None for what this machine lacks."""

    def read(self, path: str) -> str | None:
        """The text of a file, without surrounding space."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return None

    def rlimit(self, name: str) -> tuple[int, int] | None:
        """Soft and hard limit ``RLIMIT_<name>``; ``RLIM_INFINITY`` (-1) is unlimited."""
        try:
            return resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        except (AttributeError, OSError, ValueError):
            return None

    def space(self, path: str) -> tuple[int, int] | None:
        """Size and free space of the file system at ``path``, in bytes."""
        try:
            stat = os.statvfs(path)
        except OSError:
            return None
        return stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail

    def kernel(self) -> str | None:
        """The kernel's release, such as ``6.8.0-45-generic``."""
        return platform.release() or None

    def transports(self) -> list[Any]:
        """(name, available, reason) of each transport, from the core."""
        from kvzc import _core

        return list(_core.transports())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with ``argv`` (default: the process's) and returns the exit code."""
    options = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvzc", description="Zero-copy transport for the KV caches of large language models."
    )
    parser.add_argument("--version", action="version", version=f"kvzc {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    info = commands.add_parser(
        "info",
        help="what this machine can do: transports, and limits that will bite",
        description="Prints version, transports (and what is missing for those that cannot be "
        "used) and the limits of this machine and process, with a remark where one is low.",
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)

    split = commands.add_parser(
        "demo",
        help=demo.SUMMARY,
        description=demo.DESCRIPTION,
        epilog=demo.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_arguments(split)
    split.set_defaults(run=demo.main)
    return parser


def _version() -> str:
    import kvzc

    return str(getattr(kvzc, "__version__", "unknown"))


def _info(options: argparse.Namespace) -> int:
    machine = Machine()
    facts = {
        "version": _version(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
    }
    transports = transport_infos(machine)
    limits = list(find_limits(machine))
    if options.json:
        found: dict[str, Any] = {
            **facts,
            "transports": [asdict(each) for each in transports],
            "limits": [asdict(each) for each in limits],
        }
        print(json.dumps(found, indent=2))
    else:
        print(_table(facts, transports, limits))
    return 0


def transport_infos(machine: Machine) -> list[TransportInfo]:
    """Every transport that kvzc has, in the words of the core."""
    try:
        listed = {name: (bool(available), reason) for name, available, reason in _rows(machine)}
    except (ImportError, AttributeError) as error:
        return [
            TransportInfo(name, fabric, None, f"the core cannot say: {error}", package)
            for name, (fabric, package) in _TRANSPORTS.items()
        ]
    absent = (False, "not in this build of kvzc")
    infos = []
    for name in [*_TRANSPORTS, *(set(listed) - set(_TRANSPORTS))]:
        fabric, package = _TRANSPORTS.get(name, ("", ""))
        infos.append(TransportInfo(name, fabric, *listed.get(name, absent), package))
    return infos


def _rows(machine: Machine) -> Iterator[tuple[str, bool, str]]:
    for row in machine.transports():
        if isinstance(row, tuple):
            yield row
        else:
            yield row.name, row.available, row.reason


def find_limits(machine: Machine) -> Iterator[Limit]:
    """The limits that large registrations and many peers run into."""
    yield _rlimit(
        machine,
        "MEMLOCK",
        low=_GIB,
        show=_bytes,
        remark="low: memory registered for RDMA counts against it. Raise it with "
        "`ulimit -l unlimited`, systemd's LimitMEMLOCK=infinity or docker's --ulimit memlock=-1",
    )
    yield _rlimit(
        machine,
        "NOFILE",
        low=4096,
        show=str,
        remark="low: every shared allocation and every peer takes descriptors. Raise it with "
        "`ulimit -n`, systemd's LimitNOFILE= or docker's --ulimit nofile=",
    )
    yield _max_map_count(machine)
    yield _dev_shm(machine)
    yield _cgroup_memory(machine)
    yield _kernel(machine)
    yield _ptrace_scope(machine)
    yield _transparent_huge_pages(machine)
    yield _huge_pages(machine)


def _unknown(name: str, source: str) -> Limit:
    return Limit(name, None, f"unknown ({source} cannot be read)")


def _rlimit(
    machine: Machine, name: str, low: int, show: Callable[[int], str], remark: str
) -> Limit:
    limits = machine.rlimit(name)
    if limits is None:
        return _unknown(f"RLIMIT_{name}", f"RLIMIT_{name}")
    soft, hard = ("unlimited" if each == -1 else show(each) for each in limits)
    text = soft if soft == hard else f"{soft} (can be raised to {hard})"
    return Limit(f"RLIMIT_{name}", limits[0], text, remark if 0 <= limits[0] < low else "")


def _max_map_count(machine: Machine) -> Limit:
    path = "/proc/sys/vm/max_map_count"
    count = _integer(machine.read(path))
    if count is None:
        return _unknown("vm.max_map_count", path)
    remark = (
        "low: every piece of memory that is shared with a peer is a mapping. "
        "Raise it with `sysctl vm.max_map_count=262144`"
    )
    return Limit("vm.max_map_count", count, str(count), remark if count < 65530 else "")


def _dev_shm(machine: Machine) -> Limit:
    space = machine.space("/dev/shm")
    if space is None:
        return _unknown("/dev/shm", "/dev/shm")
    size, free = space
    remark = "kvzc.empty does not use it: memory of a memfd counts against the memory cgroup"
    if free < _GIB:
        remark = f"low for other libraries (docker: --shm-size), but {remark}"
    return Limit("/dev/shm", size, f"{_bytes(size)}, {_bytes(free)} free", remark)


def _cgroup_memory(machine: Machine) -> Limit:
    name = "cgroup memory"
    membership = machine.read("/proc/self/cgroup")
    if membership is None:
        return _unknown(name, "/proc/self/cgroup")
    tightest: tuple[int, int | None] | None = None
    known = False
    for limit, used in _cgroup_limits(machine, membership):
        known = True
        if limit is not None and (tightest is None or limit < tightest[0]):
            tightest = limit, used
    if tightest is None:
        # The root group has no file: nothing to read means nothing set, if there is a tree.
        if known or machine.read("/sys/fs/cgroup/cgroup.controllers") is not None:
            return Limit(name, -1, "no limit")
        return _unknown(name, "/sys/fs/cgroup")
    limit, used = tightest
    text = _bytes(limit) + (f", {_bytes(used)} used" if used is not None else "")
    low = limit - (used or 0) < _GIB
    remark = "low: memory from kvzc.empty counts against it, when it is made" if low else ""
    return Limit(name, limit, text, remark)


def _cgroup_limits(machine: Machine, membership: str) -> Iterator[tuple[int | None, int | None]]:
    """(limit or None, used) of this process's memory groups, from its own up to the root."""
    for line in membership.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            root, limit_file, used_file = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
            limit_file, used_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = PurePosixPath("/") / path.lstrip("/")
        # In a container the path may be one of the host's; the root is then this group's own.
        for each in (group, *group.parents):
            folder = f"{root}{each}".rstrip("/")
            word = machine.read(f"{folder}/{limit_file}")
            if word is None:
                continue
            limit = _integer(word)  # "max" is no number and no limit
            if limit is not None and limit >= _NO_CGROUP_LIMIT:
                limit = None
            yield limit, _integer(machine.read(f"{folder}/{used_file}"))


def _kernel(machine: Machine) -> Limit:
    release = machine.kernel()
    if release is None:
        return _unknown("kernel", "its release")
    version = re.match(r"(\d+)\.(\d+)", release)
    old = version is not None and tuple(map(int, version.groups())) < (4, 14)
    remark = "old: below 4.14 an engine cannot tell that it is in a forked child"
    return Limit("kernel", release, release, remark if old else "")


def _ptrace_scope(machine: Machine) -> Limit:
    name, path = "yama ptrace_scope", "/proc/sys/kernel/yama/ptrace_scope"
    scope = _integer(machine.read(path))
    if scope is None:
        return _unknown(name, path)
    meaning = {
        0: "same user",
        1: "only descendants and those who consent",
        2: "only CAP_SYS_PTRACE",
        3: "nobody",
    }
    remark = (
        "restricted: one process cannot simply read or write the memory of another. "
        "Memory from kvzc.empty is shared, and not affected"
    )
    text = f"{scope} ({meaning.get(scope, 'not a known value')})"
    return Limit(name, scope, text, remark if scope > 0 else "")


def _transparent_huge_pages(machine: Machine) -> Limit:
    name, folder = "transparent hugepages", "/sys/kernel/mm/transparent_hugepage"
    private = _chosen(machine.read(f"{folder}/enabled"))
    shared = _chosen(machine.read(f"{folder}/shmem_enabled"))
    if private is None and shared is None:
        return _unknown(name, folder)
    remark = (
        "off for shared memory: memory from kvzc.empty has small pages. `within_size` in "
        f"{folder}/shmem_enabled gives it large ones"
    )
    return Limit(
        name,
        {"enabled": private, "shmem_enabled": shared},
        f"{private or 'unknown'}, for shared memory {shared or 'unknown'}",
        remark if shared in ("never", "deny") else "",
    )


def _huge_pages(machine: Machine) -> Limit:
    name, path = "reserved hugepages", "/proc/meminfo"
    fields = dict(re.findall(r"^(\w+):\s+(\d+)", machine.read(path) or "", re.MULTILINE))
    try:
        total, free = int(fields["HugePages_Total"]), int(fields["HugePages_Free"])
        page = int(fields["Hugepagesize"]) << 10
    except KeyError:
        return _unknown(name, path)
    text = f"{total} of {_bytes(page)}, {free} free" if total else "none"
    return Limit(name, {"total": total, "free": free, "page_bytes": page}, text)


def _table(facts: dict[str, str], transports: list[TransportInfo], limits: list[Limit]) -> str:
    lines = [f"kvzc {facts['version']}", f"{facts['python']} on {facts['platform']}"]
    lines += ["", "transports"]
    for each in transports:
        state = {True: "available", False: "not available", None: "unknown"}[each.available]
        lines.append(f"  {each.name:<22}  {state:<13}  {each.fabric}".rstrip())
        if not each.available:
            lines += _indented(each.reason)
            lines += _indented(f"needs: {each.package}" if each.package else "")
    lines += ["", "limits"]
    for limit in limits:
        lines.append(f"  {limit.name:<22}  {limit.text}")
        lines += _indented(limit.remark)
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [" " * 26 + line for line in wrap(text, 72, break_on_hyphens=False)]


def _integer(word: str | None) -> int | None:
    try:
        return int(word or "")
    except ValueError:
        return None


def _chosen(text: str | None) -> str | None:
    """The word in brackets: how /sys shows a choice."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found.group(1) if found else None


def _bytes(number: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", _GIB), ("MiB", _MIB), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number} B"
