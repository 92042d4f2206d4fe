"""What a step's reading counts for which part: bytes counted by hand, on a tiny network
of 2 blocks, 24 wide, whose linear layers have biases.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from videotune.config.schema import Config
from videotune.models.registry import find
from videotune.planner.ledger import Reading, Work
from videotune.planner.measure import (
    FakeRun,
    _block_bytes,
    fake_mode,
    to_fake,
    weight_bytes,
)
from videotune.planner.shallow_networks import Depths, read_deep
from videotune.trainer.build import weights_of
from videotune.types import ClipShape

Bases = Callable[..., Path]

SHAPE = ClipShape(9, 64, 64, 16.0)
"""3 x 8 x 8 latents."""

LATENT_BYTES = 4 * (4 * 3 * 8 * 8)
TEXT_NUMBERS = 512 * 16

DTYPES = {torch.float32: "FLOAT_32", torch.bfloat16: "BFLOAT_16"}


def tiny_run(
    folder: Path, family: str = "wan", dtype: torch.dtype = torch.float32, **keys: Any
) -> FakeRun:
    """A run whose bytes are counted one by one."""
    config = Config(**keys)
    weights = weights_of(config, DTYPES[dtype])
    opened = find(family)(folder, torch.device("cpu"), dtype, weights)
    return FakeRun(opened, config, piece=1)


def whole_step(run: FakeRun, samples: int = 1, checkpointing: str = "OFF") -> Reading:
    depths = tuple(run.depths.items())
    return run.step(SHAPE, samples, checkpointing, depths)


def still(run: FakeRun, samples: int = 1) -> dict[str, int]:
    """What is held before a step's first and after its last moment."""
    reading = whole_step(run, samples)
    parts = dict(reading.phases["forward"])
    after = dict(reading.phases["end"])
    parts.pop("activations")
    after.pop("activations")
    assert parts == after
    return parts


# what trains

LORA_NUMBERS = 16 * 16 * (24 + 24)
"""A and B of rank 16 at the 16 projections of attention."""

LORA_TENSORS = 2 * 16

ATTENTION_NUMBERS = 4 * (24 * 24 + 24) + 2 * 24
"""Four projections, and the norms of queries and keys."""

ATTENTION_TENSORS = 4 * 2 + 2


def adamw_bytes(numbers: int, tensors: int) -> int:
    """Two float32 numbers for each that trains, and a count of steps for each tensor."""
    return 2 * 4 * numbers + 4 * tensors


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_lora_is_trained_and_the_network_is_not(
    dtype: torch.dtype, tiny_bases: Bases
) -> None:
    """The adapter is float32 in both."""
    run = tiny_run(tiny_bases("wan"), dtype=dtype)
    net = run.family.denoiser()
    parts = still(run)
    assert parts["trained"] == 4 * LORA_NUMBERS
    assert parts["optimizer"] == adamw_bytes(LORA_NUMBERS, LORA_TENSORS)
    frozen = [*net.parameters(), *net.buffers()]
    assert parts["weights"] == sum(tensor.nbytes for tensor in frozen)


def test_in_a_fine_tune_all_weights_train_and_buffers_do_not(tiny_bases: Bases) -> None:
    run = tiny_run(tiny_bases("wan"), training_method="FINE_TUNE")
    net = run.family.denoiser()
    numbers = sum(weight.numel() for weight in net.parameters())
    parts = still(run)
    assert parts["trained"] == 4 * numbers
    assert parts["optimizer"] == adamw_bytes(numbers, len(list(net.parameters())))
    assert parts["weights"] == sum(buffer.nbytes for buffer in net.buffers()) > 0


