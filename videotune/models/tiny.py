"""Tiny checkpoints of random weights: tokenizers of single characters, and networks by their families' JSON files."""

from collections.abc import Sequence
from typing import Any

from videotune.lazy import diffusers, torch, transformers
from videotune.models.registry import facts


def letters_tokenizer() -> Any:
    """A T5 tokenizer of single characters, so that no text is unknown."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )  # light to start

    pieces = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    words = Tokenizer(
        models.Unigram(
            [(piece, 0.0 if i < 3 else -4.0) for i, piece in enumerate(pieces)], unk_id=2
        )
    )
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    marks = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return transformers.T5TokenizerFast(
        tokenizer_object=words, **marks, extra_ids=0, model_max_length=512
    )


def bytes_tokenizer(marks: Sequence[str], texts: Sequence[str] = (), **words: Any) -> Any:
    """A tokenizer of single bytes as Llama 3 has one: the first of the marks in front, none at the end.

    ``texts`` are tokens of their own; ``words`` name the marks' uses.
    """
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )  # light to start

    letters = {
        letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    begin = (marks[0], tokenizer.token_to_id(marks[0]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{marks[0]} $A", special_tokens=[begin]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=marks[0], **words
    )


def clip_tokenizer(longest: int) -> Any:
    """CLIP's tokenizer without merges: letters, and letters that end a word; the end mark is the last of its tokens."""
    from tokenizers import pre_tokenizers  # light to start

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    return transformers.CLIPTokenizer(
        {piece: i for i, piece in enumerate(pieces)}, [], model_max_length=longest
    )


TOKENIZERS: Any = {
    "letters": letters_tokenizer,
    "bytes": bytes_tokenizer,
    "clip": clip_tokenizer,
}


def tiny_pipeline(family: str, variant: str) -> Any:
    """A pipeline of tiny random networks as the family's JSON file says, made in the order in which it names them.

    The parts of a variant are those under "*" with the variant's own keys over theirs; what is no object is a setting of the
    pipeline. "_buffers" are numbers that the part's config does not hold.
    """
    rows = facts(family)["tiny"]
    parts = dict(rows["*"])
    for name, own in rows[variant].items():
        parts[name] = {**parts.get(name, {}), **own} if isinstance(own, dict) else own
    kind = parts.pop("_class_name")
    made = {
        name: make(dict(part)) if isinstance(part, dict) else part
        for name, part in parts.items()
    }
    return getattr(diffusers, kind)(**made)


def make(config: dict[str, Any]) -> Any:
    """A tokenizer, a network or a scheduler of diffusers, or a network of transformers, by its config."""
    name = config.pop("_class_name")
    buffers = config.pop("_buffers", {})
    if name in TOKENIZERS:
        return TOKENIZERS[name](**config)
    cls = getattr(diffusers, name, None) or getattr(transformers, name)
    own = getattr(cls, "config_class", None)
    part = cls(own(**config)) if own else cls(**config)
    for key, values in buffers.items():
        getattr(part, key).copy_(torch.tensor(values))
    return part
