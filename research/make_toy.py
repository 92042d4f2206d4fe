"""Makes the toy base model: a small true Wan that draws coloured shapes, from nothing
but drawn clips.

    python research/make_toy.py --out runs/toy [--seeds 0 1] [--until STAGE] [--figures
    FILE --pictures DIR]

Stages: autoencoder, text, transformer (one for each seed; the first seed is also that
of the autoencoder and the text encoder), assemble, score. Each goes on where it was
killed, and what is finished is left as it is: start the same command again. It takes
about half an hour of one core for the autoencoder and as much for each transformer. The
result is ``OUT/toy-SEED``, a checkpoint in diffusers layout, in float16.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from toymaking import autoencoder, finish, text, transformer
from toymaking.recipe import TINY, Recipe

from videotune.errors import VideotuneError
from videotune.files import digest, hash_file, read_json, write_json
from videotune.models.base_model import place
from videotune.runs.journal import read_journal
from videotune.toy.shapes import HELD_OUT, caption

STAGES = ("autoencoder", "text", "transformer", "assemble", "score")


def main(arguments: Sequence[str] | None = None) -> None:
    """All stages, up to the one that is asked for."""
    words = parsed(arguments)
    recipe = recipe_of(words)
    out = words.out
    last = STAGES.index(words.until)
    torch.set_flush_denormal(True)  # a random network's first steps meet many
    remember(out, recipe)
    vae = autoencoder.train(out, recipe)
    if last >= STAGES.index("text"):
        captions = text.make(out, recipe)
    if last >= STAGES.index("transformer"):
        trained = {
            seed: transformer.make(out, vae, captions, recipe, seed)
            for seed in words.seeds
        }
    if last >= STAGES.index("assemble"):
        made = {
            seed: finish.assemble(folder, out / f"toy-{seed}")
            for seed, folder in trained.items()
        }
    if last >= STAGES.index("score"):
        named = {f"seed {seed}, float16": str(folder) for seed, folder in made.items()}
        named |= {
            f"seed {seed}, float32": str(folder) for seed, folder in trained.items()
        }
        named |= {
            name: folder or name
            for name, _, folder in (also.partition("=") for also in words.also)
        }
        measured = measure(out, named, recipe, words.pictures or out / "pictures")
        facts = {
            "recipe": asdict(recipe),
            "checkpoints": measured,
            "curves": curves(out, words.seeds),
        }
        write_json(words.figures or out / "toy.json", facts)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder of everything"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="a transformer for each"
    )
    parser.add_argument(
        "--until", choices=STAGES, default=STAGES[-1], help="the last stage"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="everything in seconds, to try it; nothing is learnt",
    )
    parser.add_argument("--steps-autoencoder", type=int, help="instead of the recipe's")
    parser.add_argument("--steps-transformer", type=int, help="instead of the recipe's")
    parser.add_argument(
        "--also",
        nargs="*",
        default=[],
        help="other checkpoints to score: asset:toy, or NAME=FOLDER",
    )
    parser.add_argument(
        "--figures", type=Path, help="where the figures go (default: OUT/toy.json)"
    )
    parser.add_argument(
        "--pictures", type=Path, help="where the pictures go (default: OUT/pictures)"
    )
    return parser.parse_args(arguments)


def recipe_of(words: argparse.Namespace) -> Recipe:
    """The recipe with what the command line says otherwise."""
    asked = {
        "autoencoder_steps": words.steps_autoencoder,
        "transformer_steps": words.steps_transformer,
    }
    recipe = replace(TINY if words.tiny else Recipe(), seed=words.seeds[0])
    return replace(
        recipe, **{name: value for name, value in asked.items() if value is not None}
    )


def remember(out: Path, recipe: Recipe) -> None:
    """Write the recipe beside what it makes.

    Raises VideotuneError where the folder was begun with another one: its parts would
    not belong together.
    """
    path = out / "recipe.json"
    asked = asdict(recipe)
    before = read_json(path) if path.is_file() else asked
    if before != asked:
        other = ", ".join(
            f"{name} {before.get(name)}"
            for name in asked
            if before.get(name) != asked[name]
        )
        raise VideotuneError(
            f"{out} was begun with another recipe ({other}): name another --out"
        )
    write_json(path, asked)


def measure(
    out: Path, named: dict[str, str], recipe: Recipe, pictures: Path
) -> dict[str, Any]:
    """Score each checkpoint; figures that are there already are shown again.

    The first one's pictures are drawn.
    """
    figures: dict[str, Any] = {}
    for index, (name, folder) in enumerate(named.items()):
        weights = [
            hash_file(path)
            for path in sorted(place(folder).folder.rglob("*.safetensors"))
        ]
        kept = out / "work" / f"score-{digest([name, weights, asdict(recipe)])}.json"
        if not kept.is_file():
            found, shown = finish.score(folder, recipe)
            if index == 0:
                draw(pictures, shown)
            write_json(kept, found)
        figures[name] = read_json(kept)
        print(f"score: {name}: {figures[name]}", flush=True)
    return figures


def curves(out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """What was measured on the way: the autoencoder's PSNR, and each transformer's
    error on clips of held-out looks.
    """
    found: dict[str, Any] = {
        "autoencoder": read_json(out / "autoencoder" / "curve.json")
    }
    for seed in seeds:
        losses = [
            line
            for line in read_journal(out / f"run-{seed}")
            if line["kind"] == "validation"
        ]
        found[f"transformer {seed}"] = [
            {
                "step": line["step"],
                "held_out": line["held_out"]["mean"],
                "train": line["train"]["mean"],
            }
            for line in losses
        ]
    return found


def draw(folder: Path, shown: dict[str, Any]) -> None:
    """Two sheets: what the model draws of held-out looks, and clips beside what the
    autoencoder makes of them.
    """
    rows = [
        (caption(*look), clip)
        for look, clip in zip(HELD_OUT, shown["samples"], strict=False)
    ]
    finish.sheet(folder / "toy-samples.png", rows)
    parts = [
        (part, index, clip)
        for part in ("base", "concept", "striped")
        for index, clip in enumerate(shown[part][:6])
    ]
    told = [
        (f"{part}, {'rebuilt' if index % 2 else 'drawn'}", clip)
        for part, index, clip in parts
    ]
    finish.sheet(folder / "toy-autoencoder.png", told)


if __name__ == "__main__":
    main()
