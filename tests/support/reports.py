"""Run directories written by hand, as plain as the files a run leaves behind; and the
page that is made of one.
"""

import json
import math
import re
import zlib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from videotune.reporter.build import collect, write_report
from videotune.reporter.read import read_run

STEPS = 120
CLIPS = {
    "a" * 32: "zorble left.mp4",
    "b" * 32: "b <i>bold.webm",
    "c" * 32: "two windows.mov",
}
WINDOWS = [
    f"{key * 12}@{start:.3f}+17x64x64"
    for key, start in (("a", 0), ("b", 0), ("c", 0), ("c", 1.0625))
]
EVIL = "</p><script>alert('zorble')</script>"


class Tree(HTMLParser):
    """What a browser would see: elements with their attributes, that they close in
    order, and the text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def chapters(folder: Path) -> dict[str, Any]:
    """What stands in each chapter, as data."""
    found: dict[str, Any] = collect(read_run(folder))["chapters"]
    return found


def elements(page: str) -> list[tuple[str, dict[str, str | None]]]:
    tree = Tree()
    tree.feed(page)
    tree.close()
    assert tree.open == []
    return tree.elements


def attributes(page: str, name: str, *tags: str) -> list[str]:
    """An attribute of all elements of these kinds."""
    return [
        str(given[name])
        for tag, given in elements(page)
        if tag in tags and name in given
    ]


def part(page: str, anchor: str) -> str:
    """A chapter's text, as read when it is unfolded."""
    found = re.search(rf'<section id="{anchor}">(.*?)</section>', page, re.DOTALL)
    assert found, anchor
    beside_title = re.compile(r'(?<=</h2>) <span class="soft">.*?</summary>', re.DOTALL)
    body = beside_title.sub("", found[1], count=1)
    return visible_text(body)


