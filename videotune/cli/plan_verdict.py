"""The plan in one line: whether a run fits a card, and how long it takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from videotune.console import size
from videotune.errors import VideotuneError
from videotune.text import duration, memory_size, rough_duration

OFFLOADED = {
    "CPU_OFFLOADED": "inputs kept on the host",
    "IN_PARTS": "inputs kept on the host, blocks computed again in parts",
}
"""Gradient checkpointing that keeps inputs of blocks on the host."""


def verdict(
    facts: Mapping[str, Any],
    cpu_seconds: float | None = None,
    *,
    is_here: bool = True,
    has_options: bool = True,
) -> str:
    """Return the plan in one line: whether it fits, on which card, and how long it
    takes.

    Args:
        facts: The plan.
        cpu_seconds: Of the steps on this machine's CPU, if the plan is for it.
        is_here: Whether the run may be on this machine.
        has_options: Whether the command takes the options of ``plan``.
    """
    device = facts["device"]
    need = memory_size(device["need_bytes"])
    if facts["verdict"] is None and cpu_seconds is not None:
        line = cpu_verdict(facts, cpu_seconds)
        return f"{line}. For a card: --card NAME or --vram GB" if has_options else line
    if facts["verdict"] is None:
        return f"needs {need} of device memory; does it fit: --card NAME or --vram GB"

    line = _fit_text(facts)
    if is_here and is_host_short(facts):
        total = memory_size(facts["host"]["total_bytes"])
        line = (
            f"it does not fit this machine: the run keeps {memory_size(host_bytes(facts))} in "
            f"the host's memory, which has {total}. For the card alone: {line}"
        )
    return line + _time_and_price(facts) if facts["fits"] else line


def host_bytes(facts: Mapping[str, Any]) -> int:
    """Return what all processes of a machine need of its host."""
    processes = facts["processes"]
    if processes:
        bytes_of_all: int = processes["host_bytes_a_machine"]
        return bytes_of_all
    bytes_of_one: int = facts["host"]["need_bytes"]
    return bytes_of_one


def is_host_short(facts: Mapping[str, Any]) -> bool:
    """Return whether this machine's memory is less than a run keeps there."""
    total: int = facts["host"]["total_bytes"]
    return host_bytes(facts) > total


def host_text(facts: Mapping[str, Any], *, is_here: bool) -> str:
    """Return what a run keeps in the host's memory, and whose memory that is.

    Args:
        facts: The plan.
        is_here: Whether the run may be on this machine.
    """
    needed = memory_size(host_bytes(facts))
    if not is_here:
        return f"the card's computer needs {needed} of memory"
    total = memory_size(facts["host"]["total_bytes"])
    text = f"of the host {needed} of {total} here"
    return f"{text}, which is too little" if is_host_short(facts) else text


def _fit_text(facts: Mapping[str, Any]) -> str:
    """Return whether the run fits the card, with its memory."""
    device = facts["device"]
    card = card_name(device)
    need = memory_size(device["need_bytes"])
    total = memory_size(device["vram_bytes"])
    if facts["verdict"] == "fits":
        text = f"it fits {card}: {need} of {total}"
    elif facts["verdict"] == "tight":
        text = f"it is tight on {card}: {need} of {total}, so close other programs"
    else:
        text = f"it does not fit {card}: {device['phase']} needs {need} of {total}"

    if facts["processes"]:
        text += f", {processes_text(facts['processes'])}"
    if device["unstreamed_bytes"] > device["vram_bytes"] and facts["fits"]:
        without_means = memory_size(device["unstreamed_bytes"])
        text += f" ({without_means} without {_means(facts['chosen'])})"
    return text


def _time_and_price(facts: Mapping[str, Any]) -> str:
    """Return how long a run that fits takes and what it costs, or how to see that, as the
    end of a line.
    """
    device = facts["device"]

    if facts["hours"] is not None:
        hours = facts["hours"] + (facts["hours_beside"] or 0)
        is_rough = not device["measured"]
        text = f", {time_text(hours, facts['seconds_a_step'], is_rough=is_rough)}"
        price = facts.get("price")
        if price:
            text += f", {price['total']:.2f} at {price['an_hour']:g} an hour"
        if price and _machines(facts) > 1:
            text += " of a machine"
        return f"{text}, {source_of_rates(device)}"

    # Without hours: how to see them.
    if facts["examples"]:
        return f"; {example_text(facts['examples'])}; for your card: --card NAME"
    if device["card"]:
        return f"; no hours, because the rate of {device['card']} is not known"
    return "; hours: --card NAME, such as --card 'RTX 4090'"


def unproven(facts: Mapping[str, Any]) -> str:
    """Return what of a plan that fits has never run on a card; empty if all has."""
    mode = facts["chosen"].get("gradient_checkpointing")
    if not facts["fits"] or mode not in OFFLOADED:
        return ""
    return (
        f"gradient_checkpointing {mode}, which this needs, has run on a stand-in "
        "for a card only: watch the first steps"
    )


