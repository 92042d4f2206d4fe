"""``videotune plan``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from videotune.cli.options import AsJson, Folder, Opt, Skips, takes_config, with_clips
from videotune.console import answer, out, print_table, size
from videotune.text import counted, shape_words

if TYPE_CHECKING:
    from videotune.commands.plan import PlanResult
    from videotune.job.overrides import Overrides

ROWS = 8
"""Lines of the curve of noise levels."""

TimestepsOption = Annotated[
    bool,
    Opt("--timesteps", help="show the trained noise levels instead; needs no clips"),
]
VramOption = Annotated[
    float | None,
    Opt(min=1, help="memory of the card in GB (10^9 bytes): print what fits, and how"),
]
CardOption = Annotated[
    str | None,
    Opt(
        help="the card by its name, such as 'rtx 4090': its memory, and seconds a step"
    ),
]
Views = Annotated[
    list[int] | None,
    Opt(
        min=1, help="print the steps for N views of a window (default: 10, 20, 50, 100)"
    ),
]


@takes_config
def plan(
    overrides: Overrides,
    folder: Folder = None,
    as_json: AsJson = False,
    allow_skips: Skips = None,
    timesteps: TimestepsOption = False,
    vram: VramOption = None,
    card: CardOption = None,
    views: Views = None,
) -> None:
    """Show a run's steps, views of each clip, memory, time and disk.

    Exit code 2: no fit.
    """
    from videotune.commands.plan import noise_levels
    from videotune.commands.plan import plan as plan_run

    overrides = with_clips(overrides, folder)
    if timesteps:
        answer(as_json, noise_levels(overrides), show_noise_levels)
        return

    result = plan_run(
        overrides,
        allow_skips=allow_skips,
        vram=vram,
        card=card,
        views=tuple(views or ()),
    )
    answer(as_json, result.plan, lambda _: show_plan(result))
    raise typer.Exit(result.exit_code)


def show_plan(result: PlanResult) -> None:
    """Print the plan, its verdict first."""
    facts = result.plan
    if facts["device"]:
        out(verdict(facts))
    show_steps(result)
    show_views(facts["views"])
    if facts["adapter"]:
        show_parameters(result)
    if facts["experts"]:
        show_experts(facts["experts"], facts["steps"])
    show_disk(facts["disk"], str(result.job.cache))

    overhead = overhead_text(facts["beside"])
    if overhead:
        out(overhead)
    if facts["device"]:
        show_fit(facts)
    for note in facts["notes"]:
        out(f"note: {note}")


def show_steps(result: PlanResult) -> None:
    """Print the number of steps, the clips, and the buckets."""
    facts = result.plan
    base = result.job.base
    model = result.job.spec.title
    if base:
        model += f" on {base.name}"
    samples = counted(facts["effective_batch"], "sample")
    out(f"{model}: {facts['steps']} steps of {samples}")

    clips = "found {found} = used {used} + held out {held_out} + skipped {skipped}"
    out(f"clips: {clips.format_map(facts['clips'])}")

    rows = []
    for bucket in facts["buckets"]:
        share = f"{bucket['share']:.0%}"
        shape = shape_words(bucket["shape"])
        rows.append(
            [shape, bucket["windows"], share, bucket["batch"], bucket["tokens"]]
        )
    columns = [
        "width x height",
        "windows",
        "share of steps",
        "samples a step",
        "tokens",
    ]
    print_table("buckets, largest first", columns, rows, right=(1, 2, 3, 4))


def show_views(views: Mapping[str, Any]) -> None:
    """Print how often the windows and clips are shown, and the advice on it."""
    windows = "views a window: {min} to {max} ({band})".format_map(views["per_window"])
    clips = "a clip: {min} to {max}".format_map(views["per_clip"])
    out(f"{windows}; {clips}")
    out(f"  {views['advice']}")
    if views["steps_for"]:
        steps = [
            f"{count} in {steps} steps" for count, steps in views["steps_for"].items()
        ]
        out(f"  views of the window that is shown most: {', '.join(steps)}")


def show_parameters(result: PlanResult) -> None:
    """Print the trained parameters, and in which modules they are."""
    config = result.job.config
    adapter = result.plan["adapter"]
    is_full = config.training_method == "FINE_TUNE"
    if is_full:
        name = "weights"
    elif config.lora.variant == "LORA":
        name = "adapter"
    else:
        name = config.lora.variant
    out(f"{name}: {adapter['parameters']:,} parameters in {adapter['modules']} modules")

    if not is_full or config.transformer.layers is not None:
        groups = ", ".join(
            f"{count} × {path}" for path, count in adapter["groups"].items()
        )
        out(f"  {groups}" + (" in each expert" if result.experts > 1 else ""))


def show_experts(experts: Mapping[str, Any], steps: int) -> None:
    """Print the noise levels and the steps of each expert."""
    rows = []
    for expert in experts["each"]:
        levels = f"{expert['from']:g} to {expert['to']:g}"
        rows.append(
            [expert["name"], levels, expert["steps"], f"{expert['steps'] / steps:.0%}"]
        )
    print_table(
        "experts", ["expert", "noise levels", "steps", "share"], rows, right=(2, 3)
    )

    if all(expert["steps"] for expert in experts["each"]):
        out(
            f"one expert is in memory at a time, for {experts['period']} steps in a row"
        )


def show_disk(disk: Mapping[str, Any], cache: str) -> None:
    """Print the size of the cache and of the run folder."""
    latents = size(disk["latent_bytes"])
    text = size(disk["text_bytes_at_most"])
    line = f"disk: latents {latents} and text at most {text} in {cache}"
    if "checkpoints" in disk:
        checkpoint = size(disk["checkpoint_bytes"])
        run = f"{size(disk['run_bytes'])} of {size(disk['free_bytes'])} free"
        line += f"; {disk['checkpoints']} checkpoints of {checkpoint}, with the export {run}"
    out(line)

    if disk["short_bytes"]:
        out(
            f"  {size(disk['short_bytes'])} too much. "
            f"A larger save_every or a save_keep makes fewer checkpoints."
        )


def verdict(facts: Mapping[str, Any]) -> str:
    """Return the plan in one line: whether it fits, on which card, and how long it
    takes.
    """
    device = facts["device"]
    need = size(device["need_bytes"])
    if facts["fits"] is None:
        return (
            f"needs {need} of device memory "
            f"(--card or --vram shows whether and how it fits a card)"
        )

    card = device["card"] or f"{device['vram_bytes'] / 1e9:g} GB"
    fits = "it fits" if facts["fits"] else "it does not fit"
    line = f"{fits} {card}: {need} of {size(device['vram_bytes'])}"
    host = facts["host"]
    if host["need_bytes"] > host["total_bytes"]:
        memory = f"{size(host['need_bytes'])} of {size(host['total_bytes'])}"
        line += f", but host memory is short here: {memory}"
    if facts["hours"] is not None:
        hours = facts["hours"] + (facts["hours_beside"] or 0)
        step = f"{facts['seconds_a_step']:.2f} s a step"
        line += f", about {hours:.1f} hours ({step}), {source_of_rates(device)}"
    return line


def source_of_rates(device: Mapping[str, Any]) -> str:
    """Return whether a time is calculated from rates of this machine's card or of its
    model.
    """
    if device["measured"]:
        return f"calculated from rates measured on this card on {device['measured']}"
    return f"calculated for {device['card']}, not measured"


def show_fit(facts: Mapping[str, Any]) -> None:
    """Print the memory of device and host, the settings for it, the time, and remedies."""
    device = facts["device"]
    rows = []
    for name, phase in device["phases"].items():
        allocated = size(phase["allocated_bytes"])
        rows.append([name, phase["way"], allocated, size(phase["need_bytes"])])
    title = "memory of the device, calculated"
    print_table(title, ["when", "how", "held", "needed"], rows, right=(2, 3))
    out(f"most is needed for {device['phase']}: {parts_text(device['parts'])}")
    chosen = ", ".join(f"{key}={value}" for key, value in facts["chosen"].items())
    out(f"with {chosen}")

    host = facts["host"]
    memory = f"{size(host['need_bytes'])} of {size(host['total_bytes'])} here"
    line = f"host memory: {memory} ({parts_text(host['parts'])})"
    if host["need_bytes"] > host["total_bytes"]:
        line += "; this machine has too little"
    out(line)

    if facts["hours"] is not None:
        hours = f"{facts['hours']:.1f} hours of steps"
        if facts["hours_beside"]:
            hours += (
                f" and about {facts['hours_beside']:.1f} of validation and previews"
            )
        step = f"{facts['seconds_a_step']:.2f} s a step"
        out(f"time: {step}, {hours}; {source_of_rates(device)}")
    for remedy in facts["remedies"]:
        out(f"  {remedy}")


def parts_text(parts: Mapping[str, int]) -> str:
    """Return parts of a memory with their sizes."""
    return ", ".join(f"{name} {size(count)}" for name, count in parts.items())


def overhead_text(overhead: Mapping[str, Any]) -> str:
    """Return the work between the steps with its share of their time; empty without
    any.
    """
    parts = []
    readings = overhead["readings"]
    if readings:
        windows = readings["held_out_windows"] + readings["training_windows"]
        validations = f"{readings['count']} validations of {windows} windows"
        parts.append(f"{validations} {readings['share']:.1%}")

    previews = overhead["previews"]
    if previews:
        videos = f"{previews['count']} × {previews['prompts']} previews"
        steps = f"{previews['steps']} denoising steps"
        parts.append(f"{videos} of {steps} {previews['share']:.1%}")

    probes = overhead["probes"]
    if probes:
        parts.append(f"{probes['count']} sample metrics {probes['share']:.1%}")

    if not parts:
        return ""
    return f"between the steps, of their time: {', '.join(parts)}"


def curve(density: list[float]) -> list[str]:
    """Return a density over [0, 1] as ROWS lines of blocks, the highest value at the
    top.
    """
    eighths = " ▁▂▃▄▅▆▇█"
    top = max(density) or 1.0
    heights = [round(value / top * ROWS * 8) for value in density]

    lines = []
    for row in range(ROWS - 1, -1, -1):
        blocks = [eighths[min(8, max(0, height - 8 * row))] for height in heights]
        lines.append("".join(blocks))
    return lines


def show_noise_levels(levels: Mapping[str, Any]) -> None:
    """Print every distribution of noise levels."""
    for distribution in levels["distributions"]:
        show_distribution(distribution, levels["validation"])


def show_distribution(distribution: dict[str, Any], validation: list[float]) -> None:
    """Print the density of a bucket's noise levels, and its bands beside the
    validation's.

    Args:
        distribution: The noise levels of the training.
        validation: The noise levels at which the validation loss is measured.
    """
    title = (
        f"noise levels: {distribution['distribution']}, shift {distribution['shift']:g}"
    )
    if distribution["bucket"]:
        share = f"{distribution['share_of_steps']:.0%} of the steps"
        title += f", {share}: {distribution['bucket']}"
    out(title)
    for line in curve(distribution["density"]):
        out(f"  {line}")
    columns = len(distribution["density"])
    out(f"  {'0 data':<{columns - 7}}1 noise")

    bands = len(distribution["bands"])
    rows = []
    for i, share in enumerate(distribution["bands"]):
        low = i / bands
        high = (i + 1) / bands
        levels = []
        for level in validation:
            is_last_level = level == 1 and i == bands - 1
            if low <= level < high or is_last_level:
                levels.append(f"{level:.3f}")
        rows.append(
            [f"{low:.3f} to {high:.3f}", f"{share:.1%}", ", ".join(levels) or "none"]
        )
    headings = ["t", "share of draws", "the validation loss reads at"]
    print_table("by band, as the journal's by_t", headings, rows, right=(1,))

    experts = distribution["experts"]
    if len(experts) > 1:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in experts.items())
        out(f"experts: {shares}")
