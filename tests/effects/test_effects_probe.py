"""What the keys of measured samples do to what is drawn, and to what it is compared by."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.effects.effects_kit import Lab, text_of, trainer_of, watched
from tests.runs import probe
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.loop import train_loop

PROBED = {"sample_metrics.budget": 1e6, "sample_metrics.steps": 1, "sample_metrics.samples": 2}


def measured(lab: Lab, **knobs: Any) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]], Path]:
    """The journal's line of the base's probe, the network's calls for it, and the run folder."""
    trainer = trainer_of(lab, PROBED | {f"sample_metrics.{key}": value for key, value in knobs.items()})
    with watched(trainer.net) as calls:
        probe(trainer, 0)
    (line,) = read_journal(trainer.run)
    assert line["kind"] == "sample_metrics", line
    return line, calls, trainer.run


@pytest.mark.effect("sample_metrics.budget")
@pytest.mark.parametrize(("budget", "steps", "not_measured"), [(0, [], []), (0.05, [], [0]), (1e6, [0, 3, 4], [])])
def test_what_the_budget_does_not_allow_is_not_measured(
    lab: Lab, budget: float, steps: list[int], not_measured: list[int]
) -> None:
    trainer = trainer_of(lab, PROBED | {"sample_metrics.budget": budget, "steps": 4, "save_every": 3})
    with watched(trainer.net) as calls:
        train_loop(trainer)
    lines = [line for line in read_journal(trainer.run) if line["kind"] == "sample_metrics"]
    assert [line["step"] for line in lines if "not_measured" not in line] == steps
    assert [line["step"] for line in lines if "not_measured" in line] == not_measured
    assert len(calls) == 4 + 2 * len(steps)


@pytest.mark.effect("sample_metrics.samples", "sample_metrics.steps", "sample_metrics.prompts")
@pytest.mark.parametrize(("samples", "steps", "prompts"), [(1, 1, 2), (3, 1, 2), (1, 3, 2), (2, 1, ["a cat", "a dog"])])
def test_the_number_of_samples_their_steps_and_their_prompts(
    samples: int, steps: int, prompts: int | list[str], lab: Lab
) -> None:
    """Prompts are those that are named, or captions."""
    line, calls, run = measured(lab, samples=samples, steps=steps, prompts=prompts)
    captions = [(lab.clips / "captions" / f"{name}.txt").read_text(encoding="utf-8") for name in "ac"]
    wanted = [(captions if prompts == 2 else prompts)[place % 2] for place in range(samples)]
    assert [sample["prompt"] for sample in line["samples"]] == wanted
    assert len(list((run / "sample_metrics").glob("*.mp4"))) == samples
    assert len(calls) == samples * steps
    texts = {prompt: text_of(lab, prompt)[0] for prompt in wanted}
    assert all(torch.equal(call["text"][0], texts[prompt]) for call, prompt in zip(calls[::steps], wanted, strict=True))


@pytest.mark.effect("sample_metrics.encoder")
def test_samples_are_compared_by_the_encoder_that_is_named(lab: Lab) -> None:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    torch.manual_seed(0)
    CLIPVisionModel(CLIPVisionConfig(**small, intermediate_size=16)).save_pretrained(lab.tmp / "clip")
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPImageProcessor(**size).save_pretrained(lab.tmp / "clip")
    own, _, _ = measured(lab, encoder=str(lab.tmp / "clip"))
    default, _, _ = measured(lab)
    assert default["heuristic"]
    assert not own["heuristic"]
    assert own["embedding"].startswith("clip_vision_model-")
    assert [a["similarity"] for a in own["samples"]] != [b["similarity"] for b in default["samples"]]
