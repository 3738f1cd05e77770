"""`kvzc info` on machines of every kind, and the command line itself."""

import json
import subprocess
import sys
from typing import Any

import pytest
from kvzc import cli
from kvzc.demo import run as demo

GIB = 1 << 30
THP = "/sys/kernel/mm/transparent_hugepage"

FILES = {
    "/proc/sys/vm/max_map_count": "65530",
    "/proc/self/cgroup": "0::/app.slice/x",
    "/sys/fs/cgroup/app.slice/x/memory.max": "max",
    "/sys/fs/cgroup/app.slice/x/memory.current": "1000",
    "/sys/fs/cgroup/app.slice/memory.max": str(8 * GIB),
    "/sys/fs/cgroup/app.slice/memory.current": str(GIB),
    "/proc/sys/kernel/yama/ptrace_scope": "0",
    f"{THP}/enabled": "always [madvise] never",
    f"{THP}/shmem_enabled": "always within_size [advise] never deny force",
    "/proc/meminfo": "HugePages_Total:  8\nHugePages_Free:  3\nHugepagesize:  2048 kB",
}

NAMES = [
    "RLIMIT_MEMLOCK",
    "RLIMIT_NOFILE",
    "vm.max_map_count",
    "/dev/shm",
    "cgroup memory",
    "kernel",
    "yama ptrace_scope",
    "transparent hugepages",
    "reserved hugepages",
]


class Fake(cli.Machine):
    """A machine that is well set up, except for what a test changes."""

    def __init__(self, **changes: Any) -> None:
        self.files = {**FILES, **changes.get("files", {})}
        self.rlimits = {"MEMLOCK": (-1, -1), "NOFILE": (65536, 65536), **changes.get("rlimits", {})}
        self.shm = changes.get("shm", (16 * GIB, 15 * GIB))
        self.release = changes.get("release", "6.8.0-45-generic")
        self.listed = changes.get("listed", [("shm", True, ""), ("tcp", True, "")])

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def rlimit(self, name: str) -> tuple[int, int] | None:
        return self.rlimits.get(name)

    def space(self, path: str) -> tuple[int, int] | None:
        return self.shm

    def kernel(self) -> str | None:
        return self.release

    def transports(self) -> list[Any]:
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed


class Bare(cli.Machine):
    """A machine that tells nothing."""

    def read(self, path: str) -> str | None:
        return None

    def rlimit(self, name: str) -> tuple[int, int] | None:
        return None

    def space(self, path: str) -> tuple[int, int] | None:
        return None

    def kernel(self) -> str | None:
        return None

    def transports(self) -> list[Any]:
        raise AttributeError("no attribute 'transports'")


def limits(machine: cli.Machine) -> dict[str, cli.Limit]:
    return {limit.name: limit for limit in cli.find_limits(machine)}


def test_a_good_machine_gets_no_remark_but_the_note_on_dev_shm() -> None:
    found = limits(Fake())
    assert list(found) == NAMES
    assert [name for name in found if found[name].remark] == ["/dev/shm"]
    assert "memory cgroup" in found["/dev/shm"].remark
    assert found["RLIMIT_MEMLOCK"].text == "unlimited"
    assert found["cgroup memory"].text == "8 GiB, 1 GiB used"
    assert found["transparent hugepages"].text == "madvise, for shared memory advise"
    assert found["reserved hugepages"].text == "8 of 2 MiB, 3 free"


