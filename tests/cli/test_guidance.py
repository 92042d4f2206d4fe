"""What the command line says to somebody who does not know it yet: which model, which
card, which option, and what comes next.
"""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.cli.conftest import Run
from tests.support.clips import noise, write_clip
from videotune.captioning.offered_models import offered_models
from videotune.cli import init_questions
from videotune.cli.main import app
from videotune.config.base_models import (
    comfyui_files,
    download_size,
    has_pictures_only,
)
from videotune.files import read_json
from videotune.models import registry
from videotune.models.model_files import CONFIGS
from videotune.planner.preset_fits import CLASSES, best_preset, fit_of
from videotune.presets.recipes import find_model, models, motion_notes, suits_best
from videotune.presets.shipped import preset_card, preset_names, read_preset
from videotune.reporter.comfyui import base_model_step

ROOT = Path(__file__).parents[2]


# ---- captions


@pytest.mark.parametrize("text", ["rtx 3060", "no such card"])
def test_an_answer_to_a_question_is_given_no_option_as_advice(text: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        init_questions._card_answer(text)
    assert "--" not in str(refused.value)


def test_without_a_model_for_captions_the_offered_ones_are_named(
    videotune: Run, clips: Path
) -> None:
    code, _, error = videotune("caption", clips)
    assert code == 1
    for row in offered_models():
        assert f"--model {row['model']} (a download of {row['download_gb']:g}" in error
    assert "--endpoint URL --model NAME" in error


@pytest.mark.parametrize("page", ["README.md", "docs/captioning.md"])
def test_pages_name_models_for_captions_that_are_offered(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"Qwen/[\w.-]+", text))
    assert named
    assert named <= {row["model"] for row in offered_models()}


# ---- options


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "--steps", "50"), "steps is a setting: --set steps=50"),
        (("train", "--rank=8"), "rank is a setting: --set lora.rank=8"),
        (
            ("plan", "--learning-rate", "1e-4"),
            "learning_rate is a setting: --set learning_rate=1e-4",
        ),
        (
            ("check", "--learning-rat", "1e-4"),
            "did you mean the setting learning_rate: --set learning_rate=1e-4",
        ),
        (("sample", "--steps", "9"), "steps is a setting: --set sample.steps=9"),
        (("compare", "--steps=9"), "steps is a setting: --set sample.steps=9"),
        (("sample", "--shift", "3"), "shift is a setting: --set sample.shift=3"),
        (("plan", "--gpu", "4090"), "did you mean --card?"),
        (("train", "--output-dir", "x"), "did you mean --out?"),
    ],
)
def test_a_setting_or_another_name_given_as_an_option_is_explained(
    videotune: Run, words: tuple[str, ...], said: str
) -> None:
    command, *options = words
    code, _, error = videotune(command, "clips", *options)
    assert code == 1
    assert said in error
    assert "Possible options" not in error


@pytest.mark.parametrize("command", ["sample", "compare", "autopsy"])
def test_a_setting_that_cannot_act_in_a_command_is_not_advised(
    videotune: Run, command: str
) -> None:
    """What is drawn is trained already; autopsy takes the keys of another trainer."""
    code, _, error = videotune(command, "clips", "--learning-rate", "1e-4")
    assert code == 1
    assert "is a setting" not in error


def test_a_path_with_a_space_is_to_be_quoted(
    videotune: Run, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clips.parent)
    code, _, error = videotune("check", "my", "clips")
    assert code == 1
    assert 'in quotation marks: "my clips"' in error


def test_a_missing_folder_is_told_with_its_neighbours(
    videotune: Run, clips: Path
) -> None:
    code, _, error = videotune("check", clips.with_name("myclips"), "--preset", "toy")
    assert code == 1
    assert f"does not exist; did you mean '{clips}'?" in " ".join(error.split())


def test_help_names_no_type_behind_a_flag() -> None:
    printed = CliRunner().invoke(app, ["check", "--help"]).output
    flags = [line for line in printed.splitlines() if "--verbose" in line]
    assert flags
    assert "bool" not in printed.lower()


# ---- held-out clips


