"""``python -m videotune.families.hidream BASE LLAMA NEW``: HiDream-I1 and the Llama that it reads with, as one folder.

The folder holds links and takes no room.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.families.hidream.facts import ENCODERS
from videotune.families.parts import read_config


def joined(base: Path, llama: Path, folder: Path) -> Path:
    """Write ``folder`` in diffusers layout: the parts of ``base``, and ``llama`` as fourth text encoder and its tokenizer.

    Raises VideotuneError where either is something else, or the folder is there.
    """
    index, config = read_config(base / "model_index.json"), read_config(llama / "config.json")
    if index.get("_class_name") != "HiDreamImagePipeline":
        raise VideotuneError(f"{base} is a {index.get('_class_name')}, not a HiDreamImagePipeline")
    layers = max(read_config(base / "transformer" / "config.json")["llama_layers"]) + 1
    if config.get("model_type") != "llama" or config.get("num_hidden_layers") != layers:
        raise VideotuneError(
            f"{llama} is a {config.get('model_type')} of {config.get('num_hidden_layers')} layers; HiDream-I1 reads a llama "
            f"of {layers}"
        )
    if not (llama / "tokenizer.json").is_file():
        raise VideotuneError(f"{llama} has no tokenizer.json")
    if folder.exists():
        raise VideotuneError(f"{folder} is there already: name a new folder")
    part = "text_encoder_4"
    tokenizer, encoder = ENCODERS[part]
    folder.mkdir(parents=True)
    for entry in base.iterdir():
        if entry.is_dir() and entry.name not in (part, tokenizer):
            (folder / entry.name).symlink_to(entry.absolute())
    (folder / part).mkdir()
    (folder / tokenizer).mkdir()
    for entry in llama.iterdir():
        if entry.is_file():
            (folder / (tokenizer if "token" in entry.name else part) / entry.name).symlink_to(entry.absolute())
    named = {part: ["transformers", encoder], tokenizer: ["transformers", "PreTrainedTokenizerFast"]}
    (folder / "model_index.json").write_text(json.dumps(index | named, indent=2) + "\n", encoding="utf-8")
    return folder


def main() -> int:
    """Join the folders that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m videotune.families.hidream", description=__doc__)
    parser.add_argument("base", type=Path, help="HiDream-I1's folder in diffusers layout")
    parser.add_argument("llama", type=Path, help="the folder of Llama-3.1-8B-Instruct in transformers' layout")
    parser.add_argument("folder", type=Path, help="where to write")
    words = parser.parse_args()
    try:
        print(joined(words.base, words.llama, words.folder))
    except VideotuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
