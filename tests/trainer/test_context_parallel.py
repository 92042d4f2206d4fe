"""Processes that share the tokens of each sample are one that has them all: real
processes, diffusers' context parallelism over gloo.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.clips import noise, write_clip, write_dataset, write_image
from tests.support.command_line import Bases, train
from tests.support.launcher import (
    QUIET,
    STEPS,
    Ended,
    assert_runs_close,
    overrides_of,
    processes,
)
from tests.support.run_processes import KILLED
from tests.support.run_results import film, of_kind
from videotune.errors import DONE
from videotune.job.overrides import Overrides
from videotune.runs.checkpoint import complete_checkpoints, pick

FULL = "training_method=FINE_TUNE"


@pytest.fixture(scope="module")
def words(
    small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Overrides:
    cache = tmp_path_factory.mktemp("context") / "cache"
    return overrides_of(
        small_clips, tiny_bases("wan"), cache, "save_every=2", "warmup_steps=0", *QUIET
    )


def in_processes(
    count: int, run: Path, words: Overrides, *sets: str, fault: str = ""
) -> Ended:
    """A run in so many processes."""
    sets = [part for text in (*words.sets, *sets) for part in ("--set", text)]
    arguments = ["train", "--out", str(run), "--data", str(words.data), *sets]
    return processes(count, run.parent / f"logs-{run.name}", arguments, fault)


@pytest.fixture(scope="module")
def alone(words: Overrides, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """One process with two samples a step, for each method once."""
    made: dict[str, Path] = {}

    def get(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp(f"alone-{method}") / "run"
            sets = (*words.sets, f"training_method={method}", "batch_size=2")
            overrides = Overrides(data=words.data, sets=sets)
            assert train(overrides, made[method]) == DONE
        return made[method]

    return get


@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
def test_two_processes_that_share_each_sample_are_one(
    method: str, words: Overrides, alone: Bases, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ("batch_size=2", "context_parallel=2", f"training_method={method}")
    ended = in_processes(2, run, words, *settings)
    assert ended.codes == (DONE, DONE), ended.failures
    assert_runs_close(run, alone(method), ("weights", "ema", "optimizer"))


def resumed(count: int, run: Path, step: int, *sets: str) -> Ended:
    """A run that goes on in so many processes."""
    words = [part for text in sets for part in ("--set", text)]
    arguments = ["train", "--out", str(run), "--resume", "--from", str(step), *words]
    return processes(count, run.parent / f"logs-{run.name}", arguments)


def test_a_resume_may_share_samples_otherwise(
    words: Overrides, alone: Bases, tmp_path: Path
) -> None:
    """Begun by two processes that share each sample and killed, gone on with by two that
    have samples of their own, then by one.
    """
    run = tmp_path / "run"
    sets = ("batch_size=2", "context_parallel=2", "save_every=1")
    killed = in_processes(2, run, words, *sets, fault="killed in the third save")
    # The other process may notice it before its own turn comes.
    assert KILLED in killed.codes, killed.said
    assert DONE not in killed.codes, killed.said
    assert complete_checkpoints(run)[-1].step == 2

    ended = resumed(2, run, 2, "context_parallel=1", f"steps={STEPS - 1}")
    assert ended.codes == (DONE, DONE), ended.failures
    ended = resumed(1, run, STEPS - 1, f"steps={STEPS}")
    assert ended.codes == (DONE,), ended.failures
    assert_runs_close(run, alone("LORA"))


def test_a_run_of_one_process_goes_on_in_two_that_share_its_samples(
    alone: Bases, tmp_path: Path
) -> None:
    """And repeated, with the same bits."""
    runs = []
    for name in ("run", "again"):
        run = shutil.copytree(alone("FINE_TUNE"), tmp_path / name)
        ended = resumed(2, run, 2, "context_parallel=2")
        assert ended.codes == (DONE, DONE), ended.failures
        assert_runs_close(run, alone("FINE_TUNE"), ("weights", "ema", "optimizer"))
        runs.append(run)
    for part in ("weights", "ema", "optimizer"):
        ours, theirs = (pick(run, STEPS).load(part) for run in runs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def four_heads(
    words: Overrides, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Overrides:
    """The same clips, and a base whose attention has four narrower heads."""
    folder = tmp_path_factory.mktemp("heads") / "base"
    shutil.copytree(tiny_bases("wan"), folder)
    path = folder / "transformer" / "config.json"
    config = json.loads(path.read_text())
    width = config["num_attention_heads"] * config["attention_head_dim"]
    config |= {"num_attention_heads": 4, "attention_head_dim": width // 4}
    path.write_text(json.dumps(config))
    sets = (*words.sets, f"base_model_name={folder}")
    return Overrides(data=words.data, sets=sets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "parts", "sharding", "method"),
    [
        (4, 2, "FULL", "FINE_TUNE"),
        (4, 2, "OFF", "LORA"),
        (4, 4, "FULL", "LORA"),
        (8, 4, "FULL", "FINE_TUNE"),
    ],
)
def test_groups_that_share_samples_share_the_samples_of_a_step(
    count: int,
    parts: int,
    sharding: str,
    method: str,
    four_heads: Overrides,
    tmp_path: Path,
) -> None:
    """One mesh: groups of processes share tokens, the groups samples, and all of them the
    weights. With previews and readings, and gone on with by one process.
    """
    looking = ("validate_every=4", "sample_after=4")
    settings = (f"training_method={method}", f"sharding={sharding}", *looking)
    groups = count // parts
    whole = tmp_path / "whole"
    sets = (*four_heads.sets, *settings, f"batch_size={4}")
    assert train(Overrides(data=four_heads.data, sets=sets), whole) == DONE

    run = tmp_path / "run"
    shared = (f"batch_size={4 // groups}", f"context_parallel={parts}")
    ended = in_processes(count, run, four_heads, *settings, *shared)
    assert ended.codes == (DONE,) * count, ended.failures
    kept = ("weights", "ema", "optimizer")
    assert_runs_close(run, whole, kept)
    readings = [
        [line["train"]["mean"] for line in of_kind(folder, "validation")]
        for folder in (run, whole)
    ]
    assert readings[0] == pytest.approx(readings[1], rel=1e-5)
    assert_previews_close(run, whole)

    ended = resumed(1, run, 2, "context_parallel=1")
    assert ended.codes == (DONE,), ended.failures
    assert_runs_close(run, whole, kept)


CONDITIONS = (
    'conditions=[{"type": "reference", "probability": 0.6, "latent_frames": 1}, '
    '{"type": "last_frame", "probability": 0.5}, {"type": "mask"}]'
)
CLEAN = ("first_frame_probability=0.6", "video_config.variants=1")
KINDS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "nothing computed again": ("wan", None, ("gradient_checkpointing=OFF",)),
    "streamed blocks": ("wan", None, ("layer_offload_fraction=1",)),
    "streamed weights that train": ("wan", None, (FULL, "layer_offload_fraction=0.5")),
    "inputs on the host": ("wan", None, ("gradient_checkpointing=CPU_OFFLOADED",)),
    "dora": ("wan", None, ("lora.variant=DORA",)),
    "text encoder too": ("wan", None, (FULL, "text_encoder.train=true")),
    "a new token": ("wan", None, ("training_method=EMBEDDING", "caption_dropout=0.5")),
    "conditions": ("wan", None, (CONDITIONS,)),
    "masked loss": ("wan", None, ("loss_mask.outside=0.1",)),
    "clean first frames": ("wan", "ti2v", CLEAN),
    "first frames on channels": ("wan", "i2v", CLEAN),
    "two experts": ("wan", "t2v-a14b", ("expert_period=1",)),
    "ltx": ("ltx_video", None, CLEAN),
    "newer ltx": ("ltx_video", "0.9.7", CLEAN),
    "ltx2": ("ltx2", None, CLEAN),
    "older ltx2": ("ltx2", "2.0", CLEAN),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four clips of 64x64 with references and masks."""
    names = "abcd"
    clips = {f"{name}.mkv": noise(17, 64, 64, seed) for seed, name in enumerate(names)}
    folder = tmp_path_factory.mktemp("pictures") / "clips"
    write_dataset(folder, clips, {name: f"clip {name}" for name in names}, fps=16)
    for seed, name in enumerate(names):
        reference = noise(17, 64, 64, 10 + seed)
        path = folder / "references" / f"{name}.mov"
        write_clip(path, reference, 16, codec="png", pix_fmt="rgb24")
        mask = np.zeros((64, 64, 3), np.uint8)
        mask[:, : 24 + 8 * seed] = 255
        write_image(folder / "masks" / f"{name}.png", mask)
    return folder


