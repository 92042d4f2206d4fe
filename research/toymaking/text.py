"""The toy's text half: a tokenizer whose pieces are the words of its captions, and a
small frozen UMT5.

Training a Unigram model by its usual expectation-maximisation needs more text than 288
captions of 15 words: it falls apart into letters. Of words that are known, the
likeliest scores are the logarithms of their counts, so these are set.
"""

import math
import string
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from toymaking.recipe import Recipe
from transformers import AutoTokenizer, T5Tokenizer, UMT5Config, UMT5EncoderModel

from videotune.rng import torch_seed
from videotune.toy.shapes import COMBINATIONS, TEMPLATES, caption

RARE = -9.0
"""Score of a single letter: a word of the captions is likelier whole, any other word is
spelt.
"""


def make(out: Path, recipe: Recipe) -> Path:
    """Write tokenizer and text encoder into the folder that is returned; what is
    finished is left as it is.
    """
    finished = out / "text"
    aside = out / "work" / "text"
    if finished.is_dir():
        return finished
    tokenizer().save_pretrained(aside / "tokenizer")
    encoder(
        recipe, len(AutoTokenizer.from_pretrained(aside / "tokenizer"))
    ).save_pretrained(aside / "text_encoder")
    aside.rename(finished)
    return finished


def tokenizer() -> Any:
    """A T5 tokenizer of the captions' words and of every ASCII letter, digit and mark."""
    captions = [
        caption(*look, template)
        for look in COMBINATIONS
        for template in range(len(TEMPLATES))
    ]
    counts = Counter(word for text in captions for word in text.split())
    words = [
        (f"▁{word}", math.log(count / counts.total()))
        for word, count in counts.most_common()
    ]
    letters = [
        (letter, RARE)
        for letter in string.ascii_letters + string.digits + ".,:;!?'\"-()"
    ]
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", RARE),
        *words,
        *letters,
    ]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def encoder(recipe: Recipe, pieces: int) -> Any:
    """A random UMT5 encoder of two layers.

    It stays as it is: the transformer learns to read it.
    """
    torch.manual_seed(torch_seed(recipe.seed, "text encoder"))
    config = UMT5Config(
        vocab_size=pieces,
        d_model=recipe.text_width,
        d_kv=16,
        num_heads=4,
        d_ff=2 * recipe.text_width,
        num_layers=2,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
        dropout_rate=0.0,
    )
    return UMT5EncoderModel(config).eval()
