"""What MkDocs asks while it builds the site (`hooks` in mkdocs.yml): pages that are not under docs/.

README and its like are pages of the site too, and each kernel file is a page, so that links to it can be read there.
Links are written as they are right in the repository; here they are put as they are right on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

TOP = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "bench.md",
}
ELSEWHERE = {on_site: path for path, on_site in PAGES.items()}
CODE = (".cu", ".cuh", ".py")
_UNTOLD = re.compile(
    r"(?:<li class=.doc-section-item field-body.>(?:(?!</li>|<code>as ).)*"
    r"<div class=.doc-md-description.>\s*</div>\s*</li>\s*){6,}",
    re.DOTALL,
)
_LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Every page says which version it is of."""
    found = re.search(r'__version__ = "(.*)"', (TOP / "cupyflash" / "__init__.py").read_text(encoding="utf-8"))
    config.copyright = f"cupyflash {found[1] if found else ''}, MIT licence"
    return config


def on_files(files: Any, config: Any) -> Any:
    for path, on_site in PAGES.items():
        files.append(File.generated(config, on_site, content=(TOP / path).read_text(encoding="utf-8")))
    folders = ("kernels_cu", "examples", "tests")
    linked = {_in_repository(page, link) for page in _pages(files) for link, _ in _LINK.findall(page.content_string)}
    for path in sorted(linked):
        if path.startswith(folders) and path.endswith(CODE) or path == "LICENSE":
            files.append(File.generated(config, _on_site(path), content=_as_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def put(match: re.Match[str]) -> str:
        path = _in_repository(page.file, match[1])
        here = posixpath.dirname(page.file.src_uri)
        return f"]({posixpath.relpath(_on_site(path), here or '.')}{match[2] or ''})"

    return _LINK.sub(put, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Many options of which a docstring says no more than that `attention` takes them are one line, not one each."""
    return _UNTOLD.sub('<li class="doc-section-item">options – as given to <code>attention</code></li>', html)


def _pages(files: Any) -> list[Any]:
    return [file for file in files if file.src_uri.endswith(".md")]


def _in_repository(file: Any, link: str) -> str:
    """Where a link of a page leads, from the top of the repository."""
    page = ELSEWHERE.get(file.src_uri, f"docs/{file.src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _on_site(path: str) -> str:
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{path}.md"


def _as_page(path: str) -> str:
    language = "python" if path.endswith(".py") else "cpp" if path.endswith(CODE) else "text"
    text = (TOP / path).read_text(encoding="utf-8")
    return f"---\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n\n# {path}\n\n````{language}\n{text}````\n"
