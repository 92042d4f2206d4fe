"""N steps are k steps, a SIGKILL, a resume, and the rest: bit for bit, wherever the
kill falls and whatever trains.
"""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.support import interruptions
from tests.support.command_line import Bases
from tests.support.run_processes import KILLED, start
from tests.support.run_results import of_kind, same_tensors, state
from tests.support.sounding_clips import write_sounding_clips
from videotune.errors import DONE
from videotune.job.overrides import Overrides
from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.journal import read_journal

STEPS = 6
MOMENTS = {
    "mid-accumulation": ("trainer.network_pass:denoising_loss", 10),
    "save": ("runs.checkpoint_writer:write_tensors", 4),
    "validation": ("validation.validation_loss:loss_between", 17),
    "preview": ("validation.decoding:render_samples", 3),
}
"""The function and its call at which the process kills itself: at step 5 of
micro-batches of one; in the save at step 4; in the validation and the preview after it.
"""

METHODS = {
    "adapter": ("lora.rank=176", "lora.dropout=0.1"),
    "full": ("training_method=FINE_TUNE", "learning_rate=0.001"),
    "tokens": ("training_method=EMBEDDING", "embedding.vectors=2"),
    "text encoder": (
        "training_method=FINE_TUNE",
        "learning_rate=0.001",
        "text_encoder.train=true",
    ),
}
EMA, SMALL = "ema=0.7", "optimizer=ADAMW_8BIT"
STATES = {"plain": (), "EMA": (EMA,), "8-bit": (SMALL,), "EMA, 8-bit": (EMA, SMALL)}
RULES = [{"pattern": "to_q", "rank": 2, "alpha": 1, "learning_rate": 0.003}]
OWN_RATES = (
    "lora.rank=4",
    "lora.learning_rate_ratio=4",
    f"lora.modules={json.dumps(RULES)}",
)
SCHEDULE_FREE = ("optimizer=SCHEDULE_FREE", "learning_rate_scheduler=CONSTANT")
TEXT_IN_THE_STEP = [
    ("save", "tokens", "EMA", 2),
    ("mid-accumulation", "text encoder", "EMA, 8-bit", 0),
]
"""New tokens are too few for moments of 8 bits, which begin at 4096 numbers."""
EVERY = itertools.product(MOMENTS, METHODS, STATES, (0, 2))
ALL = [one for one in EVERY if not (one[1] == "tokens" and "8-bit" in one[2])]
METHODS["own rates"], STATES["schedule-free"] = OWN_RATES, SCHEDULE_FREE
GIVEN = [
    {"type": name, "probability": 0.5}
    for name in ("first_frame", "last_frame", "prefix", "suffix", "mask", "reference")
]
METHODS["conditions"] = ("lora.rank=4", f"conditions={json.dumps(GIVEN)}")
CONDITIONS = [("mid-accumulation", "conditions", "plain", 2)]
"""Each drawn for each sample, encoded on its own, of clips with references."""
OF_LTX = [
    {"type": name, "probability": 0.5}
    for name in ("first_frame", "last_frame", "prefix", "suffix")
]
DRAWN_OF_VACE = ("first_frame", "mask", "control", "reference")
OF_VACE = [
    *({"type": name, "probability": 0.5} for name in DRAWN_OF_VACE),
    *({"type": name} for name in ("last_frame", "prefix", "suffix")),
]
METHODS["conditions of LTX"] = ("lora.rank=4", f"conditions={json.dumps(OF_LTX)}")
METHODS["conditions of VACE"] = ("lora.rank=4", f"conditions={json.dumps(OF_VACE)}")
OF_LTX2 = [
    {"type": name, "probability": 0.5}
    for name in ("first_frame", "last_frame", "prefix", "reference")
]
METHODS["conditions of LTX-2"] = (
    "lora.rank=4",
    "sample.steps=2",
    f"conditions={json.dumps(OF_LTX2)}",
)
METHODS["sound of LTX-2"] = (
    "lora.rank=4",
    "sample.steps=2",
    'generate=["video", "sound"]',
    "video_config.frames=17",
)
"""Clips with sound and without, in buckets of their own."""
METHODS["text connectors of LTX-2"] = (
    *METHODS["sound of LTX-2"],
    'lora.targets=["attention", "connectors"]',
)
"""Their captions are cached before them, and they run in the step."""
METHODS["float16"] = ("lora.rank=4", "train_dtype=FLOAT_16")
HALF = [("mid-accumulation", "float16", "EMA", 2)]
OTHER_BASES = {
    "text connectors of LTX-2": ("ltx2", "2.3"),
    "sound of LTX-2": ("ltx2", "2.3"),
    "conditions of LTX-2": ("ltx2", "2.3"),
    "conditions of LTX": ("ltx_video", "0.9.7"),
    "conditions of VACE": ("wan_vace", "vace"),
}
CONDITIONS_OF_OTHERS = [
    ("save", "conditions of LTX", "plain", 2),
    ("mid-accumulation", "conditions of VACE", "plain", 0),
    ("validation", "conditions of LTX-2", "plain", 2),
    ("mid-accumulation", "sound of LTX-2", "plain", 2),
    ("mid-accumulation", "text connectors of LTX-2", "plain", 2),
]
CONNECTORS_WITH_EMA = ("validation", "text connectors of LTX-2", "EMA", 0)
"""Averages and a kill in a validation are others' too, and know nothing of what trains."""
FREE = [
    ("validation", "own rates", "schedule-free", 2),
    ("mid-accumulation", "full", "schedule-free", 0),
]
"""Its weights for validation and previews are others than those that train, and its
groups count steps.
"""
PAIRWISE = [
    ("mid-accumulation", "adapter", "plain", 0),
    ("mid-accumulation", "full", "EMA, 8-bit", 2),
    ("save", "adapter", "8-bit", 2),
    ("save", "full", "EMA", 0),
    ("validation", "adapter", "EMA", 2),
    ("validation", "full", "8-bit", 0),
    ("preview", "adapter", "EMA, 8-bit", 0),
    ("preview", "full", "plain", 2),
]
"""Every value of each beside every value of each other."""


