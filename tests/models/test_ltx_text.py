"""Captions of LTX-Video 0.9.0 and 0.9.1 as their authors' code reads them."""

from pathlib import Path

import diffusers
import pytest
import torch

from tests.support.families import Bases, open_family
from videotune.errors import VideotuneError
from videotune.models.ltx_video import LTXVideo

CAPTIONS = ["a red circle", "", "a long caption " * 40]


def with_authors_text(folder: Path) -> LTXVideo:
    family = open_family("ltx_video", folder)
    assert isinstance(family, LTXVideo)
    family.spec = family.with_authors_text(family.spec)
    return family


@pytest.mark.parametrize("variant", ["0.9.0", "0.9.1"])
def test_padding_is_masked_and_captions_have_256_tokens(
    tiny_bases: Bases, variant: str
) -> None:
    """T5 by hand; the words' states do not depend on how much padding follows."""
    family = with_authors_text(tiny_bases("ltx_video", variant))
    pipeline = family.text_pipeline()
    for caption in CAPTIONS:
        states = family.encode_text([caption])[0]
        tokens = pipeline.tokenizer(
            family.clean(caption),
            padding="max_length",
            max_length=256,
            truncation=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            expected = pipeline.text_encoder(
                tokens.input_ids, attention_mask=tokens.attention_mask
            )[0][0]
            words = int(tokens.attention_mask.sum())
            alone = pipeline.text_encoder(tokens.input_ids[:, :words])[0][0]
        assert torch.allclose(states["text"], expected, atol=1e-6)
        assert torch.equal(states["mask"], tokens.attention_mask[0].bool())
        assert torch.allclose(states["text"][:words], alone, atol=1e-5)


@pytest.mark.parametrize("variant", ["0.9.0", "0.9.1"])
def test_the_other_parts_stay_those_of_the_version(
    tiny_bases: Bases, variant: str
) -> None:
    folder = tiny_bases("ltx_video", variant)
    plain = open_family("ltx_video", folder)
    masked = with_authors_text(folder)
    assert masked.pipeline_class() is plain.pipeline_class() is diffusers.LTXPipeline
    before, after = plain.fingerprints(), masked.fingerprints()
    assert {part for part in before if before[part] != after[part]} == {"text_encoder"}


def test_newer_checkpoints_have_no_other_convention(tiny_bases: Bases) -> None:
    with pytest.raises(VideotuneError, match="convention"):
        with_authors_text(tiny_bases("ltx_video", "0.9.7"))
