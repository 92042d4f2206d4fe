"""Files of a studio, valid and damaged, for tests that draw thousands of them."""

import copy
import json
import os
import struct
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.support.journal_lines import step_line

COUNT = int(os.environ.get("VIDEOTUNE_FUZZ", "400"))
"""Inputs of each test; more by the environment variable, as for the other fuzz."""

EACH = settings(
    max_examples=COUNT,
    deadline=None,
    derandomize="VIDEOTUNE_FUZZ" not in os.environ,
    suppress_health_check=list(HealthCheck),
    database=None,
)

MP4 = b"\0\0\0\x20ftypisom" + b"\0" * 64
JPEG = b"\xff\xd8\xff\xe0\0\x10JFIF" + b"\0" * 64
RUN = "runs/run-1/"

CLIP = {
    "path": "clips/a.mp4",
    "id": "a" * 32,
    "used": True,
    "held_out": False,
    "reason": None,
    "detail": None,
    "source_seconds": 2.0,
    "source_fps": 24.0,
    "source_frames": 48,
    "width": 64,
    "height": 64,
    "windows": 1,
    "spans": [[0.0, 1.0]],
    "shape": "17x64x64",
    "seconds_cut": 0.0,
    "captions": ["a cat"],
    "warnings": ["80% of it is frozen"],
    "notes": ["x"],
}
ACCOUNT = {"clips": [CLIP], "notes": ["few clips"], "blockers": ["none"], "skipped": 0}
CONFIG = {
    "settings": {
        "base_model_name": "asset:toy",
        "training_method": "LORA",
        "steps": 8,
        "lora": {"rank": 4, "variant": "LORA"},
        "datasets": [{"path": "/clips"}],
        "output_model_destination": "/elsewhere",
        "cache_dir": "/elsewhere",
        "samples": "../../prompts.txt",
    },
    "origins": {"steps": "user", "lora.rank": "preset"},
    "base": {"name": "asset:toy", "fingerprints": {}},
    "data": "0",
    "steps": 8,
    "asked": {"steps": 8, "cache_dir": "x"},
    "digest": "0",
}
PLAN: dict[str, Any] = {
    "fits": True,
    "verdict": "fits",
    "hours": 1.0,
    "hours_beside": 0.5,
    "hours_encoding": 0.1,
    "seconds_a_step": 1.0,
    "device": {
        "card": "x",
        "measured": None,
        "vram_bytes": 24 * 2**30,
        "memory_from": "vram",
        "spare_bytes": 2**30,
        "unstreamed_bytes": 10**9,
        "need_bytes": 10**9,
        "phase": "training",
        "parts": {"weights": 10**9, "rest": 0},
    },
    "disk": {
        "latent_entries": 2,
        "latent_bytes": 1,
        "condition_entries": 2,
        "condition_bytes": 1,
        "text_bytes_at_most": 1,
        "short_bytes": 1,
    },
    "steps": 8,
    "effective_batch": 2,
    "clips": {"used": 1, "held_out": 0, "skipped": 0},
    "views": {
        "per_window": {"min": 1, "mean": 1.0, "max": 2, "band": "high"},
        "steps_for": {"10": 5},
        "advice": "x",
    },
    "buckets": [{"shape": "17x64x64", "windows": 1}],
    "remedies": ["try steps=4"],
    "notes": ["x"],
}
READING = {"normalised": 0.9, "clips": {"a": 1.0}, "by_quantile": [1.0] * 9}
JOURNAL: list[dict[str, Any]] = [
    {
        "kind": "start",
        "time": 1.79e9,
        "steps": 8,
        "device": "cpu",
        "clips": {"used": 1},
    },
    {"kind": "views", "step": 0, "per_clip": {"mean": 1.0}, "per_window": {"min": 0}},
    *(step_line(step, captions=[0]) for step in range(1, 5)),
    {"kind": "validation", "step": 0, "train": READING, "held_out": READING},
    {"kind": "validation", "step": 4, "train": READING, "held_out": READING},
    {"kind": "verdict", "step": 4, "verdict": "good", "reason": "x", "turned": True},
    {
        "kind": "sample",
        "step": 4,
        "prompt": "a cat",
        "seed": 1,
        "path": "samples/step-000004-a-seed1.mp4",
    },
    {
        "kind": "sample_metrics",
        "step": 4,
        "samples": [
            {
                "path": "samples/step-000004-a-seed1.mp4",
                "clip": "clips/a.mp4",
                "prompt": "a cat",
                "seed": 1,
                "similarity": 0.5,
                "copy": False,
            }
        ],
    },
    {"kind": "save", "step": 4, "path": "checkpoints/step-4", "memory": 10**9},
    {"kind": "warning", "step": 4, "text": "slow"},
    {"kind": "end", "step": 4, "why": "done", "time": 1.79e9, "take": {"why": "x"}},
]
HEARTBEAT = {
    "pid": 1,
    "host": "x",
    "started": 1.0,
    "step": 4,
    "state": "ended",
    "since": 1.0,
    "progress": {"what": "clips", "done": 1, "total": 2},
    "seconds": {"training": 1.0},
    "time": 2.0,
}
EXPORTS = [
    {
        "format": "diffusers",
        "path": "export/a.safetensors",
        "use": "x",
        "verified": {"max_error": 0.0, "modules": 1, "reader": "x"},
        "hash": "0",
    }
]
TRY = {"prompt": "a cat", "asked": 1.0, "step": "4", "seed": "1", "entry": "x"}
CHANGE = {
    "batch": "1",
    "by": "edit",
    "name": "a.mp4",
    "before": "",
    "after": "a cat",
    "undoes": "",
    "time": 1.0,
}


