"""Text encoders that train, or have new tokens: what is attached, encoded and put back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.support.families import batch_of
from videotune.config.resolve import parse
from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.trainer.text_encoders import (
    attach_text,
    by_part,
    encode_live_text,
    live_text,
    put_files,
    put_text,
    refuse_text,
    text_size,
)

Open = Callable[..., Any]
PART = "text_encoder"


@pytest.fixture
def family(tiny_family: Open) -> Any:
    return tiny_family("wan")


def rows_config(**settings: Any) -> Config:
    embedding = {"token": "<x>", "vectors": 2}
    config: Config = parse(
        {"training_method": "EMBEDDING", "embedding": embedding, **settings}
    )
    return config


def trained_config(layers: list[str] | None = None, **settings: Any) -> Config:
    text = {"train": True, "layers": layers}
    config: Config = parse(
        {"training_method": "FINE_TUNE", "text_encoder": text, **settings}
    )
    return config


def test_captions_are_encoded_in_the_step_where_their_encoder_learns() -> None:
    rows = live_text(rows_config())
    assert rows is not None
    assert rows.tokens == ("<x>", "<x>_1")
    whole = live_text(trained_config())
    assert whole is not None
    assert whole.tokens == ()
    assert live_text(parse({})) is None


def test_a_caption_is_encoded_with_all_its_new_tokens(family: Any) -> None:
    """Anew, and each with its own; what belongs to the clip stays."""
    config = rows_config()
    (parameter,) = attach_text(family, config)["embedding"].values()
    batch = batch_of(family, ["a <x> circle", "a red circle"])
    frame = torch.rand(2, 4)
    conditioning = replace(batch.conditioning, extras={"frame": frame})
    batch = replace(batch, conditioning=conditioning)
    encoded = encode_live_text(family, live_text(config), batch)
    assert encoded.captions == batch.captions
    assert torch.equal(encoded.x0, batch.x0)
    assert encoded.conditioning.extras["frame"] is frame
    expected = family.encode_in_loop(["a <x> <x>_1 circle", "a red circle"])
    assert torch.equal(encoded.conditioning.text, expected.text)
    encoded.conditioning.text[0].sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.abs().sum(dim=1).count_nonzero() == 2


def test_a_pattern_for_no_weight_is_refused_before_anything_is_encoded(
    family: Any,
) -> None:
    """Where text encoders train; a pattern may name one of them."""
    refuse_text(family, trained_config())
    refuse_text(family, trained_config([r"encoder\.block\.0", f"{PART}.shared.weight"]))
    with pytest.raises(VideotuneError, match=r"text_encoder\.layers: 'nothing'"):
        refuse_text(family, trained_config(["nothing"]))
    not_trained = trained_config(["nothing"])
    text = not_trained.text_encoder.model_copy(update={"train": False})
    refuse_text(family, not_trained.model_copy(update={"text_encoder": text}))
    refuse_text(family, parse({}))


def test_a_token_that_the_tokenizer_has_is_refused(family: Any) -> None:
    refuse_text(family, rows_config())
    (tokenizer,) = family.tokenizers().values()
    known = next(word for word in tokenizer.get_vocab() if len(word) > 2)
    taken = {"token": known, "vectors": 1}
    with pytest.raises(VideotuneError, match="has a token"):
        refuse_text(family, rows_config(embedding=taken))


def recomputes(family: Any) -> set[bool]:
    return {
        bool(layer.training)
        for part in family.text_parts().values()
        for layer in part.encoder.modules()
        if isinstance(layer, GradientCheckpointingLayer)
    }


@pytest.mark.parametrize(("mode", "expected"), [(None, True), ("OFF", False)])
def test_layers_of_text_encoders_recompute_as_the_config_says(
    mode: str | None, expected: bool, family: Any
) -> None:
    """Without a word they do."""
    attach_text(family, rows_config(gradient_checkpointing=mode))
    assert recomputes(family) == {expected}


def test_what_is_attached_has_the_names_of_checkpoints(family: Any) -> None:
    assert attach_text(family, parse({})) == {}
    encoders = {name: part.encoder for name, part in family.text_parts().items()}
    groups = attach_text(family, trained_config([r"encoder\.block\.0"]))
    assert list(groups) == ["text_encoder"]
    prefix = f"{PART}.encoder.block.0."
    expected = {
        f"{PART}.{path}": parameter
        for path, parameter in encoders[PART].named_parameters()
        if path.startswith("encoder.block.0.")
    }
    assert groups["text_encoder"] == expected
    assert all(name.startswith(prefix) for name in expected)
    assert all(parameter.requires_grad for parameter in expected.values())


def test_new_rows_are_drawn_by_the_seed(tiny_family: Open) -> None:
    drawn = {}
    for seed in (1, 2, 1):
        groups = attach_text(tiny_family("wan"), rows_config(seed=seed))
        assert list(groups) == ["embedding"]
        assert list(groups["embedding"]) == [f"embedding.{PART}"]
        rows = groups["embedding"][f"embedding.{PART}"].detach()
        assert len(rows) == 2
        if seed in drawn:
            assert torch.equal(rows, drawn[seed])
        drawn[seed] = rows
    assert not torch.equal(drawn[1], drawn[2])


def test_the_weights_of_each_part_are_told_apart_by_their_names(family: Any) -> None:
    state = {
        "blocks.0.weight": torch.ones(1),
        f"{PART}.shared.weight": torch.ones(2),
        f"{PART}s.other": torch.ones(3),
        f"blocks.{PART}.weight": torch.ones(4),
    }
    denoiser, text = by_part(family, state)
    assert list(denoiser) == [
        "blocks.0.weight",
        f"{PART}s.other",
        f"blocks.{PART}.weight",
    ]
    assert all(value is state[name] for name, value in denoiser.items())
    assert list(text) == [PART]
    assert list(text[PART]) == ["shared.weight"]
    assert text[PART]["shared.weight"] is state[f"{PART}.shared.weight"]
    assert by_part(family, {}) == ({}, {PART: {}})


def rows_in(family: Any) -> Tensor:
    encoder = family.text_parts()[PART].encoder
    rows: Tensor = encoder.get_input_embeddings().rows
    return rows


def test_rows_of_a_checkpoint_are_put_back(family: Any, tiny_family: Open) -> None:
    """Its other tensors are left alone, and one that is missing is named with it."""
    config = rows_config()
    width = next(iter(attach_text(family, config)["embedding"].values())).shape[1]
    rows = torch.rand(2, width)
    other = tiny_family("wan")
    state = {"blocks.0.lora_A": torch.ones(1), f"embedding.{PART}": rows}
    spell = put_text(other, config, state, "step 3")
    assert spell("a <x> circle") == "a <x> <x>_1 circle"
    assert torch.equal(rows_in(other), rows)
    with pytest.raises(VideotuneError, match=r"^step 3 does not fit"):
        put_text(tiny_family("wan"), config, {}, "step 3")
    plain = put_text(family, parse({}), {}, "step 3")
    assert plain("a <x> circle") == "a <x> circle"


def test_weights_of_a_checkpoint_are_put_back(family: Any) -> None:
    config = trained_config([f"{PART}.shared.weight"])
    encoder = family.text_parts()[PART].encoder
    value = torch.rand_like(encoder.shared.weight)
    spell = put_text(family, config, {f"{PART}.shared.weight": value}, "step 3")
    assert spell("a <x> circle") == "a <x> circle"
    assert torch.equal(encoder.shared.weight, value)


def test_tokens_of_several_files_are_spelled_one_after_the_other(family: Any) -> None:
    encoder = family.text_parts()[PART].encoder
    width = encoder.get_input_embeddings().weight.shape[1]
    first, second = torch.rand(2, width), torch.rand(1, width)
    embeddings = [("<x>", {PART: first}), ("<y>", {PART: second})]
    spell = put_files(family, embeddings)
    assert spell("<y> and <x>") == "<y> and <x> <x>_1"
    tokenizer = family.text_parts()[PART].tokenizer
    table = encoder.get_input_embeddings()
    for token, row in (("<x>", first[0]), ("<x>_1", first[1]), ("<y>", second[0])):
        number = torch.tensor(tokenizer.convert_tokens_to_ids(token))
        assert torch.equal(table(number), row), token
    assert put_files(family, [])("<x>") == "<x>"


def test_what_would_train_is_counted_over_all_encoders(
    tiny_family: Open,
) -> None:
    two_encoders = tiny_family("hunyuan_video")
    parts = two_encoders.text_parts()
    groups = attach_text(two_encoders, rows_config())
    numbers = sum(value.numel() for value in groups["embedding"].values())
    assert text_size(two_encoders, rows_config()) == (len(parts), numbers)


def test_the_modules_that_would_train_are_counted(family: Any) -> None:
    """A module counts once, whether it has one weight or two."""
    parameters = attach_text(family, trained_config([r"encoder\.block\.0"]))
    names = list(parameters["text_encoder"])
    modules, numbers = text_size(family, trained_config([r"encoder\.block\.0"]))
    assert modules == len({name.rpartition(".")[0] for name in names})
    assert numbers == sum(p.numel() for p in parameters["text_encoder"].values())
