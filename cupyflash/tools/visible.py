"""Text from anywhere, for a terminal: control characters in it are shown, not sent."""

from __future__ import annotations

from typing import Any, TextIO


def visible(text: str) -> str:
    """Text with control characters, and what changes the direction of writing, as Python writes them: \\x1b for an
    escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


class VisibleStream:
    """A stream to which only visible text is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(visible(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
