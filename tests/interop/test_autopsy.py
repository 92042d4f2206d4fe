"""videotune autopsy: what other trainers make of clips, on synthetic clips whose
outcome is known and on real ones.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.command_line import Printed, run
from videotune.errors import DONE, VideotuneError
from videotune.interop.autopsy import build_autopsy, clip_outcomes, steps_per_epoch
from videotune.interop.trainer_rules import build_trainer_rules
from videotune.models.registry import find

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "autopsy.schema.json"
WAN = find("wan").spec
MUSUBI = {
    "network_dim": 32, "network_alpha": 16, "timestep_sampling": "shift", "discrete_flow_shift": 12.0,
    "dataset_config.general.resolution": [832, 480], "dataset_config.datasets.0.video_directory": "clips",
    "dataset_config.datasets.0.target_frames": [33], "dataset_config.datasets.0.num_repeats": 2,
}  # fmt: skip


def clip(
    name: str, frames: int, fps: float, size: tuple[int, int] = (832, 480)
) -> dict[str, Any]:
    """A row of `videotune check --json`."""
    source = {
        "source_frames": frames,
        "source_fps": fps,
        "source_seconds": frames / fps,
    }
    return {
        "path": name,
        **source,
        "width": size[0],
        "height": size[1],
        "used": True,
        "reason": None,
        "windows": 1,
        "shape": "33x480x832",
        "speed": 1.0,
    }


def account(*clips: dict[str, Any]) -> dict[str, Any]:
    return {
        "clips": clips,
        "used": len(clips),
        "held_out": 0,
        "skipped": 0,
        "buckets": [],
    }


OURS = {"steps_per_epoch": 1.0, "noise": [0.1, 0.3, 0.5, 0.7, 0.9], "scale": 1.0}


def result(
    trainer: str, values: dict[str, Any], *clips: dict[str, Any]
) -> dict[str, Any]:
    return build_autopsy(
        trainer,
        build_trainer_rules(trainer, values, WAN),
        WAN,
        account(*clips),
        OURS,
        [],
    )


def kinds(found: dict[str, Any]) -> set[str]:
    return {one["kind"] for one in found["findings"]}


def test_a_clip_at_another_rate_plays_at_another_speed_unless_it_is_resampled() -> None:
    found = result("musubi", MUSUBI, clip("a.mp4", 96, 24.0), clip("b.mp4", 64, 16.0))
    speeds = [row["theirs"][0]["speed"] for row in found["clips"]]
    assert speeds == pytest.approx([16 / 24, 1.0])
    assert "speed" in kinds(found)
    kept = result(
        "musubi",
        MUSUBI | {"dataset_config.datasets.0.source_fps": 24.0},
        clip("a.mp4", 96, 24.0),
    )
    assert kept["clips"][0]["theirs"][0]["speed"] == pytest.approx(1.0, abs=0.02)
    assert "speed" not in kinds(kept)


SQUEEZED = {
    "config.process.0.datasets.0.folder_path": "clips",
    "config.process.0.datasets.0.num_frames": 33,
    "config.process.0.datasets.0.resolution": [480],
}


def texts(found: dict[str, Any]) -> dict[str, str]:
    return {one["kind"]: one["text"] for one in found["findings"]}


def test_the_conclusion_says_what_the_table_says() -> None:
    """Of speed and of size, as the config makes videotune's."""
    fast = clip("fast.mp4", 98, 16.0) | {"speed": 3.0}
    found = texts(result("ai-toolkit", SQUEEZED, fast))
    assert "speed" not in found, "both squeeze it"
    assert "fast.mp4 at 3.00 x" in found["stretch"]
    assert "480x832" not in str(found)
    assert "832x480 here, " in found["size"]

    slow = clip("slow.mp4", 98, 16.0) | {"speed": 1.0, "shape": "33x352x608"}
    found = texts(result("ai-toolkit", SQUEEZED, slow))
    assert "in videotune at 1.00 x" in found["speed"]
    assert not {"stretch", "size"} & set(found)


def test_short_clips_are_dropped_and_named() -> None:
    found = result(
        "musubi", MUSUBI, clip("short.mp4", 20, 16.0), clip("long.mp4", 40, 16.0)
    )
    assert (found["theirs"]["used"], found["theirs"]["dropped"]) == (1, 1)
    assert "short.mp4" in next(
        one["text"] for one in found["findings"] if one["kind"] == "dropped"
    )


def test_a_clip_that_only_they_use_is_named_and_has_no_speed_here() -> None:
    lost = clip("lost.mp4", 98, 8.0) | {
        "used": False,
        "reason": "missing_caption",
        "windows": 0,
        "speed": None,
    }
    found = texts(result("ai-toolkit", SQUEEZED, lost, clip("kept.mp4", 98, 16.0)))
    assert "1 of 2 clips dropped by videotune alone, as lost.mp4" in found["dropped"]
    assert "lost.mp4" not in found.get("speed", "")


