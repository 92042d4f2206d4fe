"""Processes that share a network's weights out are one that has them all: real
processes, FSDP2 over gloo.
"""

import json
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.command_line import Bases, export, train
from tests.support.launcher import (
    LOOKING,
    QUIET,
    STEPS,
    Ended,
    assert_runs_close,
    overrides_of,
    processes,
)
from tests.support.run_results import film, of_kind, steps_of
from videotune.errors import DONE, VideotuneError
from videotune.job.overrides import Overrides, resolve_config
from videotune.latent_cache.sampler import ExpertSchedule
from videotune.latent_cache.store import LatentCache
from videotune.memory.context_parallel import process_mesh
from videotune.memory.sharding import refuse_idle_processes
from videotune.runs.checkpoint import complete_checkpoints, incomplete_checkpoints, pick
from videotune.runs.journal import read_journal
from videotune.runs.run_dir import read_run_config
from videotune.trainer.build import open_models
from videotune.trainer.expert_pool import ExpertLoader, ExpertPool
from videotune.trainer.resume import Resume

FULL = "training_method=FINE_TUNE"
READ = (
    "forgetting.budget=1000000",
    "forgetting.steps=1",
    'forgetting.prompts=["a boat", "two dogs", "a red wall", "rain"]',
)


@pytest.fixture(scope="module")
def words(
    small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Overrides:
    cache = tmp_path_factory.mktemp("sharded") / "cache"
    return overrides_of(
        small_clips, tiny_bases("wan"), cache, "save_every=2", "warmup_steps=0"
    )


def rounded(run: Path, other: Path) -> None:
    """AdamW's first steps have the rate's size, whatever the gradient's: near 0 its
    sign is rounding's.
    """
    assert_runs_close(run, other, ("weights", "ema", "optimizer"))


def several(
    count: int, run: Path, words: Overrides, *sets: str, fault: str = ""
) -> Ended:
    """A sharded run in so many processes, of one sample each a step."""
    told = (*words.sets, "batch_size=1", "sharding=FULL", *sets)
    sets = [part for text in told for part in ("--set", text)]
    return go_on(count, run, "--data", str(words.data), *sets, fault=fault)


def go_on(count: int, run: Path, *more: str, fault: str = "") -> Ended:
    return processes(
        count,
        run.parent / f"logs-{run.name}",
        ["train", "--out", str(run), *more],
        fault,
    )


@pytest.fixture(scope="module")
def alone(words: Overrides, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """One process with two samples a step, for each method once."""
    made: dict[str, Path] = {}

    def get(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp(f"alone-{method}") / "run"
            sets = (
                *words.sets,
                f"training_method={method}",
                "batch_size=2",
                "sample_after=4",
                "validate_every=4",
                *READ,
            )
            assert (
                train(Overrides(data=words.data, sets=(*sets, *LOOKING)), made[method])
                == DONE
            )
        return made[method]

    return get


@pytest.fixture(scope="module")
def two(words: Overrides, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes that train every weight, each a part of them, with readings and
    previews.
    """
    run = tmp_path_factory.mktemp("two") / "run"
    ended = several(
        2,
        run,
        words,
        "training_method=FINE_TUNE",
        "sample_after=4",
        "validate_every=4",
        *LOOKING,
        *READ,
    )
    assert ended.codes == (DONE, DONE), ended.failures
    assert ended.said[0].count("\ntraining ") == 1
    assert "training " not in ended.said[1], "the first process alone talks"
    return run


def same(run: Path, other: Path) -> None:
    """Bit for bit what a checkpoint holds."""
    for part in ("weights", "ema", "optimizer"):
        a, b = (pick(folder, STEPS).load(part) for folder in (run, other))
        assert set(a) == set(b)
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_two_processes_that_share_all_weights_out_are_one(
    two: Path, alone: Bases
) -> None:
    other = alone("FINE_TUNE")
    rounded(two, other)
    kinds = [
        Counter(line["kind"] for line in read_journal(run)) for run in (two, other)
    ]
    assert kinds[0] == kinds[1], "one journal, each thing in it once"
    losses = [
        [line["train"]["mean"] for line in of_kind(run, "validation")]
        for run in (two, other)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    probes = [of_kind(run, "sample_metrics") for run in (two, other)]
    assert [line["step"] for line in probes[0]] == [0, 2, STEPS]
    for one, same in zip(
        *probes, strict=True
    ):  # films are compressed and read again, and noise of a pixel is spread
        assert [sample["clip"] for sample in one["samples"]] == [
            sample["clip"] for sample in same["samples"]
        ]
        assert one["replication"]["mean"] == pytest.approx(
            same["replication"]["mean"], abs=0.01
        )
    start = [of_kind(run, "start")[0] for run in (two, other)]
    assert start[0]["trainable_parameters"] == start[1]["trainable_parameters"]


def assert_parts_close(run: Path, other: Path) -> None:
    """The same parts, in the same order, with the same figures to rounding."""
    ours, theirs = (of_kind(folder, "parts")[-1]["parts"] for folder in (run, other))
    assert list(ours) == list(theirs)
    assert len(ours) > 1
    for label, part in theirs.items():
        assert ours[label] == {
            "numbers": part["numbers"],
            "change": pytest.approx(part["change"], rel=1e-4),
            "moved": True,
            "gradient": pytest.approx(part["gradient"], rel=1e-4),
        }


def test_parts_of_shared_out_weights_move_as_those_of_one_process(
    two: Path, alone: Bases
) -> None:
    assert_parts_close(two, alone("FINE_TUNE"))


def assert_forgetting_close(run: Path, other: Path) -> None:
    """The same readings of what the base model lost, to rounding."""
    ours, theirs = (of_kind(folder, "forgetting") for folder in (run, other))
    assert [line["step"] for line in ours] == [0, 2, STEPS]
    for line, other in zip(ours, theirs, strict=True):
        assert (line["forgetting"], line["verdict"]) == (
            other["forgetting"],
            other["verdict"],
        )
        for figure in ("distance", "guidance", "effect"):
            mean = other[figure]["mean"]
            assert line[figure]["mean"] == pytest.approx(mean, rel=1e-3)
        few_steps = pytest.approx(other["few_steps"]["error"], rel=1e-3)
        assert line["few_steps"]["error"] == few_steps
    assert ours[-1]["distance"]["mean"] > 0.01


def test_processes_that_share_weights_out_read_what_the_base_lost_as_one_does(
    two: Path, alone: Bases
) -> None:
    assert_forgetting_close(two, alone("FINE_TUNE"))


@pytest.mark.parametrize("fault", ["feed-forward cut", "feed-forward not updated"])
def test_a_part_of_shared_out_weights_that_does_not_move_is_named(
    fault: str, words: Overrides, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    sets = ("steps=12", "save_every=0", FULL, *QUIET)
    ended = several(2, run, words, *sets, fault=fault)
    assert ended.codes == (DONE, DONE), ended.failures
    (line,) = of_kind(run, "parts")
    still = [label for label, part in line["parts"].items() if not part["moved"]]
    assert still == ["feed-forward"]
    has_gradient = line["parts"]["feed-forward"]["gradient"] > 0
    assert has_gradient == (fault == "feed-forward not updated")
    texts = [line["text"] for line in of_kind(run, "warning")]
    assert [text for text in texts if text.startswith("feed-forward")] == texts != []


def test_previews_of_all_processes_in_step_are_written_once_and_show_the_same(
    two: Path, alone: Bases
) -> None:
    names = [
        sorted(path.name for path in (run / "samples").glob("*.mp4"))
        for run in (two, alone("FINE_TUNE"))
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 2
    for name, most in zip(
        names[0], (0.5, 2), strict=True
    ):  # rounding moves pixels, and compression spreads them
        ours, theirs = (
            film(run / "samples" / name).astype(int)
            for run in (two, alone("FINE_TUNE"))
        )
        assert np.abs(ours - theirs).mean() <= most


def test_each_process_writes_its_rows_and_the_export_gathers_them(
    two: Path, alone: Bases, tmp_path: Path
) -> None:
    """Half of the bytes in each file; what is exported, at the end and later by one
    process, are the averages, whole.
    """
    checkpoint = pick(two, STEPS)
    files = {path.name: path.stat().st_size for path in checkpoint.folder.iterdir()}
    parts = [files[f"weights-0000{rank}-of-00002.safetensors"] for rank in (1, 2)]
    assert max(parts) < 1.2 * min(parts)
    index = json.loads((checkpoint.folder / "weights.index.json").read_text())
    assert {len(told["rows"]) for told in index["tensors"].values()} == {1, 2}, (
        "some have a single row"
    )
    state = checkpoint.load("ema")
    written = next((two / "export").glob("**/transformer/*.safetensors"))
    exported = load_file(written)
    assert set(exported) == set(state)
    assert all(torch.equal(exported[name], state[name]) for name in state)
    copy = shutil.copytree(two, tmp_path / "run")
    shutil.rmtree(copy / "export")
    assert export(copy) == DONE
    assert (
        next((copy / "export").glob("**/transformer/*.safetensors")).read_bytes()
        == written.read_bytes()
    )


def test_a_sharded_run_goes_on_bit_for_bit(two: Path, tmp_path: Path) -> None:
    run = shutil.copytree(two, tmp_path / "run")
    ended = go_on(2, run, "--resume", "--from", "2")
    assert ended.codes == (DONE, DONE), ended.failures
    same(run, two)


def test_a_sharded_run_goes_on_in_one_process(
    two: Path, alone: Bases, tmp_path: Path
) -> None:
    """From the rows of two processes to one that has them all, and the checkpoint is
    one file again.
    """
    run = shutil.copytree(two, tmp_path / "run")
    assert train(Overrides(), run, resume=Resume(step=2)) == DONE
    assert (pick(run, STEPS).folder / "weights.safetensors").is_file()
    rounded(run, alone("FINE_TUNE"))


def test_a_run_of_one_process_goes_on_sharded_by_three(
    alone: Bases, tmp_path: Path
) -> None:
    """Of two samples a step one process has none: it runs the network along, and adds
    nothing.
    """
    run = shutil.copytree(alone("FINE_TUNE"), tmp_path / "run")
    sets = [word for text in ("sharding=FULL", *QUIET) for word in ("--set", text)]
    ended = go_on(3, run, "--resume", "--from", "2", *sets)
    assert ended.codes == (DONE,) * 3, ended.failures
    assert (pick(run, STEPS).folder / "weights-00003-of-00003.safetensors").is_file()
    rounded(run, alone("FINE_TUNE"))


def alike(ours: LatentCache, theirs: LatentCache) -> None:
    """The same entries with the same bytes; nothing of anybody left over."""
    marks = [
        {entry.name: entry.hash for entry in store.entries()}
        for store in (ours, theirs)
    ]
    assert marks[0] == marks[1]
    assert not ours.unknown_files() | ours.parts()
    assert [path.name for path in ours.folder.glob(".*")] == [".gitignore"]


def test_an_adapter_over_a_base_that_is_shared_out_is_the_adapter_of_one_process(
    words: Overrides, alone: Bases, tmp_path: Path
) -> None:
    """The adapter itself each process has whole, so the checkpoint is the plain one.

    They also share the encoding out.
    """
    run, cache = tmp_path / "run", tmp_path / "cache"
    ended = several(2, run, words, f"cache_dir={cache}", *QUIET, *READ)
    assert ended.codes == (DONE, DONE), ended.failures
    assert "with 2 processes" in ended.said[0]
    alike(
        LatentCache(cache),
        LatentCache(Path(read_run_config(alone("LORA"))["settings"]["cache_dir"])),
    )
    rounded(run, alone("LORA"))
    assert_parts_close(run, alone("LORA"))
    assert_forgetting_close(run, alone("LORA"))
    assert (pick(run, STEPS).folder / "weights.safetensors").is_file()


def test_a_sharded_network_computes_attention_as_the_config_says(
    tiny_bases: Bases, tmp_path: Path
) -> None:
    overrides = Overrides(sets=(f"base_model_name={tiny_bases('wan', None)}",))
    config, spec, base = resolve_config(overrides)
    family = open_models(spec, base, config.config)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = process_mesh("cpu", 1, 1)
        loader = ExpertLoader(family, config.config, ("transformer",), mesh)
        pool = ExpertPool(ExpertSchedule(("transformer",)), ("transformer",), nn.Module)
        pool.attention = "_native_math"
        net = loader.load(pool, "transformer")
    finally:
        torch.distributed.destroy_process_group()

    backends = {
        str(module.processor._attention_backend.value)
        for module in net.modules()
        if hasattr(module, "processor")
    }
    assert backends == {"_native_math"}


def test_a_process_killed_while_all_save_leaves_the_checkpoint_before(
    words: Overrides, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    fault = "killed in the second save"
    ended = several(2, run, words, "training_method=FINE_TUNE", *QUIET, fault=fault)
    assert ended.codes[1] == -signal.SIGKILL
    assert ended.codes[0] != DONE, "a dead process ends them all"
    assert [checkpoint.step for checkpoint in complete_checkpoints(run)] == [2]
    assert (
        run / "checkpoints" / ".step-4.part" / "weights-00002-of-00002.safetensors"
    ).read_bytes() == b"half"
    for part in ("weights", "optimizer"):
        pick(run, 2).verify(part)


@pytest.mark.long
def test_where_one_process_has_no_room_all_wait_and_go_on(
    words: Overrides, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = several(
        2, run, words, "training_method=FINE_TUNE", *QUIET, fault="no room twice"
    )
    assert ended.codes == (DONE, DONE), ended.failures
    assert "there is room again" in ended.said[0]
    assert [checkpoint.step for checkpoint in complete_checkpoints(run)] == [2, STEPS]


def test_a_part_with_other_bytes_is_named_and_one_that_is_missing_makes_a_checkpoint_incomplete(
    two: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(two, tmp_path / "run")
    folder = pick(run, STEPS).folder
    part = folder / "optimizer-00002-of-00002.safetensors"
    held = bytearray(part.read_bytes())
    held[-1] ^= 1
    part.write_bytes(held)
    pick(run, STEPS).load(
        "optimizer", verify_share=(0, 2)
    )  # the other process compares the second file
    for share in ((0, 1), (1, 2)):
        with pytest.raises(
            VideotuneError, match=r"optimizer-00002-of-00002\.safetensors is damaged"
        ):
            pick(run, STEPS).load("optimizer", verify_share=share)
    part.unlink()
    assert "optimizer-00002" in incomplete_checkpoints(run)[STEPS]
    assert [checkpoint.step for checkpoint in complete_checkpoints(run)] == [2]


LENGTH = 3
KINDS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "computed again": (
        "wan",
        None,
        (FULL, "gradient_checkpointing=ON", "micro_batch_size=1"),
    ),
    "layers": ("wan", None, (FULL, 'transformer.layers=["blocks.0.attn1"]')),
    # A table of one row, which the second process has none of.
    "a single row": ("wan", None, (FULL, 'transformer.layers=["^scale_shift_table"]')),
    "stochastic rounding": (
        "wan",
        None,
        (FULL, "train_dtype=BFLOAT_16", "optimizer.masters=STOCHASTIC_ROUNDING"),
    ),
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
    "hunyuan_video15": ("hunyuan_video15", None, (FULL,)),
    "hidream": ("hidream", None, ("video_config.target_fps=4",)),
    "kandinsky5": ("kandinsky5", "i2v", (FULL, "micro_batch_size=1")),
}


def run_it(
    count: int,
    run: Path,
    clips: Path,
    base: Path,
    cache: Path,
    sets: tuple[str, ...],
    resumed: tuple[str, ...] = (),
) -> None:
    own = (
        f"base_model_name={base}",
        f"cache_dir={cache}",
        "resolution=32x32",
        f"steps={LENGTH}",
        "save_every=2",
    )
    own += (
        "learning_rate=0.0003",
        "warmup_steps=0",
        "sample.steps=2",
        "samples=1",
        "sample_metrics.budget=0",
    )
    own += (
        "sample_after=2",
        "validate_every=2",
        f"batch_size={1 if count > 1 else 2}",
        "sharding=FULL",
        "ema=0.5",
    )
    words = (
        "--data",
        str(clips),
        *(word for text in (*own, *sets) for word in ("--set", text)),
    )
    ended = go_on(count, run, *(resumed or words))
    assert set(ended.codes) == {DONE}, ended.said


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_shared_out_it_is_the_run_of_one_process(
    kind: str, small_clips: Path, tiny_bases: Bases, tmp_path: Path
) -> None:
    """Losses and weights to the dtype's rounding, previews and readings on the way;
    gone on with, the same bits again.
    """
    family, variant, sets = KINDS[kind]
    base, cache = tiny_bases(family, variant), tmp_path / "cache"
    one, two, again = tmp_path / "one", tmp_path / "two", tmp_path / "again"
    run_it(1, one, small_clips, base, cache, sets)
    run_it(2, two, small_clips, base, cache, sets)
    rough = any("BFLOAT_16" in text for text in sets)
    rounded = {"rtol": 0.05, "atol": 2e-3} if rough else {"rtol": 1e-3, "atol": 2e-4}
    losses = [[line["loss"] for line in steps_of(run)] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2 if rough else 1e-4)
    for part in ("weights", "ema"):
        ours, theirs = (pick(run, LENGTH).load(part) for run in (two, one))
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, **rounded)  # type: ignore[arg-type]
    readings = [
        [line["train"]["mean"] for line in of_kind(run, "validation")]
        for run in (one, two)
    ]
    assert readings[0] == pytest.approx(readings[1], rel=2e-2 if rough else 1e-4)
    shutil.copytree(two, again)
    run_it(
        2, again, small_clips, base, cache, sets, resumed=("--resume", "--from", "2")
    )
    for part in ("weights", "ema", "optimizer"):
        ours, theirs = (pick(run, LENGTH).load(part) for run in (again, two))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
def test_blocks_of_a_sharded_network_are_compiled(
    method: str, words: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP gathers a block outside of its graph; a compiler that fails on all processes
    ends none.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    settings = (f"training_method={method}", *QUIET)
    assert several(2, tmp_path / "plain", words, *settings).codes == (DONE, DONE)
    faults = {"compiled": "no kernels"}
    if method == "LORA":
        faults["failing"] = "no compiler"
    for run, fault in faults.items():
        chosen = (*settings, "compile=true")
        ended = several(2, tmp_path / run, words, *chosen, fault=fault)
        assert ended.codes == (DONE, DONE), ended.failures
        assert_runs_close(tmp_path / run, tmp_path / "plain")
        warnings = [line["text"] for line in of_kind(tmp_path / run, "warning")]
        assert ["compile: " in text for text in warnings] == [True] * (run == "failing")
    (end,) = of_kind(tmp_path / "compiled", "end")
    assert end["compiled"] >= 1


@pytest.mark.parametrize(
    ("rows", "processes", "is_idle"),
    [(2, 2, False), (3, 2, False), (5, 4, True), (8, 4, False), (9, 8, True)],
)
def test_processes_without_a_row_of_all_that_trains_are_refused(
    rows: int, processes: int, is_idle: bool
) -> None:
    """As torch shares rows out."""
    chunks = torch.zeros(rows, 3).chunk(processes)
    assert (len(chunks) < processes) == is_idle
    shapes = {"blocks.0.bias": (rows,), "blocks.1.bias": (rows, 3)}
    if is_idle:
        with pytest.raises(VideotuneError, match=r"transformer\.layers"):
            refuse_idle_processes(shapes, processes)
        # One more table that has a row for each.
        shapes["blocks.2.weight"] = (processes, 3)
    refuse_idle_processes(shapes, processes)
