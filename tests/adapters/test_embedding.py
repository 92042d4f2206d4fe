"""New tokens' rows: laid over the frozen table of each kind of text encoder, and
nothing else ever moves.
"""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from videotune.adapters.layers import (
    Overlay,
    add_rows,
    add_text,
    add_tokens,
    first_rows,
    lay_rows,
    layers_of,
    spelled,
)
from videotune.config.sections import Embedding, token_names
from videotune.errors import VideotuneError
from videotune.memory.checkpointing import checkpoint_text
from videotune.models.tiny import letters_tokenizer
from videotune.types import TextPart

SPARE = 5
"""Rows of the table that the tokenizer has no word for, as T5's and UMT5's tables have.
"""


def encoder_of(kind: str, words: int, spare: int = SPARE) -> Any:
    """A tiny encoder of transformers, made from its config, with a dropout that must
    never act.
    """
    size: dict[str, Any] = {"vocab_size": words + spare}
    t5 = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.5,
    }
    other = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    other["attention_dropout"] = 0.5
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: Any = {
            "t5": lambda: hf.T5EncoderModel(hf.T5Config(**size, **t5)),
            "umt5": lambda: hf.UMT5EncoderModel(hf.UMT5Config(**size, **t5)),
            "clip": lambda: hf.CLIPTextModel(
                hf.CLIPTextConfig(**size, **other, eos_token_id=1)
            ),
            "llama": lambda: hf.LlamaModel(
                hf.LlamaConfig(**size, **other, num_key_value_heads=2)
            ),
        }[kind]()
    return model.eval().requires_grad_(False)


def part_of(kind: str, spare: int = SPARE) -> TextPart:
    tokenizer = letters_tokenizer()
    return TextPart(tokenizer, encoder_of(kind, len(tokenizer), spare))


KINDS = pytest.mark.parametrize("kind", ["t5", "umt5", "clip", "llama"])


def states(part: TextPart, text: str, tokens: tuple[str, ...] = ()) -> torch.Tensor:
    numbers = part.tokenizer(
        spelled(text, tokens) if tokens else text, return_tensors="pt"
    ).input_ids
    return part.encoder(numbers).last_hidden_state


@KINDS
@pytest.mark.parametrize("spare", [0, SPARE], ids=["no spare rows", "spare rows"])
def test_a_text_without_the_token_is_read_as_before_to_the_bit(
    kind: str, spare: int
) -> None:
    part = part_of(kind, spare)
    before = states(part, "a red circle")
    add_rows({"text_encoder": part}, Embedding(token="<x>", vectors=2), seed=0)
    assert torch.equal(states(part, "a red circle"), before)


