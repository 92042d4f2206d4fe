"""Weigh what a checkpoint learnt against what that cost."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kept:
    """What is left of the abilities before training at a step."""

    share: float
    """Of the prompts' effect, at most 1."""
    label: str | None
    """FORGETTING or UNDISTILLING, or None."""


def kept_by_step(lines: Iterable[Mapping[str, Any]]) -> dict[int, Kept]:
    """Return what is left of the abilities before training at each step that was read.

    Readings compare with the latest one only if they have its prompts, shape and steps.

    Args:
        lines: events of the journal.
    """
    readings = [
        line
        for line in lines
        if line["kind"] == "forgetting" and line.get("guidance") is not None
    ]
    kept_shares = {}
    for reading in readings:
        share = reading["guidance"]["mean"]
        is_comparable = reading.get("forgetting") == readings[-1].get("forgetting")
        if is_comparable and share is not None:
            step = int(reading["step"])
            kept_shares[step] = Kept(min(1.0, float(share)), reading.get("verdict"))
    return kept_shares


def weigh_kept(
    choice: int,
    held_out: Mapping[int, float],
    kept_shares: Mapping[int, Kept],
    saved: Collection[int],
) -> tuple[int, str]:
    """Return a saved step that no other one beats in both what it learnt and what is
    left of the abilities before training.

    If the choice has lost abilities, it is the best of the steps that
    have not. Otherwise it is the choice, unless another step is better in one and no
    worse in the other.

    Args:
        choice: the step that the held-out clips speak for.
        held_out: the validation loss by step.
        kept_shares: what is left by step.
        saved: the steps with a checkpoint.

    Returns:
        The step, and why it is not the choice, or what the choice has lost; empty if
        there is nothing to say.
    """
    of_choice = kept_shares.get(choice)
    if of_choice is None:
        return choice, ""
    compared = [step for step in saved if step in kept_shares and step in held_out]
    if of_choice.label is not None:
        return _without_loss(choice, of_choice, held_out, kept_shares, compared)

    if choice not in held_out:
        return choice, ""
    better = []
    for step in compared:
        learnt_more = held_out[step] <= held_out[choice]
        kept_more = kept_shares[step].share >= of_choice.share
        differs = (held_out[step], kept_shares[step].share) != (
            held_out[choice],
            of_choice.share,
        )
        if learnt_more and kept_more and differs:
            better.append(step)
    if not better:
        return choice, ""
    step = min(better, key=lambda step: (held_out[step], -kept_shares[step].share))
    return step, (
        f"clips kept aside are no worse there than at step {choice}, and more of what the "
        f"model did with other prompts before training is left ({_percent(kept_shares[step].share)} of "
        f"their effect, {_percent(of_choice.share)} at step {choice})"
    )


def _without_loss(
    choice: int,
    of_choice: Kept,
    held_out: Mapping[int, float],
    kept_shares: Mapping[int, Kept],
    compared: Collection[int],
) -> tuple[int, str]:
    """Return the best of the steps that have lost no ability, if there is one."""
    loss = (
        f"{of_choice.label} at step {choice}: {_percent(of_choice.share)} of the effect "
        "of prompts that have nothing to do with the clips is left"
    )
    intact = [step for step in compared if kept_shares[step].label is None]
    if not intact:
        return choice, f"{loss}, and no saved step that was read has lost less"
    step = min(intact, key=lambda step: (held_out[step], step))
    return step, (
        f"it is the best by clips kept aside of the saved steps that keep what the "
        f"model could do before training. {loss}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
