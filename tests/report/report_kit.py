"""Run folders written by hand, as plain as the files a run leaves behind."""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 120
CLIPS = {"a" * 32: "zorble left.mp4", "b" * 32: "b <i>bold.webm", "c" * 32: "two windows.mov"}
WINDOWS = [f"{'a' * 12}@0.000+17x64x64", f"{'b' * 12}@0.000+17x64x64"] + [
    f"{'c' * 12}@{start:.3f}+17x64x64" for start in (0, 1.0625)
]
EVIL = "</p><script>alert('zorble')</script>"


def write_journal(folder: Path, records: list[dict[str, Any]], tail: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "journal.jsonl").write_text(lines + tail, encoding="utf-8")


def put(folder: Path, name: str, value: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def start(**changed: Any) -> dict[str, Any]:
    return {
        "kind": "start",
        "time": 1790000000.5,
        "steps": STEPS,
        "effective_batch": 2,
        "device": "cpu",
        "versions": {"videotune": "0.1.0", "torch": "2.13.0"},
        "clips": {"found": 5, "used": 3, "held_out": 1, "skipped": 1},
        "windows": 4,
        "buckets": [{"shape": "17x64x64", "windows": 4, "tokens": 80}],
        "trainable_parameters": 359424,
        "notes": ["16 frames are no count the model takes: 17 are used"],
    } | changed


def step(number: int, mse: float | None = None, **changed: Any) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    mse = 0.2 + 0.25 * math.exp(-number / 30) + 0.02 * rng.standard_normal() if mse is None else mse
    ninth = number % 9
    return {
        "kind": "step",
        "step": number,
        "loss": mse,
        "mse": mse,
        "by_t": [mse * (1.5 - i / 9) if i in (ninth, (ninth + 4) % 9) else None for i in range(9)],
        "lr": {"lora": 1e-3},
        "grad_norm": 0.5,
        "window_ids": [WINDOWS[(2 * number) % 4], WINDOWS[(2 * number + 1) % 4]],
        "seconds": {"data": 0.01, "forward": 0.1, "backward": 0.19, "optimizer": 0.0},
    } | changed


def reading(number: int, held_out: float | None, train: float) -> dict[str, Any]:
    def part(mean: float) -> dict[str, Any]:
        clips = {letter * 12: mean for letter in "de"}
        levels = [mean * (1.6 - 0.15 * i) for i in range(9)]
        return {"mean": mean, "by_quantile": levels, "normalised": 1.0, "clips": clips}

    held = None if held_out is None else part(held_out)
    return {"kind": "ruler", "step": number, "held_out": held, "train": part(train), "seconds": 0.4}


def clip(path: str, **changed: Any) -> dict[str, Any]:
    return {
        "path": path,
        "used": True,
        "held_out": False,
        "reason": None,
        "detail": None,
        "source_fps": 16.0,
        "source_frames": 17,
        "width": 64,
        "height": 64,
        "windows": 1,
        "frames": 17,
        "shape": "17x64x64",
        "seconds_cut": 0.0,
        "repeats_share": 0.0,
        "speed": 1.0,
        "views": 60,
        "warnings": [],
    } | changed


def account(ids: bool = True) -> dict[str, Any]:
    used = [clip(path, **({"id": key} if ids else {})) for key, path in CLIPS.items()]
    used[2] |= {"windows": 2, "frames": 34, "views": 120, "source_fps": 29.97, "seconds_cut": 0.1875}
    used[1] |= {"warnings": ["42 % of its frames repeat the one before <b>"], "repeats_share": 0.42}
    gone = {"used": False, "windows": 0, "frames": 0, "shape": None, "views": None}
    held = clip("held back.mp4", **gone) | {"held_out": True, "windows": 1, "frames": 17, "shape": "17x64x64"}
    short = clip("short.mp4", **gone) | {"reason": "too_short", "detail": "3 frames at 16 fps; 5 are needed"}
    return {
        "found": 5,
        "used": 3,
        "held_out": 1,
        "skipped": 1,
        "clips": [*used, held, short],
        "buckets": [{"shape": "17x64x64", "windows": 4}],
        "notes": ["fewer than 20 source videos"],
    }


def config() -> dict[str, Any]:
    return {
        "settings": {
            "base_model_name": "asset:toy",
            "training_method": "LORA",
            "steps": STEPS,
            "learning_rate": 1e-3,
            "lora": {"rank": 16, "targets": "linear"},
            "video_config": {"target_fps": 16.0, "strict_frames": False},
            "datasets": [{"path": "/clips/<mine>", "trigger": None}],
        },
        "origins": {
            "base_model_name": "preset",
            "training_method": "default",
            "steps": "user",
            "learning_rate": "preset",
            "lora.rank": "default",
            "lora.targets": "preset",
            "video_config.target_fps": "family",
            "video_config.strict_frames": "default",
            "datasets": "user",
        },
        "base": {"name": "asset:toy", "fingerprints": {}},
        "steps": STEPS,
    }


def plan() -> dict[str, Any]:
    views = {
        "per_window": {"min": 60, "mean": 60.0, "max": 60, "band": "high"},
        "clips": dict(zip(CLIPS, (60, 60, 120), strict=True)),
        "advice": "50 to 100 views a window: watch the previews for copies of the clips",
    }
    return {"steps": STEPS, "effective_batch": 2, "views": views, "disk": {"latent_bytes": 1}}


def sample(number: int, prompt: str, seed: int = 42, **changed: Any) -> dict[str, Any]:
    path = f"samples/step-{number:06d}-{zlib.crc32(prompt.encode()):08x}-seed{seed}.mp4"
    return {"kind": "sample", "step": number, "prompt": prompt, "seed": seed, "path": path, "seconds": 1.5} | changed


def full_run(folder: Path, last_step: int = STEPS) -> Path:
    """A run that went well, with text in it that would be markup if it were let through."""
    samples = [sample(n, prompt) for n in (0, 60, 120) if n <= last_step for prompt in ("a zorble moves left", EVIL)]
    records = [start(), reading(0, 0.44, 0.46), *(r for r in samples if r["step"] == 0)]
    for number in range(1, last_step + 1):
        records.append(step(number))
        records += [r for r in samples if r["step"] == number]
        if number % 60 == 0:
            records += [reading(number, 0.4 - number / 1000, 0.38 - number / 800)]
            records += [{"kind": "save", "step": number, "path": f"checkpoints/step-{number}"}]
    if last_step == STEPS:
        records += [{"kind": "warning", "step": 60, "text": f"the preview was slow {EVIL}"}]
        records += [{"kind": "end", "step": last_step, "why": "done"}]
    write_journal(folder, records)
    for record in samples:
        (folder / record["path"]).parent.mkdir(exist_ok=True)
        (folder / record["path"]).write_bytes(b"not looked into")
    for number in range(60, last_step + 1, 60):
        (folder / f"checkpoints/step-{number}").mkdir(parents=True)
    (folder / "export").mkdir()
    (folder / "export" / "zorble.safetensors").write_bytes(bytes(1_450_000))
    checked = {"max_error": 2.5e-8, "modules": 60, "reader": "diffusers"}
    put(folder, "exports.json", [{"format": "diffusers", "path": "export/zorble.safetensors", "verified": checked}])
    put(folder, "config.json", config())
    put(folder, "check.json", account())
    put(folder, "plan.json", plan())
    return folder