def tensors() -> bytes:
    """A small LoRA file."""
    header = {}
    for number, name in enumerate(("lora_A", "lora_B")):
        header[f"blocks.0.attn1.to_q.{name}.weight"] = {
            "dtype": "F32",
            "shape": [2, 2],
            "data_offsets": [16 * number, 16 * number + 16],
        }
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + struct.pack("<8f", *range(8))


EXPORTED: dict[str, Any] = {
    "project.json": {
        "title": "Cats",
        "created": 1.0,
        "archived": False,
        "preset": "toy",
        "card": "RTX 4090",
        "vram": 24.0,
        "allow_skips": True,
        "sources": [{"path": "/clips", "kind": "validation"}],
        "captioning": {"model": "a/b", "endpoint": ""},
        "folder": "/old/cats",
    },
    "config.json": {"steps": 8, "lora": {"rank": 4}, "samples": ["a cat"]},
    "clips/a.mp4": MP4,
    "clips/a.txt": b"a cat",
    "held-out/b.jpg": JPEG,
    "scenes/film/1.mp4": MP4,
    RUN + "config.json": CONFIG,
    RUN + "check.json": ACCOUNT,
    RUN + "plan.json": PLAN,
    RUN + "exports.json": EXPORTS,
    RUN + "journal.jsonl": JOURNAL,
    RUN + "compare/compare.json": [
        {"prompt": "x", "seed": 1, "video": "a.mp4", "sheet": "a.png"}
    ],
    RUN + "checkpoints/step-4/COMPLETE": {"step": 4, "kind": "save", "files": {}},
    RUN + "checkpoints/step-4/state.json": {"step": 4, "lora_scale": 1.0},
    RUN + "checkpoints/step-4/weights.safetensors": tensors(),
    RUN + "samples/step-000004-a-seed1.mp4": MP4,
    RUN + "export/a.safetensors": tensors(),
    RUN + "branches/1/config.json": CONFIG,
    RUN + "branches/1/journal.jsonl": JOURNAL[:4],
    "tries/run-1/1f/try.json": TRY,
    "tries/run-1/1f/a.mp4": MP4,
}
"""What an export of a project may hold; a list in a .jsonl file is one line an item."""

JOB = {"kind": "check", "about": "", "words": ["check"], "started": 1.0, "turn": 0}
ENDED = {"code": 0, "ended": 2.0}
PROCESS = {"pid": 1, "boot": "x", "started": 1.0, "command_line": ["x"]}

OWN: dict[str, Any] = {
    "jobs/000001-check/job.json": JOB,
    "jobs/000001-check/rc.json": ENDED,
    "jobs/000001-check/out": ACCOUNT,
    "jobs/000002-caption/job.json": JOB | {"kind": "caption"},
    "jobs/000002-caption/rc.json": ENDED,
    "jobs/000002-caption/before.json": {"clips/a.mp4": "a dog"},
    "jobs/000003-doctor/job.json": JOB | {"kind": "doctor", "about": "run-1"},
    "jobs/000003-doctor/pid.json": {
        "folder": "1",
        "runner": PROCESS,
        "command": PROCESS,
    },
    "history.jsonl": [CHANGE, CHANGE | {"batch": "2", "undoes": "1"}],
    "bin/1f/item.json": {
        "id": "1f",
        "kind": "clip",
        "title": "b.mp4",
        "when": 1.0,
        "bytes": 9,
        "lay": ["clips/b.mp4"],
    },
    "bin/1f/0": MP4,
    ".studio/plan.json": {
        "key": "0",
        "code": 0,
        "words": "",
        "part": "full",
        "plan": PLAN,
    },
    ".studio/hours.json": {
        "key": "0",
        "part": "known",
        "presets": {"toy": {"fits": True, "hours": 1.0, "need_bytes": 10**9}},
    },
    ".studio/theirs/m.toml": b"x = 1",
    ".studio/imported.json": {
        "key": "0",
        "code": 0,
        "part": "full",
        "trainer": "musubi",
        "config": {"steps": 1},
        "rows": [
            {
                "key": "a",
                "theirs": 1,
                "verdict": "same",
                "ours": {"steps": 1},
                "note": "x",
                "source": "",
                "given": True,
            }
        ],
    },
    ".studio/sweeps/s.json": {"runs": {"run-1": {"seed": "1"}}},
    RUN + "heartbeat.json": HEARTBEAT,
}
"""What a studio writes into a project beside that."""

