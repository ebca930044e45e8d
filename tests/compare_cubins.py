"""Do two trees compile to the same programs? Every one that test_kernels_compile.py makes, with NVRTC alone: no GPU
needed.

python tests/compare_cubins.py main .                        # a commit and this tree; some half an hour of two cores
python tests/compare_cubins.py main . --sample 10 --only softcap --family 'sm[89]0'
python tests/compare_cubins.py HEAD~1 HEAD --json same.json

A program counts as the same where its text is (but for comments and line marks), its cubin, or all of the cubin that is
loaded and runs: instructions, constants, launch information and resources. (A cubin also holds each constant of the
source by name.) Cubins are kept by the digest of what was compiled, so that a second look is quick. Exit code 1 where
something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
WAYS = ("text", "bytes", "code")  # in which a program may be the same


class Program(NamedTuple):
    """One of a tree's programs; `name` says what is asked, so that the other tree's is found by it."""

    family: str
    arch: str
    name: str
    text: str  # what is compiled, without comments
    shared: bool  # whether architectures of the family share out the programs that they have in common


# In a process of each tree ------------------------------------------------------------------------------------------


def of_tree(families: str, archs: str, only: str) -> list[Program]:
    """What the covering set comes to, as the tree's own tests make it, where these regular expressions fit."""
    import kernel_cover
    import test_kernels_compile as tests

    found, seen = [], Counter[tuple[str, ...]]()
    for family, arch in tests.FAMILY_ARCHS:
        if not re.fullmatch(families, family) or not re.fullmatch(archs, arch):
            continue
        shared = arch in kernel_cover.THOROUGH[family]
        first = kernel_cover.some_problems() if arch == tests.FIRST[family] else ()
        for problem in (*kernel_cover.cover(family, arch), *first):
            asked = (family, arch, described(problem, kernel_cover.problem("float16")))
            seen[asked] += 1
            if not any(re.search(only, f"{what} {asked[2]}") for what in ("forward", "backward", "gradient")):
                continue
            for text, plan in tests.plans([problem], family, tests.Arch.of(arch)).items():
                what = "gradient" if plan.wrt else "backward" if "backward" in plan.source else "forward"
                number = f" #{seen[asked]}" if seen[asked] > 1 else ""
                found.append(Program(family, arch, f"{what} {asked[2]}{number}", plain(text), shared))
    return [x for x in found if re.search(only, x.name)]


def described(problem: Any, usual: Any) -> str:
    """Its fields that are not as usual."""
    words = [f"{problem.dtype} {problem.dim}/{problem.dim_v}"]
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if field.name in ("dtype", "dim", "dim_v") or value == getattr(usual, field.name, None):
            continue
        if field.name == "score":
            value = hashlib.sha256(value.data.encode()).hexdigest()[:8]
        if field.name == "given":
            value = ",".join(f"{x.name}:{x.dtype}:{'/'.join(x.axes)}" for x in value)
        words.append(f"{field.name}={value}".replace(" ", ""))
    return " ".join(words)


_NOISE = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/|^#line[^\n]*', re.DOTALL | re.MULTILINE)


def plain(text: str) -> str:
    """A source without comments, line marks and empty lines."""
    lines = _NOISE.sub(lambda found: found[1] or " ", text).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


_DECLARED = re.compile(r"^\.(?:visible |weak )*global\b[^;=\[]*?([\w$]+)(?=\[|;| =)", re.MULTILINE)


def compiled(text: str, arch: str) -> dict[str, Any]:
    """Cubin, resources by kernel, and whether code reads variables in global memory."""
    from cuda.bindings import nvrtc

    from cupyflash.gpu import compiler

    try:
        program, cubin, log = compiler._nvrtc(text, arch)
    except compiler.CompileError as error:
        return {"error": str(error)}
    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    ptx = bytes(size)
    nvrtc.nvrtcGetPTX(program.handle, ptx)
    body = "\n".join(line for line in ptx.decode().splitlines() if not line.startswith("."))
    reads = set(re.findall(r"[\w$]+", body)) & set(_DECLARED.findall(ptx.decode()))
    resources = {name: list(vars(x).values()) for name, x in compiler.parse_resources(log).items()}
    return {"cubin": cubin.hex(), "resources": resources, "reads": sorted(reads)}


