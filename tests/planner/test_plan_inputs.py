"""On which settings a reading depends, and the sizes of a network."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.clips import noise, write_dataset
from tests.support.trainers import Lab, job_of
from videotune.adapters.lora import add_lora
from videotune.job.job import Job
from videotune.models.base import DiffusersModel
from videotune.planner import cpu_rate, denoiser_size
from videotune.planner import network_facts as network_facts_module
from videotune.planner.denoiser_size import (
    activations_at_most,
    host_checkpointing,
    surely_fits,
)
from videotune.planner.network_facts import (
    NetworkFacts,
    linear_sizes,
    named_and_idle,
    network_facts,
    read_network_facts,
    skeleton_family,
)
from videotune.planner.plan_inputs import PlanInputs, configs_of
from videotune.planner.read_step import open_family

Bases = Callable[..., Path]


@pytest.fixture
def lab(tmp_path: Path, tiny_bases: Bases) -> Lab:
    """A base model in no table, and two clips of 9 frames."""
    frames = {f"{name}.mkv": noise(9, 32, 32, seed=ord(name)) for name in "ab"}
    clips = write_dataset(tmp_path / "clips", frames, {}, fps=16)
    return Lab(tiny_bases("wan"), clips, tmp_path / "cache", tmp_path)


def test_a_reading_depends_on_these_settings(lab: Lab) -> None:
    inputs = PlanInputs.of(job_of(lab), "FLOAT_32")
    settings = inputs.run_settings()
    assert settings == {
        "authors_text": inputs.spec.authors_text,
        "dtype": "FLOAT_32",
        "weights": settings["weights"],
        "method": ["LORA", True, None, inputs.config.experts],
        "text_encoder": [False, None, inputs.config.embedding.vectors],
        "ema": inputs.config.ema.model_dump(mode="json"),
        "isolated": False,
        "first_frame": False,
        "loss": [inputs.config.loss, inputs.config.loss_weighting],
        "consistency": False,
        "distilled_guidance": False,
        "whole_graph": False,
    }
    changed = {
        "video_config.use_temporal_attention": False,
        "first_frame_probability": 0.5,
        "video_config.temporal_consistency_weight": 0.1,
        "compile": True,
        "conditions": [{"type": "suffix"}, {"type": "mask"}],
    }
    others = PlanInputs.of(job_of(lab, changed), "FLOAT_32").run_settings()
    assert {key: others[key] for key in others if others[key] != settings.get(key)} == {
        "isolated": True,
        "first_frame": True,
        "consistency": True,
        "whole_graph": True,
        "conditions": ["mask", "suffix"],
    }
    spec = replace(inputs.spec, connectors_in_step=True)
    assert replace(inputs, spec=spec).run_settings() == settings | {"connectors": True}


@pytest.mark.parametrize(
    ("knobs", "has_preview"),
    [
        ({"sample_after": 0}, False),
        ({"sample_after": 2}, True),
        ({"sample_after": 2, "samples": 0}, False),
    ],
)
def test_a_preview_is_planned_where_the_run_draws_one(
    knobs: dict[str, Any], has_preview: bool, lab: Lab
) -> None:
    inputs = PlanInputs.of(job_of(lab, knobs), "FLOAT_32")
    assert (inputs.preview is not None) == has_preview


def test_a_config_is_compared_without_versions_and_private_keys(tmp_path: Path) -> None:
    for name, text in {
        "vae": '{"_class_name": "A", "_name_or_path": "x", "z": {"_y": 1, "dtype": 2}}',
        "transformer": '{"transformers_version": "5", "layers": [{"_a": 1}]}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    assert configs_of(tmp_path) == {
        "vae": {"_class_name": "A", "z": {}},
        "transformer": {"layers": [{"_a": 1}]},
    }


# sizes of a network


def network_of(job: Job) -> nn.Module:
    family = open_family(PlanInputs.of(job, "FLOAT_32"))
    return family.denoiser()


def test_sizes_of_linear_layers_are_those_of_the_network(lab: Lab) -> None:
    job = job_of(lab)
    net: Any = network_of(job)
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    in_blocks = [
        module for module in net.blocks.modules() if isinstance(module, nn.Linear)
    ]
    assert len(in_blocks) < len(layers)
    sizes = linear_sizes(job)
    assert sizes.parameters == sum(value.numel() for value in net.parameters())
    assert sizes.in_and_out == sum(
        layer.in_features + layer.out_features for layer in layers
    )
    assert sizes.block_weights == sum(layer.weight.numel() for layer in in_blocks)


def test_what_trains_is_counted_by_module_part_and_rows(lab: Lab) -> None:
    job = job_of(lab, {"lora.rank": 3})
    parameters = add_lora(network_of(job), job.spec, job.config.lora, seed=0)
    facts = network_facts(job)
    numbers = sum(value.numel() for value in parameters.values())
    assert facts.modules == len(parameters) // 2
    assert facts.parameters == sum(facts.parts.values()) == numbers
    assert list(facts.parts.values()) == sorted(facts.parts.values(), reverse=True)
    assert sum(facts.groups.values()) == facts.modules
    assert facts.text == (0, 0)
    of_rank = sum(value.numel() for value in parameters.values() if len(value) == 3)
    assert facts.by_rows[3] == of_rank
    assert sum(facts.by_rows.values()) == numbers

    full = network_facts(job_of(lab, {"training_method": "FINE_TUNE"}))
    net = network_of(job)
    assert full.parameters == sum(value.numel() for value in net.parameters())
    names = {name.rpartition(".")[0] for name, _ in net.named_parameters()}
    assert full.modules == len(names)
    text_only = {"training_method": "FINE_TUNE", "transformer.train": False}
    text = network_facts(job_of(lab, text_only | {"text_encoder.train": True}))
    assert (text.modules, text.parameters) == (0, 0)
    assert text.text[1] > text.text[0] > 0


def test_numbers_of_tensors_with_fewer_rows_are_summed() -> None:
    facts = NetworkFacts(1, {}, {}, {}, by_rows={1: 10, 2: 20, 3: 40})
    assert [facts.numbers_below(rows) for rows in (1, 2, 3, 4)] == [0, 10, 30, 70]


def test_modules_without_an_effect_are_named_once_if_the_config_names_them(
    lab: Lab,
) -> None:
    full = {"training_method": "FINE_TUNE"}
    layers = full | {"transformer.layers": ["blocks.0.attn1.to_q", "blocks.1.attn1"]}
    idle = {"idle_paths": (r"blocks\.\d\.attn1\.(to_q|norm_q)",)}

    def idle_of(knobs: dict[str, Any], **changes: Any) -> list[str]:
        job = job_of(lab, knobs)
        family = open_family(PlanInputs.of(job, "FLOAT_32"))
        family.spec = replace(family.spec, **changes)
        return named_and_idle(family, job.config)

    assert idle_of(layers) == []
    assert idle_of(full, **idle) == []
    assert sorted(idle_of(layers, **idle)) == [
        "blocks.0.attn1.to_q",
        "blocks.1.attn1.norm_q",
        "blocks.1.attn1.to_q",
    ]
    without_denoiser = {"transformer.train": False, "text_encoder.train": True}
    assert idle_of(full | without_denoiser, **idle) == []

    job = job_of(lab, layers)
    family = open_family(PlanInputs.of(job, "FLOAT_32"))
    family.spec = replace(family.spec, **idle)
    assert read_network_facts(family, job.config).idle == {
        "blocks.*.attn1.to_q": 2,
        "blocks.*.attn1.norm_q": 1,
    }


def test_a_bound_on_activations_is_three_times_what_linear_layers_touch(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(lab, {"batch_size": 2})
    (shape,) = job.shapes
    tokens = 2 * (job.spec.tokens(shape) + job.spec.text_tokens)
    sizes = linear_sizes(job)
    bound = activations_at_most(job, 4)
    assert bound == 3 * 4 * tokens * sizes.in_and_out
    assert activations_at_most(job, 2) == bound // 2

    least = 4 * (4 * sizes.parameters + bound)
    assert surely_fits(job, least)
    assert not surely_fits(job, least - 1)
    full = job_of(lab, {"batch_size": 2, "training_method": "FINE_TUNE"})
    least = 4 * (24 * sizes.parameters + bound)
    assert surely_fits(full, least)
    assert not surely_fits(full, least - 1)
    assert not surely_fits(job_of(lab, {"training_method": "EMBEDDING"}), 1 << 60)

    for free, mode in ((2 * bound, "OFF"), (2 * bound - 1, "ON")):
        host = type("Host", (), {"available": free})
        monkeypatch.setattr(
            denoiser_size.psutil, "virtual_memory", lambda host=host: host
        )
        assert host_checkpointing(job) == mode


def test_a_cpu_s_rate_is_that_of_its_fastest_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of eight products one takes half a second, all others a second."""
    times = iter([0.0, 1.0, 2.0, 2.5, *(float(i) for i in range(3, 15))])
    monkeypatch.setattr(cpu_rate.time, "perf_counter", lambda: next(times))
    card = cpu_rate.measured_cpu()
    assert card.flops == 2 * 512**3 / 0.5
    assert (card.name, card.vram, card.link) == ("this CPU", 0, 1e10)
    assert list(times) == []
    assert torch.get_num_threads() >= 1


@pytest.mark.parametrize("rank", [4, 24])
def test_what_trains_of_a_base_in_the_tables_is_not_read(
    rank: int, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what a reading gives. With sound there is no table."""
    toy = replace(lab, model=Path("asset:toy"))
    job = job_of(toy, {"lora.rank": rank}, preset="toy")
    read = read_network_facts(skeleton_family(job), job.config)
    opened: list[Job] = []

    def open_skeleton(asked: Job) -> DiffusersModel:
        opened.append(asked)
        return skeleton_family(asked)

    monkeypatch.setattr(network_facts_module, "skeleton_family", open_skeleton)
    facts = network_facts(job)
    assert opened == []
    assert facts == replace(read, by_rows={})

    sounding = replace(job, spec=replace(job.spec, reads_sound=True))
    assert network_facts(sounding) == read
    assert opened == [sounding]
