"""N steps are k steps, a SIGKILL, a resume, and the rest: bit for bit, wherever the kill falls and whatever trains."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.commands.processes import KILLED, WHEN, end, start
from videotune.errors import DONE
from videotune.trainer.checkpoint import PARTS, complete_checkpoints
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume

STEPS = 6
CALLS = {"mid-accumulation": 10, "save": 4, "ruler": 17, "preview": 3}
"""At step 5 of micro-batches of one; in the save at step 4; in the reading and the preview after it."""

METHODS = {
    "adapter": ("lora.rank=176", "lora.dropout=0.1"),
    "full": ("training_method=FINE_TUNE", "learning_rate=0.001"),
    "rows": ("training_method=EMBEDDING", "embedding.vectors=2"),
    "text encoder": ("training_method=FINE_TUNE", "learning_rate=0.001", "text_encoder.train=true"),
}
STATES = {
    "plain": (),
    "EMA": ("ema=0.7",),
    "8-bit": ("optimizer=ADAMW_8BIT",),
    "EMA, 8-bit": ("ema=0.7", "optimizer=ADAMW_8BIT"),
}
TEXT_IN_THE_STEP = [("save", "rows", "EMA", 2), ("mid-accumulation", "text encoder", "EMA, 8-bit", 0)]
"""Rows are too few for moments of 8 bits, which begin at 4096 numbers."""
ALL = [one for one in itertools.product(WHEN, METHODS, STATES, (0, 2)) if not (one[1] == "rows" and "8-bit" in one[2])]
PAIRWISE = [
    ("mid-accumulation", "adapter", "plain", 0),
    ("mid-accumulation", "full", "EMA, 8-bit", 2),
    ("save", "adapter", "8-bit", 2),
    ("save", "full", "EMA", 0),
    ("ruler", "adapter", "EMA", 2),
    ("ruler", "full", "8-bit", 0),
    ("preview", "adapter", "EMA, 8-bit", 0),
    ("preview", "full", "plain", 2),
]
"""Every value of each beside every value of each other."""


@pytest.fixture(scope="module")
def straight(
    small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Overrides, Path]]:
    """(words, folder) of the run that never stops, made once for each method and state; its batches come without threads."""
    home, made = tmp_path_factory.mktemp("straight"), {}
    base = shutil.copytree(tiny_bases("wan"), home / "base")
    config = WanTransformer3DModel.load_config(base / "transformer")
    torch.manual_seed(0)  # weights of 6144 numbers: bitsandbytes keeps moments of 4096 and more in 8 bits
    WanTransformer3DModel.from_config({**config, "ffn_dim": 256}).save_pretrained(base / "transformer")
    fixed = (
        f"base_model_name={base}",
        f"cache_dir={home / 'cache'}",
        "resolution=32x32",
        "learning_rate=0.01",
    )
    often = (f"steps={STEPS}", "save_every=2", "validate_every=2", "sample_after=2", "sample.steps=1", "samples=1")
    step = ("gradient_accumulation_steps=2", "warmup_steps=3", "learning_rate_scheduler=COSINE", "caption_dropout=0.3")

    def get(method: str, state: str) -> tuple[Overrides, Path]:
        words = Overrides(data=str(small_clips), sets=(*fixed, *often, *step, *METHODS[method], *STATES[state]))
        if (method, state) not in made:
            run = made[method, state] = home / f"{method} {state}"
            assert end(start(Overrides(data=words.data, sets=(*words.sets, "dataloader_threads=0")), run)) == DONE
        return words, made[method, state]

    return get


def facts_of(run: Path) -> list[Any]:
    """What must be equal: all of the journal but times and seconds, the events of one process, and paths."""
    lines = [line for line in read_journal(run) if line["kind"] not in ("start", "resume", "end")]
    return [{key: value for key, value in line.items() if key not in ("time", "seconds")} for line in lines]


def state_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    checkpoint = next(one for one in complete_checkpoints(run) if one.step == step)
    parts = [part for part in PARTS if (checkpoint.folder / f"{part}.safetensors").is_file()]
    return {f"{part} {name}": value for part in parts for name, value in checkpoint.load(part).items()}


def the_same(one: Path, other: Path) -> None:
    """The two runs are one run: journal, weights, moments, averages, exported file."""
    assert facts_of(one) == facts_of(other)
    a, b = state_of(one, STEPS), state_of(other, STEPS)
    assert set(a) == set(b)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def call_of(moment: str, state: str) -> int:
    """At which call of it the process is killed; the ruler reads averages and then the weights, so twice as often."""
    return CALLS[moment] * (2 if moment == "ruler" and "EMA" in state else 1)


def killed_and_resumed(moment: str, call: int, words: Overrides, threads: int, run: Path) -> int:
    """Train until the kill, then go on; the step resumed from."""
    process = start(
        Overrides(data=words.data, sets=(*words.sets, f"dataloader_threads={threads}")), run, None, moment, call
    )
    assert end(process) == KILLED
    assert max(line.get("step", 0) for line in read_journal(run)) < STEPS
    assert end(start(Overrides(), run, Resume())) == DONE
    (resumed,) = [line["from_step"] for line in read_journal(run) if line["kind"] == "resume"]
    return int(resumed)


def check(moment: str, method: str, state: str, threads: int, straight: Any, tmp_path: Path) -> None:
    words, whole = straight(method, state)
    resumed = killed_and_resumed(moment, call_of(moment, state), words, threads, tmp_path / "run")
    assert resumed == (2 if moment == "save" else 4)
    the_same(tmp_path / "run", whole)
    has = {name.split()[0] for name in state_of(whole, STEPS)}
    assert has == {"weights", "optimizer"} | ({"ema"} if "EMA" in state else set())
    moments = {value.dtype for name, value in state_of(whole, STEPS).items() if "state1" in name}
    assert (torch.uint8 in moments) == ("8-bit" in state)


@pytest.mark.parametrize(("moment", "method", "state", "threads"), [*PAIRWISE, *TEXT_IN_THE_STEP])
def test_killed_and_resumed_is_one_run(
    moment: str, method: str, state: str, threads: int, straight: Any, tmp_path: Path
) -> None:
    check(moment, method, state, threads, straight, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("moment", "method", "state", "threads"), [one for one in ALL if one not in (*PAIRWISE, *TEXT_IN_THE_STEP)]
)
def test_killed_and_resumed_is_one_run_in_every_combination(
    moment: str, method: str, state: str, threads: int, straight: Any, tmp_path: Path
) -> None:
    check(moment, method, state, threads, straight, tmp_path)


def test_the_pairs_are_all_there() -> None:
    """Each moment, method, average or none, 8 bits or not, and number of workers meets each value of each other."""
    rows = [(*one[:2], "EMA" in one[2], "8-bit" in one[2], one[3]) for one in PAIRWISE]
    values = [set(WHEN), {"adapter", "full"}, {True, False}, {True, False}, {0, 2}]
    for (i, left), (j, right) in itertools.combinations(enumerate(values), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(left, right))


def test_previews_ruler_and_workers_change_nothing(straight: Any, tmp_path: Path) -> None:
    words, whole = straight("adapter", "EMA")
    off = ("save_every=0", "validate_every=0", "sample_after=0", "sample_metrics.budget=0", "dataloader_threads=2")
    assert end(start(Overrides(data=words.data, sets=(*words.sets, *off)), tmp_path / "off")) == DONE
    a, b = state_of(tmp_path / "off", STEPS), state_of(whole, STEPS)
    assert all(torch.equal(a[name], b[name]) for name in b)
    kinds = [line["kind"] for line in read_journal(tmp_path / "off") if line["kind"] != "views"]
    assert kinds == ["start", *["step"] * STEPS, "save", "end"]


def test_weights_alone_would_differ(straight: Any, tmp_path: Path) -> None:
    """The comparison can fail: a run that begins with the weights of step 4 and a fresh optimizer is another one."""
    words, whole = straight("adapter", "plain")
    folder = next(one.folder for one in complete_checkpoints(whole) if one.step == 4)
    run = tmp_path / "other"
    assert end(start(Overrides(data=words.data, sets=(*words.sets, "steps=2", f"init_from={folder}")), run)) == DONE
    a, b = state_of(run, 2), state_of(whole, STEPS)
    assert not any(torch.equal(a[name], b[name]) for name in b if name.startswith("weights") and "lora_B" in name)
