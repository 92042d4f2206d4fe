"""Optimizers, averages, adapters, weights in few bits, methods and experts, on the
stand-in card.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.simcuda import card
from tests.simcuda.child import on_card
from tests.simcuda.lab import Lab, faults, seen_by_card
from tests.support.command_line import train
from tests.support.run_results import complete, state
from videotune.config.optimizers import OPTIMIZERS
from videotune.errors import DONE
from videotune.trainer import saving

CLASSES = ("torch.optim:RAdam", "pytorch_optimizer:Lamb", "pytorch_optimizer:AggMo")
WAITS = {"host": 2, "ADAMW": 0, "PRODIGY": 65, "EMBEDDING": 3, "text encoder": 3}
"""Known waits of the host in a step: an average on the host; Prodigy's own; ids and
mask of captions that diffusers and transformers copy and look at.

An optimizer whose kernel cannot skip a step asks once whether the gradient is finite.
"""
NAMES = (*OPTIMIZERS, *CLASSES)
SETTINGS = {
    **{name: (f"optimizer.name={name}", "lora.rank=512") for name in NAMES},
    **{place: ("ema.decay=0.9", f"ema.device={place}") for place in ("device", "host")},
    **{
        variant: (f"lora.variant={variant}", "lora.rank=4")
        for variant in ("DORA", "LOHA", "LOKR", "OFT")
    },
    **{
        f"{kept} {fraction}": (
            f"weight_dtype={kept}",
            f"layer_offload_fraction={fraction}",
        )
        for kept in ("FLOAT_8", "INT_8", "NFLOAT_4")
        for fraction in (0, 1)
    },
    "EMBEDDING": ("training_method=EMBEDDING",),
    "text encoder": ("training_method=FINE_TUNE", "text_encoder.train=true"),
    "rounding": ("training_method=FINE_TUNE", "optimizer.masters=STOCHASTIC_ROUNDING"),
    "in backward": ("optimizer.step_in_backward=true",),
    "parts of a step": (
        "batch_size=2",
        "micro_batch_size=1",
        "gradient_accumulation_steps=2",
        "lora.dropout=0.1",
    ),
    "no threads": ("dataloader_threads=0",),
    "two experts": ("experts=both", "expert_period=2"),
}


def stepped(folder: str) -> dict[str, Any]:
    """What the card sees of a run with each of these settings."""
    lab, found = Lab(Path(folder)), {}
    for name, sets in SETTINGS.items():
        words = lab.words(
            "wan", *sets, variant="t2v-a14b" if name == "two experts" else None
        )
        found[name] = lab.steps(name.replace(" ", "-"), words)
    return found


def test_every_setting(tmp_path: Path) -> None:
    """No error, no growth, and no wait of the host that is not known."""
    seen = on_card(stepped, tmp_path)
    wrong = {
        name: faults(one, WAITS.get(name, int(name in NAMES)))
        for name, one in seen.items()
    }
    assert {name: told for name, told in wrong.items() if told} == {}
    assert len(set(seen["two experts"]["experts"])) == 2


def saved(folder: str) -> dict[str, Any]:
    """What the card sees of each checkpoint that is begun, and whether it is written
    later as it was then.
    """
    lab, waits, own = Lab(Path(folder)), list[list[str]](), saving.save
    run = Path(folder) / "run"

    def noted(*given: Any) -> None:
        saving.finish_pending_save(given[0])
        card.ops.waits()
        own(*given)
        waits.append(card.ops.waits())

    words = lab.words(
        "wan", "save_every=2", "ema.decay=0.9", "sample_after=0", "validate_every=0"
    )
    with seen_by_card() as seen, patch.object(saving, "save", noted):
        assert train(words, run) == DONE
    finite = [
        bool(value.isfinite().all())
        for step in complete(run)
        for value in state(run, step).values()
    ]
    return {
        "errors": seen.errors,
        "waits": waits,
        "finite": all(finite),
        "complete": complete(run),
    }


def test_a_checkpoint_is_copied_without_a_wait(tmp_path: Path) -> None:
    """What had not arrived would be NaN."""
    assert on_card(saved, tmp_path) == {
        "errors": [],
        "waits": [[]] * 3,
        "finite": True,
        "complete": [2, 4, 6],
    }
