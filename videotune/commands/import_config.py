"""``import``: translate another trainer's config into videotune's keys."""

from collections.abc import Sequence
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.interop.foreign_config import read_foreign_config
from videotune.interop.translate import (
    Imported,
    refuse_config_of_other_model,
    translate,
)


def import_config(
    files: Sequence[Path | str],
    *,
    out: Path | str | None = None,
    within: Path | None = None,
) -> Imported:
    """Translate configs of one run of another trainer, and write videotune's config to
    ``out``, a new JSON file. With ``within``, only files below that folder are read.

    Raises VideotuneError for files that cannot be read, for a model that videotune does
    not train, and if ``out`` already exists; then nothing is written.
    """
    if out is not None and Path(out).exists():
        raise VideotuneError(f"{out} already exists. Choose another file")
    config = read_foreign_config([Path(file) for file in files], within=within)
    refuse_config_of_other_model(config)
    result = translate(config)
    if out is not None:
        write_json(Path(out), result.config, durable=False)
    return result
