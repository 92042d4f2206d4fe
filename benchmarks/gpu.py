"""What training costs on a CUDA card, at the real models' sizes: memory beside its
prediction, seconds, and equal losses.

    python benchmarks/gpu.py PART… [--out FILE] [--seconds 540] [--tiny]

PART is one of:

- memory: the guide's rows of memory, the card's allocator capped to each: three steps, and
  the peak beside the plan's
- streaming: seconds of a step with streamed weights over those of the same step with all of
  them on the card
- published: rows that others have published: seconds and GiB
- rate: operations a second over what this card reaches in a matrix product, with and without
  compiled blocks
- equal: losses of the plain step and of every other way of doing it, with deterministic
  kernels and without
- sync: a step during which the host must not wait for the card
- quantised: seconds and memory of a step over weights in fewer bits, over those of the same
  step in bfloat16
- families: seconds of a step and its peak beside the plan's, for models that the other parts
  leave out, by what is recomputed and streamed
- kernels: the share of a step's time in products of matrices, attention, the other kernels
  and copies, and how long the card waits for the host
- matmul8: seconds and errors of products in eight bits at the layers' sizes, and a step with
  them, plain and compiled, beside bfloat16 and weights that are only stored in eight bits

Weights are random and made on the card; nothing is downloaded or decoded. Each row is
written as soon as it is known, none is begun that would not end within ``--seconds``,
and a second call with the same ``--out`` does those that are missing. ``--rows`` names the
rows to do by words in their names. What a plan reads takes no card: with ``--specs FOLDER``
several processes read it beforehand, and ``--prepare`` does no more than that. ``--tiny``
rehearses it with a model of a few thousand parameters, two rows of each part, on a CPU
too.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # for deterministic kernels; read when CUDA starts
os.environ.setdefault(
    "PYTORCH_ALLOC_CONF", "expandable_segments:True"
)  # as the program itself sets it

import gpu_matmul8
import torch
from gpu_rig import (
    GIB,
    TINY,
    Case,
    Rig,
    device,
    dtype,
    fresh,
    matrix_rate,
    peaks,
    read_specs,
)

from videotune.memory.checkpointing import CPU_OFFLOADED, OFF, ON
from videotune.planner.fit import config_constraints
from videotune.planner.gpus import Card
from videotune.planner.memory import Constraints, fastest, smallest
from videotune.trainer.captured_passes import CapturedPasses

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A row of the table that is still to be measured."""

    name: str
    measure: Callable[[], Row]
    cases: tuple[Case, ...]
    """The cases whose plans it compares with."""


TABLE = {8: (1, 9, 384), 16: (2, 17, 512), 24: (4, 17, 512), 48: (8, 33, 768)}
"""GB of the card: samples of a step, frames, pixels of a side."""
CONTEXT = int(0.6 * GIB)
"""Bytes of a card that CUDA's context takes, outside of the allocator."""
WAYS = {
    "streamed": {
        "layer_offload_fraction": 1.0,
        "gradient_checkpointing": CPU_OFFLOADED,
    },
    "half streamed": {"layer_offload_fraction": 0.5, "gradient_checkpointing": ON},
    "resident": {"layer_offload_fraction": 0.0, "gradient_checkpointing": ON},
    "nothing computed again": {
        "layer_offload_fraction": 0.0,
        "gradient_checkpointing": OFF,
    },
}


def sized(
    model: str, frames: int, height: int, width: int, tiny: bool, batch: int = 1
) -> Case:
    """A case; in a rehearsal the tiny model and few tokens in its place."""
    return (
        Case(TINY, 5, 32, 32, min(batch, 2))
        if tiny
        else Case(model, frames, height, width, batch)
    )


def way(case: Case, name: str) -> Case:
    """The case with everything of memory named, all samples in one pass."""
    words = {"micro_batch_size": case.batch, **WAYS[name]}
    return replace(case, sets=tuple({**dict(case.sets), **words}.items()))


@contextmanager
def capped(limit: int) -> Iterator[None]:
    """The allocator gives no more than so many bytes."""
    if device().type != "cuda":
        yield
        return
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def memory(model: str, gigabytes: int, tiny: bool) -> Row:
    """Three steps with what the plan chooses for a card of so many GB."""
    batch, frames, side = TABLE[gigabytes]
    case = sized(model, frames, side, side, tiny, batch)
    facts = case.facts()
    limit = int(gigabytes * 1e9)
    own = Constraints(streamed=2, checkpointing=ON) if tiny else Constraints()
    fitting = fastest(facts, case.batch, own, limit, this_card())
    planned = fitting or smallest(facts, case.batch, own)
    case = case.chosen(planned.choice, len(facts.blocks))
    row: Row = {
        "planned_fits": fitting is not None,
        **{
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in case.sets
        },
        "planned_allocated_gib": round(planned.allocated / GIB, 6),
        "cap_gib": round((limit - CONTEXT) / GIB, 3),
    }
    with capped(limit - CONTEXT):
        try:
            rig = Rig(case)
            row["losses"] = rig.losses(3)
            row["stayed_inside"] = True
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            row["stayed_inside"] = False
            row["said"] = str(error).splitlines()[0][:200]
        row |= peaks()
    return row


