"""Whole runs with blocks and inputs on the host: the same as the plain run, line by line and bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.safety_kit import Make, assert_same_run, of_kind, resume
from tests.offload_kit import deepen
from tests.shell import train
from videotune.errors import DONE, VideotuneError
from videotune.trainer.resolve_config import Overrides
from videotune.validation import decoding


@pytest.fixture(scope="module")
def overrides(small_clips: Path, tiny_bases: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Words of a run of four steps on a tiny base of six blocks; everything that a run does happens in it."""
    folder = tmp_path_factory.mktemp("deep")
    bases = {variant: deepen(tiny_bases("wan", variant), folder / variant, blocks=4) for variant in ("t2v", "t2v-a14b")}
    fixed = (
        f"cache_dir={folder / 'cache'}", "resolution=32x32", "steps=4", "save_every=2", "warmup_steps=0", "samples=1",
        "sample_after=4", "sample.steps=2", "sample.guidance=1", "validate_every=4",
        "dataloader_threads=0", "learning_rate=0.001",
    )  # fmt: skip

    def make(*sets: str, variant: str = "t2v") -> Overrides:
        return Overrides(data=str(small_clips), sets=(*fixed, f"base_model_name={bases[variant]}", *sets))

    return make


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The latents of every preview, in order: the encoder of the files themselves does not give the same bits twice."""
    seen: list[torch.Tensor] = []

    def keep(family: Any, latents: list[torch.Tensor], tiled: bool) -> Any:
        seen.extend(latents)
        return decode(family, latents, tiled)

    decode = decoding.decode
    monkeypatch.setattr(decoding, "decode", keep)
    return seen


def validations(run: Path) -> list[Any]:
    return [{k: v for k, v in line.items() if k not in ("seconds", "time")} for line in of_kind(run, "validation")]


RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lora": ("t2v", ("lora.dropout=0.2", "ema.decay=0.9")),
    "full": ("t2v", ("training_method=FINE_TUNE", "ema.decay=0.9")),
    "full-bf16": ("t2v", ("training_method=FINE_TUNE", "train_dtype=BFLOAT_16", "sample_after=0", "validate_every=0")),
    "two-experts": ("t2v-a14b", ("expert_period=2", "validate_every=0")),
    "one-expert-full": ("t2v-a14b", ("training_method=FINE_TUNE", "experts=low", "validate_every=0")),
}
STREAMED = ("layer_offload_fraction=0.5", "gradient_checkpointing=CPU_OFFLOADED")


LONG = ("full-bf16", "one-expert-full")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in RUNS])
def test_a_streamed_run_is_the_plain_run(
    name: str, overrides: Make, tmp_path: Path, decoded: list[torch.Tensor]
) -> None:
    """Losses, checkpoints, averages, previews and validation."""
    variant, sets = RUNS[name]
    plain, streamed = tmp_path / "plain", tmp_path / "streamed"
    assert train(overrides(*sets, variant=variant), plain) == DONE
    count = len(decoded)
    assert train(overrides(*sets, *STREAMED, variant=variant), streamed) == DONE
    assert_same_run(streamed, plain, 4)
    assert validations(streamed) == validations(plain)
    assert count == (0 if "sample_after=0" in sets else 2)
    assert len(decoded) == 2 * count
    assert all(torch.equal(one, other) for one, other in zip(decoded[:count], decoded[count:], strict=True))


def test_new_tokens_learn_through_streamed_blocks(overrides: Make, tmp_path: Path) -> None:
    """Nothing in the denoiser trains; gradients pass through it to the text encoder's new rows, to the bit."""
    sets = ("training_method=EMBEDDING", "sample_after=0", "validate_every=0", "learning_rate=0.01", "steps=3")
    assert train(overrides(*sets, "layer_offload_fraction=0"), tmp_path / "plain") == DONE
    for fraction in (0.5, 1.0):
        run = tmp_path / f"streamed-{fraction}"
        assert train(overrides(*sets, f"layer_offload_fraction={fraction}"), run) == DONE
        assert_same_run(run, tmp_path / "plain", 3)


@pytest.mark.parametrize(
    ("sets", "first", "then"),
    [
        (("lora.dropout=0.2", "ema.decay=0.9"), (), STREAMED),
        (("training_method=FINE_TUNE",), ("layer_offload_fraction=1",), ("layer_offload_fraction=0",)),
    ],
)
def test_a_resume_turns_streaming_on_and_off(
    sets: tuple[str, ...], first: tuple[str, ...], then: tuple[str, ...], overrides: Make, tmp_path: Path
) -> None:
    sets, plain, run = (*sets, "sample_after=0", "validate_every=0"), tmp_path / "plain", tmp_path / "run"
    assert train(overrides(*sets), plain) == DONE
    assert train(overrides(*sets, "steps=2", *first), run) == DONE
    assert resume(run, "steps=4", *then) == DONE
    assert_same_run(run, plain, 4)


def test_what_cannot_update_weights_on_the_host_is_refused(overrides: Make, tmp_path: Path) -> None:
    settings = overrides("training_method=FINE_TUNE", "layer_offload_fraction=0.5", "optimizer=ADAMW_8BIT")
    with pytest.raises(
        VideotuneError, match=r"optimizer\.name: ADAMW_8BIT does not update weights that wait on the host"
    ):
        train(settings, tmp_path / "run")
