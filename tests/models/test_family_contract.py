"""What every family owes the rest of the house; each runs its tiny checkpoint."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.models_kit import FAMILIES, KINDS, Open, batch_of, denoisers, first_of, small_shape
from tests.models.oracles import oracle
from videotune.adapters.lora import add_lora, matching
from videotune.config.schema import Embedding, Lora
from videotune.diffusion.loss import objective
from videotune.diffusion.timesteps import Timesteps
from videotune.errors import VideotuneError
from videotune.models.base_model import of_base, spec_for
from videotune.models.registry import find
from videotune.types import BasePlace, ClipShape, SampleRequest


@KINDS
def test_the_spec_is_read_without_torch(name: str, variant: str, tiny_bases: Callable[..., Path]) -> None:
    folder = tiny_bases(name, variant)
    code = (
        "import sys; from videotune.models.base_model import of_base; from pathlib import Path;"
        f"m = of_base(Path({str(folder)!r})); s = m.read_spec(Path({str(folder)!r}));"
        "print(s.name, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == [name, "False"]


@KINDS
def test_the_base_says_its_family(name: str, variant: str, tiny_bases: Callable[..., Path]) -> None:
    folder = tiny_bases(name, variant)
    assert of_base(folder) is find(name)
    assert spec_for(name, BasePlace("tiny", folder)) == find(name).read_spec(folder)


@KINDS
def test_tiny_is_the_same_for_the_same_seed(
    name: str, variant: str, tmp_path: Path, tiny_bases: Callable[..., Path]
) -> None:
    again = find(name).tiny(tmp_path / "again", variant=variant)
    first = tiny_bases(name, variant)
    for path in sorted(first.rglob("*.safetensors")):
        assert path.read_bytes() == (again / path.relative_to(first)).read_bytes()


@KINDS
def test_predict_gives_gradients_to_the_adapter_alone(name: str, variant: str, tiny_family: Open) -> None:
    family = tiny_family(name, variant=variant)
    batch = batch_of(family, ["a red circle", ""])
    net = first_of(family)
    parameters = add_lora(net, family.spec, Lora(rank=2), seed=0)
    v = family.predict(net, torch.randn_like(batch.x0), torch.tensor([0.3, 0.9]), batch)
    assert v.shape == batch.x0.shape
    assert v.dtype == torch.float32
    v.square().mean().backward()
    trained = {id(parameter) for parameter in parameters.values()}
    for parameter in net.parameters():
        assert (parameter.grad is not None) == (id(parameter) in trained)
    assert any(p.grad.abs().max() > 0 for n, p in parameters.items() if "lora_B" in n)


@KINDS
def test_text_in_the_step_is_the_cached_text_to_the_bit(name: str, variant: str, tiny_family: Open) -> None:
    """Whatever captions stand beside one another; what a clip tells stays as it was cached.

    With gradients the CPU takes another kernel of attention, which rounds otherwise.
    """
    from videotune.adapters.layers import LiveText
    from videotune.trainer.step import condition

    family = tiny_family(name, variant=variant)
    batch = batch_of(family, ["a red circle", "", "a much longer caption than the others", ""])
    assert condition(family, None, batch) is batch
    for on in (False, True):
        for part in family.text_parts().values():
            part.encoder.requires_grad_(on)
        live = condition(family, LiveText(), batch)
        assert live.cond.text.requires_grad == on
        off = (live.cond.text - batch.cond.text).abs().max()
        assert off < 1e-5 if on else off == 0
        assert live.cond.text.dtype == batch.cond.text.dtype
        assert (live.cond.text_mask is None) == (batch.cond.text_mask is None)
        told = set(family.encode_text([""])[0])  # of a caption; all else is a clip's
        assert set(live.cond.extras) == set(batch.cond.extras)
        for key, value in batch.cond.extras.items():
            assert (
                live.cond.extras[key] is value
                if key not in told
                else bool((live.cond.extras[key] - value).abs().max() <= (1e-5 if on else 0))
            )


@pytest.mark.parametrize("recomputed", ["OFF", "ON"])
@KINDS
def test_gradients_reach_new_tokens_through_the_frozen_denoiser(
    name: str, variant: str, recomputed: str, tiny_family: Open
) -> None:
    """With blocks recomputed as without; a caption without the token gives none, and no weight gets any."""
    from videotune.adapters.layers import LiveText
    from videotune.adapters.textual_inversion import add_rows
    from videotune.memory.checkpointing import checkpoint_blocks, checkpoint_text
    from videotune.trainer.step import condition

    family = tiny_family(name, variant=variant)
    net, parts = first_of(family), family.text_parts()
    checkpoint_blocks(net, recomputed)
    for part in parts.values():
        checkpoint_text(part.encoder, recomputed)
    settings = Embedding(token="<x>", vectors=2)
    rows = add_rows(parts, settings, seed=0)
    net.train()
    batch = batch_of(family, ["a <x> circle", "a red circle"])
    batch = condition(family, LiveText(settings.tokens), batch)
    v = family.predict(net, batch.x0, torch.tensor([0.3, 0.8]), batch)
    v[1].square().mean().backward(retain_graph=True)
    assert not any(bool(row.grad.any()) for row in rows.values() if row.grad is not None)
    v[0].square().mean().backward()
    for row in rows.values():
        assert bool((row.grad != 0).any(1).all())
    encoders = [parameter for part in parts.values() for parameter in part.encoder.parameters()]
    ours = {id(row) for row in rows.values()}
    assert all(p.grad is None for p in (*net.parameters(), *encoders) if id(p) not in ours)


@KINDS
def test_tokenizers_and_skeletons_are_those_of_the_text_encoders(name: str, variant: str, tiny_family: Open) -> None:
    family = tiny_family(name, variant=variant)
    parts, bare = family.text_parts(), family.text_skeletons()
    assert set(parts) == set(bare) == set(family.tokenizers())
    for part, one in parts.items():
        shapes = {key: tuple(value.shape) for key, value in one.encoder.state_dict().items()}
        assert {key: tuple(value.shape) for key, value in bare[part].state_dict().items()} == shapes
        assert all(parameter.is_meta for parameter in bare[part].parameters())
        fresh = family.tokenizers()[part]
        one.tokenizer.add_tokens(["<x>"])
        assert "<x>" not in fresh.get_vocab()
        assert fresh("a red circle").input_ids == one.tokenizer("a red circle").input_ids
    assert all(set(keys) in (set(), set(parts)) for keys in family.embedding_keys().values())
    assert "diffusers" in family.embedding_keys()


@KINDS
def test_a_batch_is_its_samples(name: str, variant: str, tiny_family: Open) -> None:
    """No sample's prediction depends on its neighbours, and captions of unequal length are padded rightly."""
    family = tiny_family(name, variant=variant)
    batch = batch_of(family, ["a", "a much longer caption than the other"])
    net, x_t, t = first_of(family), torch.randn_like(batch.x0), torch.tensor([0.2, 0.7])
    with torch.no_grad():
        together = family.predict(net, x_t, t, batch)
        apart = [family.predict(net, x_t[i : i + 1], t[i : i + 1], part) for i, part in enumerate(batch.split(1))]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-4, atol=1e-5)