def _means(chosen: Mapping[str, Any]) -> str:
    """Return what makes a run fit that would not fit as it is."""
    means = []
    if chosen.get("layer_offload_fraction"):
        means.append("streaming")
    mode = chosen.get("gradient_checkpointing")
    if mode in OFFLOADED:
        means.append(OFFLOADED[mode])
    return " and ".join(means) or "settings that save memory"


def priced(facts: Mapping[str, Any], an_hour: float) -> dict[str, float]:
    """Return what a run costs: encoding, steps, and what is between them.

    Args:
        facts: The plan.
        an_hour: Price of an hour of each machine.

    Raises:
        VideotuneError: If the plan has no hours.
    """
    if facts["hours"] is None:
        raise VideotuneError(
            "--price: the plan has no hours without a card that it knows. Add --card "
            "NAME, such as --card 'RTX 4090'"
        )
    parts = ("hours", "hours_beside", "hours_encoding")
    hours = sum(facts[part] or 0.0 for part in parts)
    total = hours * an_hour * _machines(facts)
    return {"an_hour": an_hour, "total": round(total, 2)}


def _machines(facts: Mapping[str, Any]) -> int:
    """Return how many machines a plan is for."""
    processes = facts["processes"]
    if not processes or not processes["machines"]:
        return 1
    count: int = processes["machines"]["count"]
    return count


def processes_text(processes: Mapping[str, Any]) -> str:
    """Return how several GPUs share a step."""
    text = f"on each of {processes['count']}"
    machines = processes["machines"]
    if machines:
        text += f" in {machines['count']} machines"
    if processes["context_parallel"] > 1:
        text += (
            f" (context {processes['context_parallel']} × data {processes['groups']})"
        )
    else:
        text += ", which take different samples"
    return text


def example_text(examples: Sequence[Mapping[str, Any]]) -> str:
    """Return the time of a run on example cards of its memory."""
    cards_by_time: dict[str, list[str]] = {}
    for example in examples:
        hours = example["hours"] + example["hours_beside"]
        time = time_text(hours, 0, is_rough=True)
        cards_by_time.setdefault(time, []).append(example["card"])

    texts = [
        f"{time} on {' and '.join(cards)}" for time, cards in cards_by_time.items()
    ]
    return " to ".join(texts)


def time_text(hours: float, seconds_a_step: float, *, is_rough: bool = False) -> str:
    """Return the time of a run with that of a step, which is left out below a
    millisecond.

    Args:
        hours: Of the run.
        seconds_a_step: Of a step.
        is_rough: Whether it is calculated for a card on which nothing was measured.
    """
    text = "less than a minute"
    if hours > 1 / 60:
        span = duration(round(hours * 3600))
        text = f"about {rough_duration(hours) if is_rough else span}"
    if seconds_a_step >= 0.001:
        digits = 2 if is_rough else 3
        text += f" ({seconds_a_step:.{digits}g} s a step)"
    return text


def cpu_verdict(facts: Mapping[str, Any], seconds: float) -> str:
    """Return the plan in one line for a machine without a GPU."""
    need = facts["device"]["need_bytes"]
    total = facts["host"]["total_bytes"]
    line = f"no GPU here, so it trains on the CPU: it needs {memory_size(need)}"
    if need > total:
        line += f", more than this machine's memory ({memory_size(total)})"
    else:
        line += f" of {memory_size(total)} of memory, about {duration(round(seconds))} of steps"
        line += " (calculated from this CPU's speed)"
    return line


def card_name(device: Mapping[str, Any]) -> str:
    """Return the card that a plan is for, and how its memory is known."""
    if device["memory_from"] == "preset":
        return f"{device['vram_bytes'] >> 30} GB, the preset's card"
    name = device["card"] or f"{device['vram_bytes'] / 2**30:.3g} GB"
    return f"{name} of this machine" if device["memory_from"] == "machine" else name


def source_of_rates(device: Mapping[str, Any]) -> str:
    """Return whether a time is calculated from rates of this machine's card or of its
    model.
    """
    if device["measured"]:
        return f"calculated from rates measured on this card on {device['measured']}"
    return (
        f"calculated for {device['card']} from its data sheet: no run on such a card was "
        "measured"
    )


def sent_text(processes: Mapping[str, Any]) -> str:
    """Return what each GPU sends in a step, and how long the step waits for it."""
    sent = processes["sent_bytes"]
    parts = ", ".join(f"{name} {size(count)}" for name, count in sent.items() if count)
    line = f"each GPU sends in a step: {parts}"
    if processes["link_bytes_a_second"] is None:
        return line
    link = size(processes["link_bytes_a_second"])
    waiting = processes["seconds_waiting"]
    line += f"; the step waits {waiting:.3g} s for it, over {link} a second"
    weight_seconds = processes["seconds_beside"]
    if weight_seconds:
        line += f"; weights take {weight_seconds:.3g} s beside computing"
    return line


def free_text(disk: Mapping[str, Any]) -> str:
    """Return how much of the disk is free, as the end of a sentence."""
    return f"; {size(disk['free_bytes'])} are free"
