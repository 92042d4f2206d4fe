"""Everything that can train over weights that are shared out: families, experts, dtypes, anchors, tokens. A long product."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.crew_kit import processes
from videotune.errors import DONE
from videotune.trainer.checkpoint import pick
from videotune.trainer.logging.journal import read_journal

pytestmark = pytest.mark.long

STEPS = 3
FULL = "training_method=FINE_TUNE"
KINDS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "computed again": ("wan", None, (FULL, "gradient_checkpointing=ON", "micro_batch_size=1")),
    "layers": ("wan", None, (FULL, 'transformer.layers=["blocks.0.attn1"]')),
    "stochastic rounding": ("wan", None, (FULL, "train_dtype=BFLOAT_16", "optimizer.masters=STOCHASTIC_ROUNDING")),
    "bf16 with masters": ("wan", None, (FULL, "train_dtype=BFLOAT_16")),
    "text encoder too": ("wan", None, (FULL, "text_encoder.train=true")),
    "a new token": ("wan", None, ("training_method=EMBEDDING", "caption_dropout=0.5")),
    "dora": ("wan", None, ("lora.variant=DORA",)),
    "dropout": ("wan", None, ("lora.dropout=0.1", "micro_batch_size=1")),
    "two experts": ("wan", "t2v-a14b", ("expert_period=1",)),
    "one of two experts": ("wan", "t2v-a14b", (FULL, "experts=high")),
    "cogvideox": ("cogvideox", None, ("video_config.target_fps=16",)),
    "ltx_video": ("ltx_video", None, (FULL,)),
    "hunyuan_video": ("hunyuan_video", None, (FULL,)),
    "hidream": ("hidream", None, ("video_config.target_fps=4",)),
}


def run_it(
    count: int, run: Path, clips: Path, base: Path, cache: Path, sets: tuple[str, ...], resumed: tuple[str, ...] = ()
) -> None:
    own = (f"base_model_name={base}", f"cache_dir={cache}", "resolution=32x32", f"steps={STEPS}", "save_every=2")
    own += (
        "learning_rate=0.0003",
        "warmup_steps=0",
        "sample.steps=1",
        "samples=1",
        "sample_after=2",
        "validate_every=2",
    )
    own += ("sample_metrics.budget=0", f"batch_size={1 if count > 1 else 2}", "sharding=FULL", "ema=0.5")
    words = ["train", "--out", str(run), "--data", str(clips), *(w for text in (*own, *sets) for w in ("--set", text))]
    ended = processes(
        count, run.parent / f"logs-{run.name}", ["train", "--out", str(run), *resumed] if resumed else words
    )
    assert set(ended.codes) == {DONE}, ended.said


@pytest.mark.parametrize("kind", KINDS)
def test_shared_out_it_is_the_run_of_one_process(
    kind: str, small_clips: Path, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """Losses and weights to the dtype's rounding, previews and readings on the way; gone on with, the same bits again."""
    family, variant, sets = KINDS[kind]
    base, cache = tiny_bases(family, variant), tmp_path / "cache"
    one, two, again = tmp_path / "one", tmp_path / "two", tmp_path / "again"
    run_it(1, one, small_clips, base, cache, sets)
    run_it(2, two, small_clips, base, cache, sets)
    rough = any("BFLOAT_16" in text for text in sets)
    rounded = {"rtol": 0.05, "atol": 2e-3} if rough else {"rtol": 1e-3, "atol": 2e-4}
    losses = [[line["loss"] for line in read_journal(run) if line["kind"] == "step"] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2 if rough else 1e-4)
    for part in ("weights", "ema"):
        ours, theirs = (pick(run, STEPS).load(part) for run in (two, one))
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, **rounded)  # type: ignore[arg-type]
    readings = [
        [line["train"]["mean"] for line in read_journal(run) if line["kind"] == "validation"] for run in (one, two)
    ]
    assert readings[0] == pytest.approx(readings[1], rel=2e-2 if rough else 1e-4)
    shutil.copytree(two, again)
    run_it(2, again, small_clips, base, cache, sets, resumed=("--resume", "--from", "2"))
    for part in ("weights", "ema", "optimizer"):
        ours, theirs = (pick(run, STEPS).load(part) for run in (again, two))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
