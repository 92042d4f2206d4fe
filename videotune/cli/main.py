"""The command line: options in, a command called, its result printed, exit codes out.

``--help`` imports nothing heavy: commands are imported in the functions that run them.
"""

import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from videotune import cpu_threads, lazy
from videotune._version import __version__
from videotune.cli.cache import cache_app
from videotune.cli.data import caption, check
from videotune.cli.dataset import dataset_app
from videotune.cli.demo import demo
from videotune.cli.doctor import doctor
from videotune.cli.download import download
from videotune.cli.export import card, export, publish, report
from videotune.cli.init import init, tiny
from videotune.cli.interop import autopsy, import_config
from videotune.cli.lora import lora_app
from videotune.cli.options import Command, Opt, with_json, without_types_of_flags
from videotune.cli.plan import plan
from videotune.cli.presets import config_app, presets_app, show_schema
from videotune.cli.queue import queue_app, sweep
from videotune.cli.sample import compare, sample
from videotune.cli.status import status
from videotune.cli.train import resume, train, wait
from videotune.console import for_stderr
from videotune.errors import DONE, FAILED, VideotuneError, printable
from videotune.text import unwrapped

app = typer.Typer(
    help="Fine-tune video diffusion models on your own clips.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

COMMANDS = (
    init,
    caption,
    check,
    plan,
    download,
    train,
    resume,
    status,
    wait,
    sweep,
    sample,
    compare,
    export,
    report,
    publish,
    card,
    autopsy,
    demo,
    doctor,
    tiny,
)
"""Commands that have the name of their function, in the order of ``--help``."""

for command in COMMANDS:
    app.command()(command)
app.command("import")(import_config)

GROUPS = {
    "presets": presets_app,
    "config": config_app,
    "cache": cache_app,
    "dataset": dataset_app,
    "lora": lora_app,
    "queue": queue_app,
}
for name, group in GROUPS.items():
    app.add_typer(group, name=name)

Root = Annotated[
    Path | None,
    Opt(
        "--root",
        help="the folder of the projects; default: videotune-projects, in your home folder unless the current one has it",
    ),
]
Host = Annotated[
    str,
    Opt(
        "--host",
        help="address to listen on; other addresses need a password in VIDEOTUNE_STUDIO_PASSWORD",
    ),
]
Port = Annotated[int, Opt("--port", min=1, max=65535, help="port to listen on")]


@app.command()
def studio(
    root: Root = None,
    host: Host = "127.0.0.1",
    port: Port = 7860,
) -> None:
    """Serve the studio: from clips to a finished LoRA in the browser."""
    from videotune.studio.app import serve
    from videotune.studio.default_root import default_root

    raise typer.Exit(serve(root or default_root(), host, port))


WITHOUT_JSON_OPTION = (studio, show_schema)
"""The studio serves until it is stopped; the schema is JSON anyway."""

for group in (app, *GROUPS.values()):
    for registered in group.registered_commands:
        if registered.callback not in WITHOUT_JSON_OPTION:
            registered.callback = with_json(registered.callback)  # type: ignore[arg-type]
        without_types_of_flags(registered.callback)
        registered.cls = Command
        # Typer would break the lines of --help where the docstring's lines end
        registered.help = unwrapped(registered.callback.__doc__ or "")


def _print_version(show_version: bool) -> None:
    if show_version:
        print(f"videotune {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    Opt("--version", callback=_print_version, is_eager=True, help="print the version"),
]


@app.callback()
def _top(show_version: Version = False) -> None:
    """Fine-tune video diffusion models on your own clips."""


def main() -> None:
    """Run a command; a user's mistake is a sentence and exit code 1 or 2, never a
    traceback.
    """
    from typer.exceptions import TyperException

    set_up_libraries()
    _set_up_signals()
    _set_up_streams()
    try:
        exit_code = app(standalone_mode=False) or DONE
        # A launcher's signal may come while Python ends, and needs no answer by then.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.exit(exit_code)
    except TyperException as error:
        # exit code 1: 2 would say that something was skipped
        if error.format_message().strip():  # a bare `videotune` has shown its help
            from videotune.cli.usage_errors import usage_error_text

            _print_error(usage_error_text(error, sys.argv[1:]))
    except VideotuneError as error:
        _print_error(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        pass  # the reader of the output has gone: nobody would read a message
    except typer.Abort:
        _print_error(
            "stopped at a question. Give the answer as an option; the command's --help lists it."
        )
    except OSError as error:
        file = f"{printable(str(error.filename))}: " if error.filename else ""
        _print_error(f"{file}{error.strerror or error}")
    except Exception as error:
        from videotune.cli.crash import sentence

        _print_line(sentence(error))
    sys.exit(FAILED)


def set_up_libraries() -> None:
    """Set the environment that libraries read when they are imported."""
    lazy.freeze_imports = True

    cpu_threads.configure()

    # they warn about what is done on purpose; their errors are still shown
    for library in ("TRANSFORMERS", "DIFFUSERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")

    # less memory is lost between tensors; single devices have older names for this
    # variable
    is_set = any(
        name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF")
        for name in os.environ
    )
    if not is_set:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _set_up_signals() -> None:
    """Print a line when the process is interrupted; Typer would end without one.

    A background job ignores SIGINT; its SIGTERM is handled all the same.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    print(
        "\nvideotune: stopped at once; files that were saved before are intact",
        file=sys.stderr,
    )
    raise KeyboardInterrupt


def _set_up_streams() -> None:
    """Print letters that the console's encoding lacks as escapes, not as an exception."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            with suppress(OSError):  # a stream that cannot be flushed stays as it is
                stream.reconfigure(errors="backslashreplace")


def _print_error(text: str) -> None:
    _print_line(f"videotune: {text}")


def _print_line(text: str) -> None:
    """Print a line on standard error; if that is closed, the exit code is the message."""
    with suppress(OSError, ValueError):
        print(for_stderr(text), file=sys.stderr, flush=True)
