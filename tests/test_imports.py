"""Who may import whom: no circle, few floors, and nothing of the tools in the library that they stand on."""

from __future__ import annotations

import graphlib
import subprocess
import sys

import pytest
from imports import import_graph, imports

from cupyflash.gpu.plan import FAMILIES

# The house from the ground. A room is one or more modules and packages, "" the package's face (* stands for any end);
# what is named apart is no part of the package that it lies in. It imports from itself and from rooms on floors below.
FLOORS = (
    (
        "passes", "score", "signature other_names", "folders", "later", "reals counts scalars", "gpu.device pip_line",
        "blockmask.tile_lists", "interop.foreign", "namespaces",
        "torch.dropout", "tools.visible",
    ),
    ("problem rules lengths places layouts gradients cached latent", "call", "arrays"),
    ("interop.protocol", "overlap", "folding", "parts", "float8", "rotary caches"),
    ("gpu", "cpu", "interop"),
    ("dispatch", "merging", "blockmask", "tangents", "writing"),
    ("interop.torch_*", "interop.jax_*"),
    ("api derivatives vjp weights given appending", "interop.conformance", "masks", "paging"),
    ("torch compat", "reference", "tools", "parallel"),
    ("jax integrations ",),  # and the package itself, which names all of them
    ("bench", "demo"),
    ("tools.commands tools.cli tools.info __main__ bench.__main__",),
)  # fmt: skip
ROOMS = {
    f"cupyflash.{x}".rstrip("."): (floor, room)
    for floor, rooms in enumerate(FLOORS)
    for room in rooms
    for x in room.split(" ")
}


def place(module: str) -> tuple[int, str]:
    """The floor and the room that a module is in: the longest name that fits says it."""
    found = [x for x in ROOMS if f"{module}.".startswith(x.rstrip("*") + "." * (x[-1] != "*"))]
    best = max(found, key=len)
    assert best != "cupyflash" or module == best, f"{module} is in no room"
    return ROOMS[best]


def test_no_circle() -> None:
    try:
        list(graphlib.TopologicalSorter(import_graph()).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_rooms_import_from_floors_below() -> None:
    for name, imported in import_graph().items():
        floor, room = place(name)
        wrong = {x for x in imported if place(x)[1] != room and place(x)[0] >= floor}
        assert not wrong, f"{name}, on floor {floor}, imports {wrong}"


def test_the_house_has_few_floors() -> None:
    assert len(FLOORS) <= 11
    assert {place(name)[1] for name in import_graph()} == {room for rooms in FLOORS for room in rooms}


def test_a_family_imports_no_other() -> None:
    """What two of them do alike is beside them."""
    graph, home = import_graph(), "cupyflash.gpu.families."
    families = [name.removeprefix(home) for name in graph if name.startswith(home)]
    owners = {name: next((x for x in FAMILIES if name == x or name.startswith(f"{x}_")), None) for name in families}
    assert set(owners.values()) == {*FAMILIES, None}
    for name, owner in owners.items():
        others = {owners[x.removeprefix(home)] for x in graph[home + name] if x.startswith(home)}
        assert others <= {owner, None}, f"{name} imports {others}"


def test_the_planner_reads_no_file() -> None:
    """Tuned tiles come in from outside."""
    graph = import_graph()
    for name in graph:
        if name.startswith("cupyflash.gpu.families") or name in ("cupyflash.gpu.plan", "cupyflash.gpu.kernel_plan"):
            assert not graph[name] & {"cupyflash.gpu.tuned", "cupyflash.tools.files", "cupyflash.folders"}


def test_importing_the_package_imports_no_array_library() -> None:
    """They take longer than everything else; each comes with the first array of its own."""
    code = "import sys, cupyflash; print(*{'numpy', 'cupy', 'torch', 'jax', 'ml_dtypes', 'cuda'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_graph_sees_imports_of_every_form() -> None:
    graph = import_graph()
    assert "cupyflash.gpu.plans" in graph["cupyflash.gpu.corridor"]  # from .plans import plans
    assert "cupyflash.gpu.params" in graph["cupyflash.gpu.source"]  # from . import params
    assert "cupyflash.problem" in graph["cupyflash.gpu.families.sm90"]  # from ...problem import
    assert "cupyflash.blockmask.blocks" in graph["cupyflash.api"]  # in a function
    assert "cupyflash" in graph["cupyflash.bench.gpt"]  # import cupyflash
    assert {"cupyflash.tools.explanation", "cupyflash.masks"} <= graph["cupyflash"]  # by a string
    assert "cupyflash.bench.gpt_flax" in graph["cupyflash.bench.steps"]  # by the whole name in a string


@pytest.mark.parametrize(
    "text",
    [
        "import p.b", "from p import b", "from . import b", "from .b import x", "def f():\n    from .b import x",
        "import_module('.b', __package__)", "__import__('p.b')", "TABLE = {'x': '.b'}", "import_module('p.' + name)",
        "import_module(f'p.{name}')", "if TYPE_CHECKING:\n    from . import b",
    ],
)  # fmt: skip
def test_an_import_of_any_form_is_seen(text: str) -> None:
    assert set(imports("p.a", False, text, ["p", "p.b"])) == {"p.b"}


def test_other_strings_are_no_imports() -> None:
    text = "import numpy\nx = 'p', 'p.b and more', '.', '.c', 'b', 'see p.b.'\nfrom .c import d"
    assert not set(imports("p.a", False, text, ["p", "p.b"]))


SUBMODULES = ("compat", "float8", "integrations", "jax", "masks", "torch")


def test_submodules_are_found_when_they_are_asked_for() -> None:
    """As README writes them, after `import cupyflash` alone, and of no cost before."""
    code = (
        "import sys, cupyflash\n"
        f"names = {SUBMODULES}\n"
        "print({*names} <= {*dir(cupyflash)}, [x for x in names if f'cupyflash.{x}' in sys.modules])\n"
        "print(cupyflash.compat.install.__name__, cupyflash.float8.quantize.__name__, cupyflash.masks.__name__)\n"
        "print({'flash_attn', 'xformers'} <= {*dir(cupyflash.compat)}, 'diffusers' in dir(cupyflash.integrations))\n"
        "print(hasattr(cupyflash, 'tensorflow'), 'torch' in sys.modules, 'jax' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "True []", "install quantize cupyflash.masks", "True True", "False False False"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["torch", "jax", "jax.parallel", "compat.flash_attn", "integrations.transformers"])
def test_submodules_of_a_library(name: str) -> None:
    pytest.importorskip("jax" if name.startswith("jax") else "torch")
    code = f"import cupyflash; print(cupyflash.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"cupyflash.{name}\n"


def test_a_submodule_whose_library_is_missing() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import cupyflash\n"
        "print(hasattr(cupyflash, 'torch'))\n"
        "for what in ('cupyflash.torch', 'import cupyflash.torch', 'from cupyflash import torch'):\n"
        "    try:\n"
        "        exec(what)\n"
        "    except (AttributeError, ImportError) as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    halted = "import of torch halted; None in sys.modules"
    assert done.stdout.splitlines() == [
        "False", "AttributeError cupyflash.torch needs torch, which is not installed; run pip install torch",
        f"ModuleNotFoundError {halted}", f"ModuleNotFoundError {halted}",
    ]  # fmt: skip
