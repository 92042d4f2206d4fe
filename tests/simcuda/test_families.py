"""A training on the stand-in card, of every family: previews, a checkpoint and a resume
from it.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.simcuda.child import on_card
from tests.simcuda.lab import STEPS, Lab, faults, seen_by_card
from tests.support.command_line import train
from tests.support.run_results import facts_of
from tests.support.sounding_clips import write_sounding_clips
from videotune.errors import DONE
from videotune.models.registry import find, names
from videotune.trainer.resume import Resume

LONG = ("video_config.frames=49", "video_config.target_fps=40")
OWN = {
    "cogvideox 2b": LONG,
    "cogvideox 5b-i2v": LONG,
    "ltx2 2.0": ("resolution=64x64",),
}
"""Settings of a kind: a table of positions takes 49 frames alone, and a decoder that
mirrors at the border no side of one latent.
"""
WAITS = {
    "hidream full": 1,
    "hidream dev": 1,
    "hunyuan_video15 t2v": 25,
    "hunyuan_video15 i2v": 26,
}
"""Known waits of the host in a step: diffusers' sizes of pictures, which nobody reads; its
HunyuanVideo 1.5 asks whether there is an image and selects each sample's text by masks,
and we ask once for all which samples have an image.
"""


def trained(family: str, folder: str) -> dict[str, Any]:
    """What the card sees of each kind's training, and of the first kind's going back to
    the checkpoint of the middle.
    """
    half, found = STEPS // 2, {}
    first_kind, *_ = find(family).variants
    quiet = ("validate_every=0", "sample_metrics.budget=0")
    for kind in find(family).variants:
        run = Path(folder) / f"run-{kind}"
        sets = (f"save_every={half}", f"sample_after={half}", "sample.steps=2", *quiet)
        words = Lab(Path(folder)).words(
            family, *sets, *OWN.get(f"{family} {kind}", ()), variant=kind
        )
        with seen_by_card() as straight:
            assert train(words, run) == DONE
        facts = facts_of(run)
        straight.losses = [[line[1], line[5]] for line in facts]
        drawn = {path.name.split("-")[1] for path in (run / "samples").iterdir()}
        found[kind] = {"straight": asdict(straight), "drawn": len(drawn)}
        if kind == first_kind:
            with seen_by_card() as resumed:
                assert train(words, run, resume=Resume(step=half)) == DONE
            found[kind] |= {"resumed": asdict(resumed), "same": facts == facts_of(run)}
    return found


@pytest.mark.parametrize("family", sorted(names()))
def test_a_training_with_previews_and_a_resume(family: str, tmp_path: Path) -> None:
    """No error, no wait and no growth that is not known, and a resume with the same
    losses to the bit: what a checkpoint holds of the card knows no kind of a family.
    """
    wrong = {}
    for kind, seen in on_card(trained, family, tmp_path).items():
        known = WAITS.get(f"{family} {kind}", 0)
        wrong[kind] = faults(seen["straight"], known)
        assert len(seen["straight"]["held"]) == STEPS, kind
        assert seen["drawn"] == 3, kind
        if "resumed" in seen:
            wrong[kind] += faults(seen["resumed"], known)
            assert len(seen["resumed"]["held"]) == STEPS - STEPS // 2, kind
            assert seen["same"], kind
    assert {kind: told for kind, told in wrong.items() if told} == {}


def trained_with_sound(learnt: str, folder: str) -> dict[str, Any]:
    """What the card sees of a training with sound; if both are learnt, also of going back
    to its middle.
    """
    half = STEPS // 2
    run = Path(folder) / "run"
    clips = write_sounding_clips(Path(folder) / "sounding", sounding=4, silent=0)
    words = Lab(Path(folder)).words(
        "ltx2",
        f"generate=[{learnt}]",
        "video_config.frames=17",
        f"save_every={half}",
        f"sample_after={half}",
        "sample.steps=2",
        "validate_every=0",
        "sample_metrics.budget=0",
        variant="2.3",
    )
    words = replace(words, data=str(clips))
    with seen_by_card() as straight:
        assert train(words, run) == DONE
    facts = facts_of(run)
    straight.losses = [[line[1], line[5]] for line in facts]
    found = {"straight": asdict(straight)}
    if "video" in learnt and "sound" in learnt:
        with seen_by_card() as resumed:
            assert train(words, run, resume=Resume(step=half)) == DONE
        found |= {"resumed": asdict(resumed), "same": facts == facts_of(run)}
    return found


@pytest.mark.parametrize("learnt", ['"video", "sound"', '"sound"', '"video"'])
def test_a_training_with_sound_waits_for_nothing(learnt: str, tmp_path: Path) -> None:
    seen = on_card(trained_with_sound, learnt, tmp_path)
    assert faults(seen["straight"]) == []
    if "resumed" in seen:
        assert faults(seen["resumed"]) == []
        assert seen["same"]
