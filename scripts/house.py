"""The size and shape of the code, each figure beside its bound; exit code 1 where one is beyond it.

Code lines hold a token of code: docstrings, comments, blank lines and data files (JSON, templates) do not count.
"""

import ast
import io
import sys
import threading
import tokenize
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "videotune"
FAMILIES = ("wan", "cogvideox", "hunyuan_video", "ltx_video", "hidream")
TRAIN_CORE = ("loop", "step", "setup", "optimizers", "ema", "checkpoint", "checkpoint_writer")
CORE = (
    "config",
    "types",
    "diffusion",
    "latent_cache",
    *(f"trainer/{name}" for name in TRAIN_CORE),
)
STEP_ENTRY, STEP_END = "videotune.trainer.loop", "videotune.trainer.optimizers"
"""A training step is measured between these modules."""


@dataclass(frozen=True)
class Figure:
    """A measured figure, its bound, and the places behind it."""

    name: str
    value: int
    bound: int
    places: tuple[str, ...] = ()


GPU_TESTS = 1_500
"""Code lines that tests of the GPU path may add to those of the rest: the stand-in card in tests/simcuda/."""

INTEROP = 1_500
"""Code lines that files of other programs (LoRA tools, import, autopsy, single files) may add to the rest; tests alike."""

AROUND = 1_500
"""Code lines that what stands around a run (captions, trackers, Hub, queue, recipes) may add to the rest; tests alike."""

STUDIO = 200
"""Code lines that the studio's pages may add to the rest, of the 970 that came when they took the place of a form generator:
clips that play, captions with their history, the bin, the queue of all projects, sessions, the stream of changes."""

DOC_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def code_lines(path: Path) -> int:
    """Lines of a file with a token of code on them, docstrings left out."""
    docs: set[int] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, DOC_OWNERS):
            for inner in node.body:  # also the strings that document a constant
                if (
                    isinstance(inner, ast.Expr)
                    and isinstance(inner.value, ast.Constant)
                    and isinstance(inner.value.value, str)
                ):
                    docs.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(
        io.StringIO(path.read_text(encoding="utf-8")).readline
    ):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def graph() -> dict[str, frozenset[str]]:
    """Each module of the package and the modules of the package that it imports, at any place, for types too."""
    modules = {module_of(path): path for path in files(PACKAGE)}
    out: dict[str, frozenset[str]] = {}
    for name, path in modules.items():
        found: set[str] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = base_of(name, path, node)
                found.update(
                    full if (full := f"{base}.{alias.name}") in modules else base
                    for alias in node.names
                )
        out[name] = frozenset(found & modules.keys()) - {name}
    return out


def base_of(module: str, path: Path, node: ast.ImportFrom) -> str:
    """The absolute name of what an import is from."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    return ".".join(
        [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
    )


def circles() -> list[str]:
    """Groups of modules that reach each other (Tarjan, as sets of what is reachable both ways)."""
    reach = {name: reachable(name) for name in graph()}
    groups = {
        frozenset(o for o in reach if name in reach[o] and o in reach[name])
        for name in reach
        if name in reach[name]
    }
    return sorted(" <-> ".join(sorted(group)) for group in groups)


@cache
def reachable(name: str) -> frozenset[str]:
    seen: set[str] = set()
    waiting = list(graph()[name])
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += graph()[one]
    return frozenset(seen)


def inner_imports() -> list[str]:
    """Import statements inside functions."""
    found = []
    for path in files(PACKAGE):
        lines: set[int] = set()
        for function in ast.walk(tree_of(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                lines |= {
                    node.lineno
                    for node in ast.walk(function)
                    if isinstance(node, ast.Import | ast.ImportFrom)
                }
        found += [f"{path.relative_to(ROOT)}:{line}" for line in sorted(lines)]
    return found


def total(paths: Iterable[Path]) -> int:
    return sum(code_lines(path) for path in paths)


def in_core(path: Path) -> bool:
    name = str(path.relative_to(PACKAGE).with_suffix(""))
    return any(name == one or name.startswith(f"{one}/") for one in CORE)


def step_modules() -> list[str]:
    """The modules of ours that execute in two training steps of the toy model (LoRA, one expert), the threads that read
    batches included, between the loop and the optimizer.
    """
    with TemporaryDirectory() as name, redirect_stderr(io.StringIO()):
        from videotune.job.job import open_job
        from videotune.job.overrides import Overrides, resolve_config
        from videotune.planner.plan import make_plan
        from videotune.toy.dataset import write_dataset
        from videotune.trainer.loop import step_records
        from videotune.trainer.resume import OpenedRun
        from videotune.trainer.setup import prepare

        write_dataset(Path(name) / "clips", concept_clips=2, reminder_clips=0)
        sets = ("steps=9", "validate_every=0", "sample_after=0", "dataloader_threads=1")
        job = open_job(
            *resolve_config(Overrides(preset="toy", data=f"{name}/clips", sets=sets))
        )
        trainer = prepare(OpenedRun(job), Path(name) / "run", make_plan(job))
        seen: set[str] = set()
        measuring = False

        def profile(frame: FrameType, event: str, argument: object) -> None:
            if (
                measuring
                and event == "call"
                and frame.f_code.co_filename.startswith(str(PACKAGE))
            ):
                seen.add(module_of(Path(frame.f_code.co_filename)))

        threading.setprofile(profile)
        records: Any = step_records(trainer)
        try:
            next(records), next(records)  # the first steps import, and draw for many steps
            measuring = True
            sys.setprofile(profile)
            next(records), next(records)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            records.close()
            trainer.journal.close()
    return sorted(seen - {STEP_ENTRY, STEP_END})


def figures() -> list[Figure]:
    """Every figure with its bound."""
    package = files(PACKAGE)
    rings, inner = circles(), inner_imports()
    long = [
        f"{path.relative_to(ROOT)} {code_lines(path)}"
        for path in package
        if code_lines(path) > 400
    ]
    families = [PACKAGE / "models" / f"{name}.py" for name in FAMILIES]
    return [
        Figure("code lines of the package", total(package), 21_500 + INTEROP + AROUND + STUDIO),
        Figure(
            "code lines of the core", total(path for path in package if in_core(path)), 3_500
        ),
        Figure("code lines of commands/", total(files(PACKAGE / "commands")), 1_300),
        Figure(
            "code lines of the longest family file",
            max((code_lines(path) for path in families if path.exists()), default=9999),
            380,
        ),
        Figure("files of more than 400 code lines", len(long), 0, tuple(long)),
        Figure("import circles", len(rings), 0, tuple(rings)),
        Figure("modules of one training step", len(step := step_modules()), 9, tuple(step)),
        Figure("imports inside functions", len(inner), 100, tuple(inner)),
        Figure(
            "code lines of the tests",
            total(files(ROOT / "tests")),
            21_000 + GPU_TESTS + INTEROP + AROUND,
        ),
    ]


def main(show: Callable[[str], object] = print) -> int:
    found = figures()
    for one in found:
        show(
            f"{one.name:<44} {one.value:>7,}  bound {one.bound:>7,}{'' if one.value <= one.bound else '  BEYOND'}"
        )
        if one.value > one.bound or "-v" in sys.argv:
            for place in one.places[:20]:
                show(f"    {place}")
    return int(any(one.value > one.bound for one in found))


if __name__ == "__main__":
    sys.exit(main())