@pytest.mark.parametrize(
    ("dtype", "bytes_a_number"), [(torch.float32, 4), (torch.bfloat16, 2 + 4)]
)
def test_of_layers_that_are_chosen_only_these_train(
    dtype: torch.dtype, bytes_a_number: int, tiny_bases: Bases
) -> None:
    """In bfloat16 each weight also has a float32 copy that the optimizer updates."""
    run = tiny_run(
        tiny_bases("wan"),
        dtype=dtype,
        training_method="FINE_TUNE",
        transformer={"layers": ["blocks.0.attn1"]},
    )
    parts = still(run)
    assert parts["trained"] == bytes_a_number * ATTENTION_NUMBERS
    assert parts["optimizer"] == adamw_bytes(ATTENTION_NUMBERS, ATTENTION_TENSORS)

    net = run.family.denoiser()
    all_bytes = sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))
    network_bytes = dtype.itemsize * ATTENTION_NUMBERS
    assert parts["weights"] == all_bytes - network_bytes


def test_where_only_text_trains_a_row_of_a_table_does(tiny_bases: Bases) -> None:
    run = tiny_run(
        tiny_bases("wan"),
        training_method="FINE_TUNE",
        transformer={"train": False},
        text_encoder={"train": True},
    )
    net = run.family.denoiser()
    parts = still(run)
    assert parts["trained"] == 4 * 16
    assert parts["optimizer"] == adamw_bytes(16, 1)
    frozen = [*net.parameters(), *net.buffers()]
    assert parts["weights"] == sum(tensor.nbytes for tensor in frozen)


def test_an_average_is_a_part_of_its_own(tiny_bases: Bases) -> None:
    without = still(tiny_run(tiny_bases("wan")))
    average = still(tiny_run(tiny_bases("wan"), ema={"decay": 0.9}))
    assert average == without | {"ema": 4 * LORA_NUMBERS}


@pytest.mark.parametrize("name", ["LION", "SGD"])
def test_the_state_of_any_optimizer_is_read_as_that_of_adamw(
    name: str, tiny_bases: Bases
) -> None:
    run = tiny_run(tiny_bases("wan"), optimizer={"name": name})
    assert still(run)["optimizer"] == adamw_bytes(LORA_NUMBERS, LORA_TENSORS)


def test_a_gradient_is_held_for_each_number_that_trains(tiny_bases: Bases) -> None:
    """Where the optimizer runs; before it, those of the blocks that are behind."""
    phases = whole_step(tiny_run(tiny_bases("wan"))).phases
    assert phases["optimizer"]["gradients"] == 4 * LORA_NUMBERS
    assert 0 < phases["backward"]["gradients"] < phases["first block"]["gradients"]
    assert phases["first block"]["gradients"] <= 4 * LORA_NUMBERS
    assert not any("gradients" in phases[name] for name in ("forward", "kept", "end"))


def test_of_two_experts_the_first_is_read(tiny_bases: Bases) -> None:
    run = tiny_run(tiny_bases("wan", "t2v-a14b"))
    first = run.family.denoiser(run.family.spec.experts[0].name)
    parts = still(run)
    assert parts["trained"] == 4 * LORA_NUMBERS
    frozen = [*first.parameters(), *first.buffers()]
    assert parts["weights"] == sum(tensor.nbytes for tensor in frozen)
    assert run.network(tuple(run.depths.items())).trainable.expert == "high"


# a step


@pytest.mark.parametrize("samples", [1, 2])
def test_a_batch_is_clean_latents_noise_and_text(
    samples: int, tiny_bases: Bases
) -> None:
    parts = still(tiny_run(tiny_bases("wan")), samples)
    assert parts["batch"] == samples * (2 * LATENT_BYTES + 4 * TEXT_NUMBERS)


def test_text_is_in_the_networks_dtype(tiny_bases: Bases) -> None:
    parts = still(tiny_run(tiny_bases("wan"), dtype=torch.bfloat16))
    assert parts["batch"] == 2 * LATENT_BYTES + 2 * TEXT_NUMBERS


