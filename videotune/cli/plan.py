"""``videotune plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from videotune.cli.next_steps import proposed_run, train_command
from videotune.cli.options import AsJson, Skips, Verbose, takes_config
from videotune.cli.plan_buckets import bucket_words, show_buckets, show_sound
from videotune.cli.plan_cluster import between_text, show_simulation
from videotune.cli.plan_model import show_download, show_licence, show_model
from videotune.cli.plan_noise_levels import show_timesteps
from videotune.cli.plan_options import (
    CardOption,
    GpusOption,
    NetworkOption,
    NodesOption,
    OutOption,
    PriceOption,
    ScheduleOption,
    SimulateOption,
    StorageOption,
    TimestepsOption,
    Views,
    VramOption,
    WaysOption,
    refuse_without_simulation,
)
from videotune.cli.plan_times import (
    SHORT_HOURS,
    encoding_hours,
    encoding_text,
    total_text,
)
from videotune.cli.plan_verdict import (
    free_text,
    host_text,
    priced,
    sent_text,
    source_of_rates,
    time_text,
    unproven,
    verdict,
)
from videotune.cli.plan_views import fewer_steps
from videotune.cli.plan_ways import show_ways
from videotune.console import answer, doing, echo, out, print_table, size, tell
from videotune.data.remarks import shown_first
from videotune.errors import DONE
from videotune.job.shown_notes import remember
from videotune.latent_cache.view_bands import views_text
from videotune.text import counted, memory_size, plain, times_between

if TYPE_CHECKING:
    from videotune.commands.plan import PlanResult
    from videotune.job.job import Job
    from videotune.job.overrides import Overrides

DEFAULT_OUT = Path("run")
"""The run folder whose disk is meant if none is named."""


@takes_config
def plan(
    overrides: Overrides,
    as_json: AsJson = False,
    allow_skips: Skips = None,
    timesteps: TimestepsOption = False,
    vram: VramOption = None,
    card: CardOption = None,
    views: Views = None,
    verbose: Verbose = False,
    gpus: GpusOption = None,
    nodes: NodesOption = 1,
    network: NetworkOption = None,
    price: PriceOption = None,
    simulate: SimulateOption = False,
    schedule: ScheduleOption = None,
    storage: StorageOption = None,
    ways: WaysOption = False,
    run: OutOption = DEFAULT_OUT,
) -> None:
    """Show a run's steps, views of each clip, memory, time and disk.

    Exit code 2: no fit.
    """
    if timesteps:
        show_timesteps(overrides, as_json=as_json)
        return

    from videotune.job.early_captions import refuse_missing_captions
    from videotune.job.overrides import check_files
    from videotune.planner.gpus import find_card, memory_and_name

    check_files(overrides)
    refuse_without_simulation(schedule, storage, simulate=simulate)
    vram, card = memory_and_name(vram, card)
    if card is not None:
        find_card(card, vram)  # raises for an unknown card
    refuse_missing_captions(overrides, allow_skips)
    doing("calculating memory and time")
    from videotune.commands.plan import plan as plan_run
    from videotune.commands.simulation import Simulation

    result = plan_run(
        overrides,
        allow_skips=allow_skips,
        vram=vram,
        card=card,
        views=tuple(views or ()),
        gpus=gpus,
        nodes=nodes,
        network=network,
        simulation=Simulation(schedule, storage) if simulate else None,
        out=run,
        ways=ways,
    )
    if price is not None:
        result.plan["price"] = priced(result.plan, price)
    answer(as_json, result.plan, lambda _: show_plan(result, verbose=verbose))
    if result.exit_code == DONE and not as_json:
        skips = [] if allow_skips is None else ["--allow-skips", allow_skips]
        folder = proposed_run(overrides.config) if run == DEFAULT_OUT else str(run)
        options = ["--out", folder, *skips]
        _show_next(train_command(overrides, result.plan, *options), result.plan)
    raise typer.Exit(result.exit_code)


def _show_next(command: str, facts: Mapping[str, Any]) -> None:
    """Print the command that trains what was planned."""
    processes = facts["processes"]
    if processes and processes["machines"] and processes["machines"]["count"] > 1:
        machines = processes["machines"]["count"]
        echo(
            f"next, on each of the {machines} machines, with its number from 0 to "
            f"{machines - 1} as RANK and the address of number 0 as ADDRESS:"
        )
        echo(f"  {command}")
        return
    echo(f"next: {command}")


def show_plan(result: PlanResult, *, verbose: bool = False, command: str = "") -> None:
    """Print the plan, its verdict first.

    Args:
        result: The plan.
        verbose: Print all of it, and not only what decides.
        command: The ``plan`` that prints this, if another command does, which has none of
            its options.
    """
    facts = result.plan
    if facts["device"]:
        tell(
            verdict(
                facts,
                result.cpu_seconds,
                is_here=result.is_here,
                has_options=not command,
            )
        )
        for remedy in facts["remedies"]:
            tell(f"  {remedy}", indent="    ")
    show_shortage(facts["disk"])
    if verbose:
        show_details(result)
    else:
        show_summary(result, command)
    show_ways(facts["ways"])
    if facts["simulation"]:
        show_simulation(facts["simulation"])


def show_summary(result: PlanResult, command: str) -> None:
    """Print what decides whether to start: clips, views, memory, disk, and two notes."""
    facts = result.plan
    show_model(result.job.spec.title, facts)
    show_licence(facts)
    show_download(facts)
    clips = "{used} used, {held_out} kept aside, {skipped} skipped"
    line = f"clips: {clips.format_map(facts['clips'])}"
    shape = bucket_words(facts["buckets"][0])
    is_only = len(facts["buckets"]) == 1
    tell(f"{line}; {shape}" if is_only else f"{line}; largest {shape}")
    show_sound(facts)

    views = facts["views"]
    tell(f"{views_text(views['per_window'], with_limits=True)}; {views['advice']}")
    if not command:
        _show_fewer_steps(result)
    device = facts["device"]
    if device:
        way = device["phases"][device["phase"]]["way"]
        how = "" if way == "unchanged" else f" ({way})"
        needed = memory_size(device["need_bytes"])
        host = host_text(facts, is_here=result.is_here)
        tell(f"most memory: {device['phase']}{how}, {needed}; {host}")
        if unproven(facts):
            tell(unproven(facts))
    _show_processes(facts)
    disk = facts["disk"]
    cache = f"{size(cache_bytes(disk))} of cache"
    if "run_bytes" in disk:
        free = free_text(disk) if result.is_here else ""
        tell(f"disk, beside the model: {size(disk['run_bytes'])} and {cache}{free}")
    else:
        tell(f"disk: {cache}")
    if disk["condition_entries"]:
        tell(conditions_text(result.plan))
    if (encoding_hours(result) or 0.0) > SHORT_HOURS:
        tell(encoding_text(result))
    total = total_text(result)
    if total:
        tell(total)
    notes = shown_first(facts["notes"])
    show_notes(result.job, notes)

    more_notes = len(facts["notes"]) - len(notes)
    unshown = f", {counted(more_notes, 'more note')}" if more_notes > 0 else ""
    option = f"{command} --verbose".lstrip()
    tell(f"{option}: buckets, memory by part, settings{unshown}")


def show_details(result: PlanResult) -> None:
    """Print all of the plan but its verdict."""
    facts = result.plan
    model = result.job.spec.title
    if result.job.base:
        model += f" on {result.job.base.name}"
    show_model(model, facts)
    show_licence(facts)
    show_download(facts)
    show_buckets(facts)
    show_views(facts["views"])
    _show_fewer_steps(result)
    if facts["adapter"]:
        show_parameters(result)
    if facts["experts"]:
        show_experts(facts["experts"], facts["steps"])
    show_cache(facts["disk"], str(result.job.cache))
    if encoding_hours(result) is not None:
        tell(encoding_text(result))
    show_disk(facts["disk"])

    overhead = overhead_text(facts["beside"])
    if overhead:
        tell(overhead)
    if facts["device"]:
        show_fit(facts, is_here=result.is_here)
    show_notes(result.job, facts["notes"])


def show_notes(job: Job, notes: Sequence[str]) -> None:
    """Print notes, which a training then does not repeat."""
    for note in notes:
        tell(f"note: {note}")
    remember(job.cache, notes)


def _show_fewer_steps(result: PlanResult) -> None:
    """Print how many steps show the clips less often, if they are seen very often."""
    steps = fewer_steps(result)
    if steps:
        tell(f"  fewer steps copy less: {steps}", indent="    ")


def show_views(views: Mapping[str, Any]) -> None:
    """Print how often the windows and clips are shown, and the advice on it."""
    text = views_text(views["per_window"], with_limits=True)
    per_clip = views["per_clip"]
    if per_clip["max"] != views["per_window"]["max"]:  # clips of several windows
        clip_times = times_between(per_clip["min"], per_clip["max"])
        text += f", a clip with all its windows {clip_times}"
    tell(text)
    tell(f"  {views['advice']}", indent="    ")
    if views["steps_for"]:
        steps = [
            f"{count} in {counted(steps, 'step')}"
            for count, steps in views["steps_for"].items()
        ]
        tell(
            f"  views of the window that is shown most: {', '.join(steps)}",
            indent="    ",
        )


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
    tell(
        f"{name}: {counted(adapter['parameters'], 'parameter')} in "
        f"{counted(adapter['modules'], 'module')}"
    )

    if not is_full or config.transformer.layers is not None:
        groups = ", ".join(
            f"{count} × {path}" for path, count in adapter["groups"].items()
        )
        where = " in each expert" if result.experts > 1 else ""
        tell(f"  {groups}{where}", indent="    ")
    if len(adapter["parts"]) > 1:
        parts = ", ".join(
            f"{name} {plain(numbers)}" for name, numbers in adapter["parts"].items()
        )
        tell(f"  parameters by part: {parts}", indent="    ")
    if adapter["idle"]:
        groups = ", ".join(
            f"{count} × {path}" for path, count in adapter["idle"].items()
        )
        tell(
            f"  named and left out, because they have no effect in these steps (see generate): {groups}",
            indent="    ",
        )


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
            f"one expert is in memory at a time, for {counted(experts['period'], 'step')} in a row"
        )


def cache_bytes(disk: Mapping[str, Any]) -> int:
    """Return the bytes of the cache, at most."""
    parts = ("latent_bytes", "condition_bytes", "text_bytes_at_most")
    return sum(int(disk[part]) for part in parts)


def conditions_text(plan: Mapping[str, Any]) -> str:
    """Return how much of the cache is encoded for conditions and sound."""
    disk = plan["disk"]
    subject = "conditions and sound" if plan["sound_windows"] else "conditions"
    entries = counted(disk["condition_entries"], "entry", "entries")
    windows = counted(disk["latent_entries"], "window")
    return (
        f"{subject}: {entries} of the cache, {size(disk['condition_bytes'])}, "
        f"beside those of {windows}"
    )


def show_cache(disk: Mapping[str, Any], folder: str) -> None:
    """Print the entries and bytes of the cache by kind, and its folder."""
    rows = [["windows", disk["latent_entries"], size(disk["latent_bytes"])]]
    if disk["condition_entries"]:
        rows.append(
            ["conditions", disk["condition_entries"], size(disk["condition_bytes"])]
        )
    rows.append(["text, at most", "", size(disk["text_bytes_at_most"])])
    columns = ["what", "entries", "bytes"]
    print_table(f"cache in {folder}", columns, rows, right=(1, 2))


def show_disk(disk: Mapping[str, Any]) -> None:
    """Print the size of the cache and of the run folder."""
    line = f"disk: cache {size(cache_bytes(disk))}"
    if "checkpoints" in disk:
        checkpoint = size(disk["checkpoint_bytes"])
        run = size(disk["run_bytes"])
        line += f"; {counted(disk['checkpoints'], 'checkpoint')} of {checkpoint}, with the export {run}"
    tell(line + free_text(disk))


def show_shortage(disk: Mapping[str, Any]) -> None:
    """Print how much room the disk lacks, and what would help."""
    if disk["short_bytes"]:
        tell(
            f"the disk of the run folder has {size(disk['free_bytes'])} free, and the run writes "
            f"{size(disk['run_bytes'])}: {size(disk['short_bytes'])} too much. Name another disk by --out, or "
            "make fewer checkpoints: a larger save_every, or a save_keep"
        )


def show_fit(facts: Mapping[str, Any], *, is_here: bool) -> None:
    """Print the memory of device and host, the settings for it, and the time."""
    device = facts["device"]
    rows = []
    for name, phase in device["phases"].items():
        tensors = memory_size(phase["allocated_bytes"])
        rows.append([name, phase["way"], tensors, memory_size(phase["need_bytes"])])
    title = "memory of the device, calculated"
    print_table(title, ["when", "how", "tensors", "needed"], rows, right=(2, 3))
    tell(f"most is needed for {device['phase']}: {parts_text(device['parts'])}")
    chosen = ", ".join(f"{key}={value}" for key, value in facts["chosen"].items())
    tell(f"with {chosen}")

    host = facts["host"]
    needed = host_text(facts, is_here=is_here).removeprefix("of the host ")
    line = f"host memory: {needed}"
    of_each = " of each process" if facts["processes"] else ""
    tell(f"{line} (parts{of_each}: {parts_text(host['parts'])})")

    _show_processes(facts)
    if facts["hours"] is not None:
        is_rough = not device["measured"]
        steps_time = time_text(
            facts["hours"], facts["seconds_a_step"], is_rough=is_rough
        )
        time = f"steps {steps_time}"
        if facts["hours_beside"]:
            previews_time = time_text(facts["hours_beside"], 0, is_rough=is_rough)
            time += f", validation and previews {previews_time}"
        tell(f"time: {time}; {source_of_rates(device)}")


def _show_processes(facts: Mapping[str, Any]) -> None:
    """Print what several processes send each other."""
    processes = facts["processes"]
    if not processes:
        return
    tell(sent_text(processes))
    if processes["machines"]:
        tell(between_text(processes["machines"]))


def parts_text(parts: Mapping[str, int]) -> str:
    """Return parts of a memory with their sizes, the largest first."""
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name} {memory_size(count)}" for name, count in largest_first if count
    )


def overhead_text(overhead: Mapping[str, Any]) -> str:
    """Return the work between the steps with its share of their time; empty without
    any.
    """
    parts = []
    readings = overhead["readings"]
    if readings:
        windows = readings["held_out_windows"] + readings["training_windows"]
        validations = f"{counted(readings['count'], 'validation')} of {counted(windows, 'window')}"
        if not readings["held_out_windows"]:
            validations += " of training clips"
        parts.append(f"{validations} {readings['share']:.1%}")

    previews = overhead["previews"]
    if previews:
        prompts = counted(previews["prompts"], "preview")
        videos = f"{previews['count']} × {prompts}"
        steps = counted(previews["steps"], "denoising step")
        parts.append(f"{videos} of {steps} {previews['share']:.1%}")

    probes = overhead["probes"]
    if probes:
        parts.append(f"{probes['count']} sample metrics {probes['share']:.1%}")

    forgetting = overhead["forgetting"]
    if forgetting:
        count = counted(forgetting["count"], "comparison")
        share = forgetting["share"]
        parts.append(f"{count} with the base model on other prompts {share:.1%}")

    if not parts:
        return ""
    return f"between the steps, of their time: {', '.join(parts)}"