@KINDS
@pytest.mark.parametrize("spare", [0, SPARE], ids=["no spare rows", "spare rows"])
def test_only_the_rows_change_weight_decay_included(kind: str, spare: int) -> None:
    """After steps with a strong decay every other number of the encoder is the same to
    the bit, and each row has moved.
    """
    part = part_of(kind, spare)
    before = {name: value.clone() for name, value in part.encoder.state_dict().items()}
    (rows,) = add_rows(
        {"text_encoder": part}, Embedding(token="<x>", vectors=3), seed=0
    ).values()
    tokens, start = token_names("<x>", 3), rows.detach().clone()
    trained = [
        parameter for parameter in part.encoder.parameters() if parameter.requires_grad
    ]
    assert {id(parameter) for parameter in trained} == {id(rows)}
    optimizer = torch.optim.AdamW(trained, lr=0.1, weight_decay=0.5)
    for _ in range(3):
        states(part, "a <x> b", tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bool((rows.detach() != start).any(1).all())
    table = part.encoder.get_input_embeddings()
    assert isinstance(table, Overlay)
    part.encoder.set_input_embeddings(table.table)
    after = part.encoder.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@KINDS
def test_the_rows_are_what_a_longer_table_would_hold(kind: str) -> None:
    """The way of transformers' own: more rows in the table itself; the same states to
    the bit.
    """
    ours, theirs = part_of(kind, 0), part_of(kind, 0)
    (rows,) = add_rows(
        {"text_encoder": ours}, Embedding(token="<x>", vectors=2), seed=0
    ).values()
    tokens = token_names("<x>", 2)
    theirs.tokenizer.add_tokens(list(tokens))
    theirs.encoder.resize_token_embeddings(len(theirs.tokenizer))
    numbers = theirs.tokenizer.convert_tokens_to_ids(list(tokens))
    theirs.encoder.get_input_embeddings().weight.data[numbers] = rows.detach()
    with torch.no_grad():
        assert torch.equal(
            states(ours, "a <x> b", tokens), states(theirs, "a <x> b", tokens)
        )


@KINDS
def test_recomputed_layers_give_the_rows_the_same_gradient_and_drop_nothing_out(
    kind: str,
) -> None:
    found = []
    for mode in ("OFF", "ON"):
        part = part_of(kind)
        checkpoint_text(part.encoder, mode)
        (rows,) = add_rows(
            {"text_encoder": part}, Embedding(token="<x>"), seed=0
        ).values()
        states(part, "a <x> b", ("<x>",)).square().mean().backward()
        found.append(rows.grad)
    assert bool(found[0].any())
    assert torch.equal(*found)


def test_several_encoders_have_rows_each() -> None:
    parts = {"text_encoder": part_of("llama"), "text_encoder_2": part_of("clip")}
    rows = add_rows(parts, Embedding(token="<x>", vectors=2), seed=0)
    assert set(rows) == set(parts)
    assert not torch.equal(*rows.values())
    one = add_rows(
        {"text_encoder_2": part_of("clip")}, Embedding(token="<x>", vectors=2), seed=0
    )
    assert torch.equal(one["text_encoder_2"], rows["text_encoder_2"]), (
        "a choice of one begins as it does among both"
    )


def test_rows_are_those_of_the_seed() -> None:
    part = part_of("clip")
    settings = Embedding(token="<x>", vectors=2)
    drawn = first_rows(part, settings, 5, "text_encoder_2")
    added = add_rows({"text_encoder_2": part}, settings, seed=5)
    assert torch.equal(added["text_encoder_2"], drawn)


def test_rows_begin_as_the_words_they_are_given() -> None:
    part = part_of("umt5")
    table = part.encoder.get_input_embeddings().weight
    numbers = part.tokenizer("ab", add_special_tokens=False).input_ids
    assert len(numbers) == 3, "a blank, a, b"
    words = table[numbers]

    def first(count: int) -> torch.Tensor:
        return first_rows(
            part, Embedding(token="<x>", vectors=count, init_text="ab"), seed=0
        )

    torch.testing.assert_close(first(1), words.mean(0, keepdim=True))
    assert torch.equal(first(3), words)
    torch.testing.assert_close(first(2), torch.stack([words[0], words[1:].mean(0)]))
    assert torch.equal(first(6), words.repeat_interleave(2, 0))


def test_rows_without_words_are_drawn_like_usual_ones_by_seed_and_encoder() -> None:
    part = part_of("t5")
    table = part.encoder.get_input_embeddings().weight
    many = first_rows(part, Embedding(token="<x>", vectors=400), seed=1)
    assert many.std().item() == pytest.approx(table.std().item(), rel=0.1)
    assert torch.equal(
        many, first_rows(part, Embedding(token="<x>", vectors=400), seed=1)
    )
    assert not torch.equal(
        many, first_rows(part, Embedding(token="<x>", vectors=400), seed=2)
    )
    assert not torch.equal(
        many,
        first_rows(
            part, Embedding(token="<x>", vectors=400), seed=1, name="text_encoder_2"
        ),
    )


def test_rows_are_float32_over_a_bf16_table_and_states_stay_bf16() -> None:
    part = part_of("umt5")
    part.encoder.bfloat16()
    (rows,) = add_rows({"text_encoder": part}, Embedding(token="<x>"), seed=0).values()
    out = states(part, "a <x>")
    assert rows.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert bool(rows.grad.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_of_a_file_become_a_float32_copy(dtype: torch.dtype) -> None:
    rows = torch.ones(1, 16, dtype=dtype)
    parameter = lay_rows(part_of("t5"), ("<y>",), rows)
    parameter.data.zero_()
    assert parameter.dtype == torch.float32
    assert parameter.requires_grad
    assert torch.equal(rows, torch.ones_like(rows))


def test_words_that_a_tokenizer_knows_or_takes_apart_are_refused() -> None:
    with pytest.raises(
        VideotuneError,
        match=r"embedding.token: the tokenizer has a token 'a' of its own",
    ):
        add_tokens(letters_tokenizer(), ("a",))
    tokenizer = letters_tokenizer()
    add_tokens(tokenizer, ("<x>", "<x>_1"))
    with pytest.raises(VideotuneError, match="has a token '<x>' of its own"):
        add_tokens(tokenizer, ("<x>",))
    with pytest.raises(
        VideotuneError,
        match=r"<y> has rows of 8 numbers, and the text encoder reads 16",
    ):
        lay_rows(part_of("t5"), ("<y>",), torch.zeros(1, 8))


def test_a_word_is_spelled_out_as_diffusers_does_it() -> None:
    from diffusers.loaders import TextualInversionLoaderMixin

    assert token_names("<x>", 3) == ("<x>", "<x>_1", "<x>_2")
    for vectors in (1, 2, 3):
        tokenizer, tokens = letters_tokenizer(), token_names("<x>", vectors)
        add_tokens(tokenizer, tokens)
        for text in ("a <x> b", "<x>, <x>", "nothing", "(<x>)"):
            diffusers_text = TextualInversionLoaderMixin().maybe_convert_prompt(
                text, tokenizer
            )
            assert spelled(text, tokens) == diffusers_text


def test_layers_of_a_text_encoder_are_named_by_module_or_weight() -> None:
    encoders: dict[str, nn.Module] = {"text_encoder": encoder_of("umt5", 98)}
    names = [
        f"text_encoder.{name}"
        for name, _ in encoders["text_encoder"].named_parameters()
    ]
    block = [name for name in names if ".block.1." in name]
    for pattern in (
        "block.1",
        r"encoder\.block\.1",
        r"text_encoder\.encoder\.block\.1",
    ):
        assert layers_of(names, [pattern], of_text=True) == block, pattern
    queries = [name for name in names if name.endswith("SelfAttention.q.weight")]
    assert layers_of(names, ["SelfAttention.q.weight"], of_text=True) == queries
    assert layers_of(names, ["shared", "block.1"], of_text=True) == [
        "text_encoder.shared.weight",
        *block,
    ]
    with pytest.raises(VideotuneError, match=r"text_encoder.layers: 'nothing'"):
        layers_of(names, ["nothing"], of_text=True)
    with pytest.raises(VideotuneError, match="not a valid pattern"):
        layers_of(names, ["("], of_text=True)
    chosen = add_text(encoders, ["block.1"])
    assert list(chosen) == block
    training = {
        name
        for name, p in encoders["text_encoder"].named_parameters()
        if p.requires_grad
    }
    assert training == {name.removeprefix("text_encoder.") for name in block}