@pytest.fixture(scope="module")
def straight(
    server: None,
    small_clips: Path,
    tiny_bases: Bases,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Overrides, Path]]:
    """(settings, folder) of the run that never stops, made once for each method and
    state; its batches come without threads.
    """
    home, made = tmp_path_factory.mktemp("straight"), {}
    base = shutil.copytree(tiny_bases("wan"), home / "base")
    referenced = shutil.copytree(small_clips, home / "clips")
    shutil.copytree(referenced / "videos", referenced / "references")
    shutil.copytree(referenced / "videos", referenced / "controls")
    sounding = write_sounding_clips(home / "sounding")
    config = WanTransformer3DModel.load_config(base / "transformer")
    torch.manual_seed(
        0
    )  # weights of 6144 numbers: bitsandbytes keeps moments of 4096 and more in 8 bits
    WanTransformer3DModel.from_config({**config, "ffn_dim": 256}).save_pretrained(
        base / "transformer"
    )
    fixed = (
        f"base_model_name={base}",
        f"cache_dir={home / 'cache'}",
        "resolution=32x32",
        "learning_rate=0.01",
    )
    often = (
        f"steps={STEPS}",
        "save_every=2",
        "validate_every=2",
        "sample_after=2",
        "sample.steps=1",
        "samples=1",
    )
    step = (
        "gradient_accumulation_steps=2",
        "warmup_steps=3",
        "learning_rate_scheduler=COSINE",
        "caption_dropout=0.3",
    )
    step += ("validation_windows=24",)

    def get(method: str, state: str) -> tuple[Overrides, Path]:
        own = [*METHODS[method], *STATES[state]]
        if method in OTHER_BASES:
            own.append(f"base_model_name={tiny_bases(*OTHER_BASES[method])}")
        data = small_clips
        if method.startswith("conditions"):
            data = referenced
        elif method.startswith(("sound", "text connectors")):
            data = sounding
        settings = Overrides(
            data=str(data),
            sets=(*fixed, *often, *step, *own),
        )
        if (method, state) not in made:
            run = made[method, state] = home / f"{method} {state}"
            assert start(more(settings, "dataloader_threads=0"), run).ended() == DONE
        return settings, made[method, state]

    return get


def more(settings: Overrides, *sets: str) -> Overrides:
    return Overrides(data=settings.data, sets=(*settings.sets, *sets))


def facts_of(run: Path) -> list[Any]:
    """What must be equal: all of the journal but times and seconds, and the events of
    one process; each step's in any order.

    A checkpoint is written beside the steps after it.
    """
    lines = [
        line
        for line in read_journal(run)
        if line["kind"] not in ("start", "resume", "end")
    ]
    found = [
        {
            key: value
            for key, value in line.items()
            if key not in ("time", "seconds", "waited")
        }
        for line in lines
    ]
    return sorted(found, key=lambda line: (line["step"], json.dumps(line)))