def test_alpha_and_noise_levels_are_laid_beside_ours() -> None:
    found = result("musubi", MUSUBI, clip("a.mp4", 64, 16.0))
    assert found["theirs"]["scale"] == 0.5
    assert found["theirs"]["noise"][2] == pytest.approx(
        12 / 13, abs=1e-3
    )  # 12·0.5 / (1 + 11·0.5)
    assert {"alpha", "noise"} <= kinds(found)
    ignored = result(
        "musubi", MUSUBI | {"timestep_sampling": "sigmoid"}, clip("a.mp4", 64, 16.0)
    )
    assert ignored["theirs"]["noise"][2] == pytest.approx(
        0.5, abs=1e-3
    )  # the shift is not read


def test_a_file_without_alpha_is_read_at_another_scale() -> None:
    values = {
        "rank": 128,
        "lora_alpha": 64,
        "dataset_config.datasets.0.video_resolution_buckets": [[33, 480, 832]],
    }
    found = result("finetrainers", values, clip("a.mp4", 99, 16.0))
    assert (found["theirs"]["scale"], found["theirs"]["read_scale"]) == (0.5, 1.0)
    assert {"scale", "speed"} <= kinds(found)  # 99 frames pressed into 33
    assert found["clips"][0]["theirs"][0]["speed"] == pytest.approx(98 / 32)


def test_held_frames_stretched_and_cut_pictures_are_named() -> None:
    held = result(
        "onetrainer", {"frames": 49, "concepts.0.path": "x"}, clip("a.mp4", 25, 16.0)
    )
    assert held["clips"][0]["theirs"][0]["held"] == pytest.approx(1 - 24 / 49)
    wide = {"dataset_config.datasets.0.video_resolution_buckets": [[33, 480, 480]]}
    stretched = result("finetrainers", wide, clip("a.mp4", 33, 16.0))
    assert stretched["clips"][0]["theirs"][0]["stretch"] == pytest.approx(480 / 832)
    square = {
        "dataset.directory.0.path": "x",
        "dataset.frame_buckets": [33],
        "dataset.resolutions": [480],
    }
    cut = result("diffusion-pipe", square, clip("a.mp4", 40, 16.0))
    assert cut["clips"][0]["theirs"][0]["cut"] == pytest.approx(1 - 480 / 832)
    assert "held" in kinds(held)
    assert "stretch" in kinds(stretched)
    assert "cut" in kinds(cut)


