"""Write the tables from which a preset is planned without a run on fake tensors,
videotune/planner/readings/FAMILY.json: python scripts/write_ledgers.py [FAMILY ...]

All families take about an hour of one CPU; ``--new`` keeps what the files have and reads
only what is missing, ``--check`` writes nothing and lists what is missing.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import chain, product
from typing import Any

from videotune.job.overrides import Overrides, resolve_config
from videotune.model_spec import VideoRules
from videotune.models.base_model import comfyui_reads_otherwise
from videotune.planner.compared import EIGHT_BITS
from videotune.planner.fit import planned_dtype
from videotune.planner.measure import FakeRun
from videotune.planner.network_facts import read_linear_sizes, read_network_facts
from videotune.planner.plan_inputs import PlanInputs
from videotune.planner.read_step import fake_run
from videotune.planner.shipped_readings import (
    FOLDER,
    autoencoder_key,
    family_tables,
    has_affine_rank,
    mixed,
    network_key,
    sizes_key,
    step_key,
    text_key,
    whole_numbers,
)
from videotune.planner.step_spec import MODES
from videotune.presets import shipped
from videotune.types import ClipShape

RANKS = (8, 64)

FRAMES = (1, 5, 9, 17, 33, 49, 65, 161)
"""Frames of the clips that are encoded and decoded."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of clips at which a model is read, before its rules."""

    steps: tuple[tuple[int, int, int], ...]
    """Frames, height and width of the clips whose steps are read."""
    sides: tuple[tuple[int, int], ...]
    """Heights and widths of the clips that are encoded and decoded."""


PUBLISHED = Sizes(
    steps=((1, 256, 256), (17, 320, 512), (81, 480, 832), (257, 768, 1344)),
    sides=(
        (192, 192),
        (320, 512),
        (480, 832),
        (544, 960),
        (640, 1088),
        (768, 1344),
    ),
)

TOY = Sizes(
    steps=((1, 32, 32), (17, 64, 64), (33, 128, 128)),
    sides=((32, 32), (64, 64), (128, 128)),
)
"""Those of the base model that comes with videotune, which was trained at 17x64x64."""

TOY_SETTINGS = (
    ("train_dtype=FLOAT_32",),
    ("train_dtype=BFLOAT_16",),
    ("train_dtype=BFLOAT_16", f"transformer.matmul_dtype={EIGHT_BITS}"),
)
"""How the toy is read: as on a CPU, as on a card, and in eight bits, which ``plan --ways``
compares.
"""

FRAMES_IN_TILES = (1, 5, 9, 17, 33)
SIDES_IN_TILES = ((192, 192), (320, 512), (480, 832), (768, 1344))
"""The same of clips that are decoded in tiles, which takes long to read: what it holds
is affine in the frames from the last two of these on.
"""

KINDS = ("sizes", "networks", "steps", "autoencoders", "texts")