def test_a_reference_is_a_part_of_the_batch(tiny_bases: Bases) -> None:
    """It has as many latents as the clip, and the network has as many tokens more."""
    plain = whole_step(tiny_run(tiny_bases("wan")))
    conditions = [{"type": "reference"}]
    run = tiny_run(tiny_bases("wan"), conditions=conditions)
    reading = whole_step(run)
    added = {
        part: reading.phases["forward"][part] - plain.phases["forward"][part]
        for part in ("batch", "activations")
    }
    assert added["batch"] == LATENT_BYTES
    assert added["activations"] > 0
    assert reading.work.flops > 1.5 * plain.work.flops


def test_frames_that_are_given_are_looked_for_where_they_are_in_the_clip(
    tiny_bases: Bases,
) -> None:
    """Not where they are appended."""
    base = tiny_bases("wan")
    kinds = {"prefix": True, "reference": False}
    for kind, expected in kinds.items():
        run = tiny_run(base, conditions=[{"type": kind}])
        with run.mode:
            prepared = run.prepared(SHAPE, 2)
        assert prepared.batch is not None
        assert prepared.batch.has_clean_frames is expected
        assert prepared.batch.fps.shape == (2,)
        assert prepared.t.shape == (2,)
        assert prepared.noise.shape == (2, 4, 3, 8, 8)


@pytest.mark.parametrize("generated", [("video",), ("sound",), ("video", "sound")])
def test_what_is_not_generated_is_given_clean(
    generated: tuple[str, ...], tiny_bases: Bases
) -> None:
    """If a model generates video and sound, the sound has its own noise level."""
    run = tiny_run(tiny_bases("ltx2"), "ltx2")
    run.family.spec = run.family.spec.with_sound(generated)
    with run.mode:
        prepared = run.prepared(replace(SHAPE, sound=True), 2)
    assert prepared.batch is not None
    sound = prepared.batch.sound
    assert sound is not None
    assert sound.is_conditioning is ("sound" not in generated)
    assert prepared.batch.video_is_conditioning is ("video" not in generated)
    assert run.family.spec.sound is not None
    latents = run.family.spec.sound.latents(SHAPE)
    size = (2, run.family.spec.sound.channels, latents, 1, 1)
    assert sound.x0.shape == sound.noise.shape == size
    assert sound.t.shape == (2,)
    has_both = len(generated) == 2
    assert (prepared.sound_t is not None) is has_both
    if prepared.sound_t is not None:
        assert prepared.sound_t.shape == (2,)


def test_a_guidance_that_is_kept_runs_the_base_twice_more(tiny_bases: Bases) -> None:
    """With the caption and without: two passes forward, without a graph."""
    plain = whole_step(tiny_run(tiny_bases("wan")))
    guided = whole_step(tiny_run(tiny_bases("wan"), distilled_guidance=3.0))
    more = guided.work.flops / plain.work.flops
    assert 1.5 < more < 2
    kept = [reading.phases["kept"]["activations"] for reading in (plain, guided)]
    assert kept[1] < 1.2 * kept[0]


def test_text_that_is_encoded_in_the_step_has_a_gradient(tiny_bases: Bases) -> None:
    keys = {"training_method": "FINE_TUNE", "text_encoder": {"train": True}}
    for settings, expected in ((keys, True), ({}, False)):
        run = tiny_run(tiny_bases("wan"), **settings)
        batch = run.prepared(SHAPE, 1).batch
        assert batch is not None
        assert batch.conditioning.text.requires_grad is expected


def test_the_network_is_in_training_mode(tiny_bases: Bases) -> None:
    """Dropout keeps a mask; recomputed blocks keep less."""
    dropout = tiny_run(tiny_bases("wan"), lora={"dropout": 0.5})
    plain = tiny_run(tiny_bases("wan"))

    def kept(run: FakeRun, checkpointing: str) -> int:
        phases = whole_step(run, checkpointing=checkpointing).phases
        return phases["kept"]["activations"]

    assert kept(dropout, "OFF") > kept(plain, "OFF") > kept(plain, "ON")


