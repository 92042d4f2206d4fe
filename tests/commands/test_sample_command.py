"""``sample``: from a run, from a LoRA file, from the base; the strength is a scale."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.shell import export, sample, train
from videotune.commands.sample import SampleOptions, named_by
from videotune.data.decode import decode
from videotune.data.media_info import probe
from videotune.errors import DONE, VideotuneError
from videotune.exporter.lora import export_lora
from videotune.models.registry import find
from videotune.trainer.checkpoint import last_checkpoint
from videotune.trainer.resolve_config import Overrides

SIZE = ("sample.frames=5", "sample.resolution=32x32", "sample.steps=3", "sample.guidance=1")


@pytest.fixture(scope="module")
def a_run(small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampled")
    sets = (f"base_model_name={tiny_bases('wan')}", f"cache_dir={folder / 'cache'}", "resolution=32x32", "steps=20")
    quiet = ("sample_after=0", "validate_every=0", "learning_rate=0.003", "warmup_steps=0", *SIZE)
    assert train(Overrides(data=str(small_clips), sets=(*sets, *quiet)), folder / "run") == DONE
    return folder / "run"


def drawn(words: SampleOptions, out: Path) -> np.ndarray:
    assert sample(words, out) == DONE
    facts = probe(next(out.glob("*.mp4")))
    return decode(facts, facts.timestamps, 32, 32).astype(int)


def test_a_run_and_its_file_draw_the_same_and_strength_0_is_the_base(
    a_run: Path, tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    base, prompts = str(tiny_bases("wan")), ("a red circle",)
    family = find("wan")(tiny_bases("wan"), torch.device("cpu"), torch.float32)
    state = last_checkpoint(a_run).load("weights")
    file = export_lora(family, "comfyui", state, 1.0, tmp_path / "lora.safetensors", {}).path
    from_run = drawn(SampleOptions(prompts, 3, run=a_run), tmp_path / "a")
    from_file = drawn(SampleOptions(prompts, 3, base=base, loras=(file,), sets=SIZE), tmp_path / "b")
    alone = drawn(SampleOptions(prompts, 3, base=base, sets=SIZE), tmp_path / "c")
    off = drawn(SampleOptions(prompts, 3, run=a_run, strength=0.0), tmp_path / "d")
    half = drawn(SampleOptions(prompts, 3, run=a_run, strength=0.5), tmp_path / "e")
    assert np.abs(from_run - from_file).max() <= 1
    assert np.abs(alone - off).max() <= 1
    assert np.abs(from_run - alone).mean() > 0.2
    assert 0.05 < np.abs(half - alone).mean() < np.abs(from_run - alone).mean()
    assert np.abs(half - from_run).mean() > 0.05


def test_words_that_do_not_say_what_to_draw(a_run: Path, tmp_path: Path) -> None:
    for words in (SampleOptions((), run=a_run), SampleOptions(("a",)), SampleOptions(("a",), run=a_run, base="x")):
        with pytest.raises(VideotuneError):
            sample(words, tmp_path)
    with pytest.raises(VideotuneError, match="no such LoRA file"):
        sample(SampleOptions(("a",), base="asset:toy", loras=(tmp_path / "none.safetensors",)), tmp_path)
    with pytest.raises(VideotuneError, match="no complete checkpoint of step 7; complete are those of the steps 20"):
        sample(SampleOptions(("a",), run=a_run, step=7), tmp_path)


def test_of_two_experts_files_a_sample_is_named_by_what_both_begin_with() -> None:
    from videotune.commands.sample import adapter_name

    files = (Path("mine_high_noise.safetensors"), Path("mine_low_noise.safetensors"))
    assert adapter_name(SampleOptions(("a",), base="x", loras=files)) == "mine-"
    assert adapter_name(SampleOptions(("a",), base="x", loras=files[:1])) == "mine_high_noise-"
    assert adapter_name(SampleOptions(("a",), base="x", loras=files, strength=0.5)) == "mine-strength-0.5-"
    assert adapter_name(SampleOptions(("a",), base="x")) == "base-"


@pytest.mark.parametrize("seed", [2**63, 10**30, -1])
def test_a_seed_of_more_than_63_bits_is_refused(seed: int, tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match="seed"):
        sample(SampleOptions(("a",), seed, base="asset:toy"), tmp_path)
    with pytest.raises(VideotuneError, match="seed"):
        sample(SampleOptions(("a",), base="asset:toy", sets=(f"sample.seed={seed}",)), tmp_path)


@pytest.mark.parametrize("prompt", ["a\0b", "a\x1b[31m", "a \ud800", "a" * 3_000_000])
def test_a_prompt_that_is_no_text_is_refused(prompt: str, tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match="--prompt"):
        sample(SampleOptions((prompt,), base="asset:toy"), tmp_path)


def test_a_sample_is_named_by_its_prompt_too() -> None:
    assert (
        named_by("step-000004-0123-seed42.mp4", "A cat, in the rain/..\n日本!")
        == "step-000004-0123-seed42-a-cat-in-the-rain.mp4"
    )
    assert named_by("step-000004-0123-seed42.mp4", "日本") == "step-000004-0123-seed42.mp4"
    assert len(named_by("x.mp4", "a" * 1000)) < 60


def test_a_lora_of_another_base_is_told(
    a_run: Path, tiny_bases: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the fingerprints in its header; nothing is said over the base that it was trained on."""
    assert export(a_run, ["diffusers"], out=tmp_path) == DONE
    (file,) = tmp_path.glob("*.safetensors")
    other = find("wan").tiny(tmp_path / "other", seed=5)
    for base, told in ((tiny_bases("wan"), False), (other, True)):
        capsys.readouterr()
        sample(SampleOptions(("a cat",), base=str(base), loras=(file,), sets=SIZE), tmp_path / "out")
        assert ("was trained on" in capsys.readouterr().err) == told