def this_card() -> Card:
    """This card with the rate and the link that its kind is known for; they only order
    choices here.
    """
    whole = (
        torch.cuda.get_device_properties(0).total_memory
        if device().type == "cuda"
        else int(64e9)
    )
    return Card("this card", whole, 800e12, 48e9)


def timed(case: Case, steps: int) -> Row:
    """Seconds of a step and its peak, beside the plan's."""
    facts = case.facts()
    config = case.wanted().config
    chosen = config_constraints(config, len(facts.blocks), case.batch)
    planned = fastest(facts, case.batch, chosen, 1 << 60, this_card())
    assert planned is not None
    fresh()
    rig = Rig(case)
    took = rig.seconds(steps)
    row = {
        "tokens": rig.tokens,
        "seconds": round(took, 4),
        **peaks(),
        "launches": rig.launches(),
    }
    return row | {
        "planned_allocated_gib": round(planned.allocated / GIB, 6),
        "tflop": planned.work.flops / 1e12,
    }


def streaming(case: Case, steps: int) -> Row:
    """Seconds streamed over seconds resident, at equal tokens and equal work."""
    row_by_way = {}
    for name in ("resident", "half streamed", "streamed"):
        row_by_way[name] = timed(way(case, name), steps)
    resident_seconds = row_by_way["resident"]["seconds"]
    return {
        name: {**row, "ratio": round(row["seconds"] / resident_seconds, 3)}
        for name, row in row_by_way.items()
    }


WEIGHTS = (
    "auto",
    "FLOAT_8",
    "INT_8",
    *(("NFLOAT_4",) if find_spec("bitsandbytes") else ()),
)
"""Kinds of stored weights; NFLOAT_4 where bitsandbytes is installed."""


def with_weights(case: Case, kind: str) -> Case:
    """The case with its weights stored in this kind."""
    return replace(case, sets=(*case.sets, ("weight_dtype", kind)))


def quantised(case: Case, steps: int) -> Row:
    """A step over each kind of weights, resident and streamed."""
    rows: Row = {}
    for name in ("resident", "streamed"):
        for kind in WEIGHTS:
            row = timed(with_weights(way(case, name), kind), steps)
            plain = rows.get(f"{name} auto", row)
            row["ratio"] = round(row["seconds"] / plain["seconds"], 3)
            rows[f"{name} {kind}"] = row
    return rows


def rate(case: Case, steps: int) -> Row:
    """Achieved operations a second over the card's own in a product of matrices; blocks
    as they are, and compiled.
    """
    card = matrix_rate()
    case = way(case, "resident")
    facts = case.facts()
    training = fastest(
        facts,
        case.batch,
        config_constraints(case.wanted().config, len(facts.blocks), 1),
        1 << 60,
        this_card(),
    )
    assert training is not None
    flops = training.work.flops
    row: Row = {
        "matrix_tflops": round(card / 1e12, 2),
        "tflop": round(flops / 1e12, 3),
    }
    for compiled in (False, True):
        fresh()
        rig = Rig(replace(case, sets=(*case.sets, ("compile", compiled))))
        begun = time.perf_counter()
        took = rig.seconds(steps)
        row["compiled" if compiled else "plain"] = {
            "seconds": round(took, 4),
            "reached": round(flops / took / card, 3),
            "seconds_before": round(
                time.perf_counter() - begun - took * (steps + 1), 2
            ),
            **peaks(),
            "launches": rig.launches(),
        }
        del rig
    return row


def equal(case: Case) -> Row:
    """Losses of five steps: the plain step twice, then every other way; and what
    deterministic kernels cost.
    """
    row: Row = {}
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        losses_by_way = {}
        took = {}
        for name in ("resident", "again", *WAYS):
            fresh()
            rig = Rig(way(case, "resident" if name == "again" else name))
            losses_by_way[name] = rig.losses(5)
            took[name] = rig.seconds(3) if name == "again" else 0.0
            del rig
        plain = losses_by_way.pop("resident")
        row["deterministic" if deterministic else "as usual"] = {
            "losses": plain,
            "largest_difference": {
                name: max(abs(a - b) for a, b in zip(plain, losses, strict=True))
                for name, losses in losses_by_way.items()
            },
            "seconds": round(took["again"], 4),
        }
    torch.use_deterministic_algorithms(False)
    row["cost_of_deterministic"] = round(
        row["deterministic"]["seconds"] / row["as usual"]["seconds"], 3
    )
    return row