@pytest.mark.parametrize(
    ("name", "changes", "text", "remark"),
    [
        ("RLIMIT_MEMLOCK", {"rlimits": {"MEMLOCK": (8 << 20, -1)}}, "8 MiB (can be", "ulimit -l"),
        ("RLIMIT_NOFILE", {"rlimits": {"NOFILE": (1024, 4096)}}, "1024 (can be", "ulimit -n"),
        ("vm.max_map_count", {"files": {"/proc/sys/vm/max_map_count": "5"}}, "5", "low"),
        ("/dev/shm", {"shm": (64 << 20, 64 << 20)}, "64 MiB", "--shm-size"),
        (
            "cgroup memory",
            {"files": {"/sys/fs/cgroup/app.slice/memory.max": str(GIB + 5)}},
            "1 GiB, 1 GiB used",
            "low",
        ),
        ("kernel", {"release": "4.9.0-oe"}, "4.9.0-oe", "forked child"),
        ("yama ptrace_scope", {"files": {"/proc/sys/kernel/yama/ptrace_scope": "1"}}, "1 (", "not"),
        (
            "transparent hugepages",
            {"files": {f"{THP}/shmem_enabled": "always within_size advise [never] deny force"}},
            "madvise, for shared memory never",
            "within_size",
        ),
    ],
)
def test_what_is_low_gets_a_remark(
    name: str, changes: dict[str, Any], text: str, remark: str
) -> None:
    found = limits(Fake(**changes))[name]
    assert text in found.text
    assert remark in found.remark


def test_cgroup_version_1() -> None:
    files = {
        "/proc/self/cgroup": "12:cpu,cpuacct:/docker/1\n9:memory:/docker/1\n0::/",
        # Inside the container, the group's own folder is the root.
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB // 2),
    }
    assert limits(Fake(files=files))["cgroup memory"].text == "2 GiB, 512 MiB used"
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712"
    assert limits(Fake(files=files))["cgroup memory"].text == "no limit"


def test_cgroup_root_has_no_limit() -> None:
    files = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cgroup.controllers": "cpu memory"}
    assert limits(Fake(files=files))["cgroup memory"].text == "no limit"


@pytest.mark.parametrize("path", sorted(FILES))
@pytest.mark.parametrize("content", [None, "", "nonsense"])
def test_any_file_may_be_missing_or_odd(path: str, content: str | None) -> None:
    assert list(limits(Fake(files={path: content}))) == NAMES


def test_a_machine_that_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(
        limit.value is None and limit.text.startswith("unknown")
        for limit in limits(Bare()).values()
    )
    monkeypatch.setattr(cli, "Machine", Bare)
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out.count("unknown") == len(NAMES) + 4
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["available"] for each in found["transports"]} == {None}


class Row:
    name, available, reason = "rdma", False, "libibverbs.so.1 was not found"


def test_transports_say_why_not_and_what_brings_them() -> None:
    machine = Fake(listed=[("shm", True, ""), ("tcp", False, "no network"), Row()])
    shm, tcp, rdma, ascend = cli.transport_infos(machine)
    assert (shm.name, shm.available) == ("shm", True)
    assert (tcp.available, tcp.reason) == (False, "no network")
    assert (rdma.available, rdma.reason) == (False, "libibverbs.so.1 was not found")
    assert "libibverbs1" in rdma.package
    assert (ascend.available, ascend.reason) == (False, "not in this build of kvzc")
    assert "CANN" in ascend.package


def test_info_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in [*NAMES, "shm", "tcp", "rdma", "ascend"])

    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"version", "python", "platform", "transports", "limits"}
    assert [each["name"] for each in found["transports"]][:4] == ["shm", "tcp", "rdma", "ascend"]
    assert found["transports"][0]["available"] is True
    assert [each["name"] for each in found["limits"]] == NAMES


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["nothing"], 2),
        (["info", "--nothing"], 2),
        (["demo", "--tokens", "1"], 2),
        (["demo", "--timeout", "0"], 2),
        (["demo", "--progress", "nan"], 2),
        (["--help"], 0),
        (["--version"], 0),
        (["info", "--help"], 0),
        (["demo", "--help"], 0),
    ],
)
def test_exit_codes_of_the_command_line(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == code


def test_demo_without_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "kvzc demo needs PyTorch: pip install 'kvzc[torch]'\n"


def test_demo_module_needs_no_torch() -> None:
    """What the parent imports must not load torch: it says in words that torch is missing."""
    script = "import sys; import kvzc.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
