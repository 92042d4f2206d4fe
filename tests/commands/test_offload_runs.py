"""Whole runs with blocks and inputs on the host: the same as the plain run, line by line and bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.safety_kit import Make, Work, resume
from tests.offload_kit import deepen
from tests.read_runs import assert_same_run, of_kind
from tests.shell import Bases, Patch, train
from videotune.errors import DONE
from videotune.trainer.resolve_config import Overrides
from videotune.validation import decoding


@pytest.fixture(scope="module")
def overrides(small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Make:
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
def decoded(monkeypatch: Patch) -> list[torch.Tensor]:
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
    "new-tokens": ("t2v", ("training_method=EMBEDDING", "learning_rate=0.01")),
    "one-expert-full": ("t2v-a14b", ("training_method=FINE_TUNE", "experts=low", "validate_every=0")),
}
STREAMED = ("layer_offload_fraction=0.5", "gradient_checkpointing=CPU_OFFLOADED")


LONG = ("full-bf16", "one-expert-full")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in RUNS])
def test_a_streamed_run_is_the_plain_run(name: str, work: Work, decoded: list[torch.Tensor]) -> None:
    """Losses, checkpoints, averages, previews and validation."""
    variant, sets = RUNS[name]
    plain, streamed = work.tmp / "plain", work.tmp / "streamed"
    assert train(work.overrides(*sets, variant=variant), plain) == DONE
    count = len(decoded)
    assert train(work.overrides(*sets, *STREAMED, variant=variant), streamed) == DONE
    assert_same_run(streamed, plain, 4)
    assert validations(streamed) == validations(plain)
    assert count == (0 if "sample_after=0" in sets else 2)
    assert len(decoded) == 2 * count
    assert all(torch.equal(one, other) for one, other in zip(decoded[:count], decoded[count:], strict=True))


@pytest.mark.parametrize(
    ("sets", "first", "then"),
    [
        (("lora.dropout=0.2", "ema.decay=0.9"), (), STREAMED),
        (("training_method=FINE_TUNE",), ("layer_offload_fraction=1",), ("layer_offload_fraction=0",)),
    ],
)
def test_a_resume_turns_streaming_on_and_off(
    sets: tuple[str, ...], first: tuple[str, ...], then: tuple[str, ...], work: Work
) -> None:
    sets, plain, run = (*sets, "sample_after=0", "validate_every=0"), work.tmp / "plain", work.run
    assert train(work.overrides(*sets), plain) == DONE
    assert train(work.overrides(*sets, "steps=2", *first), run) == DONE
    assert resume(run, "steps=4", *then) == DONE
    assert_same_run(run, plain, 4)