@pytest.mark.parametrize(
    ("trainer", "values", "steps"),
    [
        # 3 clips twice, the rest kept
        ("musubi", MUSUBI | {"dataset_config.datasets.0.batch_size": 4}, 2),
        ("diffusion-pipe", {"dataset.directory.0.path": "x", "dataset.frame_buckets": [33], "dataset.num_repeats": 2,
                            "micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, 1),
        ("ai-toolkit", {"config.process.0.datasets.0.num_frames": 33, "config.process.0.train.batch_size": 2}, 2),
        ("simpletuner", {"data_backend_config.0.dataset_type": "video", "data_backend_config.0.video.num_frames": 33,
                         "train_batch_size": 2}, 2),
        ("onetrainer", {"frames": 33, "concepts.0.path": "x", "batch_size": 2}, 1),
    ],
)  # fmt: skip
def test_steps_of_an_epoch_are_those_of_their_batches(
    trainer: str, values: dict[str, Any], steps: int
) -> None:
    applied = build_trainer_rules(trainer, values, WAN)
    clips = [clip(f"{i}.mp4", 41, 16.0) for i in range(3)]
    found = {
        row["path"]: [
            found for one in applied.datasets for found in clip_outcomes(one, row, 16.0)
        ]
        for row in clips
    }
    assert steps_per_epoch(applied, found) == steps


def test_a_config_without_clips_and_a_value_that_is_none_are_refused() -> None:
    with pytest.raises(VideotuneError, match="no dataset of clips"):
        build_trainer_rules("musubi", {"network_dim": 32}, WAN)
    with pytest.raises(VideotuneError, match="network_dim"):
        build_trainer_rules("musubi", MUSUBI | {"network_dim": "many"}, WAN)
    with pytest.raises(VideotuneError, match="kohya"):
        build_trainer_rules("kohya", {}, WAN)


def written(folder: Path) -> list[Path]:
    data, script = folder / "data.toml", folder / "run.sh"
    lines = [
        "[general]",
        "resolution = [64, 64]",
        "[[datasets]]",
        'video_directory = "x"',
        "target_frames = [9, 17]",
    ]
    data.write_text("\n".join(lines))
    script.write_text("python wan_train_network.py --task t2v-1.3B --dit x.safetensors --network_module "
                      "networks.lora_wan --network_dim 8 --dataset_config data.toml\n")  # fmt: skip
    return [script]


def test_the_command_prints_and_gives_json(
    small_clips: Path, tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    files = written(tmp_path)
    assert run("autopsy", *files, data=small_clips, as_json=True) == DONE
    found = json.loads(capsys.readouterr().out)
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(found)
    assert found["trainer"] == "musubi"
    assert (
        found["theirs"]["used"] + found["theirs"]["dropped"] == len(found["clips"]) > 0
    )
    assert run("autopsy", *files, data=small_clips) == DONE
    short = capsys.readouterr().out
    assert all(one["text"] in short for one in found["findings"])
    assert not any(row["path"] in short for row in found["clips"][1:])
    assert run("autopsy", *files, data=small_clips, verbose=True) == DONE
    text = capsys.readouterr().out
    assert all(row["path"] in text.replace("\n", "") for row in found["clips"])
    assert (
        run(
            "autopsy",
            *files,
            data=small_clips,
            set="dataset_config.datasets.0.target_frames=999",
            as_json=True,
        )
        == DONE
    )
    assert json.loads(capsys.readouterr().out)["theirs"]["used"] == 0


def test_a_dataset_file_alone_needs_the_name_of_a_model(
    small_clips: Path, tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_HUB_OFFLINE", "VIDEOTUNE_OFFLINE"):
        monkeypatch.setenv(variable, "1")  # put back after the test
    data = written(tmp_path)[0].with_name("data.toml")
    with pytest.raises(VideotuneError, match="--base"):
        run("autopsy", data, data=small_clips)
    assert (
        run(
            "autopsy",
            data,
            data=small_clips,
            base="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            offline=True,
        )
        == DONE
    )
    assert "musubi" in capsys.readouterr().out


@pytest.mark.parametrize(
    "odd", ["network_dim=0", "network_dim=1000000000", "dataset_config.datasets.0.target_frames=100000000",
            "dataset_config.datasets.0.resolution=[a,b]", "dataset_config.datasets.0.resolution=0",
            "sigmoid_scale=-1", "dataset_config.datasets.0.batch_size=0",
            "dataset_config.datasets.0.target_frames=[[1,2],[3,4]]"],
)  # fmt: skip
def test_values_that_no_trainer_takes_are_one_sentence(
    small_clips: Path, tmp_path: Path, odd: str
) -> None:
    with pytest.raises(VideotuneError):
        run(
            "autopsy",
            *written(tmp_path),
            "--set",
            "timestep_sampling=sigmoid",
            data=small_clips,
            set=odd,
        )


def test_nothing_is_written_where_their_config_says(
    small_clips: Path, tmp_path: Path
) -> None:
    script, elsewhere = written(tmp_path)[0], tmp_path / "elsewhere"
    data = script.with_name("data.toml")
    data.write_text(data.read_text() + f'\ncache_directory = "{elsewhere}"')
    assert run("autopsy", script, data=small_clips) == DONE
    assert not elsewhere.exists()
    with pytest.raises(VideotuneError, match="--set network_dim: pass KEY=VALUE"):
        run("autopsy", script, data=small_clips, set="network_dim")


def test_a_size_bucket_that_is_never_used_or_serves_another_ratio_is_named() -> None:
    """Their buckets are ordered by length and their ratios by value."""
    where = {"dataset.directory.0.path": "x"}
    same_ratio = {"dataset.size_buckets": [[640, 640, 25], [640, 640, 65], [832, 480, 33]]}  # fmt: skip
    found = result("diffusion-pipe", where | same_ratio, clip("a.mp4", 90, 16.0))
    assert found["theirs"]["buckets"] == {"33x480x832": 1}
    texts = [one["text"] for one in found["findings"] if one["kind"] == "bucket"]
    assert len(texts) == 1
    assert "640x640x25" in texts[0]

    swapped = {"dataset.size_buckets": [[512, 512, 33], [832, 480, 81], [480, 832, 49]]}
    found = result("diffusion-pipe", where | swapped, clip("a.mp4", 90, 16.0))
    assert found["theirs"]["buckets"] == {"33x512x512": 1}
    (text,) = [one["text"] for one in found["findings"] if one["kind"] == "bucket"]
    assert "512x512x33 for ratio 1.73" in text

    ordered = {"dataset.size_buckets": [[480, 832, 81], [832, 480, 33]]}
    found = result("diffusion-pipe", where | ordered, clip("a.mp4", 90, 16.0))
    assert "bucket" not in kinds(found)
    assert found["theirs"]["buckets"] == {"33x480x832": 1}


@pytest.mark.parametrize(("steps", "passes"), [(2, 4), (4, 2), (4, 1), (1, 4)])
def test_of_two_keys_of_accumulation_ai_toolkit_takes_the_larger(
    steps: int, passes: int
) -> None:
    values = {
        "config.process.0.datasets.0.num_frames": 33,
        "config.process.0.train.gradient_accumulation_steps": steps,
        "config.process.0.train.gradient_accumulation": passes,
    }
    rules = build_trainer_rules("ai-toolkit", values, WAN)
    assert rules.accumulation == max(steps, passes)
