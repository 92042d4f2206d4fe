"""Makes the toy base model: a small true Wan that draws coloured shapes, from nothing but drawn clips.

    python scripts/make_toy.py --out runs/toy [--seeds 0 1] [--until STAGE] [--figures FILE --pictures DIR]

Stages: autoencoder, text, transformer (one for each seed; the first seed is also that of the autoencoder and the text
encoder), assemble, score. Each goes on where it was killed, and what is finished is left as it is: start the same command
again. It takes about half an hour of one core for the autoencoder and as much for each transformer. The result is
``OUT/toy-SEED``, a checkpoint in diffusers layout, in float16.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from toymaking import autoencoder, finish, text, transformer

from videotune.errors import VideotuneError
from videotune.files import read_json, write_json
from videotune.monitor.journal import read_journal
from videotune.randomness import key
from videotune.toy.shapes import HELD_OUT, caption

STAGES = ("autoencoder", "text", "transformer", "assemble", "score")


def main(arguments: Sequence[str] | None = None) -> None:
    """All stages, up to the one that is asked for."""
    words = parsed(arguments)
    torch.set_flush_denormal(True)  # a random network's first steps meet many
    remember(words)
    last = STAGES.index(words.until)
    vae = autoencoder.train(words.out, autoencoder.Recipe(words.steps_autoencoder, words.seeds[0], words.keep_every))
    if last < 1:
        return
    captions = text.make(words.out, words.seeds[0])
    if last < 2:
        return
    recipe = transformer.Recipe(words.steps_transformer, words.clips)
    trained = {seed: transformer.make(words.out, vae, captions, recipe, seed) for seed in words.seeds}
    if last < 3:
        return
    made = {seed: finish.assemble(folder, words.out / f"toy-{seed}") for seed, folder in trained.items()}
    if last < 4:
        return
    named = {f"seed {seed}, float16": str(folder) for seed, folder in made.items()}
    named |= {f"seed {seed}, float32": str(folder) for seed, folder in trained.items()}
    named |= {name: name for name in words.also}
    measured, pictures = measure(words.out, named, words.rounds)
    facts = {"checkpoints": measured, "settings": read_json(words.out / "made.json"), "curves": curves(words)}
    write_json(words.figures or words.out / "toy.json", facts)
    draw(words.pictures or words.out / "pictures", pictures[f"seed {words.seeds[0]}, float16"])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of everything")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a transformer for each")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage")
    parser.add_argument("--steps-autoencoder", type=int, default=1150, help="1.2 seconds of a core each")
    parser.add_argument("--steps-transformer", type=int, default=1900, help="0.7 seconds of a core each")
    parser.add_argument("--clips", type=int, default=20, help="of each of the 48 looks, for the transformer")
    parser.add_argument("--keep-every", type=int, default=75, help="steps of the autoencoder between savings")
    parser.add_argument("--rounds", type=int, default=4, help="samples of each of the 24 held-out looks")
    parser.add_argument("--also", nargs="*", default=[], help="other checkpoints to score, asset:toy for one")
    parser.add_argument("--figures", type=Path, help="where the figures go (default: OUT/toy.json)")
    parser.add_argument("--pictures", type=Path, help="where the pictures go (default: OUT/pictures)")
    return parser.parse_args(arguments)


def remember(words: argparse.Namespace) -> None:
    """Write what decides the result beside it.

    Raises VideotuneError where the folder was begun with something else: its parts would not belong together.
    """
    asked = {
        "seed": words.seeds[0],
        "steps_autoencoder": words.steps_autoencoder,
        "steps_transformer": words.steps_transformer,
        "clips": words.clips,
    }
    path = words.out / "made.json"
    if path.is_file() and (before := read_json(path)) != asked:
        raise VideotuneError(f"{words.out} was begun with {before}, not {asked}: name another --out")
    write_json(path, asked)


def measure(out: Path, named: dict[str, str], rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Score each checkpoint, and keep each one's figures as soon as they are there."""
    figures, pictures = {}, {}
    for name, folder in named.items():
        kept = out / "work" / f"score-{key(rounds, name, folder):032x}.json"
        if kept.is_file() and pictures:  # the first is drawn anew for its pictures
            figures[name] = read_json(kept)
        else:
            figures[name], pictures[name] = finish.score(folder, rounds)
            write_json(kept, figures[name])
        print(f"score: {name}: {figures[name]}", flush=True)
    return figures, pictures


def curves(words: argparse.Namespace) -> dict[str, Any]:
    """What was measured on the way: the autoencoder's PSNR, and each transformer's error on clips of held-out looks."""
    found: dict[str, Any] = {"autoencoder": read_json(words.out / "autoencoder" / "curve.json")}
    for seed in words.seeds:
        lines = read_journal(words.out / f"run-{seed}")
        found[f"transformer {seed}"] = [
            {"step": line["step"], "held_out": line["held_out"]["mean"], "train": line["train"]["mean"]}
            for line in lines
            if line["kind"] == "ruler"
        ]
    return found


def draw(folder: Path, pictures: dict[str, Any]) -> None:
    """Two sheets: what the model draws of held-out looks, and clips beside what the autoencoder makes of them."""
    rows = [(caption(*look), clip) for look, clip in zip(HELD_OUT, pictures["samples"], strict=False)]
    finish.sheet(folder / "toy-samples.png", rows)
    parts = [(part, clip) for part in ("base", "concept", "striped") for clip in pictures[part][:6]]
    told = [(f"{part}, {'rebuilt' if index % 2 else 'drawn'}", clip) for index, (part, clip) in enumerate(parts)]
    finish.sheet(folder / "toy-autoencoder.png", told)


if __name__ == "__main__":
    main()
