"""Every way of saving memory, on the stand-in card: weights streamed, inputs offloaded,
blocks computed again.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.simcuda import card
from tests.simcuda.child import on_card
from tests.simcuda.lab import Lab, faults
from tests.support.tiny_networks import deepen
from videotune.memory import accelerator
from videotune.memory.block_offload import stream_blocks
from videotune.memory.quantization import QuantizedLinear
from videotune.models.registry import find
from videotune.types import WeightDtypes

ALONE = "alone"
"""A card without streams and pinned memory, as MPS is: there the host waits for copies.
"""
FRACTIONS = (0, 0.5, 1)
WAITS = {"FINE_TUNE 0.5": 2, "FINE_TUNE 1": 2}
"""Known waits of the host in a step: for the norm of gradients on the device, and
whether to update what is on the host.
"""


def stepped(folder: str, ways: dict[str, list[str]]) -> dict[str, Any]:
    """What the card sees of a run with each of these settings, of six blocks."""
    lab, seen = Lab(Path(folder)), {}
    for name, sets in ways.items():
        with ExitStack() as without:
            if name.startswith(ALONE):
                without.enter_context(patch.object(accelerator, "OVERLAPPING", ()))
            seen[name] = lab.steps(
                name, lab.words("wan", "train_dtype=FLOAT_32", *sets, blocks=6)
            )
    return seen


def freed(folder: str) -> list[int]:
    """Bytes of pinned memory before a streamed text encoder is loaded, while it is
    there, and when it is freed.
    """
    family = find("wan")(
        find("wan").tiny(Path(folder) / "wan"), torch.device("cuda"), torch.float32
    )
    family.stream_text = print
    found = [card.ops.pinned()]
    family.encode_text(["a red circle"])
    found.append(card.ops.pinned())
    family.free("text_encoder")
    return [*found, card.ops.pinned()]


def tables(folder: str) -> list[list[str]]:
    """The devices of NFLOAT_4's tables of a network that was streamed to the card, and
    of one on the CPU after it.
    """
    base, found = (
        deepen(find("wan").tiny(Path(folder) / "wan"), Path(folder) / "deep", 4),
        [],
    )
    for device in ("cuda", "cpu"):
        family = find("wan")(
            base, torch.device(device), torch.float32, WeightDtypes("NFLOAT_4", None)
        )
        net = family.denoiser(device=torch.device("cpu"))
        stream_blocks(net, family.spec.blocks, torch.device(device), 0.5)
        codes = {
            id(layer.code): layer.code
            for layer in net.modules()
            if isinstance(layer, QuantizedLinear)
        }
        found.append([code.device.type for code in codes.values()])
    return found


def test_a_freed_encoder_gives_its_pinned_memory_back(tmp_path: Path) -> None:
    before, during, after = on_card(freed, tmp_path)
    assert before == after < during


def test_a_table_on_the_card_is_no_other_networks(tmp_path: Path) -> None:
    """Each network has one for all of its layers."""
    assert on_card(tables, tmp_path) == [["cuda"], ["cpu"]]


def test_every_way_is_the_same_training(tmp_path: Path) -> None:
    """Its losses and norms are those of the resident one; memory does not grow."""
    ways = {
        f"{mode} {fraction}": [
            f"gradient_checkpointing={mode}",
            f"layer_offload_fraction={fraction}",
        ]
        for mode in ("OFF", "ON", "CPU_OFFLOADED", "IN_PARTS")
        for fraction in FRACTIONS
    } | {
        f"FINE_TUNE {part}": [
            "training_method=FINE_TUNE",
            f"layer_offload_fraction={part}",
        ]
        for part in FRACTIONS
    }
    streamed = ("CPU_OFFLOADED 0.5", "FINE_TUNE 0.5")
    seen = on_card(
        stepped, tmp_path, ways | {f"{ALONE} {name}": ways[name] for name in streamed}
    )
    wrong = {
        name: faults(one, WAITS.get(name, 0))
        for name, one in seen.items()
        if not name.startswith(ALONE)
    }
    assert [one["errors"] or one["raised"] for one in seen.values()] == [""] * len(seen)
    assert {name: told for name, told in wrong.items() if told} == {}
    for name, one in seen.items():
        if "FINE_TUNE" not in name:
            assert one["losses"] == seen["ON 0"]["losses"], name
        else:  # squares of streamed gradients are summed on the host, in another order
            for mine, resident in zip(
                one["losses"], seen["FINE_TUNE 0"]["losses"], strict=True
            ):
                assert mine == pytest.approx(resident, rel=1e-5), name
