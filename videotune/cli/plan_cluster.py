"""The text of a plan for several machines, and of a simulated run."""

from collections.abc import Mapping
from typing import Any

from videotune.console import print_table, size, tell
from videotune.text import counted, duration


def between_text(machines: Mapping[str, Any]) -> str:
    """Return what the machines send each other in a step, and over what."""
    gigabits = machines["network_bytes_a_second"] * 8 / 1e9
    network = f"{machines['network']} of {gigabits:,.4g} Gbit/s"
    sent = machines["sent_bytes"]["between"]
    parts = ", ".join(f"{name} {size(count)}" for name, count in sent.items() if count)
    text = (
        f"each machine of {machines['gpus']} sends to others, over {network}: {parts}"
    )
    if not machines["groups_within"]:
        text += (
            "; some cards that share a sample are in different machines, because "
            "context_parallel does not divide the cards of one"
        )
    return text


def show_simulation(simulation: Mapping[str, Any]) -> None:
    """Print a simulated run."""
    ranks = counted(simulation["ranks"], "process", "processes")
    steps = f"{simulation['steps']:,} of {simulation['of']:,} steps"
    machines = counted(simulation["machines"], "machine")
    tell(f"simulated: {steps}, {ranks} on {machines}")
    show_work(simulation["work"])
    tell(reads_text(simulation["cache"]))
    if simulation["checkpoints"]:
        tell(saves_text(simulation["checkpoints"]))
    else:
        tell("seconds of reading and saving need a card: --card NAME")


def show_work(work: Mapping[str, Any]) -> None:
    """Print the work of the processes and of the steps."""
    rows = []
    for row in work["buckets"]:
        seconds = row["seconds_a_step"]
        seconds_text = "" if seconds is None else f"{seconds:.3g}"
        tokens = f"{row['tokens_a_rank']:,}"
        rows.append([row["shape"], row["steps"], row["samples"], tokens, seconds_text])
    columns = ["bucket", "steps", "samples", "tokens a process", "seconds"]
    print_table("work of the steps", columns, rows, right=(1, 2, 3, 4))

    most = work["most_over_mean_of_ranks"]
    text = f"in a step the most loaded process has {most:.3g} times the mean"
    if work["share_without_sample"]:
        text += f"; {work['share_without_sample']:.1%} of the turns have no sample"
    if work["slowest_over_mean_step"] is not None:
        slowest = work["slowest_over_mean_step"]
        text += f"; the slowest bucket takes {slowest:.3g} times the mean step"
    tell(text)


def reads_text(reads: Mapping[str, Any]) -> str:
    """Return what the steps read from the cache."""
    step = reads["storage_bytes_a_step"]
    machine = reads["storage_bytes_a_step_and_machine"]
    text = (
        f"the cache is read with {size(step['mean'])} a step, at most {size(step['most'])}; "
        f"by a machine {size(machine['mean'])}, at most {size(machine['most'])}"
    )
    rate = reads["storage_bytes_a_second"]
    if rate:
        text += (
            f". Its storage must give {size(rate['mean'])} a second, at most "
            f"{size(rate['most'])}"
        )
    return text


def saves_text(saves: Mapping[str, Any]) -> str:
    """Return the bytes of the checkpoints, and how long the steps wait for them."""
    writers = counted(saves["writers"], "process", "processes")
    storage = f"{size(saves['storage_bytes_a_second'])} a second"
    if saves["storage_is_assumed"]:
        storage += ", which is assumed (--storage)"

    waits = saves["waiting_seconds"]
    shares = saves["waiting_shares"]
    texts = {
        name: f"{duration(round(wait)) if wait >= 1 else f'{wait:.2g} s'} ({shares[name]:.2%})"
        for name, wait in waits.items()
    }

    return (
        f"{counted(saves['count'], 'checkpoint')} of {size(saves['bytes'])}, written by "
        f"{writers} over {storage}, {saves['writing_seconds']:.3g} s each. The steps wait "
        f"for them {texts['asynchronous']}; without threads that write "
        f"{texts['blocking']}"
    )
