"""Plans in which blocks are computed again part by part, where nothing else fits."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_dataset
from videotune.commands.plan import plan
from videotune.errors import VideotuneError
from videotune.job.overrides import Overrides


@pytest.fixture(scope="module")
def long_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of 18,480 tokens."""
    folder = tmp_path_factory.mktemp("long") / "clips"
    return write_dataset(folder, {"a.mkv": noise(81, 352, 640)}, {}, fps=16)


def planned(clips: Path, vram: float, *sets: str) -> Any:
    """The plan of a LoRA of rank 32 on Wan 14B, on a card as fast as an H100."""
    words = (
        "resolution=352x640",
        "video_config.frames=81",
        "batch_size=1",
        "steps=10",
        *sets,
    )
    overrides = Overrides(preset="wan 2.1 14B LoRA 48GB", data=str(clips), sets=words)
    return plan(overrides, card="h100", vram=vram).plan


@pytest.mark.slow
def test_14b_trains_on_10_gib_at_a_quarter_more_time(long_clips: Path) -> None:
    roomy = planned(long_clips, 80)
    assert roomy["buckets"][0]["tokens"] == 18_480
    small = planned(long_clips, 10)
    assert small["fits"]
    assert small["chosen"]["gradient_checkpointing"] == "IN_PARTS"
    assert small["device"]["phases"]["training"]["need_bytes"] <= 10 * 2**30
    assert small["seconds_a_step"] <= 1.25 * roomy["seconds_a_step"]

    # Without it, the same card has too little.
    offloaded = planned(long_clips, 10, "gradient_checkpointing=CPU_OFFLOADED")
    assert not offloaded["fits"]
    asked = planned(long_clips, 10, "gradient_checkpointing=IN_PARTS")
    assert asked["device"]["phases"] == small["device"]["phases"]


@pytest.mark.parametrize(
    "setting",
    [
        "compile=true",
        "context_parallel=2",
        "sharding=FULL",
        "training_method=FINE_TUNE",
        "text_encoder.train=true",
    ],
)
def test_what_cannot_be_computed_in_parts_is_refused(
    setting: str, long_clips: Path
) -> None:
    with pytest.raises(VideotuneError, match="gradient_checkpointing"):
        planned(long_clips, 10, "gradient_checkpointing=IN_PARTS", setting)
