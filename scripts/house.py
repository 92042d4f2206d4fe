"""Measure the size and shape of the code: python scripts/house.py [-v]

Sizes (tokens of code) have no bound. Shapes have one, and the exit code is 1 if a bound
is exceeded. -v lists the places and the modules of a training step.
"""

import ast
import io
import sys
import threading
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "videotune"

CAPABILITIES = {
    "training": [
        "trainer",
        "job",
        "runs",
        "diffusion",
        "adapters",
        "memory",
        "models",
        "latent_cache",
    ],
    "data": ["data", "captioning", "toy"],
    "monitoring": ["validation", "sampling", "reporter"],
    "planning": ["planner"],
    "files of other programs": ["exporter", "interop"],
    "command line": ["cli", "commands", "config", "presets"],
    "studio": ["studio", "queue"],
}
"""Packages by what they are for. Modules beside the packages count as "shared"."""

VAGUE_NAMES = frozenset(
    [
        "one",
        "own",
        "other",
        "found",
        "made",
        "kept",
        "asked",
        "told",
        "said",
        "words",
        "word",
        "place",
        "places",
        "known",
        "rest",
        "given",
        "held",
        "apart",
        "beside",
        "whole",
        "several",
        "much",
        "many",
        "more",
        "less",
        "here",
        "there",
        "what",
        "which",
        "whose",
        "said",
        "good",
        "bad",
        "both",
        "same",
        "looked",
        "taken",
        "seen",
        "drawn",
        "shown",
        "laid",
        "goes",
    ]
)

STEP_ENTRY = "videotune.trainer.loop"
STEP_END = "videotune.trainer.optimizers"
"""The modules of a training step are counted between these two."""

SMALLEST_DENSE_FILE = 30
"""Code lines from which a file's density is looked at."""

NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Figure:
    """A measured figure. ``bound`` None: it is only printed."""

    name: str
    value: float
    bound: float | None = None
    places: tuple[str, ...] = ()

    @property
    def exceeds(self) -> bool:
        return self.bound is not None and self.value > self.bound


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def location(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_string(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@cache
def tokens_and_lines(path: Path) -> tuple[int, int]:
    """Count tokens of code and the lines that hold one.

    Docstrings and comments are no code.
    """
    documentation: set[int] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, DOCUMENTED):
            for statement in node.body:  # also the strings that document a field
                if is_string(statement):
                    last = statement.end_lineno or statement.lineno
                    documentation.update(range(statement.lineno, last + 1))

    tokens = 0
    lines: set[int] = set()
    source = io.StringIO(path.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(source.readline):
        first_line = token.start[0]
        if token.type not in NOT_CODE and first_line not in documentation:
            tokens += 1
            lines.update(range(first_line, token.end[0] + 1))
    return tokens, len(lines - documentation)


def tokens_of(paths: list[Path]) -> int:
    return sum(tokens_and_lines(path)[0] for path in paths)


def density(path: Path) -> float:
    tokens, lines = tokens_and_lines(path)
    return tokens / max(1, lines)


def functions() -> Iterator[tuple[Path, Function]]:
    for path in python_files(PACKAGE):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, Function):
                yield path, node


def tuple_assignments() -> list[str]:
    """Find assignments of several values in one statement, except swaps."""
    places = []
    for path in python_files(PACKAGE):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Assign):
                continue
            target = node.targets[0]
            if not (
                isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            ):
                continue
            targets = {ast.unparse(element) for element in target.elts}
            values = {ast.unparse(element) for element in node.value.elts}
            if not targets & values:
                places.append(location(path, node))
    return places


def nested_comprehensions() -> list[str]:
    places = []
    for path in python_files(PACKAGE):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, Comprehension):
                continue
            inner = [child for child in ast.walk(node) if child is not node]
            has_inner = any(isinstance(child, Comprehension) for child in inner)
            if has_inner or len(node.generators) > 1:
                places.append(location(path, node))
    return places


