"""Print the table of families that docs/families.md holds, from their specs alone; no
torch, no weights.

python scripts/write_families.py
"""

from videotune.data.frame_counts import frame_rule
from videotune.model_spec import ModelSpec
from videotune.models.registry import find, names

PATHS = {"flow": "flow matching", "v": "v-prediction"}


def row(spec: ModelSpec) -> str:
    """What a family takes, by its usual checkpoint; other checkpoints may say otherwise
    in their configs.
    """
    rules = spec.rules
    cells = (
        f"`{spec.name}`",
        ", ".join(f"`{name}`" for name in spec.aliases if "Pipeline" not in name),
        PATHS[spec.prediction],
        frame_rule(rules).replace(" frames", "", 1) if rules.most_frames != 1 else "1",
        f"{rules.fps:g}",
        f"multiples of {rules.side_multiple}",
        spec.licence,
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The whole table, a row a family."""
    head = (
        "family",
        "also known as",
        "objective",
        "frames",
        "fps",
        "sides",
        "licence of the weights",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(row(find(name).spec) for name in names())])


if __name__ == "__main__":
    print(table())
