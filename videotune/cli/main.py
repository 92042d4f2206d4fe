"""The command line: arguments in, run/ called, exit codes out. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from videotune import BEGUN, __version__, commands
from videotune.cli.cache import cache_app
from videotune.cli.lookup import config_app, presets_app
from videotune.cli.overrides import (
    AsJson,
    Base,
    ConfigFile,
    Data,
    FamilyName,
    Folder,
    Offline,
    Preset,
    Sets,
    Skips,
    one_of,
    overrides_from,
)
from videotune.cli.tiny import tiny
from videotune.errors import DONE, FAILED, VideotuneError, printable

app = typer.Typer(
    help="Fine-tune video diffusion models on your own clips.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(presets_app, name="presets")
app.add_typer(config_app, name="config")
app.add_typer(cache_app, name="cache")
app.command()(tiny)
dataset_app = typer.Typer(help="Tools for datasets.", no_args_is_help=True)
app.add_typer(dataset_app, name="dataset")


@app.command()
def check(
    folder: Folder = None,
    data: Data = None,
    preset: Preset = None,
    config: ConfigFile = None,
    family: FamilyName = None,
    base: Base = None,
    sets: Sets = None,
    as_json: AsJson = False,
    allow_skips: Skips = None,
    contact_sheet: Annotated[
        Path | None,
        typer.Option("--contact-sheet", help="folder for pictures of each clip as it is trained, and a page"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="a line for each clip, also where there are many")] = False,
    offline: Offline = False,
) -> None:
    """Account for every clip: used, held out or skipped, with the reason; no model is loaded."""
    words = overrides_from(preset, config, family, one_of(folder, data), sets, base)
    raise typer.Exit(
        commands.check.check(words, as_json=as_json, allow_skips=allow_skips, contact_sheet=contact_sheet, every=every)
    )


@app.command()
def plan(
    folder: Folder = None,
    preset: Preset = None,
    config: ConfigFile = None,
    family: FamilyName = None,
    base: Base = None,
    data: Data = None,
    sets: Sets = None,
    as_json: AsJson = False,
    allow_skips: Skips = None,
    timesteps: Annotated[
        bool, typer.Option("--timesteps", help="draw which noise levels would be trained instead; needs no clips")
    ] = False,
    vram: Annotated[
        float | None, typer.Option("--vram", min=1, help="memory of the card in GB (10^9 bytes): what fits, and how")
    ] = None,
    card: Annotated[
        str | None,
        typer.Option("--card", help="the card by its name, such as 'rtx 4090': its memory, and seconds a step"),
    ] = None,
    views: Annotated[
        list[int] | None,
        typer.Option("--views", min=1, help="say the steps for so many views of a window (default: 10, 20, 50, 100)"),
    ] = None,
    offline: Offline = False,
) -> None:
    """Say what a run would do: steps, views of each clip, tokens, memory, time, disk. Exit code 2: it does not fit."""
    words = overrides_from(preset, config, family, one_of(folder, data), sets, base)
    if timesteps:
        from videotune.commands.noise_levels import plot_noise_levels

        raise typer.Exit(plot_noise_levels(words, as_json=as_json))

    raise typer.Exit(
        commands.plan.plan(
            words, as_json=as_json, allow_skips=allow_skips, vram=vram, card=card, views=tuple(views or ())
        )
    )


@dataset_app.command("split")
def dataset_split(
    source: Annotated[Path, typer.Argument(help="a video, or a folder of videos")],
    out: Annotated[Path, typer.Option("--out", help="folder for the scenes; the originals are not touched")],
    min_seconds: Annotated[float, typer.Option("--min-seconds", help="shorter scenes are left out, and listed")] = 1.0,
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", help="how many times as strong as the changes around it a cut is (default: 3)"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace scenes that are there")] = False,
) -> None:
    """Cut videos into their scenes, one file a scene, with their captions."""
    code = commands.dataset.split_dataset(
        source, out, min_seconds=min_seconds, threshold=threshold, overwrite=overwrite
    )
    raise typer.Exit(code)


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", help="the run folder")],
    preset: Preset = None,
    config: ConfigFile = None,
    family: FamilyName = None,
    base: Base = None,
    data: Data = None,
    sets: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run that lies in --out")] = False,
    step: Annotated[
        int | None,
        typer.Option("--from", help="--resume from the checkpoint of this step; what came after is set aside"),
    ] = None,
    override: Annotated[
        bool, typer.Option("--override", help="--resume although --set changes what is learnt from here on")
    ] = False,
    allow_data_change: Annotated[
        bool, typer.Option("--allow-data-change", help="--resume although the clips are not the same any more")
    ] = False,
    replan: Annotated[
        bool, typer.Option("--replan", help="--resume with micro-batch, checkpointing and offloading chosen anew")
    ] = False,
    init_from: Annotated[
        Path | None,
        typer.Option("--init-from", help="begin a new run with a LoRA or embedding file's weights; fresh optimizer"),
    ] = None,
    allow_skips: Skips = None,
    offline: Offline = False,
) -> None:
    """Train, with previews and checkpoints, into a run folder; export the result."""
    from videotune.trainer.resume import Resume

    sets = [*(sets or []), *([f"init_from={json.dumps(str(init_from))}"] if init_from else [])]
    words = overrides_from(preset, config, family, data, sets, base)
    if not resume and (step is not None or override or allow_data_change or replan):
        raise VideotuneError("--from, --override, --allow-data-change and --replan go with --resume")
    how = Resume(step, override, allow_data_change, replan) if resume else None
    raise typer.Exit(commands.train.train(words, out, resume=how, allow_skips=allow_skips, begun=BEGUN))


@app.command()
def sample(
    run: Annotated[Path | None, typer.Argument(help="a run folder")] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="what to draw; may be given many times")] = None,
    out: Annotated[Path, typer.Option("--out", help="folder for the videos")] = Path("samples"),
    seed: Annotated[int | None, typer.Option("--seed", help="seed of the first prompt (default: sample.seed)")] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="the run's checkpoint of this step (default: newest)")
    ] = None,
    base: Annotated[str | None, typer.Option("--base", help="a base model, instead of a run")] = None,
    lora: Annotated[
        list[Path] | None, typer.Option("--lora", help="a LoRA file for --base; of two experts one for each")
    ] = None,
    embedding: Annotated[
        list[Path] | None, typer.Option("--embedding", help="a file of new tokens for --base; may be given many times")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", help="what the video begins with; one for all prompts, or one for each"),
    ] = None,
    strength: Annotated[
        float, typer.Option("--strength", help="how strongly the adapter acts; 0: the base alone")
    ] = 1.0,
    sets: Sets = None,
    offline: Offline = False,
) -> None:
    """Draw videos with what a run has learnt, with a LoRA or embedding file, or with a base model alone."""
    files, images = tuple(lora or ()), tuple(image or ())
    rows = tuple(embedding or ())
    words = commands.sample.SampleOptions(
        tuple(prompt or ()), seed, run, step, base, files, strength, tuple(sets or ()), images, rows
    )
    raise typer.Exit(commands.sample.sample(words, out))


@app.command()
def compare(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="what to draw (default: the first preview's)")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="its seed (default: sample.seed)")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="folder for what is drawn (default: RUN/compare)")] = None,
    image: Annotated[Path | None, typer.Option("--image", help="what the video begins with")] = None,
    offline: Offline = False,
) -> None:
    """Draw one prompt with one seed at every checkpoint of a run, the base model first, side by side."""
    raise typer.Exit(commands.compare.compare(run, prompt, seed, out, image))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="diffusers, comfyui or peft; may be given twice")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="the checkpoint of this step (default: newest)")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="folder for the files (default: RUN/export)")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="the whole base model with the adapter in its weights, in diffusers layout")
    ] = False,
    offline: Offline = False,
) -> None:
    """Write what a run has learnt for other programs, and read it back through diffusers."""
    raise typer.Exit(commands.export.export(run, formats or (), step, out, merge))


@app.command()
def report(run: Annotated[Path, typer.Argument(help="a run folder, also of a run that goes on")]) -> None:
    """Write a run's page, RUN/report.html, as it stands now: how it goes, what to take, every clip and setting."""
    from videotune.reporter.build import write_report

    print(write_report(run))


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="folder for everything the demo makes")] = Path("demo"),
    seed: Annotated[int, typer.Option("--seed", min=0, help="of the clips and of the training")] = 0,
) -> None:
    """Fine-tune the toy base on a shape that it does not know, and show before and after."""
    raise typer.Exit(commands.demo.demo(out, seed))