@pytest.mark.parametrize("variant", ["LOHA", "LOKR"])
def test_adapters_that_draw_numbers_are_read_too(
    variant: str, tiny_bases: Bases
) -> None:
    lora = {"variant": variant, "dropout": 0.5}
    parts = still(tiny_run(tiny_bases("wan"), lora=lora))
    assert parts["optimizer"] > 2 * parts["trained"] > 0


def test_a_reading_is_made_once(tiny_bases: Bases) -> None:
    run = tiny_run(tiny_bases("wan"))
    first = whole_step(run)
    assert whole_step(run) is first
    assert whole_step(run, samples=2) is not first
    depths = tuple(run.depths.items())
    assert run.network(depths) is run.network(depths)
    shallow = tuple((path, 1) for path in run.depths)
    assert len(run.network(shallow).net.get_submodule("blocks")) == 1
    assert len(run.network(depths).net.get_submodule("blocks")) == 2


# networks


def test_the_bytes_of_each_block(tiny_bases: Bases) -> None:
    for family in ("wan", "hidream", "kandinsky5"):
        run = tiny_run(tiny_bases(family), family)
        net = run.family.denoiser()
        expected = {}
        for path in run.family.spec.blocks:
            expected[path] = [
                sum(4 * weight.numel() for weight in block.parameters())
                for block in net.get_submodule(path)
            ]
        assert run.blocks == expected
        assert run.depths == {path: len(sizes) for path, sizes in expected.items()}
    assert len(run.depths) == 2


def test_the_bytes_of_weights_and_of_the_blocks_of_an_encoder() -> None:
    """Its blocks are the list with most parameters."""
    lists = [
        nn.ModuleList(nn.Linear(2, size, bias=False) for size in sizes)
        for sizes in ((9,), (3, 4, 5), (2, 2, 2, 2))
    ]
    encoder = nn.ModuleDict({str(index): part for index, part in enumerate(lists)})
    encoder.register_buffer("table", torch.zeros(1000))
    assert weight_bytes(encoder) == 4 * 2 * (9 + 3 + 4 + 5 + 8)
    assert _block_bytes(encoder) == [4 * 2 * 3, 4 * 2 * 4, 4 * 2 * 5]


