"""Presets say which cards they are for, and why each of their values is what it is."""

import json

import pytest

from tests.support.command_line import run
from videotune.config import nested_keys
from videotune.errors import VideotuneError
from videotune.job.overrides import Overrides, resolve_config
from videotune.presets import shipped

THE_GUIDES = {"wan 2.2 LoRA": 12, "wan 2.2 Finetune": 180, "wan 2.2 Embedding": 16}
"""Named by the guide, which says no class; what is said of each says the GB."""


@pytest.mark.parametrize("name", shipped.preset_names())
def test_each_value_of_a_preset_has_its_reason(name: str) -> None:
    values, reasons = (
        nested_keys.flatten(shipped.read_preset(name)),
        shipped.preset_reasons(name),
    )
    assert set(values) == set(reasons)
    assert all(
        len(reason) > 10 and not reason.endswith(".") for reason in reasons.values()
    )


@pytest.mark.parametrize("name", shipped.preset_names())
def test_the_cards_a_preset_is_for_stand_in_its_name(name: str) -> None:
    """The toy trains anywhere; what is said beside it says the same number."""
    gb = shipped.memory_class(name)
    if name == "toy":
        assert gb is None
        return
    assert gb in (None, 8, 12, 16, 24, 32, 48, 80)
    assert (gb is None) == (name in THE_GUIDES)
    assert f"cards of {gb or THE_GUIDES[name]} GB" in shipped.preset_about(name)


def test_the_class_may_be_left_out() -> None:
    for name in shipped.preset_names():
        short = name.removesuffix(f" {shipped.memory_class(name)}GB")
        assert shipped.preset_named(short).startswith(short)
    assert shipped.preset_named("#wan 2.1 1.3b LoRA.json") == "wan 2.1 1.3B LoRA 16GB"
    assert shipped.preset_named("wan 2.2 LoRA") == "wan 2.2 LoRA"
    with pytest.raises(VideotuneError, match=r"did you mean .wan 2\.1 1\.3B LoRA 16GB"):
        shipped.read_preset("wan 2.1 1.3B LoRA 17GB")


def test_a_preset_is_shown_with_its_reasons_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The config alone on standard output, so that it can be saved."""
    assert run("presets", "show", "cogvideox 5B LoRA") == 0
    out, beside = capsys.readouterr()
    assert json.loads(out) == shipped.read_preset("cogvideox 5B LoRA 24GB")
    for key, reason in shipped.preset_reasons("cogvideox 5B LoRA 24GB").items():
        assert f"  {key} " in beside
        assert reason in " ".join(beside.split())


@pytest.mark.parametrize("preset", ["toy", None])
def test_a_resolved_config_names_its_preset(preset: str | None) -> None:
    sets = () if preset else ("base_model_name=asset:toy",)
    resolved, _, _ = resolve_config(Overrides(preset=preset, sets=sets))
    assert resolved.to_json()["preset"] == preset
    assert resolved.with_planned({"micro_batch_size": 2}).preset == preset
