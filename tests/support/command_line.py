"""The commands as the command line runs them, in this process: what they print, and
their exit codes.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from videotune.cli.main import app
from videotune.cli.train import show_training
from videotune.commands import train as training
from videotune.commands.sample_options import FILE_OPTIONS, SampleOptions
from videotune.job.overrides import Overrides
from videotune.trainer.resume import Resume

Bases = Callable[..., Path]
"""What the fixture tiny_bases gives."""
Patch = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]

FLAGS = {"as_json": "json", "every": "all"}


def run(*args: Any, **options: Any) -> int:
    """``videotune ARGS --OPTION VALUE``: its exit code; raises what the command line
    would print as an error.
    """
    words = [str(arg) for arg in args]
    for key, value in options.items():
        flag = f"--{FLAGS.get(key, key).replace('_', '-')}"
        values = value if isinstance(value, list | tuple) else [value]
        given = [one for one in values if one is not None and one is not False]
        words += (
            [flag]
            if value is True
            else [word for one in given for word in (flag, str(one))]
        )
    return app(words, standalone_mode=False) or 0


def options_of(words: Overrides) -> dict[str, Any]:
    """The options of the command line that say the same."""
    return {
        ("set" if key == "sets" else key): value
        for key, value in asdict(words).items()
        if value
    }


def check(words: Overrides, **options: Any) -> int:
    return run("check", **options_of(words), **options)


def plan(words: Overrides, **options: Any) -> int:
    return run("plan", **options_of(words), **options)


def cache(words: Overrides, **options: Any) -> int:
    return run("cache", **options_of(words), **options)


def prune_cache(words: Overrides, **options: Any) -> int:
    return run("cache", "prune", **options_of(words), **options)


def list_cache(place: Path, **options: Any) -> int:
    return run("cache", "ls", place, **options)


def verify_cache(place: Path) -> int:
    return run("cache", "verify", place)


def sample(words: SampleOptions, out: Path) -> int:
    many = {
        "prompt": words.prompts,
        "lora": words.loras,
        "embedding": words.embeddings,
        "image": words.images,
    }
    named = {
        "seed": words.seed,
        "step": words.step,
        "base": words.base,
        "strength": words.strength,
        "set": words.sets,
        **{name: getattr(words, name) for name in FILE_OPTIONS},
    }
    return run("sample", *([words.run] if words.run else []), out=out, **many, **named)


def compare(
    folder: Path, prompt: str | None, seed: int | None, out: Path | None
) -> int:
    return run("compare", folder, prompt=prompt, seed=seed, out=out)


def export(
    folder: Path,
    formats: Sequence[str] = (),
    step: int | None = None,
    out: Path | None = None,
    merge: bool = False,
) -> int:
    return run("export", folder, format=list(formats), out=out, merge=merge)


def train(
    words: Overrides, out: Path, *, resume: Resume | None = None, **options: Any
) -> int:
    """As the command, but that its time is not this process's."""
    result = training.train(words, out, resume=resume or False, **options)
    if result.report is not None:
        show_training(result)
    return result.exit_code
