"""The prompt: bytes of a real text, one token each, after a begin-of-text token."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

BEGIN = 256


class TextTooShort(ValueError):
    """The text has fewer tokens than the run asks for."""


def read_text(path: str | None) -> bytes:
    """The bytes of the file at ``path``, or of the text that comes with the demo."""
    if path is not None:
        return Path(path).read_bytes()
    return resources.files("kvzc.demo").joinpath("text.txt").read_bytes()


def encode(text: bytes, count: int) -> list[int]:
    """The first ``count`` tokens of ``text``, the begin-of-text token among them.

    Raises TextTooShort.
    """
    if count > len(text) + 1:
        raise TextTooShort(
            f"{count} prompt tokens asked, the text has {len(text) + 1} (one a byte and one to "
            "begin); name a longer file with --text or ask for fewer with --tokens"
        )
    return [BEGIN, *text[: count - 1]]


def decode(tokens: Iterable[int]) -> str:
    """Tokens as text; what is not a printable ASCII byte shows as a dot."""
    return "".join(chr(token) if 0x20 <= token <= 0x7E else "." for token in tokens)
