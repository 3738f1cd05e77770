"""Writes the table of errors, from the installed kvzc: `make_errors.py <file>`."""

import sys
from pathlib import Path

import kvzc

HEAD = """# Errors

Made by `make docs` from the core's list of codes; a test compares.

Every error of kvzc is a `kvzc.Error`, and also the built-in that a Python programmer would catch.
Its text says what was asked, what is allowed, and what to do. In C++ the same list is `kvzc::Code`,
the code of a `Status`. A transfer ends with one as `transfer.error`, which `wait()` raises; the
first cause counts.

| error | also a | what it means | what helps |
|---|---|---|---|
"""


def rows() -> list[str]:
    out = []
    for name, kind in sorted(vars(kvzc).items()):
        if not (isinstance(kind, type) and issubclass(kind, kvzc.Error)) or kind is kvzc.Error:
            continue
        builtin = kind.__mro__[2].__name__
        means, helps = (kind.__doc__ or "").split("\n\n")
        out.append(f"| `{name}` | `{builtin}` | {means} | {helps} |")
    return out


def table() -> str:
    return HEAD + "\n".join(rows()) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(table())
