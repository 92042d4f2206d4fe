"""The rules of other trainers, beside numbers that their own functions gave
(tests/interop/results_of_others.json).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from videotune.interop import rules, size_buckets
from videotune.interop.rules import NoiseLevels, SourceVideo
from videotune.interop.trainer_rules import build_trainer_rules
from videotune.model_spec import ModelSpec
from videotune.models.registry import find

RESULTS = Path(__file__).with_name("results_of_others.json")
TABLES: dict[str, list[list[Any]]] = json.loads(RESULTS.read_text())["tables"]


def mark(indices: list[int] | None) -> list[int] | None:
    return [indices[0], indices[-1], len(indices), sum(indices)] if indices else None


def one(found: list[list[int]] | str) -> list[int] | None:
    return None if isinstance(found, str) else found[0]


def test_musubi_frames() -> None:
    options = {"frame_stride": 1, "frame_sample": 1, "max_frames": 129}
    for n, fps, mode, counts, own, source, wanted in TABLES["musubi frames"]:
        stride, samples, most = (options | own).values()
        rates = (source, 16.0) if source else None
        found = rules.extract_windows(
            mode, counts, 4, rates, (stride, samples, most), SourceVideo(n, fps, 1, 1)
        )
        got = (
            []
            if isinstance(found, str)
            else sorted([x[0], x[-1], len(x)] for x in found)
        )
        assert got == sorted(wanted), (n, fps, mode, counts, own, source)


def test_diffusion_pipe_frames() -> None:
    for n, fps, counts, mode, rate, step, wanted in TABLES["diffusion-pipe frames"]:
        assert (
            mark(
                one(
                    rules.resample_to_bucket(
                        mode,
                        lambda length, _, counts=counts: size_buckets.longest_filled(
                            counts, length
                        ),
                        0,
                        step,
                        rate,
                        SourceVideo(n, fps, 1, 1),
                    )
                )
            )
            == wanted
        ), (n, fps, counts, mode, rate)


def test_diffusion_pipe_size_buckets() -> None:
    """The buckets are ordered by length and the ratios by value, and the n-th belongs
    to the n-th.
    """
    for n, buckets, ratio, wanted in TABLES["diffusion-pipe size buckets"]:
        shaped = [(frames, height, width) for width, height, frames in buckets]
        clip = SourceVideo(n, 16.0, round(10**6 * ratio), 10**6)
        bucket = size_buckets.size_bucket(shaped, n, clip)
        assert (bucket and [bucket[2], bucket[1], bucket[0]]) == wanted
        if wanted:
            assert size_buckets.size_of_bucket(shaped, 16.0, clip, wanted[2]) == tuple(wanted[:2])  # fmt: skip


def test_ai_toolkit_frames() -> None:
    for n, fps, count, rate, shrink, auto, trim, step, wanted in TABLES[
        "ai-toolkit frames"
    ]:
        assert (
            mark(
                one(
                    rules.fixed_count_frames(
                        count, rate, shrink, auto, trim, step, SourceVideo(n, fps, 1, 1)
                    )
                )
            )
            == wanted
        ), (
            n,
            fps,
            count,
        )


def test_finetrainers_frames_and_sizes() -> None:
    for n, (width, height), buckets, wanted, size in TABLES["finetrainers frames"]:
        indices = one(rules.spread_over_clip(buckets, SourceVideo(n, 24.0, 1, 1)))
        assert mark(indices) == wanted
        assert (
            list(
                rules.bucket_by_ratio(
                    buckets, SourceVideo(n, 24.0, width, height), wanted[2]
                )
            )
            == size
        )


def test_simpletuner_frames() -> None:
    for _, n, wanted in TABLES["simpletuner frames"]:
        assert max(1, rules.floor_to_step(n, 8)) == wanted


def test_onetrainer_frames() -> None:
    for n, fps, count, wanted in TABLES["onetrainer frames"]:
        assert (
            mark(one(rules.frames_from_start(count, SourceVideo(n, fps, 1, 1))))
            == wanted
        )


def test_ltx_trainer_frames_and_sizes() -> None:
    for n, fps, (width, height), buckets, count, size in TABLES["ltx-trainer frames"]:
        found = rules.leading_frames(
            [bucket[0] for bucket in buckets], "", SourceVideo(n, fps, 1, 1)
        )
        assert (None if isinstance(found, str) else len(found[0])) == count
        if count is not None:
            assert (
                list(
                    rules.bucket_by_sides(
                        buckets, SourceVideo(n, fps, width, height), count
                    )
                )
                == size
            )


@pytest.mark.parametrize(
    "trainer", ["musubi", "diffusion-pipe", "ai-toolkit", "simpletuner", "onetrainer"]
)
def test_sizes(trainer: str) -> None:
    for row in TABLES[f"{trainer} sizes"]:
        match trainer:
            case "musubi":
                resolution, clip, *wanted = row
                found = [
                    rules.area_buckets(
                        tuple(resolution), 16, SourceVideo(1, 1.0, *clip), 1
                    )
                ]
            case "diffusion-pipe":
                ratios, side, multiple, clip, *wanted = row
                found = [
                    rules.ratio_buckets(
                        side, ratios, multiple, SourceVideo(1, 1.0, *clip), 1
                    )
                ]
            case "ai-toolkit":
                side, multiple, clip, *wanted = row
                found = [
                    rules.within_area(side, multiple, SourceVideo(1, 1.0, *clip), 1)
                ]
            case "onetrainer":
                side, multiple, clip, *wanted = row
                found = [
                    rules.listed_aspects(side, multiple, SourceVideo(1, 1.0, *clip), 1)
                ]
            case _:
                clip, side, square, *wanted = row
                found = [
                    rules.source_ratio(
                        side, 64, square, edge, SourceVideo(1, 1.0, *clip), 1
                    )
                    for edge in (False, True)
                ]
        assert [list(size) for size in found] == wanted, row


WAN: ModelSpec = find("wan").spec
LTX: ModelSpec = find("ltx_video").spec
LTX_2: ModelSpec = find("ltx2").spec


def noise_of(
    trainer: str, values: dict[str, Any], bucket: tuple[int, int, int] = (1, 480, 832)
) -> list[float]:
    spec = LTX if trainer == "ltx-trainer" else WAN
    found = build_trainer_rules(trainer, values | DATASETS[trainer], spec).noise(bucket)
    assert isinstance(found, NoiseLevels), found
    return found.quantiles(0.05, 0.25, 0.5, 0.75, 0.95)


DATASETS: dict[str, dict[str, Any]] = {
    "musubi": {"dataset_config.datasets.0.video_directory": "clips"},
    "diffusion-pipe": {"dataset.directory.0.path": "clips"},
    "ai-toolkit": {"config.process.0.datasets.0.num_frames": 33},
    "finetrainers": {
        "dataset_config.datasets.0.video_resolution_buckets": [[49, 480, 832]]
    },
    "simpletuner": {"data_backend_config.0.dataset_type": "video"},
    "onetrainer": {"concepts.0.path": "clips"},
    "ltx-trainer": {"resolution_buckets": "768x512x49"},
}
"""What names a dataset of clips in each trainer's config."""


