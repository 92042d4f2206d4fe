"""The command line: options in, a command called, its result printed, exit codes out. `--help` imports nothing heavy."""

import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from videotune import lazy
from videotune._version import __version__
from videotune.cli.cache import cache_app
from videotune.cli.data import caption, check, dataset_app
from videotune.cli.demo import demo
from videotune.cli.doctor import doctor
from videotune.cli.export import card, export, publish, report
from videotune.cli.init import init, tiny
from videotune.cli.interop import autopsy, import_config
from videotune.cli.lora import lora_app
from videotune.cli.options import Opt, with_json
from videotune.cli.plan import plan
from videotune.cli.presets import config_app, presets_app, show_schema
from videotune.cli.queue import queue_app, sweep
from videotune.cli.sample import compare, sample
from videotune.cli.train import train, wait
from videotune.errors import DONE, FAILED, VideotuneError, printable

app = typer.Typer(
    help="Fine-tune video diffusion models on your own clips.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    *(init, caption, check, plan, train, wait, sweep, sample, compare, export, report),
    *(publish, card, autopsy, demo, doctor, tiny),
):
    app.command()(command)
app.command("import")(import_config)
GROUPS = {
    "presets": presets_app,
    "config": config_app,
    "cache": cache_app,
    "dataset": dataset_app,
    "lora": lora_app,
}
GROUPS["queue"] = queue_app
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


Host = Annotated[
    str,
    Opt(
        "--host",
        help="address to listen on; other addresses need a password: see docs/studio.md",
    ),
]


@app.command()
def studio(
    root: Annotated[Path, Opt("--root", help="the folder of the projects")] = Path(
        "videotune-projects"
    ),
    host: Host = "127.0.0.1",
    port: Annotated[int, Opt("--port", min=1, max=65535, help="port to listen on")] = 7860,
) -> None:
    """Serve the studio: from clips to a finished LoRA in the browser."""
    from videotune.studio.app import serve

    raise typer.Exit(serve(root, host, port))


def _version(asked: bool) -> None:
    if asked:
        print(f"videotune {__version__}")
        raise typer.Exit


for group in (app, *GROUPS.values()):
    for one in group.registered_commands:
        if one.callback not in (
            studio,
            show_schema,
        ):  # one serves, the other prints JSON anyway
            one.callback = with_json(one.callback)  # type: ignore[arg-type]


@app.callback()
def _top(
    show_version: Annotated[
        bool, Opt("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Fine-tune video diffusion models on your own clips."""


def _interrupted(number: int, frame: object) -> None:
    print(
        "\nvideotune: stopped at once; what was saved before, if anything, is whole",
        file=sys.stderr,
    )
    raise KeyboardInterrupt


def main() -> None:
    """Run a command; a mistake of the person's is a sentence and exit code 1 or 2, never a traceback."""
    from typer.exceptions import TyperException

    lazy.imports_stay = True

    for library in (
        "TRANSFORMERS",
        "DIFFUSERS",
    ):  # their warnings are of what we do on purpose; errors are still shown
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    # torch's allocator reads it later, and loses less memory between tensors; there are older names for single devices
    if not any(
        name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF") for name in os.environ
    ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # Typer ends in silence at a Ctrl-C
        signal.signal(signal.SIGINT, _interrupted)
    if (
        signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    ):  # also of a job in the background, which hears no Ctrl-C
        signal.signal(signal.SIGTERM, _interrupted)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, TextIOWrapper
        ):  # a console that has no letters for a file's name shows their codes
            with suppress(OSError):  # a stream that cannot be flushed stays as it is
                stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(app(standalone_mode=False) or DONE)
    except (
        TyperException
    ) as error:  # a word that the command does not know; 2 would say that something was skipped
        if error.format_message().strip():  # a bare `videotune` has shown its help
            command = getattr(getattr(error, "ctx", None), "command_path", "videotune")
            _tell(f"videotune: {error.format_message()}  See `{command} --help`.")
    except VideotuneError as error:
        _tell(f"videotune: {error}")
        sys.exit(error.exit_code)
    except (
        BrokenPipeError,
        typer.Abort,
    ) as error:  # a question without an answer; a Ctrl-C has said so already
        if isinstance(error, typer.Abort):
            _tell(
                "videotune: stopped at a question: the command's options answer it, see its --help"
            )
    except OSError as error:
        where = f"{printable(str(error.filename))}: " if error.filename else ""
        _tell(f"videotune: {where}{error.strerror or error}")
    except Exception as error:
        from videotune.cli.crash import sentence

        _tell(sentence(error))
    sys.exit(FAILED)


def _tell(text: str) -> None:
    """Print a sentence on standard error; where nobody reads it any more, the exit code says enough."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
