"""The moments of a step, of a network whose blocks differ: counted by hand."""

from types import SimpleNamespace

import pytest

from videotune.memory.checkpointing import CPU_OFFLOADED, OFF, ON
from videotune.planner import memory
from videotune.planner.ledger import FIRST, Reading, Work
from videotune.planner.memory import Choice
from videotune.planner.step_spec import StepSpec, read_work
from videotune.types import ClipShape

KEPT_OFF = (30, 20, 10)
KEPT_ON = (3, 2, 1)


def reading(forward: int, backward: int, first: int, samples: int = 1) -> Reading:
    """What a step holds if every block is treated alike; of two samples twice as much."""
    return Reading(
        {
            "forward": {"weights": 200, "activations": forward * samples},
            "backward": {
                "weights": 200,
                "activations": backward * samples,
                "gradients": 6,
            },
            FIRST: {"weights": 200, "activations": first * samples, "gradients": 10},
            "end": {"weights": 200},
            "kept": {"weights": 200},
        },
        Work(1.0),
    )


def spec(kept_off: tuple[int, ...] = KEPT_OFF) -> StepSpec:
    return StepSpec(
        one_sample={OFF: reading(65, 72, 22), ON: reading(9, 33, 40)},
        two_samples={OFF: reading(65, 72, 22, 2), ON: reading(9, 33, 40, 2)},
        blocks=(100, 60, 40),
        trained=(0, 0, 0, 0),
        kept={OFF: kept_off, ON: KEPT_ON},
        encoding_flops_per_pixel=1.0,
    )


def moments(
    choice: Choice, recomputed: tuple[int, ...], kept_off: tuple[int, ...] = KEPT_OFF
) -> list[tuple[str, int, int]]:
    """Phase, activations and gradients of each moment."""
    found = []
    for phase, parts in memory.step_moments(spec(kept_off), choice, recomputed):
        assert parts["weights"] == 200
        found.append((phase, parts.get("activations", 0), parts.get("gradients", 0)))
    return found


@pytest.mark.parametrize(
    ("choice", "recomputed", "expected"),
    [
        # The last block holds what all keep. The second block is like the first one,
        # not like the last: it keeps another size. Each block behind has 2 of gradients.
        (
            Choice(1, OFF, 0),
            (),
            [
                ("forward", 65, 0),
                (FIRST, 22, 10),
                (FIRST, 22 + 30, 10 - 2),
                ("backward", 72, 6),
                ("end", 0, 0),
            ],
        ),
        (
            Choice(1, ON, 0),
            (0, 1, 2),
            [
                ("forward", 9, 0),
                (FIRST, 40, 10),
                (FIRST, 40 + 3, 10 - 2),
                ("backward", 33, 6),
                ("end", 0, 0),
            ],
        ),
        # Only the inputs of the block before are on the device.
        (
            Choice(1, CPU_OFFLOADED, 0),
            (0, 1, 2),
            [
                ("forward", 9 - 3, 0),
                (FIRST, 40, 10),
                (FIRST, 40 + 3, 10 - 2),
                ("backward", 33 - 3, 6),
                ("end", 0, 0),
            ],
        ),
        # The first block is computed again, so it keeps 3 in the place of 30.
        (
            Choice(1, OFF, 1),
            (0,),
            [
                ("forward", 65 - 27, 0),
                (FIRST, 40, 10),
                (FIRST, 22 + 3, 10 - 2),
                ("backward", 72 - 27, 6),
                ("end", 0, 0),
            ],
        ),
        # Two samples keep twice as much.
        (
            Choice(2, OFF, 0),
            (),
            [
                ("forward", 130, 0),
                (FIRST, 44, 10),
                (FIRST, 44 + 60, 10 - 2),
                ("backward", 144, 6),
                ("end", 0, 0),
            ],
        ),
        # The gradients of a pass before are there all the time.
        (
            Choice(1, OFF, 0, accumulates=True),
            (),
            [
                ("forward", 65, 10),
                (FIRST, 22, 10),
                (FIRST, 22 + 30, 10),
                ("backward", 72, 10),
                ("end", 0, 0),
            ],
        ),
    ],
)
def test_what_each_moment_holds(
    choice: Choice, recomputed: tuple[int, ...], expected: list[tuple[str, int, int]]
) -> None:
    assert moments(choice, recomputed) == expected


def test_blocks_like_the_last_one_are_between_it_and_the_first() -> None:
    """The middle block of three equal ones: one block is behind it."""
    assert moments(Choice(1, OFF, 0), (), (20, 20, 20)) == [
        ("forward", 65, 0),
        (FIRST, 22, 10),
        ("backward", 72 - 20, 6 + 2),
        ("backward", 72, 6),
        ("end", 0, 0),
    ]


@pytest.mark.parametrize(
    ("choice", "moved"),
    [
        (Choice(1, ON, 0), 0),
        # Read in both passes, but for what two slots hold of the largest block.
        (Choice(1, ON, 3), 2 * (100 + 60 + 40) - 2 * 100),
        (Choice(3, CPU_OFFLOADED, 0), 2 * (3 + 2 + 1) * 3),
        (Choice(2, CPU_OFFLOADED, 3), 2 * 200 - 2 * 100 + 2 * 6 * 2),
    ],
)
def test_what_goes_over_the_link(choice: Choice, moved: float) -> None:
    assert memory.need(spec(), choice).moved == moved


@pytest.mark.parametrize(
    ("sides", "chosen"),
    [((64,), [16]), ((64, 32), [4, 16]), ((80, 16, 64, 32, 48), [1, 9, 25])],
)
def test_work_is_read_of_the_cheapest_a_middle_and_the_dearest_shape(
    sides: tuple[int, ...], chosen: list[int]
) -> None:
    """The dearest one is the run's first shape, also of several with as many tokens."""
    shapes = [ClipShape(1, side, side, 16.0) for side in sides]
    same_tokens = ClipShape(1, 2 * sides[0], sides[0] // 2, 16.0)

    class Run:
        def deep_step(self, shape: ClipShape, samples: int, mode: str) -> Reading:
            assert (samples, mode) == (1, ON)
            return Reading(
                {}, Work(float(shape.height * shape.width + (shape == shapes[0])))
            )

    inputs = SimpleNamespace(
        spec=SimpleNamespace(tokens=lambda shape: shape.height * shape.width // 256),
        shapes=[shapes[0], *shapes[1:], same_tokens],
    )
    work = read_work(Run(), inputs)  # type: ignore[arg-type]
    assert [tokens for tokens, _ in work] == chosen
    assert [flops for _, flops in work] == [
        256.0 * tokens + (tokens == chosen[-1]) for tokens in chosen
    ]
