"""rich's Console for text from anywhere: names in files, in JSON and in the environment may hold what moves a
cursor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import rich.console
from rich.segment import Segment

from .visible import visible


class Console(rich.console.Console):
    """As rich's; but of escape sequences only its own reach the terminal."""

    def render(self, *given: Any, **named: Any) -> Iterator[Segment]:
        """The segments of what is printed."""
        for segment in super().render(*given, **named):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