def unbroken_functions() -> tuple[list[str], int]:
    """Find functions of 15 lines and more without a blank or comment line; return them
    and how many are that long.
    """
    places = []
    long = 0
    for path, function in functions():
        body = function.body
        if is_string(body[0]) and len(body) > 1:
            body = body[1:]
        source = path.read_text(encoding="utf-8").splitlines()
        lines = source[body[0].lineno - 1 : function.end_lineno]
        if len(lines) < 15:
            continue
        long += 1
        if all(line.strip() and not line.strip().startswith("#") for line in lines):
            places.append(f"{location(path, function)} {function.name}")
    return places, long


def vague_names() -> tuple[list[str], int]:
    """Find bindings whose name does not say its noun; return them and how many bindings
    there are.
    """
    places = []
    bindings = 0
    for path in python_files(PACKAGE):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            else:
                continue
            bindings += 1
            if name in VAGUE_NAMES:
                places.append(f"{location(path, node)} {name}")
    return places, bindings


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    )


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return for each module of the package the modules that it imports, at any place,
    for types too.
    """
    modules = {module_of(path): path for path in python_files(PACKAGE)}
    graph: dict[str, frozenset[str]] = {}
    for name, path in modules.items():
        imported: set[str] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = absolute_base(name, path, node)
                for alias in node.names:
                    full_name = f"{base}.{alias.name}"
                    imported.add(full_name if full_name in modules else base)
        graph[name] = frozenset(imported & modules.keys()) - {name}
    return graph


def absolute_base(module: str, path: Path, node: ast.ImportFrom) -> str:
    """Return the absolute name of what an import is from."""
    if not node.level:
        return node.module or ""
    package = module.split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    base = package[: len(package) - node.level + 1]
    if node.module:
        base.append(node.module)
    return ".".join(base)


@cache
def reachable(name: str) -> frozenset[str]:
    reached: set[str] = set()
    waiting = list(imports()[name])
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imports()[module]
    return frozenset(reached)


def circles() -> list[str]:
    """Return groups of modules that import each other, directly or not."""
    groups = set()
    for name in imports():
        if name in reachable(name):
            group = [module for module in imports() if name in reachable(module)]
            groups.add(
                frozenset(module for module in group if module in reachable(name))
            )
    return sorted(" <-> ".join(sorted(group)) for group in groups)


def inner_imports() -> list[str]:
    """Find import statements inside functions."""
    places = []
    for path, function in functions():
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                places.append(location(path, node))
    return sorted(set(places))


def step_modules() -> list[str]:
    """Return the modules of the package that run in two training steps of the toy
    model.

    Modules of the threads that read batches count as well.
    """
    with TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        from videotune.job.job import open_job
        from videotune.job.overrides import Overrides, resolve_config
        from videotune.planner.plan import make_plan
        from videotune.toy.dataset import write_dataset
        from videotune.trainer.loop import train_steps
        from videotune.trainer.resume import OpenedRun
        from videotune.trainer.setup import build_trainer

        write_dataset(Path(folder) / "clips", concept_clips=2, reminder_clips=0)
        sets = ("steps=9", "validate_every=0", "sample_after=0", "dataloader_threads=1")
        overrides = Overrides(preset="toy", data=f"{folder}/clips", sets=sets)
        job = open_job(*resolve_config(overrides))
        trainer = build_trainer(OpenedRun(job), Path(folder) / "run", make_plan(job))
        modules: set[str] = set()
        is_measuring = False

        def profile(frame: FrameType, event: str, argument: object) -> None:
            file = frame.f_code.co_filename
            if is_measuring and event == "call" and file.startswith(str(PACKAGE)):
                modules.add(module_of(Path(file)))

        threading.setprofile(profile)
        records: Any = train_steps(trainer)
        try:
            # The first steps import modules and draw for many steps.
            next(records)
            next(records)
            is_measuring = True
            sys.setprofile(profile)
            next(records)
            next(records)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            records.close()
            trainer.journal.close()
    return sorted(modules - {STEP_ENTRY, STEP_END})


def sizes() -> list[Figure]:
    """Return tokens of code: of the package, by folder and by capability, and of the
    tests.
    """
    files = python_files(PACKAGE)
    by_folder: Counter[str] = Counter()
    for path in files:
        folder = path.relative_to(PACKAGE).parts[0]
        by_folder["shared" if folder.endswith(".py") else folder] += tokens_and_lines(
            path
        )[0]

    figures = [Figure("tokens of the package", tokens_of(files))]
    for folder, tokens in sorted(by_folder.items()):
        figures.append(Figure(f"  {folder}", tokens))
    for capability, folders in CAPABILITIES.items():
        tokens = sum(by_folder[folder] for folder in folders)
        figures.append(Figure(f"tokens for {capability}", tokens))
    figures.append(
        Figure("tokens of the tests", tokens_of(python_files(ROOT / "tests")))
    )
    return figures


def shapes() -> list[Figure]:
    """Return the figures of how the package reads, with their bounds."""
    files = python_files(PACKAGE)
    tokens = tokens_of(files)
    lines = sum(tokens_and_lines(path)[1] for path in files)
    large_files = [
        path for path in files if tokens_and_lines(path)[1] >= SMALLEST_DENSE_FILE
    ]
    by_density = sorted(large_files, key=density, reverse=True)
    dense_places = tuple(
        f"{path.relative_to(ROOT)} {density(path):.1f}" for path in by_density[:8]
    )

    tuples = tuple_assignments()
    nested = nested_comprehensions()
    unbroken, long = unbroken_functions()
    vague, bindings = vague_names()
    rings = circles()

    by_length = {}
    for path, function in functions():
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        by_length[f"{location(path, function)} {function.name} {length}"] = length
    longest_functions = tuple(sorted(by_length, key=lambda name: -by_length[name])[:8])

    file_lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in files
    }
    longest_file = max(file_lengths, key=lambda path: file_lengths[path])
    return [
        Figure("tokens a line", round(tokens / lines, 2), 8.5),
        Figure(
            "tokens a line, densest file",
            round(density(by_density[0]), 2),
            9.5,
            dense_places,
        ),
        Figure("several values in one assignment", len(tuples), 0, tuple(tuples)),
        Figure("nested comprehensions", len(nested), 10, tuple(nested)),
        Figure(
            "% of functions from 15 lines without a paragraph",
            round(100 * len(unbroken) / max(1, long), 1),
            10,
            tuple(unbroken),
        ),
        Figure(
            "% of names that do not say the noun",
            round(100 * len(vague) / max(1, bindings), 2),
            0.5,
            tuple(vague),
        ),
        Figure(
            "lines, longest function", max(by_length.values()), 70, longest_functions
        ),
        Figure(
            "lines, longest file",
            file_lengths[longest_file],
            500,
            (str(longest_file.relative_to(ROOT)),),
        ),
        Figure("import circles", len(rings), 0, tuple(rings)),
    ]


def main(show: Callable[[str], object] = print) -> int:
    inner = inner_imports()
    figures = [
        *sizes(),
        *shapes(),
        Figure("imports inside functions", len(inner), None, tuple(inner)),
    ]
    if "-v" in sys.argv:  # it trains, and has no bound here: tests/test_layers.py has
        modules = step_modules()
        figures.append(
            Figure("modules of a training step", len(modules), None, tuple(modules))
        )
    for figure in figures:
        line = f"{figure.name:<50} {figure.value:>9,}"
        if figure.bound is not None:
            line += f"  bound {figure.bound:>5,}"
        if figure.exceeds:
            line += "  EXCEEDED"
        show(line)
        if figure.exceeds or "-v" in sys.argv:
            for place in figure.places[:20]:
                show(f"    {place}")
    return int(any(figure.exceeds for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
