"""What the keys about text encoders and new tokens do to what is told, to what moves, and to files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.effects.effects_kit import Lab, job_of, run_steps, trainer_of, watched, weights
from videotune.errors import VideotuneError
from videotune.trainer.run_export import export_run
from videotune.trainer.trainer import Trainer

NEW = {"training_method": "EMBEDDING", "steps": 1}
FULL = {"training_method": "FINE_TUNE", "steps": 1, "text_encoder.train": True}


def rows(trainer: Trainer) -> torch.Tensor:
    (value,) = weights(trainer).values()
    return value


def changed(trainer: Trainer, count: int = 1) -> dict[str, float]:
    """How far each trained tensor is moved by so many steps; what does not train is not in it."""
    before = weights(trainer)
    run_steps(trainer, count)
    return {name: float((value - before[name]).abs().max()) for name, value in weights(trainer).items()}


@pytest.mark.effect("training_method")
def test_new_tokens_leave_both_networks_as_they_are(lab: Lab) -> None:
    trainer = trainer_of(lab, NEW)
    (part,) = trainer.family.text_parts().values()
    frozen = {"net": trainer.net.state_dict(), "text": part.encoder.get_input_embeddings().table.state_dict()}
    before = {name: {key: value.clone() for key, value in one.items()} for name, one in frozen.items()}
    assert all(moved > 0 for moved in changed(trainer).values())
    assert all(torch.equal(frozen[name][key], value) for name, one in before.items() for key, value in one.items())
    assert trainer.job.config.learning_rate == 1e-3
    assert trainer.job.config.caption_dropout == 0


@pytest.mark.effect("embedding.token")
def test_the_token_is_what_captions_are_told_with(lab: Lab) -> None:
    """The rows are read where it stands; every caption gets the word, once; the file is called by it."""
    for token in ("<one>", "circle"):
        trainer = trainer_of(lab, NEW | {"embedding.token": token})
        texts = [caption for clip in trainer.job.library.clips for caption in clip.captions]
        assert all(text.count(token) == 1 for text in texts)
        assert sum(text.startswith(f"{token}, ") for text in texts) == (4 if token == "<one>" else 2), (
            "two circles of four"
        )
        with torch.no_grad():
            before = [trainer.family.encode_in_loop([text]).text for text in (f"a {token}", "a thing")]
            rows_now = next(iter(trainer.parameters.values()))
            rows_now.add_(1)
            after = [trainer.family.encode_in_loop([text]).text for text in (f"a {token}", "a thing")]
        assert not torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])
        (done,) = export_run(trainer.run, trainer.family, trainer.result, 1, trainer.job.resolved)
        assert set(load_file(done.path)) == {token}
    with pytest.raises(VideotuneError, match=r"embedding.token: the tokenizer has a token 'ab' of its own") as caught:
        trainer_of(lab, NEW | {"embedding.token": "ab", "embedding.vectors": 1} | taught(lab, "ab"))
    assert "take another" in str(caught.value)


def taught(lab: Lab, word: str) -> dict[str, str]:
    """The base with a tokenizer that knows a word already."""
    import shutil

    from transformers import AutoTokenizer, UMT5EncoderModel

    base = shutil.copytree(lab.model, lab.tmp / "taught")
    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    tokenizer.add_tokens([word])
    tokenizer.save_pretrained(base / "tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(base / "text_encoder")
    encoder.resize_token_embeddings(len(tokenizer))
    encoder.save_pretrained(base / "text_encoder")
    return {"base_model_name": str(base)}


@pytest.mark.effect("embedding.vectors")
def test_so_many_vectors_are_so_many_rows_and_tokens_told(lab: Lab) -> None:
    lengths = {}
    for count in (1, 3):
        trainer = trainer_of(lab, NEW | {"embedding.vectors": count})
        assert rows(trainer).shape == (count, 16)
        with watched(trainer.net) as calls:
            run_steps(trainer, 1)
        lengths[count] = int((calls[0]["text"][0] != 0).any(1).sum())
    assert lengths[3] == lengths[1] + 2


@pytest.mark.effect("embedding.init_text")
def test_rows_begin_as_the_words_of_the_text(lab: Lab) -> None:
    drawn, words, other = (
        trainer_of(lab, NEW | ({"embedding.init_text": text} if text else {})) for text in (None, "red", "blue")
    )
    (part,) = words.family.text_parts().values()
    numbers = part.tokenizer("red", add_special_tokens=False).input_ids
    torch.testing.assert_close(rows(words), part.encoder.get_input_embeddings().weight[numbers].mean(0, keepdim=True))
    assert not torch.equal(rows(words), rows(other))
    assert not torch.equal(rows(words), rows(drawn))


@pytest.mark.effect("embedding_learning_rate")
def test_the_rows_have_a_rate_of_their_own(lab: Lab) -> None:
    """Adam's first step moves each number by the rate; the general rate is stated as unused where the rows' own is given."""
    moved = {}
    for own in (None, 5e-3):
        knobs = {"learning_rate": 1e-3, "optimizer.weight_decay": 0} | ({"embedding_learning_rate": own} if own else {})
        trainer = trainer_of(lab, NEW | knobs)
        told = [note for note in trainer.job.notes if "unused" in note]
        assert told == (["learning_rate is unused: embedding_learning_rate is the new tokens' own"] if own else [])
        moved[own] = max(changed(trainer).values())
    assert moved[None] == pytest.approx(1e-3, rel=1e-2)
    assert moved[5e-3] == pytest.approx(5e-3, rel=1e-2)
    notes = job_of(lab, {"embedding_learning_rate": 1e-3}).notes
    assert 'embedding_learning_rate is unused: training_method is not "EMBEDDING"' in notes


@pytest.mark.effect("text_encoder.train")
def test_a_text_encoder_trains_or_stays_as_it_is(lab: Lab) -> None:
    still, live = (trainer_of(lab, FULL | {"text_encoder.train": train}) for train in (False, True))
    (part,) = still.family.text_parts().values()
    names = {f"text_encoder.{name}" for name, _ in part.encoder.named_parameters()}
    moved = {name: far for trainer in (still, live) for name, far in changed(trainer).items()}
    assert not names & set(still.parameters)
    assert names < set(live.parameters)
    assert all(moved[name] > 0 for name in names if not name.endswith("embed_tokens.weight"))
    with pytest.raises(VideotuneError, match=r"text_encoder.train: .* LORA does not"):
        job_of(lab, {"text_encoder.train": True})
    with pytest.raises(VideotuneError, match=r"text_encoder.train: EMBEDDING trains new tokens"):
        job_of(lab, NEW | {"text_encoder.train": True})


@pytest.mark.effect("text_encoder.learning_rate")
def test_the_text_encoder_has_a_rate_of_its_own(lab: Lab) -> None:
    furthest = {}
    for own in (None, 1e-2):
        knobs = {"learning_rate": 1e-3, "optimizer.weight_decay": 0} | (
            {"text_encoder.learning_rate": own} if own else {}
        )
        moved = changed(trainer_of(lab, FULL | knobs))
        furthest[own] = [
            max(far for name, far in moved.items() if name.startswith("text_encoder.") == text)
            for text in (True, False)
        ]
    assert furthest[None] == pytest.approx([1e-3, 1e-3], rel=1e-2)
    assert furthest[1e-2] == pytest.approx([1e-2, 1e-3], rel=1e-2)
    notes = job_of(lab, {"text_encoder.learning_rate": 1e-3}).notes
    assert "text_encoder.learning_rate is unused: the text encoder does not train" in notes


@pytest.mark.effect("text_encoder.layers")
def test_only_the_layers_that_are_named_train(lab: Lab) -> None:
    for layers, part in ((["layer.0"], ".layer.0."), (["wo"], ".wo.")):
        moved = changed(trainer_of(lab, FULL | {"text_encoder.layers": layers}))
        own = {name for name in moved if name.startswith("text_encoder.")}
        assert own
        assert all(part in name and moved[name] > 0 for name in own)
    with pytest.raises(VideotuneError, match=r"text_encoder.layers: 'none' matches no"):
        trainer_of(lab, FULL | {"text_encoder.layers": ["none"]})


@pytest.mark.effect("transformer.train")
def test_the_transformer_may_stay_as_it_is_while_the_text_encoder_trains(lab: Lab) -> None:
    with_it, without = (changed(trainer_of(lab, FULL | {"transformer.train": train})) for train in (True, False))
    assert {name for name in with_it if not name.startswith("text_encoder.")}
    assert not {name for name in without if not name.startswith("text_encoder.")}
    for knobs, why in (
        ({"transformer.train": False}, "LORA trains an adapter of the transformer"),
        (FULL | {"transformer.train": False, "text_encoder.train": False}, "nothing would train"),
        (NEW | {"transformer.train": True}, "EMBEDDING trains new tokens"),
    ):
        with pytest.raises(VideotuneError, match=f"transformer.train: {why}"):
            job_of(lab, knobs)


@pytest.mark.effect("caption_dropout")
def test_a_step_whose_caption_lost_the_token_is_a_step_without_a_gradient(lab: Lab) -> None:
    lines = run_steps(trainer_of(lab, NEW | {"steps": 4, "caption_dropout": 1}))
    assert [line["grad_norm"] for line in lines] == [0.0] * 4
    assert all("skipped" not in line for line in lines)
    assert all(line["grad_norm"] > 0 for line in run_steps(trainer_of(lab, NEW | {"steps": 4})))