QUICK = ("conditions", "ltx2")
"""Kinds that every commit runs."""


@pytest.mark.parametrize(
    "kind",
    [
        *QUICK,
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in KINDS
            if kind not in QUICK
        ),
    ],
)
def test_a_sample_that_is_shared_is_that_of_one_process(
    kind: str, pictures: Path, tiny_bases: Bases, tmp_path: Path
) -> None:
    """Losses, gradients, weights, averages and readings, to rounding."""
    family, variant, sets = KINDS[kind]
    base = tiny_bases(family, variant)
    looking = ("validate_every=4", "sample_after=4", "sample.steps=2")
    words = overrides_of(
        pictures, base, tmp_path / "cache", "resolution=64x64", *sets, *looking
    )
    both = (*words.sets, "batch_size=2", "sample_metrics.budget=0")
    whole = tmp_path / "whole"
    assert train(Overrides(data=words.data, sets=both), whole) == DONE

    run = tmp_path / "run"
    ended = in_processes(
        2, run, Overrides(data=words.data, sets=both), "context_parallel=2"
    )
    assert ended.codes == (DONE, DONE), ended.failures
    assert_runs_close(run, whole)
    readings = [
        [line["train"]["mean"] for line in of_kind(folder, "validation")]
        for folder in (run, whole)
    ]
    assert readings[0] == pytest.approx(readings[1], rel=1e-4)
    assert of_kind(run, "warning") == of_kind(whole, "warning")
    assert_previews_close(run, whole)


def assert_previews_close(run: Path, other: Path) -> None:
    """The same previews; what training makes of rounding moves pixels, and compression
    spreads them.
    """
    names = [
        sorted(path.name for path in (folder / "samples").glob("*.mp4"))
        for folder in (run, other)
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 2
    for name, most in zip(names[0], (0.5, 8), strict=True):
        ours, theirs = (
            film(folder / "samples" / name).astype(int) for folder in (run, other)
        )
        assert np.abs(ours - theirs).mean() <= most


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["OFF", "FULL"])
def test_blocks_of_a_network_that_is_shared_are_compiled(
    sharding: str,
    words: Overrides,
    alone: Bases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    run = tmp_path / "run"
    settings = (
        "batch_size=2",
        "context_parallel=2",
        "compile=true",
        f"sharding={sharding}",
    )
    ended = in_processes(2, run, words, *settings, fault="no kernels")
    assert ended.codes == (DONE, DONE), ended.failures
    assert_runs_close(run, alone("LORA"))
    assert of_kind(run, "warning") == []
    (end,) = of_kind(run, "end")
    assert end["compiled"] >= 1
