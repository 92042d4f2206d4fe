"""train_dtype FLOAT_16 with each family's own network."""

import pytest

from tests.support.run_processes import Work
from tests.support.run_results import of_kind, steps_of
from videotune.runs.step_sums import is_loss_scale_overflow

BASES = [
    ("wan", "t2v-a14b"),
    ("wan", "i2v"),
    ("wan_vace",),
    ("ltx_video",),
    ("ltx2",),
    ("hunyuan_video",),
    ("hunyuan_video15",),
    ("cogvideox",),
    ("kandinsky5",),
    ("hidream",),
]


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES, ids="-".join)
def test_each_family_trains_and_samples_in_float16(
    base: tuple[str, ...], work: Work
) -> None:
    """Beside the run in float32, with a preview."""
    settings = (
        "steps=3",
        "sample_after=3",
        "samples=1",
        "sample.steps=2",
        "video_config.target_fps=24",
        "learning_rate=0.001",
    )
    run = work.finished(*settings, "train_dtype=FLOAT_16", base=base)
    plain = work.finished(*settings, "train_dtype=FLOAT_32", base=base)
    losses = [line["loss"] for line in steps_of(run)]
    assert losses == pytest.approx([line["loss"] for line in steps_of(plain)], rel=0.01)
    skipped = [line for line in steps_of(run) if line.get("skipped")]
    assert all(is_loss_scale_overflow(line) for line in skipped)
    assert len(skipped) < 3
    assert of_kind(run, "sample")