def worker() -> None:
    """Answers a line with a line, in JSON: a text and its architecture are compiled; three expressions choose
    programs."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(compiled(*asked) if len(asked) == 2 else of_tree(*asked)), file=answers, flush=True)


# Here ---------------------------------------------------------------------------------------------------------------


class Worker:
    """A process that imports one tree; its own tests too."""

    def __init__(self, tree: Path) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "tests")))}
        env.pop("CUPYFLASH_LINEINFO", None)
        command = [sys.executable, "-P", str(HERE), "--worker"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=tree, text=True
        )

    def ask(self, *what: Any) -> Any:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a worker has ended; what it said is above")
        return json.loads(answer)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Kept:
    """Compiled programs of one tree, on disk by text, architecture, options and compiler."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree, self.folder, self.own, self.workers = tree, folder, threading.local(), []
        code = (tree / "cupyflash/gpu/compiler.py").read_bytes()  # the options
        own = "".join(map(inspect.getsource, (compiled, plain)))
        self.digest = hashlib.sha256(code + own.encode() + nvrtc_version().encode())

    def programs(self, *chosen: str) -> list[Program]:
        """What `of_tree` says, kept by the digest of all that it goes by."""
        digest = self.digest.copy()
        digest.update("\0".join((*chosen, inspect.getsource(of_tree), inspect.getsource(described))).encode())
        for folder in ("cupyflash", "kernels_cu", "tests"):
            for path in sorted((self.tree / folder).rglob("*.*")):
                if path.suffix in (".py", ".cu", ".cuh") and path.name != HERE.name:
                    digest.update(f"\0{path.relative_to(self.tree)}\0".encode() + path.read_bytes())
        return [Program(*x) for x in self._kept(digest.hexdigest(), *chosen)]

    def compile(self, text: str, arch: str) -> dict[str, Any]:
        digest = self.digest.copy()
        digest.update(f"\0{arch}\0{text}".encode())
        return self._kept(digest.hexdigest(), text, arch)

    def _kept(self, digest: str, *asked: str) -> Any:
        """A worker's answer: each thread has one of its own, once it asks."""
        path = self.folder / f"{digest[:32]}.json"
        if not path.exists():
            if not hasattr(self.own, "worker"):
                self.own.worker = Worker(self.tree)
                self.workers.append(self.own.worker)
            whole = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            whole.write_text(json.dumps(self.own.worker.ask(*asked)))
            whole.replace(path)
        return json.loads(path.read_text())


@functools.cache
def nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    return str(nvrtc.nvrtcVersion())


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """One of WAYS, or what differs."""
    if "error" in old or "error" in new:
        return "does not compile: " + old.get("error", new.get("error", ""))[:500]
    if old["cubin"] == new["cubin"]:
        return "bytes"
    if old["resources"] != new["resources"]:
        pairs = [
            (name, old["resources"].get(name), new["resources"].get(name))
            for name in {**old["resources"], **new["resources"]}
        ]
        return "resources: " + ", ".join(f"{name} {a} to {b}" for name, a, b in pairs if a != b)
    if old["reads"] or new["reads"]:  # then what lies there would count, and where
        return f"bytes, where code reads {', '.join({*old['reads'], *new['reads']})}"
    a, b = (sections(bytes.fromhex(x["cubin"])) for x in (old, new))
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return ", ".join(names) or "code"


# Names, where they are, what profilers and debuggers read, and constants of the source by name, which no code reads.
_LEFT_OUT = (
    ".shstrtab",
    ".strtab",
    ".symtab",
    ".debug",
    ".rel",
    ".note",
    ".nv.global",
    ".nv.constant4",
    ".nv.constant.pic",
)


def sections(cubin: bytes) -> dict[str, Any]:
    """Of an ELF file what is loaded and run, by name: (flags, size, content)."""
    at, size, count, names = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQII", cubin, at + n * size) for n in range(count)]
    found = {}
    for name, kind, flags, _, offset, length, _, _ in headers:
        start = headers[names][4] + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if not text or text.replace(".nv.merc", "", 1).startswith(_LEFT_OUT):
            continue
        content = b"" if kind == 8 else cubin[offset : offset + length]
        found[text] = (flags, length, launch_information(content) if ".nv.info" in text else content)
    return found


