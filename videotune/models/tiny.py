"""Tiny checkpoints of random weights: tokenizers of single characters, and networks by
config."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from videotune.lazy import diffusers, torch, transformers


def letters_tokenizer() -> Any:
    """Return a T5 tokenizer of single characters, in which no text is unknown."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )  # keeps the start light

    pieces = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    scores = [(piece, 0.0 if i < 3 else -4.0) for i, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.T5TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_ids=0,
        model_max_length=512,
    )


def bytes_tokenizer(
    marks: Sequence[str],
    texts: Sequence[str] = (),
    begins: bool = True,
    **mark_names: Any,
) -> Any:
    """Return a tokenizer of single bytes, built like Llama 3's.

    Args:
        marks: special tokens.
        texts: strings that are single tokens.
        begins: put the first mark before each text, as Llama does and Qwen does not.
        mark_names: names of special tokens for transformers, such as ``eos_token``.
    """
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )  # keeps the start light

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])

    if not begins:
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, **mark_names
        )
    first_mark = marks[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first_mark} $A",
        special_tokens=[(first_mark, tokenizer.token_to_id(first_mark))],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=first_mark, **mark_names
    )


def clip_tokenizer(longest: int) -> Any:
    """Return CLIP's tokenizer without merges: letters, and letters that end a word.

    The end mark is its last token. ``longest`` is the number of tokens of a text at
    most.
    """
    from tokenizers import pre_tokenizers  # keeps the start light

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    last_letters = [f"{letter}</w>" for letter in letters]
    pieces = [*letters, *last_letters, "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocabulary, [], model_max_length=longest)


TOKENIZERS: Any = {
    "letters": letters_tokenizer,
    "bytes": bytes_tokenizer,
    "clip": clip_tokenizer,
}


def build_pipeline(base_parts: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """Build a pipeline of tiny random networks, in the order in which the parts are
    listed.

    A part is a mapping: "_class_name" is its class ("ltx2.X" for one of the pipeline's
    own module ltx2), "_buffers" are values that its config does not hold, and all other
    keys are its config. A value that is not a mapping is a setting of the pipeline, and
    the top "_class_name" is the pipeline's class.

    Args:
        base_parts: the parts that all checkpoints of the family have.
        changes: parts to add; for a part of ``base_parts`` the keys that differ.
    """
    parts = dict(base_parts)
    for name, change in changes.items():
        parts[name] = (
            parts.get(name, {}) | change if isinstance(change, dict) else change
        )

    pipeline_class = getattr(diffusers, parts.pop("_class_name"))
    components = {}
    for name, part in parts.items():
        components[name] = (
            build_part(deepcopy(part)) if isinstance(part, dict) else part
        )
    return pipeline_class(**components)


def build_part(config: dict[str, Any]) -> Any:
    """Build a tokenizer, a network, a scheduler or an image processor by its config."""
    class_name = config.pop("_class_name")
    buffers = config.pop("_buffers", {})
    if class_name in TOKENIZERS:
        return TOKENIZERS[class_name](**config)

    cls = class_of_part(class_name)
    config_class = getattr(cls, "config_class", None)
    part = cls(config_class(**config)) if config_class else cls(**config)
    for name, values in buffers.items():
        getattr(part, name).copy_(torch.tensor(values))
    return part


def class_of_part(name: str) -> Any:
    """Return a class of diffusers or transformers; "ltx2.X" is one of the module
    ``diffusers.pipelines.ltx2``.
    """
    module, _, class_name = name.rpartition(".")
    if module:
        return getattr(getattr(diffusers.pipelines, module), class_name)
    return getattr(diffusers, name, None) or getattr(transformers, name)
