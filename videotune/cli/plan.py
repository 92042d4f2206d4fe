"""``videotune plan``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from videotune import commands
from videotune.cli.options import AsJson, Folder, Opt, Skips, takes_config, with_clips
from videotune.console import answer, print_table, size
from videotune.text import shape_words

if TYPE_CHECKING:
    from videotune.commands.plan import PlanResult
    from videotune.job.overrides import Overrides

ROWS = 8
"""Lines of the curve of noise levels."""

TimestepsOption = Annotated[
    bool, Opt("--timesteps", help="show the trained noise levels instead; needs no clips")
]

CardOption = Annotated[
    str | None,
    Opt(help="the card by its name, such as 'rtx 4090': its memory, and seconds a step"),
]
Views = Annotated[
    list[int] | None,
    Opt(min=1, help="print the steps for N views of a window (default: 10, 20, 50, 100)"),
]


@takes_config
def plan(
    overrides: Overrides,
    folder: Folder = None,
    as_json: AsJson = False,
    allow_skips: Skips = None,
    timesteps: TimestepsOption = False,
    vram: Annotated[
        float | None,
        Opt(min=1, help="memory of the card in GB (10^9 bytes): what fits, and how"),
    ] = None,
    card: CardOption = None,
    views: Views = None,
) -> None:
    """Show what a run needs: steps, views of each clip, memory, time, disk. Exit code 2: it does not fit."""
    overrides = with_clips(overrides, folder)
    if timesteps:
        answer(as_json, commands.plan.noise_levels(overrides), show_noise_levels)
        return
    result = commands.plan.plan(
        overrides, allow_skips=allow_skips, vram=vram, card=card, views=tuple(views or ())
    )
    answer(as_json, result.plan, lambda _: show_plan(result))
    raise typer.Exit(result.exit_code)


def show_plan(result: PlanResult) -> None:
    """Print the plan, its verdict first."""
    job = result.job
    facts = result.plan
    clips = facts["clips"]
    views = facts["views"]
    base = f" on {job.base.name}" if job.base else ""
    size_of_step = f"{facts['effective_batch']} sample{'s' * (facts['effective_batch'] != 1)}"
    if facts["device"]:
        print(verdict(facts))
    print(f"{job.spec.title}{base}: {facts['steps']} steps of {size_of_step}")
    print(
        "clips: found {found} = used {used} + held out {held_out} + skipped {skipped}".format_map(
            clips
        )
    )
    each = facts["buckets"]
    rows = [
        [shape_words(b["shape"]), b["windows"], f"{b['share']:.0%}", b["batch"], b["tokens"]]
        for b in each
    ]
    columns = ["width x height", "windows", "share of steps", "samples a step", "tokens"]
    print_table("buckets, largest first", columns, rows, right=(1, 2, 3, 4))
    clip = "a clip: {min} to {max}".format_map(views["per_clip"])
    print(
        "views a window: {min} to {max} ({band})".format_map(views["per_window"]),
        clip,
        sep="; ",
    )
    print(f"  {views['advice']}")
    if views["steps_for"]:
        each = ", ".join(
            f"{count} in {steps} steps" for count, steps in views["steps_for"].items()
        )
        print(f"  views of the window that is shown most: {each}")
    if facts["adapter"]:
        whole = job.config.training_method == "FINE_TUNE"
        what = (
            "weights"
            if whole
            else "adapter"
            if job.config.lora.variant == "LORA"
            else job.config.lora.variant
        )
        print(
            f"{what}: {facts['adapter']['parameters']:,} parameters in {facts['adapter']['modules']} modules"
        )
        if not whole or job.config.transformer.layers is not None:
            groups = [f"{count} × {path}" for path, count in facts["adapter"]["groups"].items()]
            print(f"  {', '.join(groups)}" + (" in each expert" if result.experts > 1 else ""))
    if facts["experts"]:
        each = facts["experts"]["each"]
        of = facts["steps"]
        rows = [
            [e["name"], f"{e['from']:g} to {e['to']:g}", e["steps"], f"{e['steps'] / of:.0%}"]
            for e in each
        ]
        print_table("experts", ["expert", "noise levels", "steps", "share"], rows, right=(2, 3))
        if all(e["steps"] for e in each):
            print(
                f"in runs of {facts['experts']['period']} steps of one expert, which alone is in memory then"
            )
    disk = facts["disk"]
    text = size(disk["text_bytes_at_most"])
    line = f"disk: latents {size(disk['latent_bytes'])} and text at most {text} in {job.cache}"
    if "checkpoints" in disk:
        room = f"{size(disk['run_bytes'])} of {size(disk['free_bytes'])} free"
        line += f"; {disk['checkpoints']} checkpoints of {size(disk['checkpoint_bytes'])}, with the export {room}"
    print(line)
    if disk["short_bytes"]:
        print(
            f"  {size(disk['short_bytes'])} too much: a larger save_every, or save_keep, makes fewer checkpoints"
        )
    if line := overhead_text(facts["beside"]):
        print(line)
    if facts["device"]:
        show_fit(facts)
    for note in facts["notes"]:
        print(f"note: {note}")


def verdict(facts: Mapping[str, Any]) -> str:
    """The plan in one line: whether it fits, where, and how long it takes."""
    device = facts["device"]
    need = size(facts["device"]["need_bytes"])
    if facts["fits"] is None:
        return f"needs {need} of device memory (--card or --vram says whether and how a card has it)"
    where = device["card"] or f"{device['vram_bytes'] / 1e9:g} GB"
    line = f"{'it fits' if facts['fits'] else 'it does not fit'} {where}: {need} of {size(device['vram_bytes'])}"
    host = facts["host"]
    if host["need_bytes"] > host["total_bytes"]:
        line += f", but host memory is short here: {size(host['need_bytes'])} of {size(host['total_bytes'])}"
    if facts["hours"] is not None:
        both = facts["hours"] + (facts["hours_beside"] or 0)
        line += f", about {both:.1f} hours ({facts['seconds_a_step']:.2f} s a step), {calculated(device)}"
    return line


def calculated(device: Mapping[str, Any]) -> str:
    """What a time rests on: rates of this very card, or those of its kind."""
    other = f"calculated for {device['card']}, not measured"
    return (
        f"calculated from rates measured on this card on {device['measured']}"
        if device["measured"]
        else other
    )


def show_fit(facts: Mapping[str, Any]) -> None:
    """What the run needs of the device and of the host, where, and how long it takes."""
    device = facts["device"]
    host = facts["host"]
    chosen = facts["chosen"]
    phases = device["phases"].items()
    rows = [
        [name, one["way"], size(one["allocated_bytes"]), size(one["need_bytes"])]
        for name, one in phases
    ]
    print_table(
        "memory of the device, calculated",
        ["when", "how", "held", "needed"],
        rows,
        right=(2, 3),
    )
    parts = ", ".join(f"{name} {size(count)}" for name, count in device["parts"].items())
    print(f"most is needed for {device['phase']}: {parts}")
    print("with", ", ".join(f"{key}={value}" for key, value in chosen.items()))
    parts = ", ".join(f"{name} {size(count)}" for name, count in host["parts"].items())
    short = "" if host["need_bytes"] <= host["total_bytes"] else "; this machine has too little"
    print(
        f"host memory: {size(host['need_bytes'])} of {size(host['total_bytes'])} here ({parts}){short}"
    )
    if facts["hours"] is not None:
        each = facts["seconds_a_step"]
        hours = f"{facts['hours']:.1f} hours of steps"
        hours += (
            f" and about {facts['hours_beside']:.1f} of validation and previews"
            if facts["hours_beside"]
            else ""
        )
        print(f"time: {each:.2f} s a step, {hours}; {calculated(device)}")
    for line in facts["remedies"]:
        print(f"  {line}")


def overhead_text(found: Mapping[str, Any]) -> str:
    """What a run does between its steps in a line, with its share of their time; empty where it does nothing."""
    parts = []
    if one := found["readings"]:
        windows = one["held_out_windows"] + one["training_windows"]
        parts.append(f"{one['count']} validations of {windows} windows {one['share']:.1%}")
    if one := found["previews"]:
        parts.append(
            f"{one['count']} × {one['prompts']} previews of {one['steps']} denoising steps {one['share']:.1%}"
        )
    if one := found["probes"]:
        parts.append(f"{one['count']} sample metrics {one['share']:.1%}")
    return f"between the steps, of their time: {', '.join(parts)}" if parts else ""


def curve(density: list[float]) -> list[str]:
    """A density over [0, 1] as ROWS lines of blocks, the highest value at the top."""
    eighths = " ▁▂▃▄▅▆▇█"
    top = max(density) or 1.0
    heights = [round(value / top * ROWS * 8) for value in density]
    rows = range(ROWS - 1, -1, -1)
    return [
        "".join(eighths[min(8, max(0, height - 8 * row))] for height in heights) for row in rows
    ]


def show_noise_levels(found: Mapping[str, Any]) -> None:
    """Print every distribution of noise levels."""
    for one in found["distributions"]:
        show_distribution(one, found["validation"])


def show_distribution(one: dict[str, Any], validation: list[float]) -> None:
    """Print the density of a bucket's noise levels as a curve, and its bands beside those of the validation loss."""
    bands = len(one["bands"])
    columns = len(one["density"])
    of = f", {one['share_of_steps']:.0%} of the steps: {one['bucket']}" if one["bucket"] else ""
    print(f"noise levels: {one['distribution']}, shift {one['shift']:g}{of}")
    for line in curve(one["density"]):
        print(f"  {line}")
    print(f"  {'0 data':<{columns - 7}}1 noise")
    rows = []
    for i, share in enumerate(one["bands"]):
        inside = [
            f"{t:.3f}"
            for t in validation
            if i / bands <= t < (i + 1) / bands or (t == 1 and i == bands - 1)
        ]
        rows.append(
            [
                f"{i / bands:.3f} to {(i + 1) / bands:.3f}",
                f"{share:.1%}",
                ", ".join(inside) or "none",
            ]
        )
    headings = ["t", "share of draws", "the validation loss reads at"]
    print_table("by band, as the journal's by_t", headings, rows, right=(1,))
    if len(one["experts"]) > 1:
        print(
            "experts: "
            + ", ".join(f"{name} {share:.1%}" for name, share in one["experts"].items())
        )