class Tensors(nn.Module):
    """A module with every kind of tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), False)
        self.trained = nn.Parameter(torch.ones(2, 5))
        self.same = self.trained
        self.register_buffer("table", torch.ones(4, dtype=torch.float64))
        self.register_buffer("nothing", None)
        self.register_parameter("no_bias", None)


def test_a_fake_tensor_is_like_the_one_that_it_replaces() -> None:
    net = nn.Sequential(Tensors())
    before = [*net.parameters(), *net.buffers()]
    fakes = to_fake(net, fake_mode())

    frozen, trained = net.parameters()
    assert frozen is fakes[id(before[0])]
    assert trained is fakes[id(before[1])]
    assert (frozen.shape, frozen.dtype, frozen.requires_grad) == ((3,), torch.bfloat16, False)  # fmt: skip
    assert (trained.shape, trained.dtype, trained.requires_grad) == ((2, 5), torch.float32, True)  # fmt: skip
    assert isinstance(frozen, nn.Parameter)
    assert net[0].same is net[0].trained
    assert net[0].table is fakes[id(before[2])]
    assert net[0].table.dtype == torch.float64
    assert not isinstance(net[0].table, nn.Parameter)
    assert net[0].nothing is None
    assert net[0].no_bias is None
    assert {type(tensor).__name__ for tensor in fakes.values()} <= {"FakeTensor", "Parameter"}  # fmt: skip


def test_a_deep_network_is_a_line_through_two_shallow_ones() -> None:
    """1000 bytes, 100 for each block of a, 10 of b, 7 of c, 3 of d; and as many
    operations.
    """
    depths: list[dict[str, int]] = []

    def read(blocks: tuple[tuple[str, int], ...]) -> Reading:
        depths.append(dict(blocks))
        prices = {"a": 100, "b": 10, "c": 7, "d": 3}
        total = 1000 + sum(prices[path] * count for path, count in blocks)
        return Reading({"forward": {"activations": total}}, Work(float(total)))

    reading = read_deep(read, {"a": 1, "b": 2, "c": 3, "d": 40})
    assert reading.phases["forward"]["activations"] == 1000 + 100 + 20 + 21 + 120
    assert reading.work.flops == 1000 + 100 + 20 + 21 + 120
    few = {"a": 1, "b": 2, "c": 2, "d": 2}
    assert depths == [few, few | {"c": 3}, few | {"d": 4}]


class CountedRun(FakeRun):
    """A step of a network whose blocks keep these bytes, beside 1000; nothing is read."""

    prices: Mapping[str, int]

    def step(
        self, shape: ClipShape, samples: int, checkpointing: str, depths: Depths
    ) -> Reading:
        assert (shape, samples, checkpointing) == (SHAPE, 1, "ON")
        total = 1000 + sum(self.prices[path] * count for path, count in depths)
        return Reading({"kept": {"activations": total}}, Work(0))


def test_what_a_block_keeps_is_the_difference_of_two_shallow_networks(
    tiny_bases: Bases,
) -> None:
    """Nothing where there are no more than two blocks, or where more keep less."""
    run = CountedRun(tiny_run(tiny_bases("wan")).family, Config())
    run.prices = {"a": 100, "b": 10, "c": 7, "d": 3, "e": -5}
    depths = {"a": 1, "b": 2, "c": 3, "d": 40, "e": 9}
    run.blocks = {path: [1] * count for path, count in depths.items()}
    kept = run.kept_by_block(SHAPE, "ON")
    assert kept == {"a": 0, "b": 0, "c": 7, "d": 3, "e": 0}


# the other parts


def bytes_of_part(run: FakeRun, name: str) -> int:
    net = run.family.part(name)
    return sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))


def test_an_autoencoder_is_read_while_it_encodes_and_decodes(tiny_bases: Bases) -> None:
    run = tiny_run(tiny_bases("wan"))
    weights = bytes_of_part(run, "vae")
    clip = 4 * 3 * 9 * 64 * 64

    parts, flops = run.encode(SHAPE)
    assert parts["autoencoder"] == weights
    assert parts["activations"] > clip
    larger = ClipShape(9, 128, 64, 16.0)
    larger_parts, larger_flops = run.encode(larger)
    assert larger_parts["activations"] == pytest.approx(
        2 * parts["activations"], rel=0.1
    )
    assert larger_flops == pytest.approx(2 * flops, rel=0.01)

    decoded = run.decode(SHAPE)
    assert decoded["autoencoder"] == weights
    assert decoded["activations"] > clip
    large = ClipShape(1, 320, 320, 16.0)
    whole = run.decode(large)["activations"]
    assert run.decode(large, tiled=True)["activations"] < whole
    assert run.decode(large, tiled=False)["activations"] == whole


def test_a_text_encoder_keeps_what_its_backward_pass_needs(tiny_bases: Bases) -> None:
    run = tiny_run(tiny_bases("wan"))
    parts, flops, blocks = run.read_text()
    assert parts["text encoder"] == bytes_of_part(run, "text_encoder")
    assert len(blocks) == 1
    assert sum(blocks[0]) < parts["text encoder"]

    trains = tiny_run(
        tiny_bases("wan"), training_method="FINE_TUNE", text_encoder={"train": True}
    )
    trained_parts, trained_flops, _ = trains.read_text()
    assert trained_parts["text encoder"] == parts["text encoder"]
    assert trained_parts["activations"] > parts["activations"]
    assert trained_flops > 1.9 * flops
