"""Code in Markdown pages, for the tests that run it."""

from __future__ import annotations

import re
import shlex


def blocks(page: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def examples(page: str) -> list[tuple[str, str | None]]:
    """Each Python block with the text block right under it, what it prints; None where there is none."""
    fence = r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?"
    return [(m[1], m[2]) for m in re.finditer(fence, page, re.MULTILINE | re.DOTALL)]


def commands(page: str) -> list[list[str]]:
    """Every command line of the bash blocks, as words."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [shlex.split(part) for line in lines for part in line.partition("#")[0].split("&&") if part.strip()]


def links(page: str) -> list[str]:
    """What links lead to, other than addresses on the web."""
    return [link for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link]


def headings(page: str) -> list[str]:
    """The anchors of its headings, as GitHub and MkDocs name them."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles]
