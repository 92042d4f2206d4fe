"""Writes tests/docs/messages.txt, every error text of the package: python
scripts/write_messages.py [FILE].

A change of wording then shows in one file, and no other test holds it. ``{…}`` stands
for a value; a part of the text that has a name in the function is written out.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "docs" / "messages.txt"


def error_classes(trees: list[ast.Module]) -> set[str]:
    """VideotuneError and the classes below it."""
    found = {"VideotuneError"}
    for _ in range(3):  # as deep as the hierarchy is
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and found & {
                    ast.unparse(base) for base in node.bases
                }:
                    found.add(node.name)
    return found


def named_parts(function: ast.AST, line: int) -> dict[str, ast.expr]:
    """The texts that have a name in a function before a line, by that name; of several
    of one name the last.
    """
    found = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and node.lineno < line
    ]
    return {
        ast.unparse(node.targets[0]): node.value
        for node in sorted(found, key=lambda node: node.lineno)
        if isinstance(node.value, ast.JoinedStr | ast.IfExp)
        or isinstance(getattr(node.value, "value", None), str)
    }


def template(text: ast.expr, parts: dict[str, ast.expr]) -> str:
    """The text with each value in braces; an expression that makes the text, as it
    stands in the code.
    """
    match text:
        case ast.Constant(value=str(words)):
            return words.replace("\n", "\\n")
        case ast.JoinedStr(values=values):
            return "".join(
                template(
                    one.value if isinstance(one, ast.FormattedValue) else one, parts
                )
                for one in values
            )
        case ast.Name(id=name) if name in parts:
            return template(
                parts[name], {key: part for key, part in parts.items() if key != name}
            )
        case _:
            return f"{{{ast.unparse(text)}}}"


def yields_faults(path: Path) -> bool:
    """Whether the generators of a module yield the faults of a config."""
    is_of_config = path.parent.name == "config"
    return is_of_config and path.stem.endswith(("_checks", "validators"))


def messages() -> Iterator[str]:
    """A line for each place that makes an error."""
    files = sorted((ROOT / "videotune").rglob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    errors = error_classes(trees)
    for path, tree in zip(files, trees, strict=True):
        owner: dict[Any, ast.AST] = dict.fromkeys(ast.walk(tree), tree)
        for inner in (
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        ):  # the inner ones last
            owner |= dict.fromkeys(ast.walk(inner), inner)
        for node, function in owner.items():
            text = None
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in errors
                and node.args
            ):
                text = node.args[0]
            elif isinstance(node, ast.Yield) and yields_faults(path):
                text = node.value
            if text is not None:
                parts = named_parts(function, node.lineno)
                yield f"{path.relative_to(ROOT / 'videotune')}: {template(text, parts)}"


def page() -> str:
    return "\n".join(sorted(messages())) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(), encoding="utf-8")
    print(
        f"{path}: {len(page().splitlines())} messages; python scripts/write_messages.py writes the snapshot anew"
    )
