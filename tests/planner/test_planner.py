"""Which settings fit: arithmetic on readings, on small made facts and on a real model's."""

from dataclasses import replace

import pytest

from videotune.config.resolve import resolve
from videotune.errors import VideotuneError
from videotune.memory.checkpointing import CPU_OFFLOADED, OFF, ON
from videotune.models.base_model import published, spec_for
from videotune.planner import memory
from videotune.planner.cards import USUAL, card, cards
from videotune.planner.measure import Reading
from videotune.planner.memory import ASIDE, PLAIN, STREAMED, TILED, Choice, Fixed, PlanInputs, StepSpec
from videotune.types import BasePlace, ClipShape

MB = 10**6
GB = 10**9


def reading(weights: int, activations: int, flops: float) -> Reading:
    still = {"weights": weights, "trained": 10 * MB, "optimizer": 20 * MB}
    return Reading(
        {
            "forward": {**still, "activations": activations},
            "backward": {**still, "activations": activations + 50 * MB, "gradients": 10 * MB},
            "end": still,
        },
        flops,
    )


def facts(full: bool = False) -> StepSpec:
    """Ten blocks of 100 MB beside 200 MB; a sample keeps 80 MB a block, or 5 MB where the block is computed again."""
    blocks = (100 * MB,) * 10
    return StepSpec(
        one={OFF: reading(1200 * MB, 800 * MB, 3e12), ON: reading(1200 * MB, 100 * MB, 4e12)},
        two={OFF: reading(1200 * MB, 1600 * MB, 6e12), ON: reading(1200 * MB, 200 * MB, 8e12)},
        blocks=blocks,
        trained=blocks if full else (0,) * 10,
        kept={OFF: 80 * MB, ON: 5 * MB},
        elsewhere={
            "encoding text": {PLAIN: {"text encoder": 3 * GB}, STREAMED: {"text encoder": GB}},
            "preview": {
                name: {"autoencoder": 300 * MB, "activations": size}
                for name, size in ((PLAIN, GB), (ASIDE, GB), (TILED, 200 * MB))
            },
        },
    )


def weights(choice: Choice, full: bool = False) -> dict[str, int]:
    return dict(memory.need(facts(full), choice).device["forward"])


def test_streamed_blocks_leave_the_device_and_two_slots_stay() -> None:
    assert weights(Choice(1, ON, 0))["weights"] == 1200 * MB
    half = memory.need(facts(), Choice(1, ON, 5))
    assert half.device["forward"]["weights"] == 700 * MB
    assert half.device["forward"]["ring"] == 200 * MB
    assert half.host == {"streamed weights": 500 * MB}
    two, none = (memory.need(facts(), Choice(1, ON, count)).device for count in (2, 0))
    assert two == none, "two slots for two blocks"
    assert memory.need(facts(), Choice(1, ON, 10)).moved == 2 * 1000 * MB - 200 * MB


def test_all_streamed_and_off_is_on() -> None:
    """Streamed blocks are computed again whatever the others do."""
    off, on = memory.need(facts(), Choice(1, OFF, 10)), memory.need(facts(), Choice(1, ON, 10))
    assert off.device == on.device
    assert off.flops == on.flops
    some = memory.need(facts(), Choice(1, OFF, 5))
    assert some.device["forward"]["activations"] == 100 * MB + 5 * 75 * MB
    assert some.flops == pytest.approx(3.5e12)


def test_inputs_on_the_host() -> None:
    away = memory.need(facts(), Choice(2, CPU_OFFLOADED, 0))
    assert away.host == {"block inputs": 100 * MB}
    assert away.device["forward"]["activations"] == 200 * MB - 8 * 10 * MB
    assert away.device["end"] == memory.need(facts(), Choice(2, ON, 0)).device["end"]


def test_weights_that_train_take_their_optimizer_with_them() -> None:
    away = memory.need(facts(full=True), Choice(1, ON, 10))
    assert "optimizer" not in away.device["forward"]
    assert away.host["masters, gradients and optimizer"] == 8 * GB
    assert memory.need(facts(full=True), Choice(1, ON, 5)).device["forward"]["optimizer"] == 10 * MB


