"""The walls of the house: which room may include which. Reads every #include under cpp/.

The tables below are the rule; cpp/README.md says why. To move a wall, change a row here and say so
there.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The public headers, low to high. Each may include only those before it.
STAIRCASE = [
    "status",
    "info",
    "stats",
    "faults",
    "completion",
    "transport",
    "view",
    "memory",
    "handle",
    "catalog",
    "endpoint",
    "engine",
    "completion_queue",
    "plan",
]

# Room: what it may include besides itself. The first row that matches a file is its room. A row is
# a folder or file below cpp/; `<x>` stands for one name, the same one in the whole row, and `<any>`
# for any.
ROOMS = {
    "src/base": ["kvzc/status.h"],
    "src/core": ["kvzc", "src/base", "src/transport/transport_list.h"],
    "src/kv": ["kvzc", "src/base"],
    "src/drivers/<x>": ["kvzc/status.h", "src/base"],
    # The only two files that know every transport.
    "src/transport/transport_list.cc": [
        "kvzc",
        "src/base",
        "src/transport/transport_list.h",
        "src/transport/<any>/factory.h",
    ],
    "src/transport/transport_list.h": [
        "kvzc/status.h",
        "kvzc/info.h",
        "kvzc/faults.h",
        "kvzc/completion.h",
        "kvzc/transport.h",
    ],
    "src/transport/rdma": [
        "kvzc/status.h",
        "kvzc/completion.h",
        "kvzc/transport.h",
        "src/base",
        "src/drivers/ibv",
    ],
    # A transport sees no region, no endpoint, no engine and no other transport.
    "src/transport/<x>": [
        "kvzc/status.h",
        "kvzc/faults.h",
        "kvzc/completion.h",
        "kvzc/transport.h",
        "src/base",
        "src/drivers/<x>",
    ],
    "emulation/<x>": [],
    "bindings": ["kvzc"],
}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def match(row: str, path: str) -> re.Match[str] | None:
    """Matches `path`, or a folder above it, against a row of the tables."""
    expression = re.escape(row).replace("<x>", "(?P<x>[^/]+)").replace("<any>", "[^/]+")
    return re.match(f"{expression}(/|$)", path)


def allowed_rows(source: str) -> list[str] | None:
    """Returns what `source` (a path below cpp/) may include; None if it has no place."""
    if source.startswith("kvzc/"):
        stem = Path(source).stem
        if stem not in STAIRCASE:
            return None
        return [f"kvzc/{step}.h" for step in STAIRCASE[: STAIRCASE.index(stem)]]
    for room, rows in ROOMS.items():
        if found := match(room, source):
            x = found.groupdict().get("x", "")
            return [row.replace("<x>", x) for row in [room, *rows]]
    return None


def resolve(file: Path, name: str, cpp: Path) -> str | None:
    """Finds an included file as the compiler does; None if it is not one of ours."""
    for folder in [file.parent, cpp / "include", cpp / "src"]:
        target = (folder / name).resolve()
        if target.is_file() and target.is_relative_to(cpp):
            # The public headers are known by the name that everybody includes.
            return target.relative_to(cpp).as_posix().removeprefix("include/")
    return None


def first_crossing(cpp: Path) -> str | None:
    """Reads every #include under `cpp` and returns the first that crosses a wall."""
    cpp = cpp.resolve()
    for file in sorted(cpp.rglob("*")):
        if file.suffix not in {".h", ".cc", ".inc"}:
            continue
        source = file.relative_to(cpp).as_posix().removeprefix("include/")
        rows = allowed_rows(source)
        if rows is None:
            return f"{source} has no place: add it to STAIRCASE or ROOMS in test_layers.py"
        for quoted, bracketed in INCLUDE.findall(file.read_text()):
            target = resolve(file, quoted or bracketed, cpp)
            if target is None and quoted:
                return f'{source} includes "{quoted}", which is not in the tree: write <{quoted}>'
            if target is not None and not any(match(row, target) for row in rows):
                return f"{source} may include only {rows}, not {target}"
    return None


def test_no_include_crosses_a_wall() -> None:
    assert any((ROOT / "cpp").rglob("*.cc"))
    assert first_crossing(ROOT / "cpp") is None


# ---- the checker itself ----

TREE = {
    "include/kvzc/status.h": "#include <string>\n",
    "include/kvzc/completion.h": '#include "kvzc/status.h"\n',
    "include/kvzc/transport.h": '#include "kvzc/completion.h"\n',
    "include/kvzc/engine.h": '#include "kvzc/transport.h"\n',
    "src/base/fd.h": '#include "kvzc/status.h"\n',
    "src/core/engine.cc": '#include "base/fd.h"\n#include "transport/transport_list.h"\n',
    "src/core/wire.h": "",
    "src/drivers/ibv/api.h": '#include "base/fd.h"\n',
    "src/drivers/acl/api.h": "",
    "src/transport/transport_list.h": '#include "kvzc/transport.h"\n',
    "src/transport/transport_list.cc": '#include "transport/shm/factory.h"\n',
    "src/transport/shm/factory.h": '#include "kvzc/transport.h"\n',
    "src/transport/shm/shm_channel.cc": '#include "factory.h"\n#include "base/fd.h"\n',
    "src/transport/tcp/factory.h": "",
    "src/transport/ibv/factory.h": '#include "drivers/ibv/api.h"\n',
    "bindings/casts.h": "",
    "bindings/module.cc": '#include "casts.h"\n#include "kvzc/engine.h"\n',
}


def build(folder: Path, extra: dict[str, str]) -> Path:
    for name, text in {**TREE, **extra}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_checker_accepts_a_good_tree(tmp_path: Path) -> None:
    assert first_crossing(build(tmp_path, {})) is None


@pytest.mark.parametrize(
    ("source", "include"),
    [
        ("include/kvzc/status.h", '"kvzc/completion.h"'),
        ("include/kvzc/engine.h", '"base/fd.h"'),
        ("src/base/fd.h", '"kvzc/transport.h"'),
        ("src/base/fd.h", "<kvzc/transport.h>"),
        ("src/core/engine.cc", '"transport/shm/factory.h"'),
        ("src/core/engine.cc", '"drivers/ibv/api.h"'),
        ("src/drivers/ibv/api.h", '"drivers/acl/api.h"'),
        ("src/drivers/ibv/api.h", '"kvzc/transport.h"'),
        ("src/transport/shm/shm_channel.cc", '"kvzc/engine.h"'),
        ("src/transport/shm/shm_channel.cc", '"core/wire.h"'),
        ("src/transport/shm/shm_channel.cc", '"../tcp/factory.h"'),
        ("src/transport/shm/shm_channel.cc", '"drivers/ibv/api.h"'),
        ("src/transport/shm/shm_channel.cc", '"transport/transport_list.h"'),
        ("src/transport/transport_list.cc", '"transport/shm/shm_channel.cc"'),
        ("bindings/module.cc", '"core/wire.h"'),
    ],
)
def test_checker_refuses_a_crossing(tmp_path: Path, source: str, include: str) -> None:
    found = first_crossing(build(tmp_path, {source: f"  # include {include}\n"}))
    assert found is not None
    assert "may include only" in found


def test_checker_refuses_what_has_no_place(tmp_path: Path) -> None:
    for number, name in enumerate(["include/kvzc/new.h", "src/attic/junk.cc"]):
        stray = build(tmp_path / str(number), {name: ""})
        assert f"{name.removeprefix('include/')} has no place" in str(first_crossing(stray))
    missing = build(tmp_path / "c", {"src/base/fd.h": '#include "gone.h"\n'})
    assert "not in the tree" in str(first_crossing(missing))