QUEUE: dict[str, Any] = {
    "queue.json": {
        "cats--run-1": {
            "run": "/root/cats/runs/run-1",
            "priority": 0,
            "added": 1.0,
            "skips": "all",
            "words": ["train"],
            "turn": 1,
            "held": False,
        }
    },
    "cats--run-1.json": {"steps": 1},
    "jobs/000001-train/job.json": JOB | {"kind": "train", "about": "cats--run-1"},
    "jobs/000001-train/rc.json": ENDED,
}
"""The queue beside the projects."""

PRESET = {"preset": "toy", "keys": {"steps": 1}}


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    5 * 10**9,
    2**53 + 1,
    2**63,
    10**30,
    10**400,
    -0.5,
    1e300,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "x",
    "\0",
    "\ud800",
    "\u202e<script>",
    "../../x",
    "/etc/passwd",
    "~/x",
    "C:\\x",
    "x" * 6000,
    "{{ 7 * 7 }}",
    [],
    [[]],
    {},
    {"": {}},
    [None],
    [0] * 300,
]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(ODD),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a JSON value."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    else:
        return
    for key in keys:
        yield value, key
        yield from _places(value[key])


@st.composite
def damaged_values(draw: st.DrawFn, value: Any) -> Any:
    """The value with some parts replaced, dropped or added, or another in its place."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places or draw(st.integers(0, 19)) == 0:
        return draw(json_values)
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(places))
        act = draw(st.sampled_from(("replace", "replace", "replace", "drop", "add")))
        if act == "drop" and isinstance(container, dict):
            container.pop(key, None)
        elif act == "add" and isinstance(container, dict):
            container[draw(st.text(max_size=8))] = draw(json_values)
        elif isinstance(container, dict) or key < len(container):
            container[key] = draw(json_values)
    return value


@st.composite
def damaged_texts(draw: st.DrawFn, value: Any) -> bytes:
    """A damaged value as the bytes of its file, which may be damaged as well."""
    content = encode(draw(damaged_values(value)))
    damage = draw(
        st.sampled_from(("none", "none", "none", "cut", "deep", "put", "number"))
    )
    position = draw(st.integers(0, len(content)))
    if damage == "cut":
        return content[:position]
    if damage == "put":
        return content[:position] + draw(st.binary(max_size=20)) + content[position:]
    if damage == "deep":
        depth = draw(st.sampled_from((50, 199, 201, 1000, 100_000)))
        return b'{"a":' * depth + content + b"}" * depth
    if damage == "number":
        number = draw(st.sampled_from((b"1e999", b"-1e999", b"9" * 5000, b"0" * 9)))
        return content.replace(b"1", number, 1)
    return content


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes of which some are others, cut or doubled."""
    position = draw(st.integers(0, len(content)))
    act = draw(st.sampled_from(("cut", "put", "flip")))
    if act == "cut":
        return content[:position]
    if act == "put":
        return content[:position] + draw(st.binary(max_size=40)) + content[position:]
    return content[:position] + bytes(1) + content[position + 1 :]


def damaged_file(value: Any) -> st.SearchStrategy[bytes]:
    """Damaged contents of a file; a list in a .jsonl file is damaged as such."""
    if isinstance(value, bytes):
        return damaged_bytes(value)
    return damaged_texts(value)


def encode(value: Any) -> bytes:
    """The bytes of a file of that value."""
    if isinstance(value, bytes):
        return value
    return json.dumps(value).encode()


def encode_file(name: str, value: Any) -> bytes:
    """The bytes of a file; one of JSON lines has an item a line."""
    if name.endswith(".jsonl") and isinstance(value, list):
        return b"".join(encode(line) + b"\n" for line in value)
    return encode(value)