def test_the_fastest_that_fits_and_nothing_that_was_fixed_is_changed() -> None:
    plenty = memory.fastest(facts(), 4, Fixed(), 80 * GB, USUAL)
    assert plenty.choice == Choice(4, OFF, 0)
    tight = memory.fastest(facts(), 4, Fixed(), int(2.6 * GB), USUAL)
    assert tight.needed <= 2.6 * GB
    for fixed in (Fixed(checkpointing=ON), Fixed(streamed=10), Fixed(micro_batch=4)):
        found = memory.fastest(facts(), 4, fixed, int(2.9 * GB), USUAL)
        assert found is not None, fixed
        for name in ("checkpointing", "streamed", "micro_batch"):
            assert getattr(fixed, name) in (None, getattr(found.choice, name))
    assert memory.fastest(facts(), 4, Fixed(), GB, USUAL) is None
    assert memory.smallest(facts(), 4, Fixed()).choice.streamed == 10


def test_the_host_has_its_limit_too() -> None:
    """What waits on the host must have room there."""
    free = memory.fastest(facts(), 1, Fixed(checkpointing=ON), 22 * GB // 10, USUAL)
    taken = sum(free.host.values())
    assert taken > 100 * MB
    assert memory.fastest(facts(), 1, Fixed(checkpointing=ON), 22 * GB // 10, USUAL, host=taken) is not None
    assert memory.fastest(facts(), 1, Fixed(checkpointing=ON), 22 * GB // 10, USUAL, host=50 * MB) is None


def test_more_memory_is_never_slower() -> None:
    took = [
        memory.seconds(found, 4, USUAL)
        for vram in range(14, 80, 2)
        if (found := memory.fastest(facts(), 4, Fixed(), vram * GB // 10, USUAL))
    ]
    assert len(took) > 20
    assert took == sorted(took, reverse=True)


def test_other_times_take_the_plainest_way_that_fits() -> None:
    training = memory.need(facts(), Choice(1, ON, 0))
    ways = {
        vram: {name: way for name, (way, _) in memory.others(facts(), training, vram).items()}
        for vram in (9 * GB, 3 * GB)
    }
    assert ways[9 * GB] == {"encoding text": PLAIN, "preview": PLAIN}
    assert ways[3 * GB] == {"encoding text": STREAMED, "preview": ASIDE}
    assert memory.others(facts(), training, 2 * GB)["preview"][0] == TILED
    assert memory.others(facts(), training, None)["preview"][0] == PLAIN
    beside = memory.others(facts(), training, None)["preview"][1]
    assert beside["weights"] == 1200 * MB, "the denoiser stays where it is"
    assert memory.room(beside) == sum(beside.values()) + round(0.3 * GB) + 2**30


def test_work_goes_with_tokens_and_their_square() -> None:
    made = replace(facts(), work=tuple((n, 3.0 * n + 0.002 * n * n + 50) for n in (100, 500, 1000)))
    for n in (100, 300, 1000):
        assert memory.lighter(made, n) == pytest.approx((3.0 * n + 0.002 * n * n + 50) / 5050)
    assert memory.lighter(facts(), 7) == 1.0


@pytest.mark.parametrize(
    ("asked", "name", "gigabytes"),
    [
        ("NVIDIA L4", "L4", 24), ("l4", "L4", 24), ("L40S", "L40S", 48), ("rtx 4090", "RTX 4090", 24),
        ("4090", "RTX 4090", 24),
        ("rtx 4090 laptop", "RTX 4090 Laptop", 16), ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop", 16),
        ("rtx4060 laptop", "RTX 4060 Laptop", 8), ("NVIDIA GeForce RTX 5070", "RTX 5070", 12),
        ("rtx 5070 ti", "RTX 5070 Ti", 16),
        ("rtx 3060 ti", "RTX 3060 Ti", 8), ("rtx 3060 8gb", "RTX 3060 8GB", 8), ("rtx 3060 12 GB", "RTX 3060 12GB", 12),
        ("4060ti 16gb", "RTX 4060 Ti 16GB", 16), ("a10", "A10", 24), ("A10G", "A10G", 24), ("h20 96gb", "H20 96GB", 96),
        ("rtx 3080 ti", "RTX 3080 Ti", 12), ("rtx 3080 12gb", "RTX 3080 12GB", 12), ("4070 super", "RTX 4070 Super", 12),
        ("rtx 4070 ti super", "RTX 4070 Ti Super", 16), ("RTX 4070 Ti SUPER 16G", "RTX 4070 Ti Super", 16),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 80),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB", 40), ("a100 80gb", "A100 80GB", 80), ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("NVIDIA H100 PCIe", "H100 PCIe", 80), ("NVIDIA H200", "H200", 141), ("A6000", "RTX A6000", 48),
        ("Tesla T4", "T4", 16),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 48), ("Tesla V100-SXM2-32GB", "V100 32GB", 32),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000", 96), ("NVIDIA L40S", "L40S", 48),
        ("NVIDIA RTX A4000", "RTX A4000", 16), ("rtx 3090", "RTX 3090", 24),
    ],
)  # fmt: skip
def test_a_card_is_known_by_every_word_of_its_name(asked: str, name: str, gigabytes: int) -> None:
    found = card(asked)
    assert (found.name, found.vram) == (name, gigabytes << 30)


def test_a_name_that_is_no_card_or_several_is_refused() -> None:
    for asked in ("", "rtx", "4", "nvidia", "voodoo", "rtx 4090 ti", "rtx 4060 ti", "a100", "rtx 6000", "4 0"):
        with pytest.raises(VideotuneError):
            card(asked)


def test_every_card_of_the_table_is_found_by_its_own_name() -> None:
    assert [card(one.name) for one in cards()] == list(cards())
    assert all(10e12 < one.flops < 1e16 and one.link > 1e9 for one in cards())
    assert not card("T4").timed, "without bfloat16 units no time is calculated"


@pytest.mark.long
def test_the_guide_s_first_row_fits_a_card_of_8_gb() -> None:
    """Wan 2.2 5B, nine frames of 384x384, one sample; the whole table: benchmarks/planning.py."""
    base = BasePlace("5b", published("wan2.2-ti2v-5b"))
    spec = spec_for("wan", base)
    shape = ClipShape(9, 384, 384, 24.0)
    config = resolve({}, {}, spec).config
    seen = memory.read_step_spec(PlanInputs(spec, base.folder, config, "BFLOAT_16", (shape,), None))
    assert sum(seen.blocks) / 2**30 == pytest.approx(9.15, abs=0.02)
    assert memory.need(seen, Choice(1, ON, 0)).allocated / 2**30 == pytest.approx(9.9, abs=0.25)
    found = memory.fastest(seen, 1, Fixed(), 8 * GB, USUAL)
    assert all(memory.room(parts) <= 8 * GB for _, parts in memory.others(seen, found, 8 * GB).values())
    assert memory.fastest(seen, 1, Fixed(checkpointing=ON, streamed=0), 8 * GB, USUAL) is None


def test_of_weights_that_are_shared_out_a_process_has_its_part_and_two_blocks_whole() -> None:
    """Of 1200 MB and four processes 300 MB; an adapter and activations stay, what trains of every weight is cut as well."""
    plain, choice = memory.need(facts(), Choice(1, ON, 0)), Choice(1, ON, 0)
    for full in (False, True):
        held = memory.need(memory.sharded(facts(full), 4, full), choice)
        cut = 4 if full else 1
        for phase in ("forward", "backward", "end"):
            gathered = 0 if phase == "end" else 200 * MB
            assert held.device[phase]["weights"] == 300 * MB + gathered
            assert held.device[phase]["optimizer"] == plain.device[phase]["optimizer"] // cut
            assert held.device[phase].get("activations") == plain.device[phase].get("activations")
        assert held.device["backward"]["gradients"] == 10 * MB // cut + (200 * MB if full else 0)
    assert memory.need(memory.sharded(facts(), 4, False), Choice(2, OFF, 0)).device["forward"]["weights"] == 500 * MB


def test_where_inputs_cannot_wait_on_the_host_they_are_not_planned_to() -> None:
    assert {choice.checkpointing for choice in memory.choices(facts(), 2, Fixed(streamed=0, waits=False))} == {OFF, ON}
