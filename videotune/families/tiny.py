"""What the families' tiny random checkpoints share; `videotune tiny FAMILY DIR` writes one."""

from __future__ import annotations

from typing import Any


def letters_tokenizer() -> Any:
    """A T5 tokenizer of single characters, so that no text is unknown and nothing has to be downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import T5TokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    words = Tokenizer(models.Unigram([(piece, 0.0 if i < 3 else -4.0) for i, piece in enumerate(pieces)], unk_id=2))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return T5TokenizerFast(
        tokenizer_object=words,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_ids=0,
        model_max_length=512,
    )
