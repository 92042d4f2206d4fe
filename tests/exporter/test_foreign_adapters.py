"""Adapter files of others: none claims more than a model has, and none loses a tensor
without a word.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.command_line import Printed
from tests.support.damaged_files import limited
from videotune.adapters.lora import ADAPTER
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import read_adapter, read_parts
from videotune.exporter.lora_inspect import inspect
from videotune.exporter.lora_target import Target
from videotune.exporter.lora_tools import convert, merge

Tensors = dict[str, torch.Tensor]
MODULE = "transformer.blocks.0.attn1.to_k"


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def loha(side: int) -> Tensors:
    return {
        f"{MODULE}.hada_w{number}_{part}": ones(*((side, 1) if part == "a" else (1, side)))
        for number in (1, 2)
        for part in "ab"
    }  # fmt: skip


HUGE: dict[str, Tensors] = {
    "LoKr of 128 TB": {f"{MODULE}.lokr_w1": ones(2000, 2000), f"{MODULE}.lokr_w2": ones(2000, 2000)},
    "LoKr of two factors": {f"{MODULE}.lokr_w1_a": ones(900, 1), f"{MODULE}.lokr_w1_b": ones(1, 900),
                            f"{MODULE}.lokr_w2": ones(900, 900)},
    "LoHa of 3 GB": loha(20_000),
    "OFT of one block": {f"{MODULE}.oft_R.weight": ones(1, 8000 * 7999 // 2)},
    "LoKr beyond 64 bits": {f"{MODULE}.lokr_w1": ones(3000, 1), f"{MODULE}.lokr_w2_a": ones(2**21, 1),
                            f"{MODULE}.lokr_w2_b": ones(1, 2**21)},
}  # fmt: skip
"""Files of at most some MB that claim updates of gigabytes."""

OTHER_SIZE: dict[str, Tensors] = {
    "LoHa": loha(9000),
    "OFT": {f"{MODULE}.oft_R.weight": ones(1, 1000 * 999 // 2)},
    "LoKr": {f"{MODULE}.lokr_w1": ones(90, 90), f"{MODULE}.lokr_w2": ones(100, 100)},
    "LoRA": {f"{MODULE}.lora_A.weight": ones(9000, 1), f"{MODULE}.lora_B.weight": ones(1, 9000)},
}  # fmt: skip
"""Files that no model of ours has room for, within the bounds."""


def readers(family: Any, path: Path, out: Path) -> dict[str, Callable[[], object]]:
    target = Target(out, "kohya", str(family.folder))
    net = family.denoiser()
    return {
        "inspect": lambda: inspect(path),
        "against": lambda: inspect(path, str(family.folder)),
        "convert": lambda: convert(path, target),
        "merge": lambda: merge([path, path], [], None, target),
        "init_from": lambda: read_parts(family, path),
        "sample": lambda: read_adapter(family, net, path, ADAPTER),
    }


@pytest.mark.parametrize("name", HUGE)
def test_a_claim_beyond_every_model_is_refused_at_once(
    name: str, family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(HUGE[name], path)
    for read in readers(family, path, tmp_path / "out.safetensors").values():
        with pytest.raises(VideotuneError), limited(5):
            read()


@pytest.mark.parametrize("name", OTHER_SIZE)
def test_shapes_are_compared_before_anything_is_computed(
    name: str, family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(OTHER_SIZE[name], path)
    found = readers(family, path, tmp_path / "out.safetensors")
    # The first reading also imports the library.
    with limited():
        assert found.pop("inspect")()
        assert found.pop("against")()
    for read in found.values():
        with pytest.raises(VideotuneError), limited(5):
            read()


@pytest.mark.parametrize("what", ["pipe", "socket folder"])
def test_a_pipe_is_refused_in_words(what: str, family: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    os.mkfifo(path)
    given = tmp_path if what == "socket folder" else path
    for name, read in readers(family, given, tmp_path / "o.safetensors").items():
        if name == "merge" and given.is_dir():
            continue  # the folder is the same file twice
        with pytest.raises(VideotuneError, match="named pipe"), limited(5):
            read()


NATIVE = "diffusion_model.blocks.0.self_attn"
PAIR = {f"{NATIVE}.q.lora_down.weight": ones(4, 24), f"{NATIVE}.q.lora_up.weight": ones(24, 4)}  # fmt: skip
LOST: dict[str, Tensors] = {
    "a norm": {f"{NATIVE}.norm_q.diff": ones(24) * 9},
    "a modulation": {f"{NATIVE}.q.diff_b": ones(24), "diffusion_model.blocks.0.diff_m": ones(1, 6, 24)},
    "a lone bias": {"diffusion_model.time_projection.1.diff_b": ones(144)},
}  # fmt: skip
"""Tensors of distilled LoRAs that diffusers' converter drops."""


