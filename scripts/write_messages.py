"""Writes tests/docs/messages.txt, every error text of the package: python scripts/write_messages.py [FILE].

A change of wording then shows in one file, and no other test holds it. ``{…}`` stands for a value.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "docs" / "messages.txt"


def error_classes(trees: list[ast.Module]) -> set[str]:
    """VideotuneError and the classes below it."""
    found = {"VideotuneError"}
    for _ in range(3):  # as deep as the hierarchy is
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and found & {ast.unparse(base) for base in node.bases}:
                    found.add(node.name)
    return found


def template(text: ast.expr) -> str:
    """The text with each value in braces; an expression that makes the text, as it stands in the code."""
    match text:
        case ast.Constant(value=str(words)):
            return words.replace("\n", "\\n")
        case ast.JoinedStr(values=values):
            parts = (
                template(part) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                for part in values
                if isinstance(part, ast.Constant | ast.FormattedValue)
            )
            return "".join(parts)
        case _:
            return f"{{{ast.unparse(text)}}}"


def messages() -> Iterator[str]:
    """A line for each place that makes an error."""
    files = sorted((ROOT / "videotune").rglob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    errors = error_classes(trees)
    for path, tree in zip(files, trees, strict=True):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in errors and node.args:
                yield f"{path.relative_to(ROOT / 'videotune')}: {template(node.args[0])}"
            elif isinstance(node, ast.Yield) and node.value and path.name == "rules.py":  # the faults of a config
                yield f"{path.relative_to(ROOT / 'videotune')}: {template(node.value)}"


def page() -> str:
    return "\n".join(sorted(messages())) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(), encoding="utf-8")
    print(f"{path}: {len(page().splitlines())} messages; python scripts/write_messages.py writes the snapshot anew")
