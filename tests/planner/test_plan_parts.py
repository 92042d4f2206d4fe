"""Parts of a plan, counted by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_dataset
from tests.support.trainers import Lab, job_of
from videotune.adapters.lora import add_lora
from videotune.config.resolve import parse
from videotune.config.sections import Lora
from videotune.memory.checkpointing import ATTENTION_SAVED, OFF
from videotune.planner.cache_size import cache_size
from videotune.planner.ledger import Reading, Work
from videotune.planner.plan import (
    bytes_a_parameter,
    checkpoints_at_most,
    make_plan,
)
from videotune.planner.step_spec import (
    StepSpec,
    state_bytes_per_number,
    with_shared_samples,
)

Bases = Callable[..., Path]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """The toy base model and two clips of 9 frames."""
    frames = {f"{name}.mkv": noise(9, 32, 32, seed=ord(name)) for name in "ab"}
    clips = write_dataset(tmp_path / "clips", frames, {}, fps=16)
    return Lab(Path("asset:toy"), clips, tmp_path / "cache", tmp_path)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"save_every": 100}, 10),
        ({"save_every": 300}, 4),
        ({"save_every": 0}, 1),
        ({"save_every": 100, "save_keep": 2}, 3),
        ({"save_every": 300, "save_keep": 20}, 4),
        ({"save_every": 100, "backup_every": 10, "backup_keep": 3}, 13),
        ({"save_every": 0, "backup_after": 5, "backup_keep": 2}, 3),
        ({"save_every": 0, "backup_keep": 2}, 1),
    ],
)
def test_saves_the_best_one_and_backups_are_counted(
    settings: dict[str, Any], count: int
) -> None:
    """Of a thousand steps."""
    config = parse({"backup_after": 0, "backup_every": 0} | settings)
    assert checkpoints_at_most(config, 1000) == count


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"optimizer": {"name": "ADAMW"}}, 12),
        ({"optimizer": {"name": "ADAMW"}, "ema": 0.9}, 16),
        ({"optimizer": {"name": "SCHEDULE_FREE"}}, 16),
    ],
)
def test_a_checkpoint_has_weights_state_and_an_average(
    settings: dict[str, Any], size: int
) -> None:
    assert bytes_a_parameter(parse(settings), state=8.0) == size


@pytest.mark.parametrize(
    ("name", "args", "size"),
    [
        ("ADAMW", {}, 8),
        ("torch.optim:SGD", {"momentum": 0.9}, 4),
        ("torch.optim:Adam", {"amsgrad": True}, 12),
    ],
)
def test_the_state_of_an_optimizer_is_measured_for_each_number(
    name: str, args: dict[str, Any], size: int, tiny_family: Callable[..., Any]
) -> None:
    """Beside 4 bytes for the steps of each tensor."""
    config = parse({"optimizer": {"name": name, "args": args}, "lora": {"rank": 4}})
    family = tiny_family("wan")
    measured = state_bytes_per_number(family, family.spec, config)
    assert measured == pytest.approx(size, rel=0.02)


def test_both_experts_have_an_adapter_and_the_parts_are_of_one(
    lab: Lab, tiny_bases: Bases, tiny_family: Callable[..., Any]
) -> None:
    model = replace(lab, model=tiny_bases("wan", "t2v-a14b"))
    adapter = make_plan(job_of(model, {"lora.rank": 4}))["adapter"]
    family = tiny_family("wan", variant="t2v-a14b")
    parameters = add_lora(family.denoiser(), family.spec, Lora(rank=4), seed=0)
    numbers = sum(value.numel() for value in parameters.values())
    modules = len(parameters) // 2
    assert sum(adapter["parts"].values()) == numbers
    assert sum(adapter["groups"].values()) == modules
    assert adapter["parameters"] == 2 * numbers
    assert adapter["modules"] == 2 * modules
    assert adapter["idle"] == {}


@pytest.mark.parametrize(("variant", "passes"), [("t2v", 1), ("i2v", 2)])
def test_the_channels_of_an_image_are_a_second_clip_to_encode(
    variant: str, passes: int, lab: Lab, tiny_bases: Bases
) -> None:
    model = replace(lab, model=tiny_bases("wan", variant))
    windows = cache_size(job_of(model)).windows
    assert windows.count == 2
    assert windows.pixels == passes * windows.count * 9 * 32 * 32


def test_a_part_of_work_starts_as_many_kernels() -> None:
    work = Work(flops=80, attention=40, moved=20, operations=7, eight_bit=8)
    part = Work(flops=20, attention=10, moved=5, operations=7, eight_bit=2)
    assert work.shared(4) == part
    assert work.plus(Work(1, 2, 3, 4, 5), 10) == Work(90, 60, 50, 47, 58)


def test_a_shared_sample_is_a_part_and_an_exchange_for_each_attention() -> None:
    """Of two samples: two blocks, each of which two processes compute at most three times.

    Attention runs once more: of 3.5 parts that it has forward and backward, one is
    forward.
    """

    def reading(samples: int) -> Reading:
        sizes = {"weights": 1000, "activations": 501 * samples}
        work = Work(
            flops=1000 * samples,
            attention=70 * samples,
            moved=40 * samples,
            operations=9,
        )
        return Reading({"forward": sizes, "end": sizes, "kept": sizes}, work)

    spec = StepSpec(
        one_sample={OFF: reading(1)},
        two_samples={OFF: reading(2)},
        blocks=(300, 300),
        trained=(0, 0, 0),
        kept={OFF: (7, 8), ATTENTION_SAVED: (1, 1)},
        encoding_flops_per_pixel=1.0,
    )
    shared = with_shared_samples(spec, 2, exchanged=100)
    assert shared.kept == {OFF: (4, 4)}
    one, two = shared.at(OFF, 1), shared.at(OFF, 2)
    assert one.phases["forward"] == {
        "weights": 1000,
        "activations": 251,
        "exchanged by attention": 2 * 100 / 2,
    }
    assert one.phases["kept"] == {"weights": 1000, "activations": 251}
    assert one.phases["end"] == {"weights": 1000, "activations": 501}
    assert two.phases["forward"]["exchanged by attention"] == 2 * 100
    attentions = 3 * 2
    assert two.work == Work(
        flops=(2000 + 2 * 20) / 2,
        attention=(140 + 2 * 20) / 2,
        moved=80 / 2 + attentions * 28 * 100,
        operations=9 + attentions * 14,
    )