def sync(case: Case) -> Row:
    """Whether a step, resident and streamed, makes the host wait for the card."""
    row: Row = {}
    for name in ("resident", "streamed"):
        fresh()
        rig = Rig(way(case, name))
        rig.losses(2)
        row[name] = "not a card" if device().type != "cuda" else _without_waiting(rig)
        del rig
    return row


def _without_waiting(rig: Rig) -> str:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        record = rig.step()
    except RuntimeError as error:
        return f"waits: {str(error).splitlines()[0][:200]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record.read()
    return "does not wait"


def kernels(case: Case, checkpointing: str, *, compiled: bool, captured: bool) -> Row:
    """Losses, seconds and kernels of a step with all weights on the card."""
    fresh()
    memory = (
        ("micro_batch_size", case.batch),
        ("layer_offload_fraction", 0.0),
        ("gradient_checkpointing", checkpointing),
        ("compile", compiled),
    )
    rig = Rig(replace(case, sets=(*case.sets, *memory)))
    if captured and device().type == "cuda":
        rig.settings = replace(rig.settings, captured=CapturedPasses())

    begun = time.perf_counter()
    losses = rig.losses(3)
    first_steps = time.perf_counter() - begun
    row = {"losses": losses, "seconds": round(rig.seconds(3), 4)}
    row |= {"first_steps": round(first_steps, 1), **peaks(), **rig.kernel_times()}
    if rig.settings.captured is not None:
        row["not captured"] = rig.settings.captured.failure
    return row


KERNEL_WAYS = tuple(product((ON, OFF), (False, True), (False, True)))
"""What is kept of the blocks, whether they are compiled, whether passes are graphs."""

RATES = {
    "wan2.1-t2v-1.3b": (81, 352, 640),
    "wan2.2-ti2v-5b": (33, 768, 768),
    "wan2.1-t2v-14b": (49, 352, 640),
    "cogvideox-5b": (49, 480, 720),
    "hunyuan-video-13b": (49, 352, 640),
    "ltx-video-2b": (49, 512, 768),
}
FAMILIES = {
    "hunyuan-video-1.5-480p-t2v": (33, 480, 832),
    "kandinsky5-t2v-lite-5s": (33, 512, 768),
    "ltx-2-19b": (49, 512, 768),
    "hidream-i1": (1, 1024, 1024),
}


def memory_tasks(tiny: bool, _: int) -> Iterator[Task]:
    """Yield the guide's rows of memory."""
    for name, model in (("5b", "wan2.2-ti2v-5b"), ("a14b", "wan2.2-t2v-a14b")):
        for gigabytes, (batch, frames, side) in TABLE.items():
            case = sized(model, frames, side, side, tiny, batch)
            measure = partial(memory, model, gigabytes, tiny)
            yield Task(f"memory {name} {gigabytes} GB", measure, (case,))


def streaming_tasks(tiny: bool, steps: int) -> Iterator[Task]:
    """Yield rows of steps with streamed weights."""
    for name, case, most_steps in (
        ("5b 5k", sized("wan2.2-ti2v-5b", 33, 768, 768, tiny), 5),
        ("14b 5k", sized("wan2.2-t2v-a14b", 17, 512, 512, tiny), 5),
        ("14b 18k", sized("wan2.2-t2v-a14b", 81, 352, 640, tiny), 3),
    ):
        measure = partial(streaming, case, min(steps, most_steps))
        yield Task(f"streaming {name} tokens", measure, (case,))


def published_tasks(tiny: bool, steps: int) -> Iterator[Task]:
    """Yield the rows that others have published."""
    for name, model, shape in (
        ("wan 14b", "wan2.1-t2v-14b", (81, 352, 640)),
        ("wan 1.3b", "wan2.1-t2v-1.3b", (81, 352, 640)),
        ("ltx 2b", "ltx-video-2b", (49, 512, 768)),
    ):
        case = sized(model, *shape, tiny)
        for ways in ("streamed", "resident"):
            measure = partial(timed, way(case, ways), steps)
            yield Task(f"published {name} {ways}", measure, (case,))


def rate_tasks(tiny: bool, steps: int) -> Iterator[Task]:
    """Yield rows of operations a second."""
    for model, shape in RATES.items():
        case = sized(model, *shape, tiny)
        yield Task(f"rate {model}", partial(rate, case, steps), (case,))


def equal_tasks(tiny: bool, _: int) -> Iterator[Task]:
    """Yield the row of losses, by every way of doing a step."""
    case = sized("wan2.1-t2v-1.3b", 17, 352, 640, tiny, 2)
    yield Task("equal 1.3b", partial(equal, case), ())


