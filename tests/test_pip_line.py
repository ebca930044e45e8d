"""The line to type where something is not installed works from where the user stands."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cupyflash import pip_line
from cupyflash.gpu import device
from cupyflash.tools import cli

ROOT = Path(__file__).parents[1]


def came(monkeypatch: pytest.MonkeyPatch, direct_url: Any) -> None:
    """As if this package had been installed from there; None: from an index."""

    class Distribution:
        requires = (
            "numpy>=1",
            'typer>=0.16; extra == "demo"',
            "rich>=13.9 ; extra == 'demo'",
            'torch; extra == "demo2"',
        )

        def read_text(self, name: str) -> str | None:
            return json.dumps(direct_url) if direct_url and name == "direct_url.json" else None

    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())


@pytest.mark.parametrize("editable", [False, True])
def test_from_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, editable: bool) -> None:
    folder = tmp_path / "a checkout"
    folder.mkdir()
    came(monkeypatch, {"url": folder.as_uri(), "dir_info": {"editable": True} if editable else {}})
    assert pip_line.pip_line("demo") == 'pip install "typer>=0.16" "rich>=13.9"'  # what was there is gone
    (folder / "pyproject.toml").touch()
    assert pip_line.pip_line("demo") == f'pip install {"-e " if editable else ""}"{folder}[demo]"'


def test_from_an_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "cupyflash-1-py3-none-any.whl"
    came(monkeypatch, {"url": wheel.as_uri(), "archive_info": {}})
    assert pip_line.pip_line("demo") == 'pip install "typer>=0.16" "rich>=13.9"'
    wheel.touch()
    assert pip_line.pip_line("demo") == f'pip install "cupyflash[demo] @ {wheel.as_uri()}"'
    came(monkeypatch, {"url": "https://example.org/a.whl", "archive_info": {}})
    assert pip_line.pip_line("cuda13") == 'pip install "cupyflash[cuda13] @ https://example.org/a.whl"'


def test_from_a_repository_and_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    came(monkeypatch, {"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}})
    assert pip_line.pip_line("demo") == 'pip install "cupyflash[demo] @ git+https://example.org/a.git@12ab"'
    came(monkeypatch, None)
    assert pip_line.pip_line("demo") == 'pip install "cupyflash[demo]"'


def test_without_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nowhere(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nowhere)
    monkeypatch.setattr(pip_line, "__file__", str(ROOT / "cupyflash" / "pip_line.py"))
    assert pip_line.pip_line("demo") == f'pip install "{ROOT}[demo]"'
    monkeypatch.setattr(pip_line, "__file__", str(tmp_path / "cupyflash" / "pip_line.py"))
    assert pip_line.pip_line("demo") == 'pip install "cupyflash[demo]"'


def test_a_command_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    came(monkeypatch, {"url": ROOT.as_uri(), "dir_info": {}})
    with pytest.raises(SystemExit), cli.told():
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    said = f'cupyflash: this command needs matplotlib, which is not installed; run pip install "{ROOT}[demo]"\n'
    assert capsys.readouterr().err == said


def test_messages_of_the_library_say_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not the commands alone: who calls functions stands there, too."""
    (tmp_path / "pyproject.toml").touch()
    came(monkeypatch, {"url": tmp_path.as_uri(), "dir_info": {}})
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError) as raised:
        device.import_cupy()
    lines = [f'pip install "{tmp_path}[{extra}]"' for extra in ("cuda13", "cuda12")]
    assert str(raised.value).endswith(f"; run {lines[0]} (NVIDIA driver 580 or newer) or {lines[1]}")


def test_no_message_has_a_line_of_its_own() -> None:
    for path in (ROOT / "cupyflash").rglob("*.py"):
        if path.name != "pip_line.py":
            assert "cupyflash[" not in path.read_text(encoding="utf-8"), path
