"""The ``tiny`` command: a random base model of a family in its real layout, small enough to try a whole run anywhere."""

from pathlib import Path
from typing import Annotated

from videotune.cli.options import Arg, Opt
from videotune.errors import VideotuneError


def tiny(
    family: Annotated[str, Arg(help="the family, by any of its names")],
    folder: Annotated[Path, Arg(help="a new folder; name it as base_model_name")],
    variant: Annotated[
        str | None, Opt(help="the kind of checkpoint; an unknown name lists them (default: the first)")
    ] = None,
    seed: Annotated[int, Opt(min=0, max=2**63 - 1, help="seed of the random weights")] = 0,
) -> None:
    """Write a tiny base model of random weights in a family's real layout, for trying a run on any machine."""
    from videotune.models.loading import quietly
    from videotune.models.registry import find

    known = find(family)
    if variant is not None and variant not in known.variants:
        raise VideotuneError(f"--variant: {known.spec.name} has {', '.join(known.variants)}, not {variant!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise VideotuneError(f"{folder} is there already: name a new folder")
    with quietly():
        print(known.tiny(folder, seed, variant))
