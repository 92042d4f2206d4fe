"""The families of models that ``caption`` offers, as tiny checkpoints with their names of
files.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from videotune.captioning import backends
from videotune.captioning.offered_models import offered_models

MARKS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<unk>",
)
WORDS = (*MARKS, *(f"word{number}" for number in range(40)))
TEMPLATE = (
    "{% for part in messages[0]['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|> ' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}"
)

KINDS = {
    "Qwen/Qwen2-VL-2B-Instruct": "qwen2_vl",
    "Qwen/Qwen3-VL-4B-Instruct": "qwen3_vl",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
}
"""The kind of each offered model, as its config.json has it."""

PROCESSORS = {
    "qwen2_vl": ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen2VLImageProcessorFast", "Qwen3VLVideoProcessor"),
}
"""The names of both processors in the authors' files."""

VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 32, "patch_size": 14, "mlp_ratio": 1},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 32,
        "patch_size": 14,
        "fullatt_block_indexes": [0],
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 32,
        "patch_size": 16,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    },
}


def write_tiny(kind: str, folder: Path) -> None:
    """Write a checkpoint with random weights and the files of the authors'."""
    token_ids = {word: index for index, word in enumerate(WORDS)}
    plain = Tokenizer(models.WordLevel(token_ids, "<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=plain,
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(MARKS[2:6]),
    )
    tokenizer.save_pretrained(folder)

    text = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": len(WORDS),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10000.0,
        },
    }
    config = hf.AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config={"depth": 1, "num_heads": 2, **VISION[kind]},
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
    )
    hf.set_seed(0)
    hf.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)

    patch = VISION[kind]["patch_size"]
    images, videos = PROCESSORS[kind]
    pictures = hf.Qwen2VLImageProcessorPil(
        patch_size=patch, min_pixels=(2 * patch) ** 2, max_pixels=(4 * patch) ** 2
    ).to_dict()
    for name, key, value in (
        ("preprocessor_config.json", "image_processor_type", images),
        ("video_preprocessor_config.json", "video_processor_type", videos),
    ):
        (folder / name).write_text(json.dumps(pictures | {key: value}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def test_each_offered_model_is_tried_here() -> None:
    assert {row["model"] for row in offered_models()} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS.values())
def test_an_offered_model_captions_images_without_torchvision(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(kind, tmp_path)
    with pytest.raises(ImportError, match="Torchvision"):
        hf.AutoProcessor.from_pretrained(tmp_path)

    monkeypatch.setattr(backends, "ANSWER_TOKENS", 5)
    captioner = backends.local_model(str(tmp_path))
    rng = np.random.default_rng(1)
    frames = rng.integers(0, 255, (2, 48, 80, 3), np.uint8)
    answer = captioner(frames, "word1 word2")
    assert set(answer.split()) <= set(WORDS)
    assert answer == captioner(frames, "word1 word2")
