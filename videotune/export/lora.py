"""A trained adapter as a file that others read, and the proof that they read what was trained.

Our own facts stand in the header under the key ``videotune``; ``export/formats.py`` says how the rest is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.adapters.effect import effects
from videotune.adapters.kinds import by_module
from videotune.errors import VideotuneError
from videotune.export.formats import baked, digest_of, header
from videotune.export.read import read_back, read_effects, read_lora, reader_of
from videotune.files import system_errors, write_whole
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TOLERANCE", "Exported", "baked", "difference", "export_lora", "read_back", "read_lora"]

TOLERANCE = 1e-6
"""Largest allowed difference of ΔW, relative to its largest entry."""


@dataclass(frozen=True)
class Exported:
    """A file that was written and read back; ``max_error`` is the largest relative difference of ΔW over the modules.

    ``use``: how it is used, in code.
    """

    format: str
    path: Path
    modules: int
    max_error: float
    reader: str = "diffusers load_lora_weights"
    use: str = ""

    def to_json(self, run: Path) -> dict[str, Any]:
        """A line of the run's ``exports.json``; the path is relative to the run folder where the file lies in it."""
        place, home = self.path.absolute(), run.absolute()
        path = place.relative_to(home).as_posix() if place.is_relative_to(home) else str(place)
        verified = {"max_error": self.max_error, "modules": self.modules, "reader": self.reader}
        return {"format": self.format, "path": path, "use": self.use, "verified": verified}


def export_lora(
    family: Family,
    format: str,
    state: Mapping[str, Tensor],
    scale: float,
    path: Path,
    facts: Mapping[str, Any],
    expert: str | None = None,
) -> Exported:
    """Write one file, read it back as others do and compare ΔW module by module; ``expert``: whose adapter it is.

    Raises VideotuneError where the file would not do elsewhere what was trained here.
    """
    from safetensors.torch import save_file

    tensors = baked(family, format, state, scale)
    words = header(state, {**facts, "digest": digest_of(tensors)})
    worst: list[float] = []
    readers: list[str] = []

    def write(aside: Path) -> None:
        with system_errors(path):
            save_file(tensors, aside, metadata=words)
        readers.append(reader_of(family, aside))
        worst.append(difference(effects(state, scale), read_effects(family, aside, expert), path, readers[0]))

    write_whole(path, write)
    return Exported(format, path, len(by_module(state)), worst[0], readers[0])


def difference(
    wanted: Mapping[str, Callable[[], Tensor]], found: Mapping[str, Callable[[], Tensor]], path: Path, reader: str
) -> float:
    """The largest difference of ΔW over the modules, each relative to its own largest entry; one at a time in memory.

    Raises VideotuneError where a module is missing or differs by more than is allowed.
    """
    # where a format joins modules, a reader finds updates of nothing in those that have none
    spare = [name for name in sorted(set(found) - set(wanted)) if bool(found[name]().any())]
    odd = sorted(set(wanted) - set(found)) or spare
    if odd:
        raise VideotuneError(
            f"{path}: {reader} reads {len(found)} of {len(wanted)} modules; the first odd one is {odd[0]}"
        )
    worst = 0.0
    for name, calculate in wanted.items():
        update = calculate()
        off = float((found[name]() - update).abs().max())
        worst = max(worst, off / float(update.abs().max()) if bool(update.any()) else off)
    if worst > TOLERANCE:
        raise VideotuneError(
            f"{path}: read back through {reader}, ΔW differs by {worst:.1e} (allowed: {TOLERANCE:.0e}): not written"
        )
    return worst
