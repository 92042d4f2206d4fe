"""Tokenizers of single characters and text encoders of one layer, so that a tiny checkpoint needs nothing from elsewhere."""

from collections.abc import Sequence
from typing import Any

from videotune.lazy import transformers


def letters_tokenizer() -> Any:
    """A T5 tokenizer of single characters, so that no text is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors  # light to start

    pieces = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    words = Tokenizer(models.Unigram([(piece, 0.0 if i < 3 else -4.0) for i, piece in enumerate(pieces)], unk_id=2))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    marks = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return transformers.T5TokenizerFast(tokenizer_object=words, **marks, extra_ids=0, model_max_length=512)


def tiny_t5(name: str = "T5EncoderModel") -> tuple[Any, Any]:
    """A tokenizer and an encoder of T5 or its kin, by the encoder's class in transformers."""
    tokenizer, cls = letters_tokenizer(), getattr(transformers, name)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return tokenizer, cls(cls.config_class(vocab_size=len(tokenizer), **sizes))


def bytes_tokenizer(marks: Sequence[str], texts: Sequence[str] = (), **words: Any) -> Any:
    """A tokenizer of single bytes as Llama 3 has one: the first of the marks in front, none at the end.

    ``texts`` are tokens of their own; ``words`` name the marks' uses.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors  # light to start

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    begin = (marks[0], tokenizer.token_to_id(marks[0]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{marks[0]} $A", special_tokens=[begin])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=marks[0], **words)


def clip_tokenizer(longest: int) -> Any:
    """CLIP's tokenizer without merges: letters, and letters that end a word; the end mark is the last of its tokens."""
    from tokenizers import pre_tokenizers  # light to start

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer({piece: i for i, piece in enumerate(pieces)}, [], model_max_length=longest)


def tiny_clip(name: str, tokenizer: Any, **words: Any) -> Any:
    """CLIP's text model of one layer, by its class in transformers; ``words`` go into its config."""
    sizes = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
    config = transformers.CLIPTextConfig(vocab_size=len(tokenizer), **sizes, **words)
    return getattr(transformers, name)(config)
