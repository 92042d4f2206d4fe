"""The table of several runs: the settings that differ, and the results, a column a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from videotune.console import print_table, tell

FACTS = {
    "state": "state",
    "steps": "steps done",
    "verdict": "verdict",
    "recommended": "recommended step",
    "held_out": "error on clips kept aside",
    "training": "error on training clips",
    "loss": "mean error of the last 50 steps",
    "minutes": "minutes",
}
"""Facts of a run by their key, with their heading."""


def print_runs(keys: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> None:
    """Print runs side by side.

    Args:
        keys: the settings that differ, by dotted name.
        runs: the facts of each run, as ``comparison_table`` returns them.
    """
    rows = []
    for index, key in enumerate(keys):
        rows.append([key, *(run["values"][index] for run in runs)])
    for key, heading in FACTS.items():
        facts = [run[key] for run in runs]
        if not any(facts):
            continue  # no run has it, as without held-out clips
        if key == "state":
            facts = [state[0] for state in facts]
        rows.append([heading, *facts])
    print_table("runs", ["", *(run["name"] for run in runs)], rows)


def tell_ranking(order: str, doubt: str) -> None:
    """Tell in which order runs were printed, and which of their errors do not compare.

    Args:
        order: as ``order_of_runs`` returns it; empty without clips kept aside.
        doubt: as ``doubt_on_errors`` returns it; empty if all compare.
    """
    if order:
        tell(order)
    else:
        tell(
            "No clip is kept aside for checking, so no figure shows which run copies less. The error on training "
            "clips is a share of that before training: it shows how much a run has learnt."
        )
    if doubt:
        tell(doubt)