AVERAGED = ("EMA", "EMA, 8-bit", "schedule-free")


def check(
    moment: str, method: str, kind: str, threads: int, straight: Any, run: Path
) -> None:
    """Train until the kill, then resume: the two runs are one run.

    Averages and weights are validated, so twice as often.
    """
    settings, whole = straight(method, kind)
    where, call = MOMENTS[moment]
    call *= 2 if moment == "validation" and "EMA" in kind else 1
    threaded = more(settings, f"dataloader_threads={threads}")
    assert (
        start(threaded, run, first=interruptions.kill_at, given=(where, call)).ended()
        == KILLED
    )
    assert max(line.get("step", 0) for line in read_journal(run)) < STEPS
    written = [
        found.step for found in complete_checkpoints(run)
    ]  # the one of step 4 is written beside what follows it
    assert max(written) == 2 if moment == "save" else max(written) in (2, 4)
    assert start(Overrides(), run, "--resume").ended() == DONE
    assert [line["from_step"] for line in of_kind(run, "resume")] == [max(written)]
    assert facts_of(run) == facts_of(whole)
    ours, theirs = state(run, STEPS), state(whole, STEPS)
    assert same_tensors(ours, theirs)
    averages = {"ema"} if kind in AVERAGED else set()
    assert {name.split("/")[0] for name in theirs} == {
        "weights",
        "optimizer",
    } | averages
    assert (
        torch.uint8
        in {value.dtype for name, value in theirs.items() if "state1" in name}
    ) == ("8-bit" in kind)


CHOSEN = [*PAIRWISE, *TEXT_IN_THE_STEP, *FREE, *CONDITIONS]
REST = [
    pytest.param(*one, marks=pytest.mark.long)
    for one in [*ALL, CONNECTORS_WITH_EMA]
    if one not in CHOSEN
]


SLOW = [
    pytest.param(*one, marks=pytest.mark.slow) for one in [*CONDITIONS_OF_OTHERS, *HALF]
]


@pytest.mark.parametrize(
    ("moment", "method", "kind", "threads"), [*CHOSEN, *SLOW, *REST]
)
def test_killed_and_resumed_is_one_run(
    moment: str, method: str, kind: str, threads: int, straight: Any, tmp_path: Path
) -> None:
    check(moment, method, kind, threads, straight, tmp_path / "run")


def test_pairwise_cases_hold_every_pair() -> None:
    """Each moment, method, average or none, 8 bits or not, and number of workers meets
    each value of each other.
    """
    rows = [(*one[:2], "EMA" in one[2], "8-bit" in one[2], one[3]) for one in PAIRWISE]
    values = [set(MOMENTS), {"adapter", "full"}, {True, False}, {True, False}, {0, 2}]
    for (i, left), (j, right) in itertools.combinations(enumerate(values), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(left, right))


@pytest.mark.parametrize(
    ("method", "kind"), [("adapter", "EMA"), ("own rates", "schedule-free")]
)
def test_previews_validation_and_workers_change_nothing(
    method: str, kind: str, straight: Any, tmp_path: Path
) -> None:
    settings, whole = straight(method, kind)
    off = (
        "save_every=0",
        "validate_every=0",
        "sample_after=0",
        "sample_metrics.budget=0",
        "dataloader_threads=2",
    )
    assert start(more(settings, *off), tmp_path / "off").ended() == DONE
    assert same_tensors(state(tmp_path / "off", STEPS), state(whole, STEPS))
    kinds = [
        line["kind"]
        for line in read_journal(tmp_path / "off")
        if line["kind"] not in ("views", "parts")
    ]
    assert kinds == ["start", *["step"] * STEPS, "save", "end"]


def test_weights_alone_would_differ(straight: Any, tmp_path: Path) -> None:
    """The comparison can fail: a run that begins with the weights of step 4 and a fresh
    optimizer is another one.
    """
    settings, whole = straight("adapter", "plain")
    begun = more(settings, "steps=2", f"init_from={whole / 'checkpoints' / 'step-4'}")
    assert start(begun, tmp_path / "other").ended() == DONE
    a, b = state(tmp_path / "other", 2), state(whole, STEPS)
    assert not any(
        torch.equal(a[name], b[name])
        for name in b
        if name.startswith("weights") and "lora_B" in name
    )