def sync_tasks(tiny: bool, _: int) -> Iterator[Task]:
    """Yield the row on whether the host waits for the card."""
    case = sized("wan2.1-t2v-1.3b", 17, 352, 640, tiny)
    yield Task("sync 1.3b", partial(sync, case), ())


def quantised_tasks(tiny: bool, steps: int) -> Iterator[Task]:
    """Yield rows of steps over weights in fewer bits."""
    for name, model, shape in (
        ("5b", "wan2.2-ti2v-5b", (33, 768, 768)),
        ("14b", "wan2.2-t2v-a14b", (17, 512, 512)),
    ):
        case = sized(model, *shape, tiny)
        quantised_cases = tuple(with_weights(case, kind) for kind in WEIGHTS)
        yield Task(
            f"quantised {name}", partial(quantised, case, steps), quantised_cases
        )


def families_tasks(tiny: bool, _: int) -> Iterator[Task]:
    """Yield rows of models that the other parts leave out."""
    for model, shape in FAMILIES.items():
        case = sized(model, *shape, tiny)
        for name in reversed(WAYS):
            measure = partial(timed, way(case, name), 3)
            yield Task(f"families {model} {name}", measure, (case,))


def matmul8_tasks(tiny: bool, steps: int) -> Iterator[Task]:
    """Yield rows of products in eight bits."""
    for name, measure_products in gpu_matmul8.rows(tiny, steps):
        yield Task(name, measure_products, ())


def kernels_tasks(tiny: bool, _: int) -> Iterator[Task]:
    """Yield rows of a step's kernels."""
    for model, shape in RATES.items():
        case = sized(model, *shape, tiny)
        for checkpointing, compiled, captured in KERNEL_WAYS:
            name = f"kernels {model} {checkpointing}"
            name += " compiled" if compiled else " eager"
            name += " graph" if captured else ""
            measure = partial(
                kernels, case, checkpointing, compiled=compiled, captured=captured
            )
            yield Task(name, measure, ())


TASKS_BY_PART: dict[str, Callable[[bool, int], Iterator[Task]]] = {
    "memory": memory_tasks,
    "streaming": streaming_tasks,
    "published": published_tasks,
    "rate": rate_tasks,
    "equal": equal_tasks,
    "sync": sync_tasks,
    "quantised": quantised_tasks,
    "families": families_tasks,
    "kernels": kernels_tasks,
    "matmul8": matmul8_tasks,
}
"""Functions that yield the rows of each part; they take whether it is a rehearsal, and the
number of steps to measure.
"""


def tasks(parts: Sequence[str], tiny: bool) -> Iterator[Task]:
    """Yield the rows of parts, in the order of the table."""
    steps = 2 if tiny else 5
    for part, tasks_of_part in TASKS_BY_PART.items():
        if part in parts:
            yield from tasks_of_part(tiny, steps)


def main() -> None:
    """Do the rows that are missing, each written as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=tuple(TASKS_BY_PART))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--rows", nargs="+", help="words, one of which a row's name has"
    )
    parser.add_argument("--specs", type=Path, help="folder for what plans read")
    parser.add_argument("--prepare", action="store_true", help="read plans, then stop")
    asked = parser.parse_args()
    if device().type != "cuda" and not (asked.tiny or asked.prepare):
        sys.exit("no CUDA device is here: --tiny rehearses on a CPU")
    begun = time.perf_counter()
    wanted = [
        task
        for task in tasks(asked.parts, asked.tiny)
        if not asked.rows or any(word in task.name for word in asked.rows)
    ]
    if asked.specs:
        read_specs({case for task in wanted for case in task.cases}, asked.specs)
    if asked.prepare:
        return
    longest = 0.0
    rows_by_name: dict[str, Row] = (
        json.loads(asked.out.read_text()) if asked.out and asked.out.is_file() else {}
    )
    rows_by_name["machine"] = {
        "device": torch.cuda.get_device_name(0) if device().type == "cuda" else "CPU",
        "torch": torch.__version__,
        "dtype": dtype(),
    }
    count: Counter[str] = Counter()
    for task in wanted:
        name = task.name
        count[name.split()[0]] += 1
        if name in rows_by_name or (asked.tiny and count[name.split()[0]] > 2):
            continue
        if time.perf_counter() - begun + longest > asked.seconds:
            print(f"left for another call: {name} and what comes after it", flush=True)
            break
        fresh()
        start = time.perf_counter()
        rows_by_name[name] = task.measure()
        took = time.perf_counter() - start
        longest = max(longest, took)
        rows_by_name[name]["row_seconds"] = round(took, 1)
        print(json.dumps({name: rows_by_name[name]}), flush=True)
        if asked.out:
            asked.out.write_text(
                json.dumps(rows_by_name, indent=1) + "\n", encoding="utf-8"
            )


if __name__ == "__main__":
    main()