@KINDS
def test_tokens_are_counted_with_torch_as_without(
    name: str, variant: str, tiny_family: Open, tiny_bases: Callable[..., Path]
) -> None:
    family, captions = (
        tiny_family(name, variant=variant),
        ["abc", "", "  two   words ", "long " * 400, "Ünïcode &amp; 你好"],
    )
    lengths = [family.text_length(caption) for caption in captions]
    assert lengths[0] in (4, 5), "three letters, the end mark, and T5's mark of a word or CLIP's of the beginning"
    assert lengths[3] > family.spec.text_tokens
    assert find(name).token_lengths(tiny_bases(name, variant), captions) == lengths


@KINDS
def test_a_sample_belongs_to_its_seed_and_moves_no_other_draw(name: str, variant: str, tiny_family: Open) -> None:
    """Drawn together or one by one, a prompt with its seed gives the same, whatever training draws from."""
    family = tiny_family(name, variant=variant)
    cond, nets, before = batch_of(family, ["a", "b"]).cond, denoisers(family), torch.random.get_rng_state()
    with torch.no_grad():
        both, alone = (
            family.sample(nets, some, None, SampleRequest(small_shape(family), 3, 1.0, seeds))
            for some, seeds in ((cond, (5, 6)), (cond.map(lambda x: x[1:]), (6,)))
        )
    assert torch.equal(before, torch.random.get_rng_state())
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)


class Oracle(nn.Module):
    """Wraps a family's network: whatever it is fed, ``predict`` over it gives the exact velocity to a known x0."""

    def __init__(self, net: nn.Module, answer: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.net, self.answer = net, answer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("net"), name)

    def forward(self, *words: Any, **named: Any) -> tuple[torch.Tensor]:
        return (self.answer(*words, **named),)


