"""HiDream-I1's own facts, against diffusers' pipeline and transformer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HiDreamImageTransformer2DModel
from torch import nn

from tests.models.models_kit import batch_of, edit
from videotune.config.schema import Embedding
from videotune.errors import VideotuneError
from videotune.memory.checkpointing import checkpoint_blocks
from videotune.models.hidream import HiDream, join
from videotune.types import ClipShape, SampleRequest

Bases = Callable[..., Path]
Open = Callable[..., Any]
SHAPES = [ClipShape(1, 32, 32, 1.0), ClipShape(1, 64, 48, 1.0)]
"""A square one, and one that is padded."""


def test_a_checkpoint_says_what_it_is(tiny_bases: Bases, tmp_path: Path) -> None:
    full, dev = (HiDream.read_spec(tiny_bases("hidream", variant)) for variant in ("full", "dev"))
    assert (full.title, full.timestep_shift, full.sample_steps, full.sample_guidance) == ("HiDream-I1 Full", 3, 50, 5)
    assert (dev.title, dev.timestep_shift, dev.sample_steps, dev.sample_guidance) == ("HiDream-I1 Dev", 6, 28, 1)
    folder = shutil.copytree(tiny_bases("hidream", "dev"), tmp_path / "fast")
    edit(folder / "scheduler" / "scheduler_config.json", shift=3.0)
    fast = HiDream.read_spec(folder)
    assert (fast.title, fast.timestep_shift, fast.sample_steps, fast.sample_guidance) == ("HiDream-I1 Fast", 3, 16, 1)


def test_llama_is_missed_and_joined(tiny_bases: Bases, tiny_family: Open, tmp_path: Path) -> None:
    """As published, without its fourth text encoder; then with the folder that is made of both."""
    whole, base, llama = tiny_bases("hidream"), tmp_path / "base", tmp_path / "llama"
    shutil.copytree(whole, base)
    shutil.move(base / "text_encoder_4", llama)
    for path in (base / "tokenizer_4").iterdir():
        shutil.move(path, llama / path.name)
    (base / "tokenizer_4").rmdir()
    index = json.loads((base / "model_index.json").read_text())
    kept = {key: value for key, value in index.items() if not key.endswith("_4")}
    (base / "model_index.json").write_text(json.dumps(kept))
    with pytest.raises(VideotuneError, match=r"no text_encoder_4.*Llama-3.1-8B-Instruct.*videotune.models.hidream"):
        HiDream.read_spec(base)
    new = join(base, llama, tmp_path / "new")
    assert HiDream.read_spec(new) == HiDream.read_spec(whole)
    ours = HiDream(new, torch.device("cpu"), torch.float32).encode_text(["a red circle"])[0]
    theirs = tiny_family("hidream").encode_text(["a red circle"])[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(VideotuneError, match="there already"):
        join(base, llama, new)
    with pytest.raises(VideotuneError, match=r"is a clip_text_model of 1 layers; HiDream-I1 reads a llama of 2"):
        join(base, base / "text_encoder", tmp_path / "other")


def test_a_new_token_does_not_move_the_end_of_a_caption(tiny_bases: Bases, tmp_path: Path) -> None:
    """Older configs of CLIP name 2 as its end mark; then the highest number of a caption counted, that of the new token."""

    from videotune.adapters.layers import add_rows

    folder = shutil.copytree(tiny_bases("hidream"), tmp_path / "older")
    for part in ("text_encoder", "text_encoder_2"):
        edit(folder / part / "config.json", eos_token_id=2)
    pooled = []
    for place in (tiny_bases("hidream"), folder):
        family = HiDream(place, torch.device("cpu"), torch.float32)
        plain = family.encode_text(["a red circle"])[0]["pooled"]
        add_rows(family.text_parts(), Embedding(token="<x>"), seed=0)
        pooled.append([plain, *(family.encode_text([text])[0]["pooled"] for text in ("<x> a", "<x> b"))])
    for newer, older in zip(*pooled, strict=True):
        assert torch.equal(newer, older)
    assert not torch.equal(pooled[1][1], pooled[1][2]), "what stands behind the token is heard"


def told(family: Any, shape: ClipShape, seed: int = 0) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """(batch, the words of a call of the transformer for it, t)."""
    batch, t = batch_of(family, ["a red circle", "b"], seed, shape=shape), torch.tensor([0.3, 0.9])
    words = {
        "hidden_states": batch.x0[:, :, 0],
        "timesteps": 1000 * t,
        "encoder_hidden_states_t5": batch.cond.text,
        "encoder_hidden_states_llama3": batch.cond.extras["llama"].transpose(0, 1),
        "pooled_embeds": batch.cond.extras["pooled"],
        "return_dict": False,
    }
    return batch, words, t


def by_hand(tokens: torch.Tensor, shape: ClipShape) -> torch.Tensor:
    """What diffusers' transformer answers in training, (B,C,S,p·p), as pictures (B,C,H,W)."""
    rows, columns = shape.height // 16, shape.width // 16
    tokens = tokens[:, :, : rows * columns].unflatten(2, (rows, columns)).unflatten(4, (2, 2))
    return tokens.permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)