def launch_information(content: bytes) -> bytes:
    """Without numbers of symbols: attributes are (form, name, 16 bits), of form 4 with so many bytes after it."""
    kept, at = b"", 0
    while at + 4 <= len(content):
        form, name, value = struct.unpack_from("<BBH", content, at)
        end = at + 4 + (value if form == 4 else 0)
        # Those of one symbol each: the bank of parameters, and a function's registers and frame, which `resources` has
        # too.
        symbol = 4 if form == 4 and name in (0x0A, 0x11, 0x12, 0x23, 0x2F) else 0
        kept += content[at : at + 4] + b"\0" * symbol + content[at + 4 + symbol : end]
        at = end
    return kept


def paired(old: list[Program], new: list[Program]) -> tuple[list[tuple[Program, Program]], list[str]]:
    """The same programs of both, those with the same two texts once; and what one has alone."""
    there, here = ({x[:3]: x for x in of} for of in (old, new))
    pairs: dict[tuple[str, ...], dict[str, tuple[Program, Program]]] = {}
    for key in sorted(there.keys() & here.keys()):
        a, b = there[key], here[key]
        pairs.setdefault((a.family, "" if a.shared else a.arch, a.text, b.text), {}).setdefault(a.arch, (a, b))
    chosen = [list(by_arch.values())[n % len(by_arch)] for n, by_arch in enumerate(pairs.values())]
    return sorted(chosen), sorted(" ".join(key) for key in there.keys() ^ here.keys())


@contextlib.contextmanager
def tree_of(what: str) -> Iterator[Path]:
    """A folder, or a commit in a folder of its own as long as it is needed."""
    if Path(what, "cupyflash").is_dir():
        yield Path(what).resolve()
        return
    import tempfile

    git = ["git", "-C", str(HERE.parent)]
    with tempfile.TemporaryDirectory(prefix="cupyflash-tree-") as folder:
        tree = Path(folder, "tree")
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), what], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a tree's folder, or a commit")
    parser.add_argument("new")
    parser.add_argument("--family", default=".*", help="a regular expression, as the next two")
    parser.add_argument("--arch", default=".*")
    parser.add_argument("--only", default="", help="what must be in a program's name")
    parser.add_argument("--sample", type=int, default=1, help="one of so many")
    parser.add_argument("--part", type=int, default=0, help="of the samples, which")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int, help="end after so many differences")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/cupyflash-compared")
    parser.add_argument("--json", type=Path, help="write each program's outcome to this file")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    with tree_of(args.old) as old, tree_of(args.new) as new:
        return compare((Kept(old, args.cache), Kept(new, args.cache)), args)


def compare(trees: tuple[Kept, Kept], args: argparse.Namespace) -> int:
    with ThreadPoolExecutor() as pool:
        pairs, alone = paired(*pool.map(lambda tree: tree.programs(args.family, args.arch, args.only), trees))
    chosen = pairs[args.part % args.sample :: args.sample]
    outcomes: dict[str, str] = {}
    table: Counter[tuple[str, str, str]] = Counter()

    def outcome(pair: tuple[Program, Program]) -> None:
        a, b = pair
        if args.limit and sum(n for (_, _, how), n in table.items() if how == "differ") >= args.limit:
            return
        how = (
            "text" if a.text == b.text else difference(*(tree.compile(x.text, x.arch) for tree, x in zip(trees, pair)))
        )
        name = " ".join(a[:3])
        outcomes[name] = how
        table[a.family, a.arch, how if how in WAYS else "differ"] += 1
        if how not in WAYS:
            print(f"{name}\n    {how}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(outcome, chosen))
    for worker in (x for tree in trees for x in tree.workers):
        worker.close()
    if args.json:
        args.json.write_text(json.dumps(dict(sorted(outcomes.items())), indent=1))
    for name in alone:
        print(f"in one tree alone: {name}")
    print(f"{'family':8}{'arch':8}" + "".join(f"{x:>10}" for x in ("text", "bytes", "code", "differ")))
    for family, arch in dict.fromkeys(key[:2] for key in sorted(table)):
        print(f"{family:8}{arch:8}" + "".join(f"{table[family, arch, x]:10}" for x in (*WAYS, "differ")))
    total = [sum(n for (_, _, x), n in table.items() if x == how) for how in (*WAYS, "differ")]
    print(f"{'all':16}" + "".join(f"{n:10}" for n in total), f"of {len(pairs)} programs")
    return int(bool(total[-1] or alone))


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker()
    else:
        sys.exit(main())
