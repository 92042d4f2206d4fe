"""What the keys of measured samples do to what is drawn, and to what it is compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.effects.effects_kit import Lab, text_of, trainer_of, watched
from tests.runs import probe
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.loop import train_loop

PROBED = {"sample_metrics.budget": 1e6, "sample_metrics.steps": 1, "sample_metrics.samples": 2}


def probed(lab: Lab, **knobs: Any) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]], Path]:
    """The journal's line of the base's probe, the network's calls for it, and the run folder."""
    trainer = trainer_of(lab, PROBED | {f"sample_metrics.{key}": value for key, value in knobs.items()})
    with watched(trainer.net) as calls:
        probe(trainer, 0)
    (line,) = read_journal(trainer.run)
    assert line["kind"] == "probe", line
    return line, calls, trainer.run


@pytest.mark.effect("sample_metrics.budget")
@pytest.mark.parametrize(("budget", "measured", "told"), [(0, [], []), (0.05, [], [0, 3, 4]), (1e6, [0, 3, 4], [])])
def test_what_the_budget_does_not_allow_is_not_measured(
    lab: Lab, budget: float, measured: list[int], told: list[int]
) -> None:
    trainer = trainer_of(lab, PROBED | {"sample_metrics.budget": budget, "steps": 4, "save_every": 3})
    with watched(trainer.net) as calls:
        train_loop(trainer)
    lines = [line for line in read_journal(trainer.run) if line["kind"] == "probe"]
    assert [line["step"] for line in lines if "not_measured" not in line] == measured
    assert [line["step"] for line in lines if "not_measured" in line] == told
    assert len(calls) == 4 + 2 * len(measured)


@pytest.mark.effect("sample_metrics.samples")
def test_so_many_samples_are_drawn(lab: Lab) -> None:
    for count in (1, 3):
        line, calls, run = probed(lab, samples=count)
        assert len(calls) == len(line["samples"]) == len(list((run / "probe").glob("*.mp4"))) == count


@pytest.mark.effect("sample_metrics.steps")
def test_so_many_denoising_steps_are_taken(lab: Lab) -> None:
    for steps in (1, 3):
        _, calls, _ = probed(lab, samples=1, steps=steps)
        assert len(calls) == steps


@pytest.mark.effect("sample_metrics.prompts")
def test_prompts_are_those_that_are_named_or_captions(lab: Lab) -> None:
    captions = [(lab.clips / "captions" / f"{name}.txt").read_text(encoding="utf-8") for name in "abcd"]
    for prompts, wanted in ((["a cat", "a dog"], ["a cat", "a dog"]), (2, captions[::2])):
        line, calls, _ = probed(lab, prompts=prompts)
        assert [sample["prompt"] for sample in line["samples"]] == wanted
        assert all(
            torch.equal(call["text"][0], text_of(lab, prompt)[0]) for call, prompt in zip(calls, wanted, strict=True)
        )


@pytest.mark.effect("sample_metrics.encoder")
def test_samples_are_compared_by_the_encoder_that_is_named(lab: Lab) -> None:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    torch.manual_seed(0)
    CLIPVisionModel(CLIPVisionConfig(**small, intermediate_size=16)).save_pretrained(lab.tmp / "clip")
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPImageProcessor(**size).save_pretrained(lab.tmp / "clip")
    own, _, _ = probed(lab, encoder=str(lab.tmp / "clip"))
    default, _, _ = probed(lab)
    assert default["heuristic"]
    assert not own["heuristic"]
    assert own["embedding"].startswith("clip_vision_model-")
    assert [a["similarity"] for a in own["samples"]] != [b["similarity"] for b in default["samples"]]
