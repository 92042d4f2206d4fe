"""The architecture: which package imports which, who may name a family, and that
starting is light.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from videotune.models.registry import find, names

ROOT = Path(__file__).parent.parent / "videotune"
FAMILY_WORDS = {
    re.split("[^a-z]", name.lower())[0]
    for known in names()
    for name in (known, *find(known).spec.aliases)
}
"""The first word of each name that a family has."""


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py"))


def test_packages_import_from_lower_layers_alone() -> None:
    """pyproject.toml has the contracts."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    lint = subprocess.run(
        command, cwd=ROOT.parent, capture_output=True, text=True, check=False
    )
    assert lint.returncode == 0, lint.stdout


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if path.parent.name != "models"],
    ids=lambda path: str(path.relative_to(ROOT)),
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
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in doc
        ):
            texts.append(node.value)
        elif isinstance(node, ast.Name):
            texts.append(node.id)
        elif isinstance(node, ast.Attribute):
            texts.append(node.attr)
        elif isinstance(node, ast.alias):
            texts.append(node.name)
        for text in texts:
            plain = re.sub(
                r"\b(un)?want(s|ed|ing)?\b|wandb", "", text.lower().replace("_", " ")
            )
            words = [word for word in FAMILY_WORDS if word in plain]
            assert not words, (
                f"{path}:{getattr(node, 'lineno', 0)} names {words[0]} in {text!r}"
            )


@pytest.mark.parametrize("package", ["config", "data", "toy", "cli"])
def test_packages_that_start_light_import_no_torch(package: str) -> None:
    names = [
        f"videotune.{package}.{path.stem}"
        for path in sorted((ROOT / package).glob("*.py"))
        if path.stem != "__init__"
    ]
    heavy = "('torch', 'diffusers', 'transformers', 'peft', 'fastapi')"
    code = f"import sys, {', '.join(names)}; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"


def test_the_modules_of_a_training_step_are_measured() -> None:
    """In a process of its own: other tests have other threads."""
    code = "import json; from scripts.house import step_modules; print(json.dumps(step_modules()))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(out.stdout.splitlines()[-1])
    assert {
        "videotune.trainer.step",
        "videotune.diffusion.loss",
        "videotune.latent_cache.batches",
    } <= set(found)