@pytest.mark.parametrize("given", [False, True], ids=["", "given"])
@KINDS
def test_oracle(name: str, variant: str, given: bool, tiny_family: Open) -> None:
    """A transformer that returns the exact velocity to a known latent, in the family's own pipeline, ends at that latent.

    That settles sign, units, layout and schedule at once; ``predict`` over the same transformer must give our v, but in
    frames that are given, which are told that they are clean and count nothing.
    """
    family = tiny_family(name, variant=variant)
    if given and family.spec.given != "replace":
        return  # what it is told of the first frame stands in its condition, always
    batch = batch_of(family, ["a red circle"], given=given)
    nets = {expert: Oracle(net, oracle(batch.x0, family.spec)) for expert, net in denoisers(family).items()}
    t, noise = torch.tensor([0.4]), torch.randn_like(batch.x0)
    path = objective(family.spec.path, family.spec.path_constants, Timesteps()).path(t)
    x_t = torch.where(batch.given, batch.x0, path.alpha * batch.x0 + path.sigma * noise)
    wanted = path.d_alpha * batch.x0 + path.d_sigma * noise
    for net in nets.values():
        v = family.predict(net, x_t, t, batch)
        torch.testing.assert_close(v * batch.weight, wanted * batch.weight, rtol=1e-4, atol=1e-4)
    first = batch.x0[:, :, :1] if given else None
    drawn = family.sample(nets, batch.cond, None, SampleRequest(small_shape(family), 20, 1.0, (3,), first=first))
    # some schedulers round the timestep that they tell, which leaves an error of a thousandth of the noise
    torch.testing.assert_close(drawn, batch.x0, rtol=0, atol=1e-2)
    if given:
        torch.testing.assert_close(drawn[:, :, :1], batch.x0[:, :, :1], rtol=0, atol=1e-6)


@KINDS
def test_experts_are_looked_up_when_their_steps_come(name: str, variant: str, tiny_family: Open) -> None:
    """One after the other, and none before its first step: a mapping may hold one at a time."""
    family = tiny_family(name, variant=variant)
    nets, asked = denoisers(family), []

    class Asked(dict[str, nn.Module]):
        def __getitem__(self, expert: str) -> nn.Module:
            asked.append(expert)
            return nets[expert]

    batch = batch_of(family, ["a"])
    family.pipeline(Asked())
    assert asked == []
    with torch.no_grad():
        family.sample(Asked(), batch.cond, None, SampleRequest(small_shape(family), 6, 1.0, (1,)))
    # from noise to data
    assert list(dict.fromkeys(asked)) == [e.name for e in sorted(family.spec.experts, key=lambda e: -e.t_lo)]
    assert asked == sorted(asked, key=[e.name for e in family.spec.experts].index)


@KINDS
def test_isolated_frames_see_no_other_frame(name: str, variant: str, tiny_family: Open) -> None:
    """On: what a frame is predicted to be hangs on itself and the text alone; off: every bit as it was."""
    family = tiny_family(name, variant=variant)
    rules = family.spec.rules
    if rules.most_frames == 1:
        family.isolate_frames(first_of(family), False)
        with pytest.raises(VideotuneError, match="single frames"):
            family.isolate_frames(first_of(family), True)
        return
    side = 2 * rules.side_multiple
    frames = 7 * rules.frame_step + rules.frame_rest if rules.frame_step else rules.frame_rest
    batch = batch_of(family, ["a red circle", "b"], shape=ClipShape(frames, side, side, rules.fps))
    net, t = first_of(family), torch.tensor([0.3, 0.8])
    group = max(1, family.spec.patch[0])
    last = batch.x0.shape[2] - 1
    moved = batch.x0.clone()
    moved[:, :, last + 1 - group :] += 1.0  # the last token's frames: where frames are padded, it is in front

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return family.predict(net, batch.x0, t, batch), family.predict(net, moved, t, batch)

    before, before_moved = both()
    others = slice(0, last + 1 - group)
    assert not torch.equal(before[:, :, others], before_moved[:, :, others]), "frames see each other"
    family.isolate_frames(net, True)
    family.isolate_frames(net, True)  # twice is once
    alone, alone_moved = both()
    assert torch.equal(alone[:, :, others], alone_moved[:, :, others])
    assert not torch.allclose(alone[:, :, last], alone_moved[:, :, last])
    assert not torch.allclose(alone, before)
    family.isolate_frames(net, False)
    family.isolate_frames(net, False)
    after, after_moved = both()
    assert torch.equal(before, after)
    assert torch.equal(before_moved, after_moved)