@app.command()
def doctor(
    run: Annotated[Path | None, typer.Argument(help="a run folder: what its journal says is wrong with it")] = None,
    as_json: AsJson = False,
    repair_journal: Annotated[
        bool, typer.Option("--repair-journal", help="take damaged lines out of the run's journal; a copy is kept")
    ] = False,
) -> None:
    """Say what is installed, which device there is, and what is missing; or what a run's journal shows."""
    if repair_journal:
        from videotune.reporter.diagnosis import repair_journal as repair

        if run is None:
            raise VideotuneError("--repair-journal: of which run? videotune doctor RUN --repair-journal")
        raise typer.Exit(repair(run))
    if run is not None:
        from videotune.reporter.diagnosis import diagnose

        raise typer.Exit(diagnose(run, as_json=as_json))

    raise typer.Exit(commands.doctor.doctor())


@app.command()
def studio(
    root: Annotated[Path, typer.Option("--root", help="the folder that holds the projects")] = Path(
        "videotune-projects"
    ),
    host: Annotated[
        str, typer.Option("--host", help="another than this computer's own needs a password: see docs/studio.md")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="the address's number")] = 7860,
) -> None:
    """Open the studio: everything from clips to a finished LoRA in the browser, without a terminal."""
    from videotune.studio.app import serve

    raise typer.Exit(serve(root, host, port))


