"""The noise levels of a plan: how training steps are spread over them, as figures and
a curve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from videotune.console import answer, doing, out, print_table

if TYPE_CHECKING:
    from videotune.job.overrides import Overrides

ROWS = 8
"""Lines of the curve of noise levels."""


def show_timesteps(overrides: Overrides, *, as_json: bool) -> None:
    """Print the trained noise levels."""
    doing("reading the noise levels")
    from videotune.commands.plan import noise_levels

    answer(as_json, noise_levels(overrides), show_noise_levels)


def curve(density: list[float]) -> list[str]:
    """Return a density over [0, 1] as ROWS lines of blocks, the highest value at the
    top.
    """
    eighths = " ▁▂▃▄▅▆▇█"
    top = max(density) or 1.0
    heights = [round(value / top * ROWS * 8) for value in density]

    lines = []
    for row in range(ROWS - 1, -1, -1):
        blocks = [eighths[min(8, max(0, height - 8 * row))] for height in heights]
        lines.append("".join(blocks))
    return lines


def show_noise_levels(levels: Mapping[str, Any]) -> None:
    """Print every distribution of noise levels."""
    for distribution in levels["distributions"]:
        show_distribution(distribution, levels["validation"])


def show_distribution(distribution: dict[str, Any], validation: list[float]) -> None:
    """Print the density of a bucket's noise levels, and its bands beside the
    validation's.

    Args:
        distribution: The noise levels of the training.
        validation: The noise levels at which the validation loss is measured.
    """
    title = (
        f"noise levels: {distribution['distribution']}, shift {distribution['shift']:g}"
    )
    if distribution["bucket"]:
        share = f"{distribution['share_of_steps']:.0%} of the steps"
        title += f", {share}: {distribution['bucket']}"
    out(title)
    for line in curve(distribution["density"]):
        out(f"  {line}")
    columns = len(distribution["density"])
    out(f"  {'0 data':<{columns - 7}}1 noise")

    bands = len(distribution["bands"])
    rows = []
    for i, share in enumerate(distribution["bands"]):
        low = i / bands
        high = (i + 1) / bands
        levels = []
        for level in validation:
            is_last_level = level == 1 and i == bands - 1
            if low <= level < high or is_last_level:
                levels.append(f"{level:.3f}")
        rows.append(
            [f"{low:.3f} to {high:.3f}", f"{share:.1%}", ", ".join(levels) or "none"]
        )
    headings = ["t", "share of draws", "the validation loss reads at"]
    print_table("by band, as the journal's by_t", headings, rows, right=(1,))

    experts = distribution["experts"]
    if len(experts) > 1:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in experts.items())
        out(f"experts: {shares}")
