"""``plan``: what a run would do, before it does it: steps, views, tokens, disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.console import bar, print_table, size
from videotune.errors import DONE, SKIPPED, VideotuneError
from videotune.latent_cache.exposure import TARGETS
from videotune.planner.fit import asked_card, fit, planned_dtype, to_json
from videotune.text import shape_words
from videotune.trainer.experts import trained
from videotune.trainer.resolve_config import Overrides, resolve_config, without_captions_too
from videotune.trainer.run_spec import Job, open_job, refuse_skips
from videotune.validation.overhead import in_words

if TYPE_CHECKING:
    pass

from videotune.planner.plan import make_plan


def plan(
    words: Overrides,
    *,
    as_json: bool = False,
    allow_skips: str | None = None,
    vram: float | None = None,
    card: str | None = None,
    views: Sequence[int] = (),
) -> int:
    """Print the plan of a run, its verdict first, on a card with ``vram`` GB of memory, or of that name.

    With neither it is this machine's, if there is one.

    ``views``: for how many views of a window the steps are said, instead of the usual ones. Exit code 2 where it does not
    fit.
    """
    resolved, spec, base = resolve_config(without_captions_too(words, allow_skips), planning=True)
    with bar("reading clips") as progress:
        job = open_job(resolved, spec, base, lambda done, total, path: progress.update(done, total, path))
    refuse_skips(job, allow_skips)
    facts = make_plan(job, views or TARGETS)
    free = shutil.disk_usage(
        Path.cwd()
    ).free  # a run lies below the folder of the command, unless its --out says otherwise
    facts["disk"] |= {"free_bytes": free, "short_bytes": max(0, facts["disk"].get("run_bytes", 0) - free)}
    if job.base is not None:
        limit, named = asked_card(vram, card)
        dtype = planned_dtype(job.config, limit is not None)
        with bar("measuring without memory"):
            result = fit(job, dtype, limit, named)
        facts |= to_json(result, job, dtype)
    elif vram or card:
        raise VideotuneError("--vram, --card: what a run needs is read from its base model: name one (base_model_name)")
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        show(job, facts)
    return SKIPPED if facts["fits"] is False or facts["disk"]["short_bytes"] else DONE


def show(job: Job, facts: dict[str, Any]) -> None:
    """The plan as a person reads it."""
    clips, views = facts["clips"], facts["views"]
    base = f" on {job.base.name}" if job.base else ""
    size_of_step = f"{facts['effective_batch']} sample{'s' * (facts['effective_batch'] != 1)}"
    if facts["device"]:
        print(verdict(facts))
    print(f"{job.spec.title}{base}: {facts['steps']} steps of {size_of_step}")
    print(
        f"clips: found {clips['found']} = used {clips['used']} + held out {clips['held_out']} + skipped {clips['skipped']}"
    )
    rows = [
        [shape_words(b["shape"]), b["windows"], f"{b['share']:.0%}", b["batch"], b["tokens"]] for b in facts["buckets"]
    ]
    columns = ["width x height", "windows", "share of steps", "samples a step", "tokens"]
    print_table("buckets, largest first", columns, rows, right=(1, 2, 3, 4))
    window, clip = views["per_window"], views["per_clip"]
    print(
        f"views a window: {window['min']} to {window['max']} ({window['band']}); a clip: {clip['min']} to {clip['max']}"
    )
    print(f"  {views['advice']}")
    if views["steps_for"]:
        each = ", ".join(f"{count} in {steps} steps" for count, steps in views["steps_for"].items())
        print(f"  views of the window that is shown most: {each}")
    if facts["adapter"]:
        whole = job.config.training_method == "FINE_TUNE"
        what = "weights" if whole else "adapter" if job.config.lora.variant == "LORA" else job.config.lora.variant
        print(f"{what}: {facts['adapter']['parameters']:,} parameters in {facts['adapter']['modules']} modules")
        if not whole or job.config.transformer.layers is not None:
            groups = [f"{count} × {path}" for path, count in facts["adapter"]["groups"].items()]
            print(f"  {', '.join(groups)}" + (" in each expert" if len(trained(job.spec, job.config)) > 1 else ""))
    if facts["experts"]:
        each, rows = facts["experts"]["each"], []
        for e in each:
            rows.append([e["name"], f"{e['from']:g} to {e['to']:g}", e["steps"], f"{e['steps'] / facts['steps']:.0%}"])
        print_table("experts", ["expert", "noise levels", "steps", "share"], rows, right=(2, 3))
        if all(e["steps"] for e in each):
            print(f"in runs of {facts['experts']['period']} steps of one expert, which alone is in memory then")
    disk = facts["disk"]
    line = (
        f"disk: latents {size(disk['latent_bytes'])} and text at most {size(disk['text_bytes_at_most'])} in {job.cache}"
    )
    if "checkpoints" in disk:
        line += (
            f"; {disk['checkpoints']} checkpoints of {size(disk['checkpoint_bytes'])}, with the export "
            f"{size(disk['run_bytes'])} of {size(disk['free_bytes'])} free"
        )
    print(line)
    if disk["short_bytes"]:
        print(f"  {size(disk['short_bytes'])} too much: a larger save_every, or save_keep, makes fewer checkpoints")
    if line := in_words(facts["beside"]):
        print(line)
    if facts["device"]:
        show_fit(facts)
    for note in facts["notes"]:
        print(f"note: {note}")


def verdict(facts: Mapping[str, Any]) -> str:
    """The plan in one line: whether it fits, where, and how long it takes."""
    device, need = facts["device"], size(facts["device"]["need_bytes"])
    if facts["fits"] is None:
        return f"needs {need} of device memory (--card or --vram says whether and how a card has it)"
    where = device["card"] or f"{device['vram_bytes'] / 1e9:g} GB"
    line = f"{'it fits' if facts['fits'] else 'it does not fit'} {where}: {need} of {size(device['vram_bytes'])}"
    if facts["hours"] is not None:
        both = facts["hours"] + (facts["hours_beside"] or 0)
        line += f", about {both:.1f} hours ({facts['seconds_a_step']:.2f} s a step), calculated, not measured"
    return line


def show_fit(facts: Mapping[str, Any]) -> None:
    """What the run needs of the device and of the host, where, and how long it takes."""
    device, host, chosen = facts["device"], facts["host"], facts["chosen"]
    rows = [
        [name, phase["way"], size(phase["allocated_bytes"]), size(phase["need_bytes"])]
        for name, phase in device["phases"].items()
    ]
    print_table("memory of the device, calculated", ["when", "how", "held", "to have"], rows, right=(2, 3))
    parts = ", ".join(f"{name} {size(count)}" for name, count in device["parts"].items())
    print(f"most is needed for {device['phase']}: {parts}")
    settings = ", ".join(f"{key}={value}" for key, value in chosen.items())
    print(f"with {settings}")
    parts = ", ".join(f"{name} {size(count)}" for name, count in host["parts"].items())
    short = "" if host["need_bytes"] <= host["total_bytes"] else "; this machine has too little"
    print(f"host memory: {size(host['need_bytes'])} of {size(host['total_bytes'])} here ({parts}){short}")
    if facts["hours"] is not None:
        each, hours = facts["seconds_a_step"], f"{facts['hours']:.1f} hours of steps"
        hours += f" and about {facts['hours_beside']:.1f} beside them" if facts["hours_beside"] else ""
        print(f"time: {each:.2f} s a step, {hours}; calculated for {device['card']}, not measured")
    for line in facts["remedies"]:
        print(f"  {line}")