def test_noise_levels() -> None:
    """To 0.01: their draws are random, or lie on a table of 1000 steps."""
    for values, bucket, wanted in TABLES["musubi noise"]:
        assert noise_of("musubi", values, tuple(bucket)) == pytest.approx(
            wanted, abs=0.01
        ), values
    for values, bucket, wanted in TABLES["diffusion-pipe noise"]:
        flat = {f"model.{key}": value for key, value in values.items()}
        assert noise_of("diffusion-pipe", flat, tuple(bucket)) == pytest.approx(
            wanted, abs=0.01
        ), values
    for kind, shift, wanted in TABLES["ai-toolkit noise"]:
        if shift != 5.0:  # that of a model whose latents are 16 times smaller
            values = {"config.process.0.train.timestep_type": kind}
            assert noise_of("ai-toolkit", values) == pytest.approx(wanted, abs=0.01), (
                kind
            )
    for trainer in ("finetrainers", "simpletuner", "onetrainer"):
        for values, wanted in TABLES[f"{trainer} noise"]:
            assert noise_of(trainer, values) == pytest.approx(wanted, abs=0.01), (
                trainer,
                values,
            )
    for bucket, wanted in TABLES["ltx-trainer noise"]:
        assert noise_of("ltx-trainer", {}, tuple(bucket)) == pytest.approx(
            wanted, abs=0.01
        ), bucket


def ltx_2_noise(std: float = 1.0) -> NoiseLevels | str:
    values = DATASETS["ltx-trainer"] | {
        "flow_matching.timestep_sampling_params.std": std
    }
    levels = build_trainer_rules("ltx-trainer", values, LTX_2).noise((121, 512, 768))
    assert isinstance(levels, NoiseLevels | str)
    return levels


def test_noise_levels_of_ltx_2() -> None:
    """As two million draws of the law of its authors' trainer, for 6144 tokens."""
    levels = ltx_2_noise()
    assert isinstance(levels, NoiseLevels)
    mean = 0.95 + (2.05 - 0.95) * (6144 - 1024) / (4096 - 1024)
    random = np.random.default_rng(0)
    count = 2_000_000

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    low, high = sigmoid(mean - 2.5758), sigmoid(mean + 3.0902)
    drawn = (sigmoid(random.normal(mean, 1, count)) - low) / (high - low)
    drawn = np.where(drawn < 1e-3, 2e-3 - drawn, drawn).clip(0, 1)
    uniform = random.uniform(1e-3, 1, count)
    drawn = np.where(random.random(count) < 0.1, uniform, drawn)

    shares = (0.05, 0.25, 0.5, 0.75, 0.95)
    wanted = np.quantile(drawn, shares)
    assert levels.quantiles(*shares) == pytest.approx(wanted, abs=2e-3)
    assert isinstance(ltx_2_noise(std=0.5), str)