@pytest.mark.parametrize("what", LOST)
def test_tensors_that_diffusers_drops_are_named(
    what: str, family: Any, tmp_path: Path, capsys: Printed
) -> None:
    path = tmp_path / "nine.safetensors"
    save_file(PAIR | LOST[what], path)
    read_adapter(family, family.denoiser(), path, ADAPTER)
    told = capsys.readouterr().err
    kept = {key for key in PAIR | LOST[what] if key.endswith(("q.diff_b", "weight"))}
    lost = set(LOST[what]) - kept
    assert f"{len(lost)} of {len(PAIR | LOST[what])} tensors" in told
    assert all(key in told for key in lost)

    save_file(PAIR | {f"{NATIVE}.q.diff_b": ones(24)}, path)
    read_adapter(family, family.denoiser(), path, ADAPTER)
    assert "left out" not in capsys.readouterr().err


def test_pefts_bias_is_scaled_as_its_factors_and_a_whole_bias_is_not(
    family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    inputs = ones(1, 24)
    for bias, expected in ((".lora_B.bias", 0.5 * 3.0), (".diff_b", 3.0)):
        prefix = (
            f"{NATIVE}.q" if bias == ".diff_b" else "transformer.blocks.0.attn1.to_q"
        )
        tensors = {
            f"{prefix}.lora_A.weight": ones(2, 24),
            f"{prefix}.lora_B.weight": ones(24, 2),
            f"{prefix}.alpha": torch.tensor(1.0),
            f"{prefix}{bias}": torch.full((24,), 3.0),
        }
        save_file(tensors, path)
        net = family.denoiser()
        read_adapter(family, net, path, ADAPTER)
        layer = net.get_submodule("blocks.0.attn1.to_q")
        off = layer(inputs) - layer.base_layer(inputs)
        torch.testing.assert_close(off, torch.full((1, 24), 0.5 * 48 + expected))


@pytest.mark.parametrize(
    "extra",
    [
        {"transformer.nothing.lora_A.weight": ones(2, 24), "transformer.nothing.lora_B.weight": ones(24, 2)},
        {"transformer.blocks.0.attn1.to_k.lora_B.bias": ones(24)},
        {"transformer.blocks.0.attn1.lora_embedding_A": ones(2, 2)},
        {"text_encoder.x.lora_A.weight": ones(2, 2)},
        {"transformer.blocks.0.attn1.to_q.dora_scale_of_bias": ones(24)},
    ],
    ids=["a module", "a lone bias", "an embedding", "a text encoder",
         "an unknown magnitude"],
)  # fmt: skip
def test_tensors_that_nothing_reads_are_refused(
    extra: Tensors, family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    good = {
        "transformer.blocks.0.attn1.to_q.lora_A.weight": ones(2, 24),
        "transformer.blocks.0.attn1.to_q.lora_B.weight": ones(24, 2),
    }
    save_file(good | extra, path)
    with pytest.raises(VideotuneError):
        read_adapter(family, family.denoiser(), path, ADAPTER)


def test_a_tensor_of_a_text_encoder_is_not_left_out(
    family: Any, tmp_path: Path
) -> None:
    """Diffusers' converter drops it: without it, all else draws otherwise."""
    path = tmp_path / "x.safetensors"
    save_file(PAIR | {"text_encoder.final_layer_norm.diff": ones(24)}, path)
    with pytest.raises(VideotuneError, match="is not a LoRA"):
        read_adapter(family, family.denoiser(), path, ADAPTER)


KEY = f"{MODULE}.lora_A.weight"
LORA = {KEY: ones(2, 24), f"{MODULE}.lora_B.weight": ones(24, 2)}
UNKNOWN = {name.replace("to_k", "to_x"): value for name, value in LORA.items()}
NO_EFFECT = {KEY: ones(2, 24), f"{MODULE}.lora_B.weight": ones(24, 2) * 0}
NO_LORA = {f"{MODULE}.lokr_w1": ones(4, 4), f"{MODULE}.lokr_w2": ones(6, 6)}
REFUSED: dict[str, tuple[Tensors, str]] = {
    "a module that the model lacks": (UNKNOWN, MODULE.replace("to_k", "to_x")),
    "a tensor of no module": (LORA | {"foo": ones(1)}, "foo"),
    "no effect": (NO_EFFECT, MODULE),
}
"""Files that are not LoRAs of the model, and the key of each that is to be named."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_not_a_lora_is_named_with_the_model_and_its_keys(
    name: str, family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    tensors, key = REFUSED[name]
    save_file(tensors, path)
    net = family.denoiser()
    for read in (
        lambda: read_parts(family, path),
        lambda: read_adapter(family, net, path, "read"),
    ):
        with pytest.raises(VideotuneError) as refused:
            read()
        message = str(refused.value)
        assert message.startswith(f"{path} is not a LoRA of {family.spec.title}: ")
        assert key in message.partition("it has the keys ")[2]
