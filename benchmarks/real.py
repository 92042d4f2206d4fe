"""A day with a card: the presets trained on real checkpoints, measured, on one page.

    python benchmarks/real.py [--data CLIPS] [--presets NAME …] [--steps 50]
    [--work runs/real] [--out docs/real] [--peer NAME='COMMAND'] [--offline] [--tiny]

For each preset, in this order: its base model is downloaded, planned, trained for
``--steps`` steps with previews before and after, and five more steps are profiled. Each
part runs in its own process, and its result is written at once. A second call does what
is missing or has failed, and resumes a run that was stopped.

Written into ``--out``: ``real.json``, the page ``README.md`` with a table, and for each
preset a sheet of its previews.

``--peer``: another trainer that is installed beside this one, as in gpu_peers.py. Its
COMMAND is a command line in which {preset}, {clips}, {steps} and {out} are replaced. It
runs with ``--steps`` updates and with twice as many; the difference is the time of the
steps. A peer that cannot train a preset ends with an error, and its cell stays empty.

``--data``: a folder of clips with captions. By default eight clips are drawn: coloured
shapes that move over a dark background, 97 frames of 768 x 768 pixels. ``--tiny``
rehearses all of it on any machine, with random checkpoints; its figures mean nothing.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_rig import busy_time, kind_of
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from videotune import __version__
from videotune.data.video_writer import read_video, write_sheet, write_video
from videotune.files import read_json, write_json, write_text
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.models.registry import find
from videotune.planner.plan import make_plan
from videotune.rng import generator_for
from videotune.runs.journal import History
from videotune.toy.shapes import KNOWN, caption, draw_clip
from videotune.trainer.build import local_device
from videotune.trainer.loop import train_steps
from videotune.trainer.resume import OpenedRun
from videotune.trainer.setup import build_trainer

PRESETS = (
    "ltx 2B LoRA 24GB",
    "wan 2.1 1.3B LoRA 16GB",
    "wan 2.2 LoRA",
    "wan 2.2 A14B LoRA 24GB",
    "hunyuan 1.5 LoRA 24GB",
    "ltx 2.3 LoRA 80GB",
)
"""Presets that are trained unless others are named, the smallest download first."""

TINY_PRESETS = {
    "wan 2.1 1.3B LoRA 16GB": ("wan", "t2v"),
    "ltx 2B LoRA 24GB": ("ltx_video", None),
}
"""Presets of a rehearsal, with the family and kind of their tiny checkpoints."""

CLIPS = 8
FRAMES = 97
SIDE = 768
TINY_FRAMES = 25
TINY_SIDE = 64

WARM_UP = 10
"""Steps of a run whose seconds are not counted."""

PROFILED = 5
SHEET_FRAMES = 5
SHEET_WIDTH = 320
"""Pixels of a frame on a sheet, at most."""
LABEL_WIDTH = 150
GIB = 2**30

LAST_CHARACTERS = 400
"""Length to which the output of a part that failed is cut."""


@dataclass(frozen=True)
class PresetRun:
    """Where a preset is measured, and with what."""

    preset: str
    data: Path
    work: Path
    out: Path
    steps: int
    base: Path | None = None
    """A tiny checkpoint in the place of the preset's base model."""
    offline: bool = False

    @property
    def name(self) -> str:
        """The preset's name in names of files."""
        return re.sub(r"[^a-z0-9.]+", "-", self.preset.lower())

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.work / self.name

    @property
    def log(self) -> Path:
        """The file with what the training printed."""
        return self.work / f"{self.name}.log"

    @property
    def warm_up(self) -> int:
        """Steps whose seconds are not counted."""
        return min(WARM_UP, self.steps // 2)

    @property
    def sets(self) -> tuple[str, ...]:
        """Settings of the run beside the preset's."""
        settings = [
            f"steps={self.steps}",
            f"sample_after={self.steps}",
            "samples=2",
            "validate_every=0",
            "sample_metrics.budget=0",
            "forgetting.budget=0",
            f"cache_dir={self.work / 'cache'}",
        ]
        if self.base is not None:
            settings += [
                f"base_model_name={self.base}",
                f"resolution={TINY_SIDE}x{TINY_SIDE}",
                "sample.steps=2",
                "gradient_checkpointing=ON",
                "layer_offload_fraction=0",
                "weight_dtype=auto",
            ]
        return tuple(settings)

    @property
    def options(self) -> list[str]:
        """Options of ``plan`` and ``train``."""
        options = ["--data", str(self.data), "--preset", self.preset]
        for setting in self.sets:
            options += ["--set", setting]
        if self.offline:
            options.append("--offline")
        return options


class PartFailed(Exception):
    """A part ended with an error; the text is the end of what it printed."""


def videotune(*arguments: str, out: Path | None = None) -> str:
    """Run a command of videotune and return what it prints.

    Args:
        arguments: the command and its options.
        out: keep its messages in this file, too.
    """
    command = [sys.executable, "-m", "videotune", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if out is not None:
        write_text(out, done.stdout + done.stderr)
    if done.returncode:
        raise PartFailed((done.stderr or done.stdout).strip()[-LAST_CHARACTERS:])
    return done.stdout


def download(preset_run: PresetRun) -> dict[str, Any]:
    """Fetch the base model; what is complete is not fetched again."""
    if preset_run.base is not None or preset_run.offline:
        return {"seconds": 0.0}
    begun = time.perf_counter()
    videotune("download", preset_run.preset)
    return {"seconds": round(time.perf_counter() - begun, 1)}


def read_plan(preset_run: PresetRun) -> dict[str, Any]:
    """Return what is planned for this card: seconds a step, and memory."""
    planned = json.loads(videotune("plan", *preset_run.options, "--json"))
    device = planned["device"] or {}
    return {
        "seconds_a_step": planned["seconds_a_step"],
        "gib": _as_gib(device.get("total_bytes")),
        "chosen": planned["chosen"],
        "buckets": [bucket["shape"] for bucket in planned["buckets"]],
    }


def train(preset_run: PresetRun) -> dict[str, Any]:
    """Train, or resume, and return what the journal has of the run."""
    if (preset_run.run / "config.json").is_file():
        ends = History(preset_run.run).of_kind("end")
        if not ends or ends[-1]["why"] != "done":
            videotune("resume", str(preset_run.run), out=preset_run.log)
    else:
        arguments = (
            "train",
            *preset_run.options,
            "--out",
            str(preset_run.run),
            "--accept-licence",
        )
        videotune(*arguments, out=preset_run.log)

    history = History(preset_run.run)
    end = history.of_kind("end")[-1]
    steps = list(history.read_steps(preset_run.steps))
    seconds = [sum(line["seconds"].values()) for line in steps[preset_run.warm_up :]]
    samples = history.of_kind("sample")
    memory = end.get("memory") or {}
    return {
        "seconds_a_step": round(statistics.median(seconds), 4),
        "slowest_step": round(max(seconds), 4),
        "gib": _as_gib(memory.get("allocated_bytes")),
        "reserved_gib": _as_gib(memory.get("reserved_bytes")),
        "loss": [round(line["loss"], 4) for line in (steps[0], steps[-1])],
        "preview_seconds": samples[-1]["seconds"] if samples else None,
        "phases": end["seconds"],
    }


def _as_gib(count: int | None) -> float | None:
    return None if count is None else round(count / GIB, 2)


def draw_sheet(preset_run: PresetRun) -> dict[str, Any]:
    """Write the previews of the base model and of the last step as one picture."""
    rows = []
    for line in History(preset_run.run).of_kind("sample"):
        frames, _ = read_video(preset_run.run / line["path"], SHEET_WIDTH)
        last = len(frames) - 1
        shown = [frames[last * i // (SHEET_FRAMES - 1)] for i in range(SHEET_FRAMES)]
        rows.append((f"step {line['step']}", shown))
    path = preset_run.out / f"{preset_run.name}.jpg"
    write_sheet(path, rows, LABEL_WIDTH)
    return {"picture": path.name}


def profile_steps(preset_run: PresetRun) -> dict[str, Any]:
    """Return the milliseconds of a step's kernels by kind, and the card's idle time.

    The steps are the trainer's own, on the run's cached clips, in a run folder that is
    thrown away.
    """
    command = [sys.executable, __file__, "--profile", json.dumps(_as_json(preset_run))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PartFailed(done.stderr.strip()[-LAST_CHARACTERS:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _as_json(preset_run: PresetRun) -> dict[str, Any]:
    values = {
        "preset": preset_run.preset,
        "steps": preset_run.steps,
        "offline": preset_run.offline,
    }
    values |= {name: str(getattr(preset_run, name)) for name in ("data", "work", "out")}
    values["base"] = None if preset_run.base is None else str(preset_run.base)
    return values


def profile_here(preset_run: PresetRun) -> dict[str, Any]:
    """Do what ``profile_steps`` does, in this process."""
    sets = (*preset_run.sets, "save_every=0", "sample_after=0", "samples=0")
    overrides = Overrides(
        preset=preset_run.preset,
        data=str(preset_run.data),
        sets=sets,
        accept_licence=True,
    )
    job = open_job(*resolve_config(overrides))

    with tempfile.TemporaryDirectory(dir=preset_run.work) as folder:
        run = Path(folder) / "run"
        trainer = build_trainer(OpenedRun(job), run, make_plan(job), [])
        steps: Any = train_steps(trainer)
        for _ in range(preset_run.warm_up):
            next(steps).read()

        on_card = ProfilerActivity.CUDA in supported_activities()
        activity = ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU
        count = min(PROFILED, preset_run.steps - preset_run.warm_up)
        with profile(activities=[activity]) as profiler:
            for _ in range(count):
                next(steps).read()
            if on_card:
                torch.cuda.synchronize()
        steps.close()
        trainer.journal.close()
    return _kernels(profiler, count, on_card=on_card)


def _kernels(profiler: profile, steps: int, *, on_card: bool) -> dict[str, Any]:
    events = list(profiler.events())
    if not on_card:
        operations = sum(event.name.startswith("aten::") for event in events)
        return {"operations": operations // steps}

    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    milliseconds: Counter[str] = Counter()
    for event in kernels:
        milliseconds[kind_of(event.name)] += event.time_range.elapsed_us() / 1e3 / steps
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return {
        "kernel_ms": {
            kind: round(value, 2) for kind, value in milliseconds.most_common()
        },
        "idle_ms": round((whole - busy_time(spans)) / 1e3 / steps, 2),
        "launches": len(kernels) // steps,
    }


def measure_peer(preset_run: PresetRun, command: str) -> dict[str, Any]:
    """Return the seconds of a step of another trainer."""
    seconds = []
    for steps in (preset_run.steps, 2 * preset_run.steps):
        with tempfile.TemporaryDirectory(dir=preset_run.work) as folder:
            filled_command = [
                word.format(
                    preset=preset_run.preset,
                    clips=preset_run.data,
                    steps=steps,
                    out=Path(folder) / "out",
                )
                for word in shlex.split(command)
            ]
            begun = time.perf_counter()
            done = subprocess.run(
                filled_command, capture_output=True, text=True, check=False
            )
            seconds.append(time.perf_counter() - begun)
        if done.returncode:
            raise PartFailed((done.stderr or done.stdout).strip()[-LAST_CHARACTERS:])
    return {"seconds_a_step": round((seconds[1] - seconds[0]) / preset_run.steps, 4)}


PARTS = {
    "download": download,
    "plan": read_plan,
    "run": train,
    "previews": draw_sheet,
    "profile": profile_steps,
}
"""What is done for each preset, in this order. A part that fails ends its preset."""


def measure(
    preset_run: PresetRun, row: dict[str, Any], peers: Sequence[tuple[str, str]]
) -> Any:
    """Yield after each part that was missing in a row, and is there now or has failed."""
    row.pop("failed", None)
    for part, measure_part in PARTS.items():
        if part in row:
            continue
        print(f"{preset_run.preset}: {part} …", flush=True)
        try:
            row[part] = measure_part(preset_run)
        except PartFailed as failure:
            row["failed"] = {"part": part, "why": str(failure)}
            print(f"{preset_run.preset}: {part} failed: {failure}", flush=True)
            yield
            return
        yield

    results = row.setdefault("peers", {})
    for name, command in peers:
        if "seconds_a_step" in results.get(name, {}):
            continue
        print(f"{preset_run.preset}: {name} …", flush=True)
        try:
            results[name] = measure_peer(preset_run, command)
        except PartFailed as failure:
            results[name] = {"failed": str(failure)}
        yield


def page(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    machine = found["machine"]
    rows: dict[str, dict[str, Any]] = found["presets"]
    names_of_peers: set[str] = set()
    for row in rows.values():
        names_of_peers.update(row.get("peers", {}))
    peers = sorted(names_of_peers)

    columns = ["preset", "s a step", "planned", "GiB", "planned", "a preview, s"]
    columns += [f"{name}, s a step" for name in peers]
    lines = [
        "# Presets on real checkpoints",
        "",
        f"{machine['device']}, torch {machine['torch']}, videotune {machine['videotune']}, "
        f"{machine['date']}: `{found['command']}`. Seconds are the middle step's of "
        f"{found['steps']}, without the first ones. GiB are allocated at the peak.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for preset, row in rows.items():
        run = row.get("run", {})
        planned = row.get("plan", {})
        cells = [
            preset,
            run.get("seconds_a_step"),
            planned.get("seconds_a_step"),
            run.get("gib"),
            planned.get("gib"),
            run.get("preview_seconds"),
        ]
        for name in peers:
            cells.append(row.get("peers", {}).get(name, {}).get("seconds_a_step"))
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")

    for preset, row in rows.items():
        lines += ["", f"## {preset}", ""]
        if "failed" in row:
            lines += [f"{row['failed']['part']} failed:", "", "```"]
            lines += [row["failed"]["why"], "```", ""]
        profiled = row.get("profile", {})
        for kind, milliseconds in profiled.get("kernel_ms", {}).items():
            lines.append(f"- {kind}: {milliseconds:.1f} ms a step")
        if "idle_ms" in profiled:
            lines.append(
                f"- the card waits: {profiled['idle_ms']:.1f} ms a step; "
                f"{profiled['launches']} kernels are started"
            )
        if "previews" in row:
            lines += ["", f"![previews]({row['previews']['picture']})"]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write_clips(folder: Path, tiny: bool) -> Path:
    """Draw clips into a folder, unless it has them."""
    folder.mkdir(parents=True, exist_ok=True)
    frames = TINY_FRAMES if tiny else FRAMES
    side = TINY_SIDE if tiny else SIDE
    for number, look in enumerate(KNOWN[:CLIPS]):
        path = folder / f"{number}.mp4"
        if not path.is_file():
            generator = generator_for(0, "real", number)
            clip = draw_clip(generator, *look, frames=frames, side=side)
            write_text(path.with_suffix(".txt"), caption(*look))
            write_video(path, clip, 16.0)
    return folder


def tiny_base(work: Path, preset: str) -> Path:
    """Write the tiny checkpoint of a preset of a rehearsal, unless it is there."""
    family, variant = TINY_PRESETS[preset]
    folder = work / f"tiny-{family}"
    if not folder.is_dir():
        find(family).tiny(folder, variant=variant)
    return folder


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path)
    add("--presets", nargs="+")
    add("--steps", type=int, default=50)
    add("--work", type=Path, default=Path("runs/real"))
    add("--out", type=Path)
    add("--peer", action="append", default=[], metavar="NAME=COMMAND")
    add("--offline", action="store_true")
    add("--tiny", action="store_true")
    add("--profile", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.steps = 4
        arguments.presets = arguments.presets or list(TINY_PRESETS)
    arguments.presets = arguments.presets or list(PRESETS)
    arguments.work = arguments.work.absolute()
    default_out = arguments.work / "page" if arguments.tiny else Path("docs/real")
    arguments.out = (arguments.out or default_out).absolute()
    return arguments


def main() -> None:
    """Do what is missing, each part written as soon as it is known."""
    arguments = parse()
    if arguments.profile:
        values = json.loads(arguments.profile)
        for name in ("data", "work", "out", "base"):
            values[name] = None if values[name] is None else Path(values[name])
        print(json.dumps(profile_here(PresetRun(**values))))
        return
    if local_device().type == "cpu" and not arguments.tiny:
        sys.exit("no GPU is here: --tiny rehearses on a CPU")

    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    data = arguments.data or write_clips(arguments.work / "clips", arguments.tiny)
    results = arguments.out / "real.json"
    found: dict[str, Any] = read_json(results) if results.is_file() else {"presets": {}}
    found["steps"] = arguments.steps
    found["command"] = shlex.join(["python", "benchmarks/real.py", *sys.argv[1:]])
    found["machine"] = {
        "device": _device_name(),
        "torch": torch.__version__,
        "videotune": __version__,
        "date": date.today().isoformat(),
    }
    peers = [tuple(peer.split("=", 1)) for peer in arguments.peer]
    for preset in arguments.presets:
        preset_run = PresetRun(
            preset,
            data.absolute(),
            arguments.work,
            arguments.out,
            arguments.steps,
            tiny_base(arguments.work, preset) if arguments.tiny else None,
            arguments.offline,
        )
        row = found["presets"].setdefault(preset, {})
        for _ in measure(preset_run, row, peers):
            write_json(results, found)
            write_text(arguments.out / "README.md", page(found))
    print((arguments.out / "README.md").read_text(encoding="utf-8"))
    if any("failed" in row for row in found["presets"].values()):
        sys.exit(1)


def _device_name() -> str:
    if local_device().type == "cuda":
        return torch.cuda.get_device_name()
    return "CPU"


if __name__ == "__main__":
    main()