def test_a_folder_is_held_out_and_the_note_names_the_option(
    videotune: Run, clips: Path, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    for seed in (7, 8):
        clip = write_clip(others / f"o{seed}.mp4", noise(40, 64, 64, seed=seed), 16)
        clip.with_suffix(".txt").write_text("another clip")

    command = ("check", clips, "--preset", "toy", "--set", "datasets.trigger=ohwx")
    _, text, _ = videotune(*command)
    assert "--held-out FOLDER" in " ".join(text.split())
    accounts = []
    for held_out in ((), ("--held-out", others)):
        code, text, _ = videotune(*command, *held_out, "--json")
        assert code == 0
        accounts.append(json.loads(text))
    assert [row["held_out"] for row in accounts] == [0, 2]
    assert [row["used"] for row in accounts] == [3, 3]

    held_out_rows = [row for row in accounts[1]["clips"] if row["held_out"]]
    for row in held_out_rows:
        assert row["captions"] == ["ohwx, another clip"], (
            "read as the training clips are"
        )


# ---- rates far off


def test_a_lost_minus_sign_in_a_rate_is_noted_by_check_plan_and_train(
    videotune: Run, clips: Path, tmp_path: Path
) -> None:
    note = "note: learning_rate 10000 is 10,000,000 times the usual 0.001: the training"
    options = ["--preset", "toy"]
    cache = f"cache_dir={tmp_path / 'cache'}"
    for setting in ("learning_rate=1e4", "steps=1", "sample_after=0", cache):
        options += ["--set", setting]

    # The training comes first, as a note is not repeated on the same day.
    for command in (("train", "--out", tmp_path / "run"), ("check",), ("plan",)):
        _, text, error = videotune(command[0], clips, *command[1:], *options)
        assert note in " ".join((text + error).split()), command[0]


def test_a_usual_rate_is_not_noted(videotune: Run, clips: Path) -> None:
    for rate in ("0.003", "1e-4"):
        setting = ("--set", f"learning_rate={rate}")
        _, text, error = videotune("plan", clips, "--preset", "toy", *setting)
        assert "times the usual" not in text + error


# ---- what comes next


def test_check_and_plan_end_with_the_next_command(videotune: Run, clips: Path) -> None:
    options = ("--preset", "toy", "--set", "steps=20", "--allow-skips", "all")
    _, _, error = videotune("check", clips, *options)
    command = error.strip().splitlines()[-1].removeprefix("next: ")
    expected = ["videotune", "plan", str(clips), *options]
    assert shlex.split(command) == expected

    code, _, error = videotune(*shlex.split(command)[1:])
    assert code == 0
    command = error.strip().splitlines()[-1].removeprefix("next: ")
    assert shlex.split(command)[:3] == ["videotune", "train", str(clips)]
    assert "--out runs/first" in command

    _, text, error = videotune("check", clips, *options, "--json")
    assert "next:" not in text + error


# ---- base models


def test_every_base_model_has_a_size_and_the_plan_names_it(
    videotune: Run, clips: Path
) -> None:
    bases = {str(read_preset(name)["base_model_name"]) for name in preset_names()}
    bases.discard("asset:toy")
    assert [base for base in sorted(bases) if download_size(base) is None] == []
    assert download_size("asset:toy") is None

    preset = "wan 2.1 1.3B LoRA 16GB"
    _, text, _ = videotune("plan", clips, "--preset", preset, "--card", "rtx 4090")
    assert "base model: about 28.9 GB to download" in text
    _, text, _ = videotune(
        "plan", clips, "--preset", preset, "--card", "rtx 4090", "--json"
    )
    assert json.loads(text)["download"] == {"gigabytes": 28.9, "is_published": True}
    _, _, error = videotune("presets", "show", preset)
    assert "about 28.9 GB to download" in error


def test_least_sizes_are_those_of_the_weights() -> None:
    """Two bytes a number of networks and autoencoder, and a text encoder of 2 to 32 GB."""
    index = read_json(CONFIGS / "index.json")
    table = read_json(ROOT / "videotune" / "config" / "base_models.json")
    least = {
        name: row["weights_gb"] for name, row in table.items() if "weights_gb" in row
    }
    assert len(least) >= 10
    for name, gigabytes in least.items():
        manifest = read_json(ROOT / "tests" / "manifests" / f"{index[name]}.json")
        experts = len(manifest["family"]["spec"]["experts"])
        networks = experts * manifest["transformer"]["bytes_in_bfloat16"]
        known = (networks + manifest["vae"]["bytes_in_bfloat16"]) / 1e9
        assert known + 2 < gigabytes < known + 32, name


def test_the_base_model_of_a_workflow_is_named_with_its_usual_file() -> None:
    one = base_model_step("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    assert "`wan2.1_t2v_1.3B_fp16.safetensors`" in one
    assert "`ComfyUI/models/diffusion_models`" in one
    assert "`Load Diffusion Model` loads it" in one
    both = base_model_step("Wan-AI/Wan2.2-T2V-A14B-Diffusers@abc")
    assert re.search(r"high_noise.* and .*low_noise.*loads each of them", both)
    assert "`Load Checkpoint`" in base_model_step("Lightricks/LTX-Video")
    assert base_model_step("me/mine") == "The base model is me/mine."
    assert base_model_step("/here/x.safetensors").endswith("the file `x.safetensors`.")
    assert base_model_step("asset:toy") == ""
    for name in read_json(ROOT / "videotune" / "config" / "base_models.json"):
        for file in comfyui_files(name):
            assert re.fullmatch(
                r"(diffusion_models|checkpoints)/[\w.-]+\.safetensors", file
            )


# ---- which preset fits


def test_presets_are_marked_for_a_card_those_that_fit_first() -> None:
    runner = CliRunner()
    answer = runner.invoke(app, ["presets", "list", "--card", "4070", "--json"])
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    (table,) = result["tables"].values()
    fits = [row["on 12 GB cards"] for row in table]
    assert fits == sorted(
        fits, key=["fits", "is tight", "any machine", "does not fit"].index
    )
    by_preset = {row["preset"]: row for row in table}
    assert by_preset["ltx 2B LoRA 12GB"]["on 12 GB cards"] == "fits"
    assert by_preset["wan 2.2 Finetune"]["on 12 GB cards"] == "does not fit"
    assert "hour" in by_preset["ltx 2B LoRA 12GB"]["hours"]

    answer = runner.invoke(app, ["presets", "list", "--card", "rtx 5090", "--json"])
    assert result["fits"] != json.loads(answer.stdout)["fits"]


def test_the_list_for_a_card_needs_no_plan() -> None:
    code = (
        "import sys; from videotune.cli.main import app; "
        "app(['presets', 'list', '--card', '4070'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - begun < 30


def test_every_preset_fits_the_cards_that_it_is_made_for() -> None:
    for name in preset_names():
        gigabytes = preset_card(name)
        if gigabytes is None:
            assert fit_of(name, 24) is None
            continue
        assert fit_of(name, gigabytes).verdict, name  # type: ignore[union-attr]
        verdicts = [fit_of(name, size).verdict for size in CLASSES]  # type: ignore[union-attr]
        order = ["", "tight", "fits"]
        assert verdicts == sorted(verdicts, key=order.index), "a larger card fits too"


def test_a_card_gets_the_largest_preset_made_for_it_or_a_larger_that_fits() -> None:
    assert best_preset("wan 2.2 A14B LoRA", 24) == "wan 2.2 A14B LoRA 24GB"
    assert best_preset("wan 2.1 1.3B LoRA", 8) == "wan 2.1 1.3B LoRA 16GB"
    assert best_preset("wan 2.2 A14B LoRA", 0) == "wan 2.2 A14B LoRA 48GB"


def test_a_row_of_the_table_of_fits_is_what_the_plan_says_today(
    videotune: Run, clips: Path
) -> None:
    preset = "wan 2.1 1.3B LoRA 16GB"
    _, text, _ = videotune("plan", clips, "--preset", preset, "--vram", "12", "--json")
    fit = fit_of(preset, 12)
    assert fit is not None
    assert json.loads(text)["verdict"] == fit.verdict


# ---- the interview of init


def interview(folder: Path, *answers: str) -> str:
    """Answer the questions of init; what it printed."""
    lines = "".join(f"{answer}\n" for answer in answers)
    done = CliRunner().invoke(app, ["init", str(folder)], input=lines)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_card_is_asked_first_and_wrong_answers_are_asked_again(
    clips: Path, tmp_path: Path
) -> None:
    answers = ("12", "stile", "style", "", str(tmp_path / "nowhere"), str(clips), "")
    printed = interview(tmp_path / "work", *answers)
    order = ["The GPU", "What is to be learnt", "Which model", "Where are the clips"]
    positions = [printed.index(question) for question in order]
    assert positions == sorted(positions)
    assert "unknown purpose 'stile'" in printed
    assert printed.count("What is to be learnt?") == 2
    assert "there is no folder" in printed
    assert printed.count("Where are the clips?") == 2
    assert "next:" in printed
    assert f'plan {tmp_path / "work" / "config.yaml"} --card "12 GB"' in printed
    assert json.dumps(str(clips)) in (tmp_path / "work" / "config.yaml").read_text()


def test_the_models_that_fit_come_first_with_one_to_begin_with(
    clips: Path, tmp_path: Path
) -> None:
    default = init_questions.first_choice(12, "style")
    fit = fit_of(best_preset(default, 12), 12)
    assert fit is not None
    assert fit.verdict == "fits"
    printed = interview(tmp_path / "work", "12", "style", "", str(clips), "")
    assert f"Which model? [{default}]" in printed
    rows = printed.partition("download")[2].partition("Which model?")[0]
    assert rows.index("fits") < rows.index("does not fit")
    assert find_model(default) in models()
    # Another card, another choice.
    assert init_questions.first_choice(24, "style") != default


# ---- movements


@pytest.mark.parametrize("purpose", ["motion", "camera"])
def test_a_model_of_pictures_is_not_offered_for_a_movement(
    purpose: str, clips: Path, tmp_path: Path
) -> None:
    answers = ("12", purpose, "hidream", "", str(clips), "")
    printed = interview(tmp_path / "work", *answers)
    assert f"Not listed, as it generates single pictures without a {purpose}" in printed
    assert f"generates single pictures, so it learns no {purpose}" in printed
    assert printed.count("Which model?") == 2, "it is asked again"
    table = printed.partition("download")[2].partition("Not listed")[0]
    assert "hidream" not in table


def test_a_model_of_pictures_named_for_a_movement_is_refused(
    videotune: Run, clips: Path, tmp_path: Path
) -> None:
    options = ("--card", "24", "--model", "hidream", "--data", clips, "--trigger", "")
    words = ("init", tmp_path / "work", *options, "--purpose")
    code, _, error = videotune(*words, "motion")
    assert code == 1
    assert "generates single pictures, so it learns no motion" in error
    assert not (tmp_path / "work").exists()
    assert videotune(*words, "style")[0] == 0


@pytest.mark.parametrize("gigabytes", [8, 12, 16, 24, 48, 80])
def test_the_first_model_for_a_movement_keeps_its_speed(gigabytes: int) -> None:
    model = init_questions.first_choice(gigabytes, "motion")
    assert not motion_notes([best_preset(model, gigabytes)])


def test_models_of_pictures_are_marked() -> None:
    for preset in preset_names():
        base_model = str(read_preset(preset).get("base_model_name", ""))
        assert has_pictures_only(base_model) == preset.startswith("hidream")
    assert registry.find("hidream-i1-full").spec.rules.most_frames == 1


@pytest.mark.parametrize("command", ["check", "plan"])
def test_videos_for_a_model_of_pictures_are_noted(
    videotune: Run, clips: Path, command: str
) -> None:
    _, text, error = videotune(command, clips, "--preset", "hidream LoRA 24GB")
    printed = " ".join((text + error).split())
    assert "HiDream-I1 Full generates single pictures: it learns from single" in printed


def test_the_card_of_the_driver_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    from videotune.studio import gpu

    def card(name: str, gigabytes: float) -> gpu.Gpu:
        return gpu.Gpu(0, name, 0, int(gigabytes * 2**30), None, None, None)

    for cards, offered in (
        ([], ""),
        ([card("NVIDIA GeForce RTX 4090", 23.99)], "RTX 4090"),
        ([card("A card of tomorrow", 31.8)], "32 GB"),
    ):
        monkeypatch.setattr(gpu, "list_gpus", lambda cards=cards: cards)
        assert init_questions.card_here() == offered


@pytest.mark.parametrize("gigabytes", [0, 8, 16, 24])
def test_the_models_that_suit_the_purpose_are_listed_first(gigabytes: int) -> None:
    for purpose in ("motion", "style"):
        listed = init_questions._suiting_first(gigabytes, purpose)
        assert sorted(listed) == sorted(models())
        assert listed[-1] == "toy"
        assert suits_best(best_preset(listed[0], gigabytes), purpose)

    default = init_questions.first_choice(gigabytes, "motion")
    assert suits_best(best_preset(default, gigabytes), "motion")


def test_a_movement_wants_text_to_video_at_its_own_speed() -> None:
    assert suits_best("wan 2.1 1.3B LoRA 16GB", "motion")
    assert suits_best("wan 2.2 LoRA 8GB", "style")
    assert not suits_best("wan 2.2 LoRA 8GB", "motion"), "it changes the speed"
    assert not suits_best("wan 2.1 I2V 14B LoRA 48GB", "style")
    assert not suits_best("hidream LoRA 16GB", "style")


@pytest.mark.parametrize("name", ["rtx 4091", "4060 ti"])
def test_an_unclear_card_is_answered_with_an_option_of_every_command(
    videotune: Run, clips: Path, name: str
) -> None:
    """One that is unknown, and one that has several memories."""
    for words in (("presets", "list"), ("plan", clips, "--preset", "toy")):
        code, _, error = videotune(*words, "--card", name)
        assert code == 1
        assert "--vram" not in error
        memory = re.search(r"--card (\d+)", error)
        assert memory
        assert videotune("presets", "list", "--card", memory[1])[0] == 0
