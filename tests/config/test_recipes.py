"""Recipes by purpose: each resolves over each preset, gives its reasons, and trains."""

import re
from pathlib import Path

import pytest

from tests.support.command_line import Bases, run
from tests.support.run_results import steps_of
from videotune.config.load import read_config
from videotune.config.safe_views import LOW_RATE, SAFE_VIEWS
from videotune.data.source_videos import SOURCES_NEEDED
from videotune.errors import DONE, VideotuneError
from videotune.job.overrides import Overrides, resolve_config
from videotune.presets.recipes import (
    SMALL,
    config_of,
    display_name,
    find_model,
    models,
    preset_for,
    presets_of,
    recipes,
)
from videotune.presets.shipped import (
    memory_class,
    preset_card,
    preset_names,
    read_preset,
)

PRESETS = [
    name
    for name in preset_names()
    if read_preset(name).get("training_method", "LORA") == "LORA"
]


@pytest.mark.parametrize("purpose", recipes())
def test_a_recipe_resolves_over_every_preset_of_a_lora(
    tmp_path: Path, purpose: str
) -> None:
    for preset in PRESETS:
        path = tmp_path / "config.yaml"
        path.write_text(config_of(purpose, preset, "clips", 5, "ohwx: a\n#word"))
        config = resolve_config(Overrides(config=path), planning=True)[0].config
        views = recipes()[purpose]["small"]
        if config.learning_rate <= LOW_RATE:
            views = min(views, SAFE_VIEWS)
        assert config.epochs == views
        assert config.datasets[0].trigger == "ohwx: a\n#word"
        kept = read_preset(preset)
        assert (config.batch_size, config.resolution) == (
            kept["batch_size"],
            kept.get("resolution"),
        )


@pytest.mark.parametrize("purpose", recipes())
def test_every_value_has_a_reason_above_it(purpose: str) -> None:
    lines = config_of(purpose, "wan 2.2 LoRA", "clips", 5).splitlines()
    for place, line in enumerate(lines):
        if line and not line.strip().startswith("#") and not line.endswith(":"):
            assert lines[place - 1].strip().startswith("#"), line


def test_purposes_and_sizes_differ_in_what_they_set(tmp_path: Path) -> None:
    found = set()
    for purpose in recipes():
        for clips in (SMALL - 1, SMALL):
            path = tmp_path / "config.yaml"
            path.write_text(config_of(purpose, "wan 2.2 LoRA", "clips", clips))
            read = read_config(path)
            found.add(
                str(
                    {
                        key: read.get(key)
                        for key in (
                            "epochs",
                            "lora",
                            "timestep_mean",
                            "caption_dropout",
                        )
                    }
                )
            )
    assert len(found) == 2 * len(recipes())


def test_init_stays_within_the_views_that_are_safe_at_a_low_rate(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    low_rates = 0
    for purpose in recipes():
        path.write_text(config_of(purpose, "cogvideox 5B LoRA 24GB", "clips", 5))
        config = read_config(path)
        is_low = config["learning_rate"] <= LOW_RATE
        low_rates += is_low
        assert config["epochs"] <= (
            SAFE_VIEWS if is_low else recipes()[purpose]["small"]
        )
    assert low_rates >= 3, "other recipes have a rate of their own"


def test_prior_preservation_is_a_dataset_whose_target_is_the_base(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        config_of(
            "character", "wan 2.2 LoRA", "clips", 5, "ohwx", str(tmp_path / "dogs")
        )
    )
    config = resolve_config(Overrides(config=path), planning=True)[0].config
    assert [(one.path, one.kind) for one in config.datasets][1:] == [
        (str(tmp_path / "dogs"), "regularization")
    ]


def test_the_largest_preset_that_a_card_holds() -> None:
    assert preset_for("wan 2.2 A14B LoRA", 30) == "wan 2.2 A14B LoRA 24GB"
    assert preset_for("wan 2.2 A14B LoRA 12GB", 80) == "wan 2.2 A14B LoRA 12GB"
    assert preset_for("toy", 1) == "toy"
    for model, card in (("wan 2.2 A14B LoRA", 6), ("nothing like it", 24)):
        with pytest.raises(VideotuneError):
            preset_for(model, card)
    assert sum(map(len, models().values())) == len(preset_names())


@pytest.mark.parametrize(
    ("spelling", "model"),
    [
        ("wan 2.2 5B", "wan 2.2 LoRA"),
        ("Wan 2.2 TI2V-5B", "wan 2.2 LoRA"),
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "wan 2.2 LoRA"),
        ("wan 2.2 embedding", "wan 2.2 Embedding"),
        ("WAN 2.2 lora 8gb", "wan 2.2 LoRA 8GB"),
        ("CogVideoX 5B", "cogvideox 5B LoRA"),
        ("hunyuan-video 13B", "hunyuan 13B LoRA"),
        ("HunyuanVideo 1.5 I2V", "hunyuan 1.5 I2V LoRA"),
        ("Wan 2.1 VACE 14B", "wan 2.1 VACE 14B LoRA"),
        ("wan 2.1 1.3B", "wan 2.1 1.3B LoRA"),
        ("the demo", "toy"),
    ],
)
def test_a_model_is_found_by_any_spelling_that_fits_no_other(
    spelling: str, model: str
) -> None:
    assert find_model(spelling) == model


def test_each_name_in_the_list_of_presets_is_taken() -> None:
    for preset in preset_names():
        assert preset in presets_of(find_model(preset))
        assert display_name(preset) == display_name(
            presets_of(find_model(display_name(preset)))[0]
        )


