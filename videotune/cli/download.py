"""``videotune download``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from videotune.cli.options import Arg, Opt
from videotune.console import doing, out, size, tell
from videotune.errors import VideotuneError
from videotune.text import as_argument

ModelArgument = Annotated[
    str,
    Arg(
        help="an id of the Hub; a preset's name or a config file, for its base model; or hf://USER/NAME, an uploaded run"
    ),
]
DryRun = Annotated[
    bool, Opt("--dry-run", help="only print the size, the folder and the licence")
]
RunData = Annotated[
    list[str] | None,
    Opt("--data", help="of a run: its clips here; once for each of its datasets"),
]
RunOut = Annotated[
    Path | None,
    Opt("--out", help="of a run: its folder (default: the repository's name)"),
]
RunStep = Annotated[
    int | None,
    Opt(
        "--step", min=1, help="of a run: the checkpoint to fetch (default: the newest)"
    ),
]


def download(
    model: ModelArgument,
    dry_run: DryRun = False,
    data: RunData = None,
    run_folder: RunOut = None,
    step: RunStep = None,
) -> dict[str, Any]:
    """Fetch a base model before a run; what is complete is not fetched again. Or fetch
    a run that was uploaded while it trained, to resume it here.
    """
    from videotune.commands.download_run import download_run, repo_of

    repo = repo_of(model)
    if repo is not None:
        if dry_run:
            raise VideotuneError("--dry-run is for base models. Omit it")
        run = download_run(repo, data or (), run_folder, step)
        out(f"{run}  continue it with: videotune resume {as_argument(run)}")
        return {"run": str(run)}
    if data or run_folder or step:
        raise VideotuneError(
            "--data, --out and --step are for a run. Omit them, or write hf://USER/NAME"
        )

    doing("asking the Hub")
    from videotune.commands.download import download as fetch_model

    result = fetch_model(model, dry_run=dry_run)
    if not dry_run:
        out(f"{result['folder']}  ({size(result['bytes'])})")
    elif "bytes" in result:
        out(f"{size(result['missing_bytes'])} of {size(result['bytes'])} to download")
    else:
        _show_known_size(result)
    return result


def _show_known_size(result: Mapping[str, Any]) -> None:
    """Print the size of a download as videotune knows it, because the Hub is not asked."""
    from videotune.config.base_models import DownloadSize

    if result["is_here"]:
        tell(f"{result['model']} is here already: nothing has to be downloaded")
        return
    line = f"{result['model']}: {DownloadSize(**result['download'])} to download"
    if result["licence"]:
        line += f"; licence: {result['licence']}"
    tell(line)
    tell("The Hub was not reached: the size is that of videotune's own table.")
