"""The house: which room may import which, who may name a family, and that starting is light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from videotune.models.registry import find, names

ROOT = Path(__file__).parent.parent / "videotune"
FLOORS = {
    "types": 0, "errors": 0, "files": 0, "randomness": 0, "lazy": 0,
    "records": 1, "config": 1, "data": 1, "diffusion": 1, "memory": 1,
    "steps": 2, "models": 2, "adapters": 2,
    "cache": 3, "prepare": 3, "importers": 3, "toy": 3,
    "train": 4, "monitor": 4, "sampling": 4, "export": 4, "report": 4,
    "run": 5, "studio": 6, "cli": 7,
}  # fmt: skip
DATA_ONLY = ("assets", "presets")
FAMILY_WORDS = {
    re.split(r"[^a-z]", name.lower())[0] for known in names() for name in (known, *find(known).spec.aliases)
}
"""The first word of each name that a family has."""


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    part = path.relative_to(ROOT).parts[0]
    return part.removesuffix(".py")


def imported(path: Path) -> list[str]:
    """Rooms of videotune that a module imports, at the top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level == 1 and len(path.relative_to(ROOT).parts) > 1:
                continue  # its own room
            if node.level:
                found.append(name.split(".")[0] if name else node.names[0].name)
            elif name == "videotune":
                found += [alias.name for alias in node.names]
            elif name.startswith("videotune."):
                found.append(name.split(".")[1])
        elif isinstance(node, ast.Import):
            found += [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("videotune.")]
    return found


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(path) for path in modules()} - {"__init__", "__main__"} - set(DATA_ONLY)
    assert rooms <= set(FLOORS), f"not in the table: {sorted(rooms - set(FLOORS))}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_to_lower_floors(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__", *DATA_ONLY):
        return
    for other in imported(path):
        if other in ("__version__", "BEGUN") or other == room:
            continue
        assert other in FLOORS, f"{path} imports videotune.{other}, which is no room"
        assert FLOORS[other] < FLOORS[room], f"{path} (F{FLOORS[room]}) imports videotune.{other} (F{FLOORS[other]})"


@pytest.mark.parametrize(
    "path", [path for path in modules() if room_of(path) != "models"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_code_outside_models_names_a_family(path: Path) -> None:
    """Names, strings and attributes; docstrings may cite a paper."""
    tree = ast.parse(path.read_text())
    doc = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        texts = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in doc:
            texts.append(node.value)
        elif isinstance(node, ast.Name):
            texts.append(node.id)
        elif isinstance(node, ast.Attribute):
            texts.append(node.attr)
        elif isinstance(node, ast.alias):
            texts.append(node.name)
        for text in texts:
            plain = re.sub(r"\b(un)?want(s|ed|ing)?\b", "", text.lower().replace("_", " "))
            words = [word for word in FAMILY_WORDS if word in plain]
            assert not words, f"{path}:{getattr(node, 'lineno', 0)} names {words[0]} in {text!r}"


def test_the_studio_goes_by_files_and_the_command_line_alone() -> None:
    """It starts commands and reads what they wrote: whatever they can do, it can, and nothing beside."""
    rooms = {other for path in (ROOT / "studio").rglob("*.py") for other in imported(path)}
    assert rooms <= {"studio", "config", "data", "report", "files", "records", "steps", "errors"}


@pytest.mark.parametrize("room", ["config", "data", "toy", "report", "cli"])
def test_rooms_that_start_light_import_no_torch(room: str) -> None:
    names = [f"videotune.{room}.{path.stem}" for path in sorted((ROOT / room).glob("*.py")) if path.stem != "__init__"]
    heavy = "('torch', 'diffusers', 'transformers', 'peft', 'gradio')"
    code = f"import sys, {', '.join(names)}; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    assert {name: lines for name, lines in long.items() if lines > 480} == {}