def gradients(net: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None and bool(p.grad.any())}


@pytest.mark.parametrize(("shape", "checkpointing"), [(SHAPES[0], "ON"), (SHAPES[1], "OFF")], ids=str)
def test_gradients_are_those_of_diffusers_in_training(
    shape: ClipShape, checkpointing: str, tiny_bases: Bases, tiny_family: Open
) -> None:
    """Of every weight, gates and routed experts among them, also where the network is set to evaluate.

    As diffusers' comes, in evaluation its routed experts get none, and what is before them others.
    """
    family = tiny_family("hidream")
    batch, words, t = told(family, shape)
    theirs = HiDreamImageTransformer2DModel.from_pretrained(tiny_bases("hidream") / "transformer").train()
    wanted = gradients(theirs, by_hand(theirs(**words)[0], shape).square().mean())
    routed = [name for name in wanted if ".experts." in name or ".gate." in name]
    assert len(routed) >= 4 * 3 * 3 + 4, "of four layers most experts, and each gate"
    theirs.zero_grad()
    lost = gradients(theirs.eval(), theirs(**words)[0].square().mean())
    assert not set(routed) & set(lost), "diffusers' own loses them: else nothing of this is needed"
    for training in (False, True):
        net = family.denoiser().requires_grad_(True).train(training)
        checkpoint_blocks(net, checkpointing)
        found = gradients(net, family.predict(net, batch.x0, t, batch).square().mean())
        assert set(found) == set(wanted)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-7)


def test_every_size_is_drawn_as_it_is(tiny_bases: Bases, tmp_path: Path) -> None:
    """The pipeline's arithmetic rounds down after a division; none of these loses a row by it."""
    folder = shutil.copytree(tiny_bases("hidream"), tmp_path / "large")
    edit(folder / "transformer" / "config.json", max_resolution=[128, 128])
    family = HiDream(folder, torch.device("cpu"), torch.float32)
    cond = family.condition(family.encode_text(["a"]))

    class Silent(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
            return (torch.zeros_like(hidden_states),)

    sides = (16, 48, 336, 512, 656, 880, 1008, 1024)
    for shape in (ClipShape(1, h, w, 1.0) for h in sides for w in sides):
        drawn = family.sample({"transformer": Silent()}, cond, None, SampleRequest(shape, 1, 1.0, (1,)))
        assert drawn.shape[3:] == (shape.height // 8, shape.width // 8)


def test_more_than_one_frame_and_more_than_its_area_are_refused(tiny_family: Open) -> None:
    from videotune.config.data_schema import VideoConfig
    from videotune.data.buckets import choose_size, parse_resolution
    from videotune.data.frame_sampling import planned_frames

    family = tiny_family("hidream")
    batch, _, t = told(family, SHAPES[0])
    with pytest.raises(VideotuneError, match=r"generates images.*these are 9 frames"):
        family.encode_video(torch.zeros(3, 9, 32, 32))
    with pytest.raises(VideotuneError, match="these are 2 frames"):
        family.predict(family.denoiser(), torch.cat([batch.x0] * 2, 2), t, batch)
    with pytest.raises(VideotuneError, match="at most 9216 pixels"):
        family.sample({}, batch.cond, None, SampleRequest(ClipShape(1, 112, 96, 1.0), 3, 1.0, (1,)))
    rules = HiDream.spec.rules
    with pytest.raises(VideotuneError, match=r"frames is 17, but this model takes single frames"):
        planned_frames(VideoConfig(frames=17), rules)
    assert planned_frames(VideoConfig(frames=1), rules) == (1, None)
    assert planned_frames(VideoConfig(), rules)[0] == 1
    with pytest.raises(VideotuneError, match="at most 1048576 pixels, as 1024x1024"):
        parse_resolution(1040, rules)
    for width, height in ((1024, 1000), (1920, 1080), (3000, 1000), (900, 1600), (1537, 1100)):
        high, wide = choose_size(width, height, parse_resolution(1024, rules), rules)
        assert 0.9 * 1024**2 < high * wide <= 1024**2
