"""The toy's transformer: fine-tuned from random weights by videotune itself, on clips
on the disk as a person's are.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from toymaking.recipe import Recipe
from transformers import AutoTokenizer, UMT5EncoderModel

from videotune.commands.train import train
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json, write_json, write_text
from videotune.rng import generator_for, torch_seed
from videotune.runs.journal import read_journal
from videotune.toy.dataset import encode_clip
from videotune.toy.shapes import (
    FPS,
    HELD_OUT,
    KNOWN,
    TEMPLATES,
    Look,
    caption,
    draw_clip,
)


def make(out: Path, autoencoder: Path, text: Path, recipe: Recipe, seed: int) -> Path:
    """Train and return the exported checkpoint, in float32; a run that was cut off goes
    on, a finished one is shown.
    """
    known = write_clips(
        out / "clips" / "known", KNOWN[: recipe.looks], recipe.clips_a_look
    )
    held_out = write_clips(out / "clips" / "held_out", HELD_OUT[: recipe.held_out], 1)
    base = fresh(out / f"fresh-{seed}", autoencoder, text, recipe, seed)
    config = out / f"transformer-{seed}.json"
    write_json(config, settings(base, known, held_out, out / "cache", recipe, seed))
    run = out / f"run-{seed}"
    if not any(
        line["kind"] == "end" and line["why"] == "done" for line in read_journal(run)
    ):
        begun = (run / "config.json").is_file()
        if train(None if begun else config, run, resume=begun).exit_code != DONE:
            raise VideotuneError(
                f"{run} was cut off: start the same command again to go on"
            )
    return run / str(read_json(run / "exports.json")[-1]["path"])


def write_clips(folder: Path, looks: tuple[Look, ...], copies: int) -> Path:
    """So many clips of each look, with the four captions that say it; those that are
    there already are left.
    """
    for index in range(copies * len(looks)):
        look = looks[index % len(looks)]
        stem = f"{index:05d}-{'-'.join(look)}"
        video = folder / "videos" / f"{stem}.mp4"
        words = folder / "captions" / f"{stem}.txt"
        if not words.is_file():
            encode_clip(
                video,
                draw_clip(
                    generator_for(0, "transformer clips", folder.name, index), *look
                ),
                FPS,
            )
            texts = [caption(*look, template) for template in range(len(TEMPLATES))]
            write_text(words, "\n".join(texts) + "\n", durable=False)
    return folder


def fresh(
    folder: Path, autoencoder: Path, text: Path, recipe: Recipe, seed: int
) -> Path:
    """The whole checkpoint with a transformer of random weights."""
    if (folder / "model_index.json").is_file():  # written last
        return folder
    torch.manual_seed(torch_seed(seed, "transformer"))
    transformer: Any = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=recipe.heads,
        attention_head_dim=recipe.head_width,
        in_channels=recipe.channels,
        out_channels=recipe.channels,
        text_dim=recipe.text_width,
        freq_dim=64,
        ffn_dim=recipe.ffn,
        num_layers=recipe.layers,
        cross_attn_norm=True,
    )
    with torch.no_grad():
        transformer.proj_out.weight.mul_(0.1)  # begins near the mean
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipeline = WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(text / "tokenizer"),
        text_encoder=UMT5EncoderModel.from_pretrained(text / "text_encoder"),
        vae=AutoencoderKLWan.from_pretrained(autoencoder),
        scheduler=scheduler,
        transformer=transformer,
    )
    pipeline.save_pretrained(folder)
    return folder


def settings(
    base: Path, known: Path, held_out: Path, cache: Path, recipe: Recipe, seed: int
) -> dict[str, Any]:
    """The config of the run.

    The held-out looks are measured by validation and never trained.
    """
    return {
        "base_model_name": str(base),
        "training_method": "FINE_TUNE",
        "datasets": [
            {"path": str(known)},
            {"path": str(held_out), "kind": "validation"},
        ],
        "cache_dir": str(cache),
        "validation_fraction": 0.0,
        "resolution": "64x64",
        "video_config": {"frames": 17},
        "steps": recipe.transformer_steps,
        "batch_size": recipe.batch,
        "seed": seed,
        "learning_rate": 1.5e-3,
        "learning_rate_scheduler": "COSINE",
        "warmup_steps": min(100, recipe.transformer_steps // 20),
        "ema": {"decay": 0.995},
        "timestep_shift": 1.0,
        "timestep_mean": 0.4,
        "timestep_stratified": True,
        "caption_dropout": 0.1,
        "dataloader_threads": 0,
        "validate_every": max(1, recipe.transformer_steps // 8),
        "save_every": max(1, recipe.transformer_steps // 4),
        "backup_after": 3.0,
        "sample_after": 0,
        "samples": 0,
    }
