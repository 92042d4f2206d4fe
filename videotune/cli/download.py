"""``videotune download``."""

from typing import Annotated, Any

from videotune.cli.options import Arg, Opt
from videotune.console import doing, out, size

ModelArgument = Annotated[
    str, Arg(help="an id of the Hub, or a preset's name, which names its base model")
]
DryRun = Annotated[
    bool, Opt("--dry-run", help="only print the size, the folder and the licence")
]


def download(model: ModelArgument, dry_run: DryRun = False) -> dict[str, Any]:
    """Fetch a base model before a run; what is complete is not fetched again."""
    doing("asking the Hub")
    from videotune.commands.download import download as fetch_model

    result = fetch_model(model, dry_run=dry_run)
    if dry_run:
        out(f"{size(result['missing_bytes'])} of {size(result['bytes'])} to download")
    else:
        out(f"{result['folder']}  ({size(result['bytes'])})")
    return result
