"""What a plan says of the cache is what ``cache`` then writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_dataset
from tests.support.trainers import Lab, job_of, overrides_of
from videotune.commands.cache import cache, list_cache
from videotune.job.overrides import Overrides
from videotune.latent_cache.conditions import CHANNELS, SeparateCondition
from videotune.model_spec import SoundRules
from videotune.planner.cache_size import cache_size, condition_bytes, encoding_seconds
from videotune.planner.gpus import find_card
from videotune.planner.plan import make_plan
from videotune.planner.simulation import bytes_by_window
from videotune.types import ClipShape
from videotune.validation.callbacks import cache_items_of

CONDITIONS = [
    {"type": "last_frame", "probability": 0.3},
    {"type": "suffix", "latent_frames": 2},
    {"type": "mask"},
]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """The toy base model and two clips of 9 frames."""
    frames = {f"{name}.mkv": noise(9, 32, 32, seed=ord(name)) for name in "ab"}
    clips = write_dataset(tmp_path / "clips", frames, {}, fps=16)
    return Lab(Path("asset:toy"), clips, tmp_path / "cache", tmp_path)


def written(overrides: Overrides) -> dict[str, list[int]]:
    """Bytes of the entries that ``cache`` writes, by kind."""
    folder = cache(overrides).folder
    store, _ = list_cache(folder)
    sizes: dict[str, list[int]] = {"latents": [], "conditions": []}
    for entry in store.entries():
        sizes.setdefault(entry.kind, []).append(entry.bytes)
    return sizes


@pytest.mark.parametrize(
    ("conditions", "variants", "flip", "count"),
    [
        ([], 2, "never", 0),
        # A box for each variant, and one of what validation reads.
        (CONDITIONS[2:], 3, "never", 2 * (3 + 1)),
        # One variant is mirrored, and the other is what validation reads.
        (CONDITIONS, 2, "always", 2 * (2 + 2 + 2 * 2 + 1)),
    ],
)
def test_windows_conditions_and_boxes_are_what_the_cache_gets(
    conditions: list[dict[str, Any]],
    variants: int,
    flip: str,
    count: int,
    lab: Lab,
) -> None:
    knobs = {"conditions": conditions, "video_config.variants": variants}
    knobs["datasets"] = [{"path": str(lab.clips), "flip": flip}]
    disk = make_plan(job_of(lab, knobs))["disk"]
    sizes = written(overrides_of(lab, knobs))
    assert disk["condition_entries"] == len(sizes["conditions"]) == count
    assert disk["condition_bytes"] == sum(sizes["conditions"])
    assert disk["latent_entries"] == len(sizes["latents"])
    assert disk["latent_bytes"] == sum(sizes["latents"])


@pytest.mark.parametrize(
    ("condition", "frames", "appended_frames"),
    [
        ({"type": "last_frame"}, 9, 1),
        ({"type": "suffix", "latent_frames": 1}, 9, 5),
    ],
)
def test_a_hidden_clip_is_encoded_whole_and_an_appended_end_by_itself(
    condition: dict[str, Any], frames: int, appended_frames: int, lab: Lab
) -> None:
    """Of four frames a latent one is made, and of the first by itself; an appended suffix
    has one latent frame more.
    """
    job = job_of(lab, {"conditions": [condition]})
    size = cache_size(job)
    assert size.windows.pixels == 2 * 9 * 32 * 32
    assert size.conditions.pixels == 2 * frames * 32 * 32

    name = condition["type"]
    support = replace(job.spec.conditions[name], mechanism="context")
    further = {**job.spec.further_conditions, name: support}
    spec = replace(job.spec, further_conditions=further)
    size = cache_size(replace(job, spec=spec))
    assert size.conditions.pixels == 2 * appended_frames * 32 * 32


def test_a_sample_reads_its_latents_its_caption_and_a_condition_of_each_type(
    lab: Lab,
) -> None:
    """As many bytes as the cache's largest entries have."""
    conditions = [
        {"type": "suffix", "latent_frames": 2},
        {"type": "last_frame"},
        {"type": "mask"},
    ]
    knobs = {"conditions": conditions}
    sizes = written(overrides_of(lab, knobs))
    job = job_of(lab, knobs)
    text = 4 * (job.spec.text_tokens * job.spec.text_width + job.spec.text_numbers)
    a_sample = max(sizes["latents"]) + text + sum(set(sizes["conditions"]))
    assert len(set(sizes["conditions"])) == 3
    assert set(bytes_by_window(job).values()) == {a_sample}

    encoded_in_step = {"training_method": "EMBEDDING"}
    assert set(bytes_by_window(job_of(lab, encoded_in_step)).values()) == {
        max(sizes["latents"])
    }


def test_seconds_follow_from_pixels_and_the_rate_of_float32() -> None:
    card = find_card("rtx 4090")
    seconds = encoding_seconds(10**9, 2e4, card)
    assert seconds == pytest.approx(2e13 / (0.4 * card.flops / 2))
    assert encoding_seconds(10**9, 2e4, card, is_cpu=True) == seconds / 2
    assert encoding_seconds(0, 2e4, card) == 0


def test_the_sound_of_a_condition_has_the_latents_of_its_seconds(lab: Lab) -> None:
    """Three seconds at 25 latents a second, of 8 numbers of 4 bytes."""
    job = job_of(lab)
    window = replace(
        job.library.windows[0], shape=ClipShape(75, 32, 32, 25.0, sound=True)
    )
    sound = SoundRules(16_000, 25.0, 8, lora_targets={}, modules=(), idle_paths={})
    spec = replace(job.spec, sound=sound)
    sample = SeparateCondition(window, 0, "sound")
    assert condition_bytes(sample, spec) == 75 * 8 * 4


def test_where_noise_is_drawn_onto_the_image_each_variant_is_an_entry(lab: Lab) -> None:
    """The frames of all variants of a clip of nine are the same."""
    job = job_of(lab, {"video_config.variants": 3})
    assert cache_size(job).windows.count == 2
    noisy = replace(job, spec=replace(job.spec, image_noise=True))
    samples = set(cache_items_of(noisy).samples)
    assert cache_size(noisy).windows.count == len(samples) > 2


def test_what_is_on_channels_has_the_size_of_latents_and_the_numbers_of_an_image(
    lab: Lab,
) -> None:
    """At four bytes a number; of a mask, one byte more for each cell."""
    job = job_of(lab)
    window = replace(job.library.windows[0], shape=ClipShape(5, 32, 32, 8.0))
    frames, rows, columns = job.spec.rules.latent_size(window.shape)
    cells = frames * rows * columns
    assert cells > 1
    sample = SeparateCondition(window, 0, CHANNELS)
    control = replace(job.spec, control_channels=3, image_numbers=7)
    assert condition_bytes(sample, control) == 4 * (3 * cells + 7)
    image = replace(job.spec, image_channels=(5, 2), image_numbers=0)
    assert condition_bytes(sample, image) == 4 * 5 * cells
    mask = SeparateCondition(window, 0, "mask")
    assert condition_bytes(mask, job.spec) == cells * (4 * job.spec.latent_channels + 1)
