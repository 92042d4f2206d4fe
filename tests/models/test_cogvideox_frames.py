"""Frames that see themselves and the text alone, against diffusers' own attention under a mask; tokenizer files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.cogvideox_kit import SHAPES, batch_for, opened
from videotune.models.cogvideox import CogVideoX

Bases = Callable[[str], Path]
EACH = pytest.mark.parametrize("variant", CogVideoX.variants)


class Masked:
    """diffusers' own attention under a dense mask: the plain and slow way to say the same."""

    def __init__(self, usual: Any, frames: int) -> None:
        self.usual, self.frames = usual, frames

    def __call__(
        self, attn: nn.Module, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor,
        attention_mask: None = None, image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        text, video = encoder_hidden_states.shape[1], hidden_states.shape[1]
        of = torch.cat([torch.full((text,), -1), torch.arange(video) // (video // self.frames)])
        sees = (of[:, None] == of[None, :]) | (of[None, :] == -1)
        mask = torch.where(sees, 0.0, -torch.inf)[None].repeat(len(hidden_states), 1, 1)
        return self.usual(attn, hidden_states, encoder_hidden_states, mask, image_rotary_emb)


def predicted(family: Any, net: nn.Module, batch: Any, x_t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return family.predict(net, x_t, torch.full((len(x_t),), 0.4), batch)


@EACH
def test_isolated_frames_are_a_mask_in_diffusers_own_attention(variant: str, cog_bases: Bases) -> None:
    family = opened(cog_bases(variant))
    for shape in SHAPES[variant]:
        batch = batch_for(family, shape, ["a", "b"], image=True)
        net, x_t = family.denoiser(), torch.randn_like(batch.x0)
        usual = predicted(family, net, batch, x_t)
        family.isolate_frames(net, True)
        isolated = predicted(family, net, batch, x_t)
        family.isolate_frames(net, False)
        assert torch.equal(predicted(family, net, batch, x_t), usual), "turned off, all is as it was, bit for bit"
        frames = -(-x_t.shape[2] // family.spec.patch[0])
        for block in net.transformer_blocks:
            block.attn1.set_processor(Masked(block.attn1.processor, frames))
        torch.testing.assert_close(isolated, predicted(family, net, batch, x_t), rtol=1e-4, atol=1e-5)
        assert (isolated - usual).abs().max() > 1e-4, "text no longer sees the video, even of one frame"


@pytest.fixture
def published_tokenizer(cog_bases: Bases, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer comes as the published ones do: a sentencepiece model, and no tokenizer.json."""
    import sentencepiece

    folder = shutil.copytree(cog_bases("5b"), tmp_path / "published")
    shutil.rmtree(folder / "tokenizer")
    (folder / "tokenizer").mkdir()
    letters = "".join(map(chr, range(97, 123)))
    (tmp_path / "text.txt").write_text("\n".join(letters[i:] + " " + letters[:i] + " red circle" for i in range(26)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(folder / "tokenizer" / "spiece"), vocab_size=80,
        hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 0}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names | {"tokenizer_class": "T5Tokenizer"}))
    return folder


def test_a_published_tokenizer_is_read(published_tokenizer: Path) -> None:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(published_tokenizer / "tokenizer" / "spiece.model"))
    family = opened(published_tokenizer)
    for caption in ("a red  circle", "", " circle red "):
        assert family.text_pipeline().tokenizer(caption).input_ids == [*model.encode(caption), 1]
    assert family.encode_text(["a red circle"])[0]["text"].shape == (226, 16)