def _version(asked: bool) -> None:
    if asked:
        print(f"videotune {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Fine-tune video diffusion models on your own clips."""


def _interrupted(number: int, frame: object) -> None:
    print("\nvideotune: stopped at once; what was saved before, if anything, is whole", file=sys.stderr)
    raise KeyboardInterrupt


def main() -> None:
    """Run a command; a mistake of the person's is a sentence and exit code 1 or 2, never a traceback."""
    from typer.exceptions import TyperException

    for library in ("TRANSFORMERS", "DIFFUSERS"):  # their warnings are of what we do on purpose; errors are still shown
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Typer ends in silence at a Ctrl-C
        signal.signal(signal.SIGINT, _interrupted)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # also of a job in the background, which hears no Ctrl-C
        signal.signal(signal.SIGTERM, _interrupted)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a console that has no letters for a file's name shows their codes
            with suppress(OSError):  # a stream that cannot be flushed stays as it is
                stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(app(standalone_mode=False) or DONE)
    except TyperException as error:  # a word that the command does not know; 2 would say that something was skipped
        if error.format_message().strip():  # a bare `videotune` has shown its help
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "videotune"
            _tell(f"videotune: {error.format_message()}  See `{command} --help`.")
        sys.exit(FAILED)
    except VideotuneError as error:
        _tell(f"videotune: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(FAILED)
    except OSError as error:
        where = f"{printable(str(error.filename))}: " if error.filename else ""
        _tell(f"videotune: {where}{error.strerror or error}")
        sys.exit(FAILED)
    except Exception as error:
        from videotune.cli.crash import sentence

        _tell(sentence(error))
        sys.exit(FAILED)


def _tell(text: str) -> None:
    """Print a sentence on standard error; where nobody reads it any more, the exit code says enough."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
