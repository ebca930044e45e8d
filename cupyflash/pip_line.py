"""What to type where a package is missing: the extra of this package, from where this package came."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

NAME = "cupyflash"


def pip_line(extra: str) -> str:
    """The command of pip that adds what an extra names: of the checkout, archive, repository or index that this package
    was installed from. Where that is gone, the packages themselves."""
    from urllib.request import url2pathname  # what comes with it takes as long to import as all of gpu/families

    try:
        found = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        checkout = Path(__file__).parents[1]
        return _of_folder(checkout, extra) if _builds(checkout) else f'pip install "{NAME}[{extra}]"'
    text = found.read_text("direct_url.json")
    came: dict[str, dict[str, str]] = json.loads(text) if text else {}
    if not came:
        return f'pip install "{NAME}[{extra}]"'
    url = str(came["url"])
    where = Path(url2pathname(urlsplit(url).path)) if url.startswith("file:") else None
    if "dir_info" in came and where is not None and _builds(where):
        return _of_folder(where, extra, bool(came["dir_info"].get("editable")))
    if vcs := came.get("vcs_info"):
        return f'pip install "{NAME}[{extra}] @ {vcs["vcs"]}+{url}@{vcs["commit_id"]}"'
    if "archive_info" in came and (where is None or where.is_file()):
        return f'pip install "{NAME}[{extra}] @ {url}"'
    own = (re.split(r"\s*;\s*", x, maxsplit=1) for x in found.requires or ())
    wanted = [name for name, *marker in own if marker and re.search(rf"extra\s*==\s*['\"]{extra}['\"]", marker[0])]
    return "pip install " + " ".join(f'"{x}"' for x in wanted)


def _of_folder(folder: Path, extra: str, editable: bool = False) -> str:
    return f'pip install {"-e " * editable}"{folder}[{extra}]"'


def _builds(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file()
