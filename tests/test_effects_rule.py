"""Every knob works or does not exist: each key of the config has an effect test, and
each such test a key that is there.

Whether a test changed the key that its mark names is recorded while it runs
(tests/support/effect_marks.py).
"""

import ast
from pathlib import Path

from videotune.config.schema import leaves

EFFECTS = Path(__file__).parent / "effects"


def marks(tree: ast.Module) -> dict[str, list[str]]:
    """The keys in ``effect`` marks, by the test function that carries them."""
    found = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            found[function.name] = [
                ast.literal_eval(word)
                for mark in function.decorator_list
                if isinstance(mark, ast.Call)
                and isinstance(mark.func, ast.Attribute)
                and mark.func.attr == "effect"
                for word in mark.args
            ]
    return found


def marked() -> dict[str, list[str]]:
    """For each key, the tests that claim it."""
    claims: dict[str, list[str]] = {}
    for path in sorted(EFFECTS.glob("test_*.py")):
        for test, keys in marks(ast.parse(path.read_text(encoding="utf-8"))).items():
            assert not keys or test.startswith("test_"), (
                f"{path.name}: {test} carries a mark and is no test"
            )
            for key in keys:
                claims.setdefault(key, []).append(f"{path.name}::{test}")
    return claims


def test_every_key_has_an_effect_test() -> None:
    missing = set(leaves()) - set(marked())
    assert not missing, (
        f"no effect test for {', '.join(sorted(missing))}: test what each does, or take it out"
    )


def test_every_effect_test_is_of_a_key_that_there_is() -> None:
    claims = marked()
    superfluous = {key: claims[key] for key in set(claims) - set(leaves())}
    assert not superfluous, f"effect tests of keys that do not exist: {superfluous}"
