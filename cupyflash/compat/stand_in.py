"""`install`: where others import flash-attn or xFormers, this process finds the functions of this package."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, final


class _Package(NamedTuple):
    """What is installed by a name: a distribution, and its modules with those of here that their names come from."""

    distribution: str
    version: str
    modules: dict[str, str | None]

    @property
    def roots(self) -> set[str]:
        return {name.partition(".")[0] for name in self.modules}


# The versions are those whose functions these are; others ask for the least that they need.
PACKAGES = {
    "flash_attn": _Package(
        "flash-attn", "2.8.3+cupyflash",
        {
            "flash_attn": "flash_attn", "flash_attn.flash_attn_interface": "flash_attn",
            "flash_attn.bert_padding": "bert_padding",
        },
    ),
    "flash_attn_interface": _Package(
        "flash-attn-3", "3.0.0+cupyflash",
        {"flash_attn_interface": "flash_attn_interface", "flash_attn_3": None},
    ),
    "flash_mla": _Package(
        "flash-mla", "1.0.0+cupyflash", {"flash_mla": "flash_mla", "flash_mla.flash_mla_interface": "flash_mla"}
    ),
    "xformers": _Package(
        "xformers", "0.0.33+cupyflash",
        {
            "xformers": None, "xformers.ops": "xformers", "xformers.ops.fmha": "xformers",
            "xformers.ops.fmha.attn_bias": "xformers",
        },
    ),
}  # fmt: skip


@final
class Installed:
    """What `install` did. `undo()`, or the end of a `with` block, takes it back."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        roots = {root for name in self.names for root in PACKAGES[name].roots}
        # Also those that a real package has besides: they would not fit what is found from now on.
        self._apart = {x: sys.modules.pop(x) for x in list(sys.modules) if x.partition(".")[0] in roots}
        self._roots, self._finder = roots, _Finder(self.names)
        sys.meta_path.insert(0, self._finder)
        importlib.invalidate_caches()

    def undo(self) -> None:
        """Take it back. What was imported meanwhile keeps the functions that it has."""
        if self._finder not in sys.meta_path:
            return
        sys.meta_path.remove(self._finder)
        for name in [x for x in sys.modules if x.partition(".")[0] in self._roots]:
            del sys.modules[name]
        sys.modules.update(self._apart)
        importlib.invalidate_caches()

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Installed({', '.join(map(repr, self.names))})"


def install(*packages: str, replace: bool = False) -> Installed:
    """Let imports of other packages find the functions of `cupyflash.compat`, for this process.

    Parameters
    ----------
    packages : "flash_attn", "flash_attn_interface", "flash_mla" or "xformers", one or more
        flash-attn 2 with flash_attn.bert_padding and flash_attn.flash_attn_interface; FlashAttention-3, whose module is
        flash_attn_interface; FlashMLA; xFormers with xformers.ops and xformers.ops.fmha. importlib.metadata knows them
        too. What is not served there cannot be imported, or raises NotImplementedError.
    replace : bool
        Also in the place of a package that is installed.

    Returns
    -------
    Installed
        Its `undo()` takes it back, as the end of a `with` block does. Call `install` before the packages that look for
        them are imported: most look once.

    Raises
    ------
    ValueError
        For another name, or a package that is installed here, without replace=True.
    """
    known = ", ".join(map(repr, PACKAGES))
    if not packages:
        raise ValueError(f"packages is empty; it must be one or more of {known}")
    for name in packages:
        if name not in PACKAGES:
            raise ValueError(f"packages has {name!r}; it must be one or more of {known}")
    wanted = [name for name in dict.fromkeys(packages) if not _is_ours(name)]
    for name in wanted:
        if not replace and any(map(_is_there, PACKAGES[name].roots)):
            raise ValueError(
                f"packages has {name!r}, which is installed here{_version(name)}; with replace=True imports find "
                "cupyflash in its place"
            )
    return Installed(wanted)


def _is_ours(name: str) -> bool:
    return any(isinstance(x, _Finder) and name in x.packages for x in sys.meta_path)


def _is_there(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # something without a __spec__ stands there
        return True


def _version(name: str) -> str:
    try:
        return f" ({PACKAGES[name].distribution} {importlib.metadata.version(PACKAGES[name].distribution)})"
    except importlib.metadata.PackageNotFoundError:
        return ""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of these packages, and what importlib.metadata knows of them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = {name: PACKAGES[name] for name in packages}
        self.modules = {name: (x, of) for x in self.packages.values() for name, of in x.modules.items()}

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname not in self.modules:
            return None
        _, of = self.modules[fullname]
        origin = f"{__package__}.{of}" if of else __package__
        return importlib.util.spec_from_loader(fullname, self, origin=origin, is_package=True)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        package, of = self.modules[module.__name__]
        module.__doc__ = f"{module.__name__}, for which cupyflash.compat stands in."
        vars(module)["__version__"] = package.version
        if of is not None:
            found = importlib.import_module(f"{__package__}.{of}")
            vars(module).update({name: getattr(found, name) for name in found.__all__})
        for name in self.modules:
            parent, _, child = name.rpartition(".")
            if parent == module.__name__:
                vars(module)[child] = importlib.import_module(name)

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        wanted = getattr(context, "name", None)
        return [_Distribution(x) for x in self.packages.values() if wanted is None or _same(wanted, x.distribution)]


def _same(a: str, b: str) -> bool:
    """Names of distributions, which `-`, `_`, `.` and capitals do not tell apart."""
    a, b = (re.sub(r"[-_.]+", "-", x).lower() for x in (a, b))
    return a == b


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, package: _Package) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {package.distribution}\nVersion: {package.version}\n"
            "Summary: cupyflash.compat stands in for it\n",
            "top_level.txt": "\n".join(sorted(package.roots)) + "\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path} of {self.name} is no file: cupyflash.compat stands in for that package")