@pytest.mark.parametrize(
    ("spelling", "near"),
    [
        ("wan 2.2", "wan 2.2 A14B LoRA"),
        ("ltx", "ltx 13B LoRA"),
        ("wna 2.2 lora", "wan 2.2 LoRA"),
        ("wna", "wan 2.2"),
        ("", "no model"),
    ],
)
def test_a_model_that_is_unclear_is_refused_with_the_near_ones(
    spelling: str, near: str
) -> None:
    with pytest.raises(VideotuneError, match=near):
        find_model(spelling)


def test_a_larger_card_gets_what_the_preset_names_for_it(tmp_path: Path) -> None:
    dtypes = {}
    for card in (12, 16, 24, None):
        path = tmp_path / f"{card}.yaml"
        path.write_text(config_of("style", "wan 2.2 LoRA", "clips", 5, card=card))
        dtypes[card] = read_config(path)["weight_dtype"]
    assert dtypes == {12: "FLOAT_8", 16: "auto", 24: "auto", None: "FLOAT_8"}


def test_clips_are_drawn_to_be_kept_aside_only_from_enough(tmp_path: Path) -> None:
    for clips, is_written in ((SOURCES_NEEDED - 1, False), (SOURCES_NEEDED, True)):
        path = tmp_path / f"{clips}.yaml"
        path.write_text(config_of("style", "toy", "clips", clips))
        assert ("validation_fraction" in read_config(path)) is is_written


@pytest.mark.parametrize(("preset", "clips"), [("toy", 5), ("wan 2.2 LoRA", 10)])
def test_intervals_fit_the_run(tmp_path: Path, preset: str, clips: int) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config_of("style", preset, "clips", clips))
    keys = read_config(path)
    for key in ("save_every", "sample_after", "validate_every"):
        assert key not in keys
        assert keys.get(f"{key}_epochs", 1) <= keys["epochs"] / 2
    assert keys["save_every_epochs"] > 0
    assert 3 * keys["validate_every_epochs"] < keys["epochs"], "enough for a verdict"
    assert keys.get("warmup_steps", 0) < clips * keys["epochs"] / keys["batch_size"]


def test_init_writes_a_config_that_trains_and_never_writes_over_one(
    tiny_bases: Bases,
    small_clips: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = {
        "purpose": "motion",
        "model": "wan 2.2 LoRA 8GB",
        "card": 24,
        "data": small_clips,
        "trigger": "ohwx",
    }
    with pytest.raises(VideotuneError):
        run("init", tmp_path / "a", **words | {"purpose": "motoin"})
    assert run("init", tmp_path / "a", **words) == DONE
    printed = " ".join(capsys.readouterr().err.split())
    assert 'config.yaml --card "24 GB"' in printed, (
        "planned for the card that was named"
    )
    assert f"--out {tmp_path / 'a' / 'a-1'}" in printed, "a name that no other has"
    with pytest.raises(VideotuneError):
        run("init", tmp_path / "a", **words)
    small = [
        "train_dtype=FLOAT_32",
        "weight_dtype=auto",
        "text_encoder.weight_dtype=auto",
        "resolution=32x32",
    ]
    small += [
        "layer_offload_fraction=0",
        "epochs=0.5",
        "sample_after=0",
        "sample_metrics.budget=0",
    ]
    base = [f"base_model_name={tiny_bases('wan')}", f"cache_dir={tmp_path / 'cache'}"]
    made = tmp_path / "a" / "config.yaml"
    assert (
        run(
            "train",
            config=made,
            set=[*small, *base],
            out=tmp_path / "run",
            allow_skips=1,
        )
        == DONE
    )
    assert steps_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("card", "preset"),
    [
        (8, "wan 2.2 LoRA 8GB"),
        (11, "wan 2.2 LoRA 8GB"),
        (12, "wan 2.2 LoRA"),
        (48, "wan 2.2 LoRA"),
    ],
)
def test_a_preset_without_a_card_in_its_name_has_one(card: int, preset: str) -> None:
    """The card that its description names, as the list of presets has it."""
    assert preset_for("wan 2.2 LoRA", card) == preset


def test_a_preset_whose_name_says_a_card_is_for_that_card() -> None:
    for name in preset_names():
        assert memory_class(name) in (None, preset_card(name))


def test_a_model_that_fits_several_is_answered_in_names_of_the_list() -> None:
    """With the cards of each, so that the names of `presets list` are found again."""
    with pytest.raises(VideotuneError) as refused:
        find_model("wan 2.2 A14B")
    named = re.findall(r"(wan [^(:,]+?) \(([\d GB,]+)\)", str(refused.value))
    assert len(named) > 1
    for model, cards in named:
        assert find_model(model) == model
        for card in cards.split(", "):
            assert f"{model} {card.replace(' ', '')}" in preset_names()


@pytest.mark.parametrize(
    ("preset", "sets", "is_noted"),
    [
        ("toy", [], True),
        ("hunyuan 1.5 LoRA 24GB", [], True),
        ("wan 2.1 1.3B LoRA 16GB", [], False),
        ("toy", ["base_model_name=asset:toy"], False),
    ],
)
def test_a_preset_beside_a_config_of_another_model_is_noted(
    small_clips: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    preset: str,
    sets: list[str],
    is_noted: bool,
) -> None:
    """Its values count, but the base model is that of the config."""
    path = tmp_path / "config.yaml"
    model = "wan 2.1 1.3B LoRA 16GB"
    path.write_text(config_of("style", model, str(small_clips), 5))
    run("check", path, preset=preset, set=sets)
    noted = f"not that of the preset {preset}" in capsys.readouterr().err
    assert noted is is_noted