def visible_text(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def write_journal(folder: Path, records: list[dict[str, Any]], tail: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "journal.jsonl").write_text(lines + tail, encoding="utf-8")


def write_file(folder: Path, name: str, value: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def start(**changed: Any) -> dict[str, Any]:
    facts = {
        "kind": "start",
        "time": 1790000000.5,
        "steps": STEPS,
        "effective_batch": 2,
        "device": "cpu",
        "windows": 4,
    }
    facts |= {
        "versions": {"videotune": "0.1.0", "torch": "2.13.0"},
        "trainable_parameters": 359424,
    }
    facts |= {"clips": {"found": 5, "used": 3, "held_out": 1, "skipped": 1}}
    facts |= {"buckets": [{"shape": "17x64x64", "windows": 4, "tokens": 80}]}
    return (
        facts
        | {"notes": ["16 frames are no count the model takes: 17 are used"]}
        | changed
    )


def step(number: int, mse: float | None = None, **changed: Any) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    mse = (
        0.2 + 0.25 * math.exp(-number / 30) + 0.02 * rng.standard_normal()
        if mse is None
        else mse
    )
    ninths = (number % 9, (number + 4) % 9)
    return {
        "kind": "step",
        "step": number,
        "loss": mse,
        "mse": mse,
        "by_t": [mse * (1.5 - i / 9) if i in ninths else None for i in range(9)],
        "lr": {"lora": 1e-3},
        "grad_norm": 0.5,
        "window_ids": [WINDOWS[(2 * number) % 4], WINDOWS[(2 * number + 1) % 4]],
        "seconds": {"data": 0.01, "forward": 0.1, "backward": 0.19, "optimizer": 0.0},
    } | changed


def reading(number: int, held_out: float | None, train: float) -> dict[str, Any]:
    """A validation."""

    def part(mean: float) -> dict[str, Any]:
        levels = [mean * (1.6 - 0.15 * i) for i in range(9)]
        return {
            "mean": mean,
            "by_quantile": levels,
            "normalised": 1.0,
            "clips": {letter * 12: mean for letter in "de"},
        }

    held = None if held_out is None else part(held_out)
    return {
        "kind": "validation",
        "step": number,
        "held_out": held,
        "train": part(train),
        "seconds": 0.4,
    }


def clip(path: str, **changed: Any) -> dict[str, Any]:
    facts = {
        "path": path,
        "used": True,
        "held_out": False,
        "reason": None,
        "detail": None,
        "warnings": [],
        "views": 60,
    }
    facts |= {
        "source_fps": 16.0,
        "source_frames": 17,
        "width": 64,
        "height": 64,
        "windows": 1,
        "frames": 17,
    }
    return (
        facts
        | {"shape": "17x64x64", "seconds_cut": 0.0, "repeats_share": 0.0, "speed": 1.0}
        | changed
    )


def account(ids: bool = True) -> dict[str, Any]:
    used = [clip(path, **({"id": key} if ids else {})) for key, path in CLIPS.items()]
    used[2] |= {
        "windows": 2,
        "frames": 34,
        "views": 120,
        "source_fps": 29.97,
        "seconds_cut": 0.1875,
    }
    used[1] |= {
        "warnings": ["42 % of its frames repeat the one before <b>"],
        "repeats_share": 0.42,
    }
    gone = {"used": False, "windows": 0, "frames": 0, "shape": None, "views": None}
    held = clip("held back.mp4", **gone) | {
        "held_out": True,
        "windows": 1,
        "frames": 17,
        "shape": "17x64x64",
    }
    short = clip("short.mp4", **gone) | {
        "reason": "too_short",
        "detail": "3 frames at 16 fps; 5 are needed",
    }
    counts = {
        "found": 5,
        "used": 3,
        "held_out": 1,
        "skipped": 1,
        "notes": ["fewer than 20 source videos"],
    }
    return counts | {
        "clips": [*used, held, short],
        "buckets": [{"shape": "17x64x64", "windows": 4}],
    }


def config() -> dict[str, Any]:
    origins = {
        "base_model_name": "preset",
        "training_method": "default",
        "steps": "user",
        "learning_rate": "preset",
    }
    origins |= {"lora.rank": "default", "lora.targets": "preset", "datasets": "user"}
    origins |= {
        "video_config.target_fps": "family",
        "video_config.strict_frames": "default",
    }
    settings: dict[str, Any] = {
        "base_model_name": "asset:toy",
        "training_method": "LORA",
        "steps": STEPS,
    }
    settings |= {"learning_rate": 1e-3, "lora": {"rank": 16, "targets": "linear"}}
    settings |= {"video_config": {"target_fps": 16.0, "strict_frames": False}}
    settings |= {"datasets": [{"path": "/clips/<mine>", "trigger": None}]}
    return {
        "settings": settings,
        "origins": origins,
        "base": {"name": "asset:toy", "fingerprints": {}},
        "steps": STEPS,
    }


def plan() -> dict[str, Any]:
    views = {"per_window": {"min": 60, "mean": 60.0, "max": 60, "band": "high"}}
    views |= {"clips": dict(zip(CLIPS, (60, 60, 120), strict=True))}
    views |= {
        "advice": "50 to 100 views a window: watch the previews for copies of the clips"
    }
    return {
        "steps": STEPS,
        "effective_batch": 2,
        "views": views,
        "disk": {"latent_bytes": 1},
    }


def sample(number: int, prompt: str, seed: int = 42, **changed: Any) -> dict[str, Any]:
    path = f"samples/step-{number:06d}-{zlib.crc32(prompt.encode()):08x}-seed{seed}.mp4"
    return {
        "kind": "sample",
        "step": number,
        "prompt": prompt,
        "seed": seed,
        "path": path,
        "picture": picture(),
        "seconds": 1.5,
    } | changed


def picture(fault: str | None = None) -> dict[str, Any]:
    """What was measured of a sample."""
    return {
        "fault": fault,
        "brightest": 200.0,
        "range": 120.0,
        "change": 60.0,
        "neighbours": 0.9,
        "moments": 0.7,
    }


def full_run(folder: Path) -> Path:
    """A run that went well, with text in it that would be markup if it were let
    through.
    """
    samples = [
        sample(n, prompt)
        for n in (0, 60, 120)
        for prompt in ("a zorble moves left", EVIL)
    ]
    records = [start(), reading(0, 0.44, 0.46), *(r for r in samples if r["step"] == 0)]
    for number in range(1, STEPS + 1):
        records += [step(number), *(r for r in samples if r["step"] == number)]
        if number % 60 == 0:
            records += [reading(number, 0.4 - number / 1000, 0.38 - number / 800)]
            records += [
                {"kind": "save", "step": number, "path": f"checkpoints/step-{number}"}
            ]
            (folder / f"checkpoints/step-{number}").mkdir(parents=True)
    records += [{"kind": "warning", "step": 60, "text": f"the preview was slow {EVIL}"}]
    records += [{"kind": "end", "step": STEPS, "why": "done"}]
    write_journal(folder, records)
    for name in (*(record["path"] for record in samples), "export/zorble.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(1_450_000 if "export" in name else 9))
    checked = {"max_error": 2.5e-8, "modules": 60, "reader": "diffusers"}
    write_file(
        folder,
        "exports.json",
        [
            {
                "format": "diffusers",
                "path": "export/zorble.safetensors",
                "verified": checked,
            }
        ],
    )
    for name, value in (("config", config()), ("check", account()), ("plan", plan())):
        write_file(folder, f"{name}.json", value)
    return folder


def overfitting_run(folder: Path, why: str = "stopped") -> Path:
    """A run that copied its clips from step 60 on, and has ended at step 120 of 1500
    without a file.
    """
    full_run(folder)
    verdict = {
        "kind": "verdict",
        "step": 120,
        "verdict": "OVERFITTING",
        "reason": "the training clips are being learned by heart",
        "best_step": 60,
        "best": 0.8,
        "turned": True,
    }
    end = {"kind": "end", "step": 120, "why": why}
    journal = folder / "journal.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if '"end"' not in line]
    write_journal(folder, [*records, verdict, end])
    write_file(folder, "config.json", {"steps": 1500})
    write_file(folder, "exports.json", [])
    return folder


def export_step(folder: Path, step: int) -> None:
    """Add the file of a step to those that a run has exported."""
    path = f"export/run-step-{step:06d}-comfyui.safetensors"
    (folder / path).write_bytes(b"weights")
    rows = json.loads((folder / "exports.json").read_text(encoding="utf-8"))
    write_file(folder, "exports.json", [*rows, {"format": "comfyui", "path": path}])
