"""A base model whose files are damaged, absurd or incomplete is refused with a sentence: no traceback, no hang."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.models_kit import edit
from videotune.errors import VideotuneError
from videotune.models.base_model import place, spec_for
from videotune.models.model_files import missing
from videotune.models.pretrained import read_tokenizer
from videotune.models.registry import find, names

WEIGHTS = "diffusion_pytorch_model.safetensors"
CPU = torch.device("cpu")


@pytest.fixture
def base(tiny_bases: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bases("wan"), tmp_path / "base"))


def used(folder: Path) -> None:
    """All that a run reads of a base: its configs, tokenizers, weights and scheduler."""
    found = place(str(folder))
    spec = spec_for(None, found)
    family = find(spec.name)(found.folder, CPU, torch.float32)
    family.encode_text(["a red circle"])
    nets = {expert.name: family.denoiser(expert.name) for expert in spec.experts}
    family.part("vae")
    family.pipeline(nets)


NET, SCHEDULE, INDEX = "transformer/config.json", "scheduler/scheduler_config.json", "model_index.json"


@pytest.mark.parametrize(
    ("name", "part", "values", "words"),
    [
        ("wan", NET, {"in_channels": 16}, "reads 16 channels"),
        ("wan", NET, {"in_channels": 12, "pos_embed_seq_len": 514}, "FLF2V"),
        ("wan", INDEX, {"boundary_ratio": 0.875}, "needs transformer_2/"),
        ("wan:t2v-a14b", INDEX, {"boundary_ratio": None}, "needs boundary_ratio"),
        ("cogvideox", NET, {"in_channels": 9}, "reads 9 channels"),
        ("cogvideox", SCHEDULE, {"prediction_type": "epsilon"}, "prediction_type is 'epsilon'"),
        ("cogvideox", SCHEDULE, {"beta_schedule": "linear"}, "beta_schedule"),
        ("cogvideox", SCHEDULE, {"snr_shift_scale": None}, "does not say snr_shift_scale"),
        ("hunyuan_video", NET, {"image_condition_type": "latent_concat"}, "text-to-video checkpoint alone"),
        ("hunyuan_video", NET, {"in_channels": 9}, "reads 9 channels"),
        ("ltx_video", NET, {"in_channels": 8}, "reads 8 channels"),
        ("ltx_video", NET, {"patch_size": 2}, "covers more than one latent"),
        ("hidream", NET, {"in_channels": 8}, "reads 8 channels"),
    ],
)
def test_what_only_looks_like_a_checkpoint_of_the_family(
    name: str, part: str, values: dict[str, Any], words: str, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    family, _, variant = name.partition(":")
    base = Path(shutil.copytree(tiny_bases(family, variant or None), tmp_path / "base"))
    edit(base / part, **values)
    with pytest.raises(VideotuneError, match=words):
        find(family).read_spec(base)


CONTENTS = {
    "nothing": b"",
    "a list": b"[1, 2]",
    "null": b"null",
    "binary": bytes(range(256)),
    "deep": b'{"a": ' * 100_000,
    "nested": b'{"a": ' * 900 + b"1" + b"}" * 900,
    "a number of 5,000 digits": b'{"a": ' + b"1" * 5000 + b"}",
    "not finite": b'{"a": NaN}',
    "without its keys": b"{}",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize(
    "name",
    [INDEX, NET, SCHEDULE, "vae/config.json", "text_encoder/config.json", "tokenizer/tokenizer.json"],
)
def test_json_that_is_none(name: str, content: bytes, base: Path) -> None:
    (base / name).write_bytes(content)
    if content in (CONTENTS["without its keys"], CONTENTS["not finite"]):  # some classes have a default of every key
        with suppress(VideotuneError):
            used(base)
    else:
        with pytest.raises(VideotuneError, match=name.split("/")[0]):
            used(base)


VALUES: list[Any] = [None, "text", 0, -1, 10**9, 10**30, 2.5, [], ["a"], [0], {"a": 1}, True, [[2]]]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((NET, key) for key in ("num_layers", "patch_size", "num_attention_heads", "rope_max_seq_len")),
        *(("vae/config.json", key) for key in ("z_dim", "latents_mean")),
        *(("text_encoder/config.json", key) for key in ("num_layers", "vocab_size")),
        *((SCHEDULE, key) for key in ("flow_shift", "num_train_timesteps")),
        *((INDEX, key) for key in ("_class_name", "boundary_ratio", "transformer", "scheduler")),
    ],
)
def test_values_of_a_wrong_type_or_size(name: str, key: str, value: Any, base: Path) -> None:
    edit(base / name, **{key: value})
    with suppress(VideotuneError):
        used(base)


@pytest.mark.parametrize("classes", [["diffusers", 7], [7, "Scheduler"], ["os", "system"], ["diffusers", "logging"]])
@pytest.mark.parametrize("part", ["scheduler", "transformer", "../vae"])
def test_classes_of_the_index(part: str, classes: list[Any], base: Path) -> None:
    edit(base / INDEX, **{part: classes})
    with pytest.raises(VideotuneError):
        used(base)


@pytest.mark.parametrize(
    "index",
    [[], {}, {"weight_map": []}, {"weight_map": {"a": 5}}, {"weight_map": {"a": "../../x.safetensors"}}],
    ids=str,
)
def test_an_index_of_shards(index: Any, base: Path) -> None:
    part = base / "transformer"
    (part / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with pytest.raises(VideotuneError, match="index"):
        used(base)


@pytest.mark.parametrize("family", names())
def test_each_tokenizer_must_have_its_vocabulary(family: str, tiny_bases: Callable[..., Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_bases(family), tmp_path / "base"))
    parts = [path.name for path in base.iterdir() if path.name.startswith("tokenizer")]
    assert parts
    for part in parts:
        vocabulary = base / part / "tokenizer.json"
        content = vocabulary.read_bytes()
        vocabulary.unlink()
        assert missing(base, weights=True) == [f"{part}/tokenizer.json"]
        with pytest.raises(VideotuneError, match=f"{part}/tokenizer.json"):
            place(str(base))
        vocabulary.write_bytes(content)
        encoder, settings = base / part.replace("tokenizer", "text_encoder"), base / part / "tokenizer_config.json"
        read_tokenizer(base / part, encoder)
        edit(settings, model_max_length=-1)
        with pytest.raises(VideotuneError, match=part):
            read_tokenizer(base / part, encoder)
        settings.unlink()
        with pytest.raises(VideotuneError, match=part):
            read_tokenizer(base / part, encoder)
    assert missing(base, weights=True) == []


def test_what_else_a_vocabulary_may_be(tiny_bases: Callable[..., Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_bases("hidream"), tmp_path / "base"))
    for part, forms in {"tokenizer": ("vocab.json", "merges.txt"), "tokenizer_3": ("spiece.model",)}.items():
        (base / part / "tokenizer.json").unlink()
        for name in forms:
            (base / part / name).touch()
        assert missing(base, weights=True) == []
    (base / "tokenizer" / "merges.txt").unlink()
    assert missing(base, weights=True) == ["tokenizer/merges.txt"]


def test_captions_that_become_the_same_numbers_are_refused(base: Path) -> None:
    """As transformers reads a vocabulary that has only its marks: every word is the unknown one."""
    path = base / "tokenizer" / "tokenizer.json"
    facts = json.loads(path.read_text())
    facts["model"]["vocab"] = facts["model"]["vocab"][:4]
    path.write_text(json.dumps(facts))
    with pytest.raises(VideotuneError, match="same"):
        used(base)


@pytest.mark.parametrize(
    ("key", "value"),
    [("pad_token", "a new one"), ("eos_token", "a new one"), ("model_max_length", "long")],
)
def test_settings_of_a_tokenizer_that_do_not_fit(key: str, value: Any, base: Path) -> None:
    """A token that the text encoder has no row for, a length that is no number."""
    edit(base / "tokenizer" / "tokenizer_config.json", **{key: value})
    with pytest.raises(VideotuneError, match="tokenizer"):
        used(base)
