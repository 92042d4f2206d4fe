"""``python -m videotune.families.tiny NAME DIR [--variant KIND]``: a tiny random checkpoint in the family's real layout.

With it a whole run can be tried on any machine: ``videotune train --set base_model_name=DIR …``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
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


def main() -> None:
    """Write the checkpoint that the command line names."""
    from videotune.families.find import find, names

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=names(), help="the family")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--seed", type=int, default=0, help="names the random weights")
    parser.add_argument("--variant", help="which of the family's kinds (default: its first)")
    words = parser.parse_args()
    module = find(words.name)
    if words.variant is not None and words.variant not in module.VARIANTS:
        parser.error(f"{words.name} has {', '.join(module.VARIANTS)}, not {words.variant!r}")
    if words.folder.is_dir() and any(words.folder.iterdir()):
        parser.error(f"{words.folder} is not empty: name a new folder")
    print(module.tiny(words.folder, words.seed, words.variant or module.VARIANTS[0]))


if __name__ == "__main__":
    main()