@dataclass(frozen=True)
class Case:
    """A preset whose readings are written."""

    preset: str
    inputs: PlanInputs
    """With any shape."""
    sizes: Sizes

    def with_rank(self, rank: int | None) -> PlanInputs:
        """Return the inputs with another rank of the LoRA."""
        config = self.inputs.config
        if rank is None:
            return self.inputs
        lora = config.lora.model_copy(update={"rank": rank, "alpha": None})
        return replace(self.inputs, config=config.model_copy(update={"lora": lora}))

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks at which it is read."""
        return RANKS if has_affine_rank(self.inputs.config) else ()


def cases() -> list[Case]:
    """Return the presets, and those of which ``init`` lets captions be read as the model's
    authors do.
    """
    result = []
    for preset in shipped.preset_names():
        if preset == "toy":
            result += [_case(preset, *sets, sizes=TOY) for sets in TOY_SETTINGS]
            continue
        result.append(_case(preset))
        base_model = str(shipped.read_preset(preset)["base_model_name"])
        if comfyui_reads_otherwise(base_model):
            result.append(_case(preset, "text_encoder.convention=authors"))
    return result


def _case(preset: str, *sets: str, sizes: Sizes = PUBLISHED) -> Case:
    """Return a preset with changed settings."""
    with redirect_stderr(StringIO()):  # hides where configs come from
        overrides = Overrides(preset=preset, sets=sets)
        resolved, spec, base = resolve_config(overrides, planning=True)
    assert base is not None, preset
    dtype = planned_dtype(resolved.config, True)
    inputs = PlanInputs(spec, base.folder, resolved.config, dtype, (), None)
    return Case(preset, inputs, sizes)


def fitting(rules: VideoRules, frames: int, height: int, width: int) -> ClipShape:
    """Return the nearest shape at or below these sizes that a model accepts."""
    frames = min(frames, rules.most_frames or frames)
    if rules.frame_step:
        frames = (frames - rules.frame_rest) // rules.frame_step * rules.frame_step
        frames = max(frames + rules.frame_rest, rules.frame_rest or rules.frame_step)
    if rules.size is not None:
        return ClipShape(frames, *rules.size, rules.fps)

    def fitting_side(side: int) -> int:
        most = min(side, rules.most_side or side)
        return most // rules.side_multiple * rules.side_multiple

    return ClipShape(frames, fitting_side(height), fitting_side(width), rules.fps)


def shapes_of_steps(case: Case) -> list[ClipShape]:
    """Return the shapes whose steps are read, by their tokens."""
    spec = case.inputs.spec
    shapes: dict[int, ClipShape] = {}
    sides = [(256, 256), (768, 768), (1024, 1024)]
    sizes: Iterable[tuple[int, int, int]] = case.sizes.steps
    if spec.rules.most_frames == 1:
        sizes = [(1, *side) for side in sides]
    elif spec.rules.size is not None:
        sizes = [(spec.rules.most_frames or case.sizes.steps[-1][0], 0, 0)]
    for size in sizes:
        shape = fitting(spec.rules, *size)
        shapes.setdefault(spec.tokens(shape), shape)
    return [shapes[tokens] for tokens in sorted(shapes)]


def columns(points: Sequence[Any]) -> Any:
    """Return one tree of numbers for several: each number, or a list of it at all
    points; a part that a point lacks is 0 there.
    """
    if any(isinstance(point, Mapping) for point in points):
        parts = [point or {} for point in points]
        names = dict.fromkeys(chain.from_iterable(parts))
        return {name: columns([part.get(name, 0) for part in parts]) for name in names}
    return points[0] if len(set(points)) == 1 else list(points)


def step_point(run: FakeRun, shape: ClipShape) -> dict[str, Any]:
    """Read a step of one shape."""
    readings: dict[str, Any] = {}
    kept = {}
    for mode in MODES:
        readings[mode] = {}
        for samples in (1, 2):
            reading = run.deep_step(shape, samples, mode)
            readings[mode][str(samples)] = {
                "phases": reading.phases,
                "work": asdict(reading.work),
            }
        kept[mode] = run.kept_by_block(shape, mode)
    return {"readings": readings, "kept": kept}


def read_step(case: Case) -> dict[str, Any]:
    """Read a step at all shapes and ranks."""
    shapes = shapes_of_steps(case)
    tokens = [case.inputs.spec.tokens(shape) for shape in shapes]
    ranks = case.ranks()

    run = fake_run(case.with_rank(ranks[0] if ranks else None))
    points = [step_point(run, shape) for shape in shapes]
    if ranks:
        higher_run = fake_run(case.with_rank(ranks[1]))
        ends = [step_point(higher_run, shape) for shape in (shapes[0], shapes[-1])]
        points += at_higher_rank(tokens, points, ends)

    return {
        "tokens": tokens,
        "ranks": ranks,
        "blocks": run.blocks,
        "other_weights": run.other_weights,
        **columns(points),
    }


def at_higher_rank(
    tokens: Sequence[int], points: Sequence[Any], ends: Sequence[Any]
) -> list[Any]:
    """Return the points of a higher rank from its first and last one: what a rank adds
    is affine in the tokens.
    """
    if len(points) == 1:
        return [ends[0]]
    result = [ends[0]]
    for count, point in zip(tokens[1:-1], points[1:-1], strict=True):
        share = (count - tokens[0]) / (tokens[-1] - tokens[0])
        weights = [1, share - 1, -share, 1 - share, share]
        between = mixed(columns([point, points[0], points[-1], *ends]), weights)
        result.append(whole_numbers(between))
    return [*result, ends[-1]]


def read_network(case: Case) -> dict[str, Any]:
    """Read what trains at all ranks."""
    points = []
    for rank in case.ranks() or (None,):
        inputs = case.with_rank(rank)
        facts = read_network_facts(fake_run(inputs).family, inputs.config)
        points.append(facts)
    return {
        "ranks": case.ranks(),
        "modules": facts.modules,
        "parts": columns([facts.parts for facts in points]),
        "groups": facts.groups,
        "idle": facts.idle,
        "text": facts.text,
    }


def read_autoencoder(case: Case) -> dict[str, Any]:
    """Read the autoencoder on a grid of frames and areas."""
    run = fake_run(case.inputs)
    rules = case.inputs.spec.rules

    def encode_and_decode(shape: ClipShape) -> dict[str, Any]:
        parts, flops = run.encode(shape)
        return {"encode": parts, "encode_flops": flops, "decode": run.decode(shape)}

    def decode_in_tiles(shape: ClipShape) -> dict[str, Any]:
        return {"decode": run.decode(shape, tiled=True)}

    sides = case.sizes.sides
    sides_in_tiles = SIDES_IN_TILES if case.sizes is PUBLISHED else sides
    whole = read_grid(rules, FRAMES, sides, encode_and_decode)
    tiles = read_grid(rules, FRAMES_IN_TILES, sides_in_tiles, decode_in_tiles)
    return {"whole": whole, "tiles": tiles}


def read_grid(
    rules: VideoRules,
    frame_counts: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    read: Callable[[ClipShape], dict[str, Any]],
) -> dict[str, Any]:
    """Read something of clips with each of these numbers of frames and each size."""
    frames = sorted({fitting(rules, count, *sizes[0]).frames for count in frame_counts})
    sides = {}
    for size in sizes:
        shape = fitting(rules, frames[0], *size)
        sides[shape.height * shape.width] = (shape.height, shape.width)
    areas = sorted(sides)

    points = []
    for count, area in product(frames, areas):
        points.append(read(ClipShape(count, *sides[area], rules.fps)))
    return {"frames": frames, "areas": areas, **columns(points)}


def read_text(case: Case) -> dict[str, Any]:
    """Read the text encoder."""
    run = fake_run(case.inputs)
    parts, flops, encoders = run.read_text()
    size = run.text_size() if run.config.text_in_step else (0, 0)
    return {"parts": parts, "flops": flops, "encoders": encoders, "size": size}


def read_sizes(case: Case) -> dict[str, Any]:
    """Read the sizes of the denoiser."""
    return read_linear_sizes(fake_run(case.inputs).family)._asdict()


def tables_of(case: Case) -> dict[str, tuple[str, Callable[[Case], dict[str, Any]]]]:
    """Return the key of each kind of table for a preset, and how it is read."""
    inputs = case.inputs
    network = (inputs.spec, inputs.folder, inputs.config)
    return {
        "sizes": (sizes_key(inputs.spec, inputs.folder), read_sizes),
        "networks": (network_key(*network), read_network),
        "steps": (step_key(inputs), read_step),
        "autoencoders": (autoencoder_key(inputs), read_autoencoder),
        "texts": (text_key(inputs), read_text),
    }


def write_family(family: str, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the tables of a family, each as soon as it is read; what is known is not
    read again.
    """
    tables: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for case in cases():
        if case.inputs.spec.name != family:
            continue
        for kind, (key, read) in tables_of(case).items():
            if key in tables[kind]:
                continue

            table = known.get(kind, {}).get(key)
            if table is None:
                begun = time.monotonic()
                table = read(case)
                seconds = time.monotonic() - begun
                print(f"{case.preset}: {kind}, {seconds:.0f} s", flush=True)

            tables[kind][key] = table
            text = json.dumps(tables, separators=(",", ":"))
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{family}.json").write_text(text + "\n", encoding="utf-8")


def missing() -> Counter[str]:
    """Return how many tables each family lacks."""
    lacking: Counter[str] = Counter()
    for case in cases():
        family = case.inputs.spec.name
        for kind, (key, _) in tables_of(case).items():
            lacking[family] += key not in family_tables(family).get(kind, {})
    return +lacking


def main() -> None:
    """Write the tables, or list what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--new", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        lacking = missing()
        print(dict(lacking) or "nothing is missing")
        sys.exit(bool(lacking))

    families = arguments.families or {case.inputs.spec.name for case in cases()}
    for family in families:
        write_family(family, family_tables(family) if arguments.new else {})


if __name__ == "__main__":
    main()