@KINDS
def test_isolated_frames_train(name: str, variant: str, tiny_family: Open) -> None:
    """The adapter gets the same gradients with blocks recomputed as without, and the pipeline runs over the same network.

    A model of pictures has nothing to isolate.
    """
    family = tiny_family(name, variant=variant)
    isolated = family.spec.rules.most_frames != 1
    batch, found = batch_of(family, ["a red circle"]), []
    for recomputed in (False, True):
        net = first_of(family)
        parameters = add_lora(net, family.spec, Lora(rank=2), seed=0)
        if recomputed:
            net.enable_gradient_checkpointing()
        net.train()
        family.isolate_frames(net, isolated)
        family.predict(net, batch.x0, torch.tensor([0.3]), batch).square().mean().backward()
        found.append({key: parameter.grad for key, parameter in parameters.items()})
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-4, atol=1e-7)
    drawn, nets, request = [], dict.fromkeys(denoisers(family), net), SampleRequest(small_shape(family), 2, 1.0, (1,))
    for on in (isolated, False):
        family.isolate_frames(net, on)
        with torch.no_grad():
            drawn.append(family.sample(nets, batch.cond, None, request))
    assert torch.equal(*drawn) != isolated


@KINDS
def test_named_targets_lie_inside_the_blocks(name: str, variant: str, tiny_family: Open) -> None:
    family = tiny_family(name, variant=variant)
    net = family.skeleton()
    counts = {preset: len(matching(net, family.spec, preset)) for preset in family.spec.lora_targets}
    assert all(count > 0 for count in counts.values())
    assert counts["attention"] < counts["linear"]


@KINDS
def test_the_skeleton_is_the_denoiser_without_weights(name: str, variant: str, tiny_family: Open) -> None:
    family = tiny_family(name, variant=variant)
    for expert, net in denoisers(family).items():
        shapes = {key: tuple(value.shape) for key, value in net.state_dict().items()}
        skeleton = family.skeleton(expert)
        assert {key: tuple(value.shape) for key, value in skeleton.state_dict().items()} == shapes
        assert all(parameter.is_meta for parameter in skeleton.parameters())


@FAMILIES
def test_fingerprints_follow_the_bytes(name: str, tiny_bases: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(tiny_bases(name), folder)
    module, cpu = find(name), torch.device("cpu")
    before = module(folder, cpu, torch.float32).fingerprints()
    assert before == module(tiny_bases(name), cpu, torch.float32).fingerprints()
    config = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").write_text(json.dumps(config | {"note": 1}))
    after = module(folder, cpu, torch.float32).fingerprints()
    assert {part for part in before if before[part] != after[part]} == {"vae"}


def test_fingerprints_see_the_middle_of_a_file(tmp_path: Path) -> None:
    from videotune.models import model_files as room

    content = bytearray(3 << 20)
    (tmp_path / "weights").write_bytes(content)
    before = room.fingerprint(tmp_path)
    content[1_500_000] = 1
    (tmp_path / "weights").write_bytes(content)
    assert room.fingerprint(tmp_path) != before


def test_large_files_are_read_all_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from videotune.models import model_files as room

    monkeypatch.setattr(room, "SAMPLED_ABOVE", 1 << 10)
    monkeypatch.setattr(room, "BLOCK", 1 << 10)
    content = bytearray(1 << 20)
    seen = set()
    for place in (None, 0, (1 << 20) - 1, (1 << 20) // 2 + 2048):
        changed = bytearray(content)
        if place is not None:
            changed[place // 4096 * 4096 if 0 < place < (1 << 20) - 1 else place] = 1
        (tmp_path / "weights").write_bytes(changed)
        seen.add(room.fingerprint(tmp_path))
    assert len(seen) >= 3


@FAMILIES
def test_clips_may_be_encoded_while_previews_are_decoded(name: str, tiny_family: Open) -> None:
    """A run that encodes in its loop has threads in the VAE while previews decode and free it."""
    family = tiny_family(name)
    shape = small_shape(family)
    clips = [torch.rand(3, shape.frames, shape.height, shape.width) * 2 - 1 for _ in range(4)]
    latents = [family.encode_video(clip).mean for clip in clips]
    pixels = family.decode(latents[0])
    with ThreadPoolExecutor(2) as pool:
        encoded = [pool.submit(family.encode_video, clip) for clip in clips * 3]
        for _ in range(6):
            torch.testing.assert_close(family.decode(latents[0]), pixels)
            family.free("vae")
        for future, mean in zip(encoded, latents * 3, strict=True):
            torch.testing.assert_close(future.result().mean, mean)
