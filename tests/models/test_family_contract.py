"""What every family owes the rest of the house, and what comes out of it; each runs its
tiny checkpoint.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.loaders import single_file_utils
from diffusers.models.transformers import (
    transformer_hunyuan_video15,
    transformer_kandinsky,
)
from torch import nn

from tests.support import families
from tests.support.families import FAMILIES, KINDS, Open
from tests.support.oracles import oracle, unpacked
from videotune.adapters.layers import LiveText, add_rows
from videotune.adapters.lora import add_lora
from videotune.config.sections import Embedding, Lora
from videotune.diffusion.loss import Objective, denoising_loss, objective_for_prediction
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.memory.checkpointing import checkpoint_blocks, checkpoint_text
from videotune.model_spec import ModelSpec
from videotune.models.registry import find, names
from videotune.rng import generator_for
from videotune.trainer.text_encoders import encode_live_text
from videotune.types import Batch, ClipShape, SampleRequest, Window
from videotune.validation.validation_loss import (
    ValidationLoss,
    read_validation,
    relative_to_first,
)


@pytest.fixture
def family(name: str, variant: str, tiny_family: Open) -> Any:
    return tiny_family(name, variant=variant)


def test_each_base_says_its_family_and_its_spec_without_torch(
    tiny_bases: Callable[..., Path],
) -> None:
    bases = [
        (name, str(tiny_bases(name, variant)))
        for name in names()
        for variant in find(name).variants
    ]
    code = """
        import json, sys
        from pathlib import Path
        from videotune.models.base_model import spec_for
        from videotune.types import BasePlace
        for name, folder in json.loads(sys.argv[1]):
            assert spec_for(None, BasePlace(folder, Path(folder))).name == name
            assert spec_for(name, BasePlace(folder, Path(folder))).name == name
        assert "torch" not in sys.modules
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), json.dumps(bases)], check=True
    )


@KINDS
def test_text_in_the_step_is_the_cached_text_to_the_bit(family: Any) -> None:
    """Whatever captions stand beside one another; what a clip tells stays as it was
    cached.

    With gradients the CPU takes another kernel of attention, which rounds otherwise.
    """

    batch = families.batch_of(
        family, ["a red circle", "", "a much longer caption than the others", ""]
    )
    assert encode_live_text(family, None, batch) is batch
    for on in (False, True):
        for part in family.text_parts().values():
            part.encoder.requires_grad_(on)
        live = encode_live_text(family, LiveText(), batch)
        assert live.conditioning.text.requires_grad == on
        off = (live.conditioning.text - batch.conditioning.text).abs().max()
        assert off < 1e-5 if on else off == 0
        assert live.conditioning.text.dtype == batch.conditioning.text.dtype
        assert (live.conditioning.text_mask is None) == (
            batch.conditioning.text_mask is None
        )
        told = set(family.encode_text([""])[0])  # of a caption; all else is a clip's
        assert set(live.conditioning.extras) == set(batch.conditioning.extras)
        for key, value in batch.conditioning.extras.items():
            own = live.conditioning.extras[key]
            assert (
                (own.float() - value.float()).abs().sum() <= (1e-5 if on else 0)
                if key in told
                else own is value
            )


@pytest.mark.parametrize("recomputed", ["OFF", "ON"])
@KINDS
def test_gradients_reach_new_tokens_through_the_frozen_denoiser(
    family: Any, recomputed: str
) -> None:
    """With blocks recomputed as without; a caption without the token gives none, and no
    weight gets any.
    """

    net, parts = families.first_of(family), family.text_parts()
    checkpoint_blocks(net, recomputed)
    for part in parts.values():
        checkpoint_text(part.encoder, recomputed)
    settings = Embedding(token="<x>", vectors=2)
    rows = add_rows(parts, settings, seed=0)
    net.train()
    batch = families.batch_of(family, ["a <x> circle", "a red circle"])
    batch = encode_live_text(family, LiveText(settings.tokens), batch)
    v = family.predict(net, batch.x0, torch.tensor([0.3, 0.8]), batch)
    v[1].square().mean().backward(retain_graph=True)
    assert not any(
        bool(row.grad.any()) for row in rows.values() if row.grad is not None
    )
    v[0].square().mean().backward()
    for row in rows.values():
        assert bool((row.grad != 0).any(1).all())
    encoders = [
        parameter for part in parts.values() for parameter in part.encoder.parameters()
    ]
    ours = {id(row) for row in rows.values()}
    assert all(
        p.grad is None for p in (*net.parameters(), *encoders) if id(p) not in ours
    )


@KINDS
def test_meta_device_models_and_fresh_tokenizers_are_those_of_the_checkpoint(
    family: Any,
) -> None:
    parts, bare = family.text_parts(), family.text_skeletons()
    assert set(parts) == set(bare) == set(family.tokenizers())
    pairs = [(one.encoder, bare[part]) for part, one in parts.items()]
    for net, meta in [
        *pairs,
        *(
            (net, family.skeleton(expert))
            for expert, net in families.denoisers(family).items()
        ),
    ]:
        loaded, described = (
            {key: value.shape for key, value in one.state_dict().items()}
            for one in (net, meta)
        )
        assert described == loaded
        assert all(parameter.is_meta for parameter in meta.parameters())
    for part, one in parts.items():
        fresh = family.tokenizers()[part]
        one.tokenizer.add_tokens(["<x>"])
        assert "<x>" not in fresh.get_vocab()
        assert (
            fresh("a red circle").input_ids == one.tokenizer("a red circle").input_ids
        )
    assert all(
        set(keys) in (set(), set(parts)) for keys in family.embedding_keys().values()
    )
    assert "diffusers" in family.embedding_keys()


@KINDS
def test_a_batch_is_its_samples(family: Any) -> None:
    """No sample's prediction depends on its neighbours, and captions of unequal length
    are padded rightly.
    """
    batch = families.batch_of(family, ["a", "a much longer caption than the other"])
    net, x_t, t = (
        families.first_of(family),
        torch.randn_like(batch.x0),
        torch.tensor([0.2, 0.7]),
    )
    with torch.no_grad():
        together = family.predict(net, x_t, t, batch)
        apart = [
            family.predict(net, x_t[i : i + 1], t[i : i + 1], part)
            for i, part in enumerate(batch.split(1))
        ]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-4, atol=1e-5)


@KINDS
def test_tokens_are_counted_with_torch_as_without(family: Any) -> None:
    captions = ["abc", "", "  two   words ", "long " * 400, "Ünïcode &amp; 你好"]
    lengths = [family.text_length(caption) for caption in captions]
    assert lengths[0] in (4, 5, 8), (
        "three letters, the end mark, and T5's mark of a word or CLIP's of the beginning; or Qwen's five after them"
    )
    assert lengths[3] > family.spec.text_tokens
    assert family.token_lengths(family.folder, captions) == lengths


class Oracle(nn.Module):
    """Wraps a family's network: whatever it is fed, ``predict`` over it gives the exact
    velocity to a known x0.
    """

    def __init__(self, net: nn.Module, answer: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.net, self.answer = net, answer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("net"), name)

    def forward(self, *words: Any, **named: Any) -> Any:
        answer = self.answer(*words, **named)
        return (answer,) if isinstance(answer, torch.Tensor) else answer


@pytest.mark.parametrize("given", [False, True], ids=["", "given"])
@KINDS
def test_oracle(family: Any, given: bool) -> None:
    """A transformer that returns the exact velocity to a known latent, in the family's
    own pipeline, ends at that latent.

    That settles sign, units, layout and schedule at once; ``predict`` over the same
    transformer must give our v, but in frames that are given, which are told that they
    are clean and count nothing.
    """
    if given and family.spec.image_conditioning != "replace":
        return  # what it is told of the first frame stands in its condition, always
    batch = families.batch_of(family, ["a red circle"], given=given)
    nets = {
        expert: Oracle(net, oracle(batch.x0, family.spec))
        for expert, net in families.denoisers(family).items()
    }
    t, noise = torch.tensor([0.4]), torch.randn_like(batch.x0)
    path = objective_for_prediction(
        family.spec.prediction, family.spec.prediction_constants, TimestepSampler()
    ).noise_path(t)
    x_t = torch.where(
        batch.conditioning_mask, batch.x0, path.alpha * batch.x0 + path.sigma * noise
    )
    wanted = path.d_alpha * batch.x0 + path.d_sigma * noise
    for net in nets.values():
        v = family.predict(net, x_t, t, batch)
        torch.testing.assert_close(
            v * batch.loss_mask, wanted * batch.loss_mask, rtol=1e-4, atol=1e-4
        )
    first = batch.x0[:, :, :1] if given else None
    drawn = family.sample(
        nets,
        batch.conditioning,
        None,
        SampleRequest(families.small_shape(family), 20, 1.0, (3,), first=first),
    )
    # some schedulers round the timestep that they tell, which leaves an error of a
    # thousandth of the noise
    torch.testing.assert_close(drawn, batch.x0, rtol=0, atol=1e-2)
    if given:
        torch.testing.assert_close(
            drawn[:, :, :1], batch.x0[:, :, :1], rtol=0, atol=1e-6
        )


@KINDS
def test_experts_are_looked_up_when_their_steps_come(family: Any) -> None:
    """One after the other, and none before its first step: a mapping may hold one at a
    time.
    """
    nets, asked = families.denoisers(family), []

    class Asked(dict[str, nn.Module]):
        def __getitem__(self, expert: str) -> nn.Module:
            asked.append(expert)
            return nets[expert]

    batch = families.batch_of(family, ["a"])
    family.pipeline(Asked())
    assert asked == []
    with torch.no_grad():
        family.sample(
            Asked(),
            batch.conditioning,
            None,
            SampleRequest(families.small_shape(family), 6, 1.0, (1,)),
        )
    # from noise to data
    assert list(dict.fromkeys(asked)) == [
        e.name for e in sorted(family.spec.experts, key=lambda e: -e.t_lo)
    ]
    assert asked == sorted(asked, key=[e.name for e in family.spec.experts].index)


def masked(
    family: Any, frames: int, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """A hook that gives diffusers' own attention a dense mask: a frame sees itself and
    the text, text sees text.

    HunyuanVideo 1.5's makes a mask of its own from one of the text, so there the product
    of queries, keys and values gets both, in diffusers' own processor.
    """
    product = transformer_hunyuan_video15.dispatch_attention_fn

    def hook(attn: nn.Module, words: tuple[Any, ...], named: dict[str, Any]) -> Any:
        named = (
            dict(zip(signature(attn.forward).parameters, words, strict=False)) | named
        )
        video, text = named["hidden_states"], named.get("encoder_hidden_states")
        of = torch.arange(video.shape[1]) * frames // video.shape[1]
        none = of.new_full((0 if text is None else text.shape[1],), -1)
        of = torch.cat([none, of] if family.text_first else [of, none])
        sees = (of[:, None] == of[None]) | (of[None] == -1)
        if family.spec.name == "hunyuan_video15":

            def both(*qkv: Any, attn_mask: torch.Tensor, **further: Any) -> Any:
                return product(*qkv, attn_mask=attn_mask & sees, **further)

            module = transformer_hunyuan_video15
            monkeypatch.setattr(module, "dispatch_attention_fn", both)
            theirs = module.HunyuanVideo15AttnProcessor2_0()
            monkeypatch.setattr(attn, "processor", theirs)
            return None
        if family.spec.name in (
            "cogvideox",
            "ltx_video",
            "ltx2",
        ):  # these take what is added to the products
            mask = torch.where(sees, 0.0, -torch.inf)[None].repeat(len(video), 1, 1)
        else:
            mask = (
                sees[None, None]
                if named.get("attention_mask") is None
                else named["attention_mask"] & sees
            )
        return (), named | {"attention_mask": mask}

    return hook


class MaskedProcessor:
    """An attention processor of diffusers that takes no mask, with one."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(
        self, *words: Any, attention_mask: torch.Tensor | None = None, **named: Any
    ) -> Any:
        attend = transformer_kandinsky.dispatch_attention_fn

        def attend_masked(*tensors: torch.Tensor, **settings: Any) -> Any:
            return attend(*tensors, **(settings | {"attn_mask": attention_mask}))

        with patch.object(
            transformer_kandinsky, "dispatch_attention_fn", attend_masked
        ):
            return self.original(*words, **named)


def masked_layers(family: Any, net: nn.Module) -> list[Any]:
    """The layers of attention over video tokens, which take a mask from now on."""
    paths = family.spec.blocks
    if family.spec.name == "kandinsky5":
        paths = ("visual_transformer_blocks",)
    layers = []
    for path in paths:
        for block in net.get_submodule(path).children():
            layers.append(getattr(block, family.attention))
    if family.spec.name == "kandinsky5":
        for layer in layers:
            layer.processor = MaskedProcessor(layer.processor)
    return layers


@KINDS
def test_isolated_frames_are_a_mask_in_diffusers_own_attention(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched on twice is once; off again, every bit is as it was.

    Captions have unequal lengths.
    """
    net, rules, t = (
        families.first_of(family),
        family.spec.rules,
        torch.tensor([0.3, 0.8]),
    )
    if rules.most_frames == 1:
        family.isolate_frames(net, False)
        with pytest.raises(VideotuneError, match="single frames"):
            family.isolate_frames(net, True)
        return
    side = 2 * rules.side_multiple
    shape = ClipShape(
        3 * rules.frame_step + rules.frame_rest, side, 3 * side // 2, rules.fps
    )
    for some in (
        families.small_shape(family),
        families.small_shape(family) if rules.size else shape,
    ):
        batch = families.batch_of(family, ["a red circle", "b"], shape=some)

        def predicted(batch: Any = batch, net: nn.Module = net) -> torch.Tensor:
            with torch.no_grad():
                return family.predict(net, batch.x0, t, batch)

        usual = predicted()
        for _ in range(2):
            family.isolate_frames(net, True)
        isolated = predicted()
        # a preview's pipeline may say no count of frames, but positions
        with torch.no_grad():
            nets, request = (
                dict.fromkeys(families.denoisers(family), net),
                SampleRequest(some, 2, 1.0, (1, 2)),
            )
            family.sample(nets, batch.conditioning, None, request)
        for _ in range(2):
            family.isolate_frames(net, False)
        assert torch.equal(predicted(), usual)
        frames = -(-batch.x0.shape[2] // family.spec.patch[0])
        hook = masked(family, frames, monkeypatch)
        layers = masked_layers(family, net)
        handles = [
            layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers
        ]
        torch.testing.assert_close(isolated, predicted(), rtol=1e-4, atol=1e-5)
        for handle in handles:
            handle.remove()
        monkeypatch.undo()
        if family.spec.name == "kandinsky5":
            net = families.first_of(family)  # without the masked processors
        assert (isolated - usual).abs().max() > 1e-4


@KINDS
def test_isolated_frames_train(family: Any) -> None:
    """The adapter gets the same gradients with blocks recomputed as without.

    A model of pictures has nothing to isolate.
    """
    isolated = family.spec.rules.most_frames != 1
    batch, found = families.batch_of(family, ["a red circle"]), []
    for recomputed in (False, True):
        net = families.first_of(family)
        parameters = add_lora(net, family.spec, Lora(rank=2), seed=0)
        if recomputed:
            net.enable_gradient_checkpointing()
        net.train()
        family.isolate_frames(net, isolated)
        family.predict(
            net, batch.x0, torch.tensor([0.3]), batch
        ).square().mean().backward()
        found.append({key: parameter.grad for key, parameter in parameters.items()})
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-4, atol=1e-7)


@KINDS
def test_whole_weights_under_the_authors_names_are_read_back_by_diffusers(
    family: Any, name: str
) -> None:
    """HunyuanVideo 1.5's are read by a script of diffusers alone; see
    test_hunyuan_video15.py.
    """
    names = list(family.skeleton().state_dict())
    if family.original(names[0]) is not None and name != "hunyuan_video15":
        marked = {
            family.original(one): torch.full((1,), float(i))
            for i, one in enumerate(names)
        }
        read = {
            "wan": single_file_utils.convert_wan_transformer_to_diffusers,
            "wan_vace": single_file_utils.convert_wan_transformer_to_diffusers,
            "hidream": single_file_utils.convert_hidream_transformer_to_diffusers,
            "ltx_video": single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers,
            "ltx2": single_file_utils.convert_ltx2_transformer_to_diffusers,
            "kandinsky5": dict,  # the authors' names are diffusers'
        }[name](marked)
        # diffusers' reader of LTX-2 has no name for these two of LTX-2.3; its script
        # that converts the authors' files has.
        read = {
            one.replace("prompt_adaln_single.", "prompt_adaln."): value
            for one, value in read.items()
        }
        assert {one: int(value) for one, value in read.items()} == {
            one: i for i, one in enumerate(names)
        }


@KINDS
def test_fingerprints_follow_the_bytes(
    name: str, variant: str, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_bases(name, variant), tmp_path / "copy"))
    before = families.open_family(name, folder).fingerprints()
    links = shutil.copytree(
        folder, tmp_path / "links", copy_function=os.symlink
    )  # as the Hub's cache has them
    for same in (tiny_bases(name, variant), links):
        assert families.open_family(name, same).fingerprints() == before
    families.edit_json(folder / "vae" / "config.json", note=1)
    after = families.open_family(name, folder).fingerprints()
    parts = {
        find(name).read_spec(folder).part_of(expert.name)
        for expert in find(name).read_spec(folder).experts
    }
    assert set(before) == {"text_encoder", "vae", *parts}
    assert {part for part in before if before[part] != after[part]} == {"vae"}


@FAMILIES
def test_clips_may_be_encoded_while_previews_are_decoded(
    name: str, tiny_family: Open
) -> None:
    """A run that encodes in its loop has threads in the VAE while previews decode and
    free it.
    """
    family = tiny_family(name)
    shape = families.small_shape(family)
    clips = [
        torch.rand(3, shape.frames, shape.height, shape.width) * 2 - 1 for _ in range(4)
    ]
    latents = [family.encode_video(clip).mean for clip in clips]
    pixels = family.decode(latents[0])
    with ThreadPoolExecutor(2) as pool:
        encoded = [pool.submit(family.encode_video, clip) for clip in clips * 3]
        for _ in range(6):
            torch.testing.assert_close(family.decode(latents[0]), pixels)
            family.free("vae")
        for future, mean in zip(encoded, latents * 3, strict=True):
            torch.testing.assert_close(future.result().mean, mean)


def objective_of(spec: ModelSpec, low: float = 0.0, high: float = 1.0) -> Objective:
    """What the family is trained with, between two noise levels."""
    levels = TimestepSampler(spec.timestep_distribution, spec.timestep_shift, low, high)
    return objective_for_prediction(spec.prediction, spec.prediction_constants, levels)


@KINDS
def test_the_network_is_fed_in_training_what_the_pipeline_feeds(family: Any) -> None:
    """Each call of a draw, replayed by ``predict`` on the same latents: every word the
    network hears is the same.
    """
    heard, nets = [], families.denoisers(family)
    for expert, net in nets.items():

        def hook(_: Any, words: Any, named: Any, expert: str = expert) -> None:
            heard.append((expert, dict(named)))

        net.register_forward_pre_hook(hook, with_kwargs=True)
    for shape in families.shapes_of(family):
        batch = families.batch_of(family, ["a red circle"], shape=shape)
        heard.clear()
        with torch.no_grad():
            family.sample(
                nets, batch.conditioning, None, SampleRequest(shape, 4, 1.0, (3,))
            )
        drawn = list(heard)
        assert {expert for expert, _ in drawn} == set(nets)
        for expert, theirs in drawn[:: len(drawn) - 1]:
            assert same_words(family, nets[expert], batch, theirs, heard) == [], (
                shape,
                expert,
            )


SOUND = re.compile("audio_.*|isolate_modalities|spatio_temporal_guidance_blocks")
"""What a transformer of video and sound is told beside the video: a step runs the video
alone, a pipeline draws both.
"""


def same_words(
    family: Any, net: nn.Module, batch: Batch, theirs: dict[str, Any], heard: list[Any]
) -> list[str]:
    """The words that ``predict`` tells otherwise than the pipeline did."""
    spec, flow = family.spec, family.spec.prediction == "flow"
    video = unpacked(spec, theirs["hidden_states"], batch.x0.shape[2:])
    x_t = video[:, : spec.latent_channels, video.shape[2] - batch.x0.shape[2] :]
    times = theirs["timestep" if "timestep" in theirs else "timesteps"]
    told = times.float().max().view(1)
    t = told / (1000 if flow else spec.prediction_constants["num_train_timesteps"] - 1)
    heard.clear()
    a_token = times.numel() > len(
        batch
    )  # a pipeline may tell one timestep, where no frame is given
    with torch.no_grad():
        family.predict(net, x_t, t, replace(batch, has_clean_frames=a_token))
    ((_, ours),) = heard
    odd = []
    for word in sorted(set(theirs) | set(ours)):
        one, other = theirs.get(word), ours.get(word)
        if spec.sample_passes > 2 and SOUND.fullmatch(word):
            continue
        if word == "fps" and "video_coords" in ours:
            continue  # positions have it in them
        if word == "encoder_attention_mask" and other is None and bool(one.all()):
            continue  # nothing is masked
        if (
            word == "hidden_states" and spec.patch[0] > 1
        ):  # the frame in front has noise of its own
            one, other = (value[:, -batch.x0.shape[2] :] for value in (one, other))
        if isinstance(one, bool) or one is None or isinstance(one, dict):
            odd += (
                [word]
                if one != other and not (one is None and word not in theirs)
                else []
            )
            continue
        if other is None:
            odd.append(word)
            continue
        both = (
            map(as_tensor, x if isinstance(x, tuple | list) else (x,))
            for x in (other, one)
        )
        for mine, given in zip(*both, strict=True):
            same = mine.shape == given.shape and torch.allclose(
                mine.float(), given.float(), rtol=1e-6, atol=1e-3
            )
            odd += [] if same else [word]
    return odd


def as_tensor(word: Any) -> torch.Tensor:
    """A tensor as it is, a number as the tensor of one that a family may tell in its
    place.
    """
    return (
        word
        if isinstance(word, torch.Tensor) and word.numel() > 1
        else torch.as_tensor(word).flatten()
    )


@KINDS
def test_bfloat16_is_close_to_float32(
    name: str, variant: str, tiny_family: Open
) -> None:
    """In the dtype that a GPU trains in: near, not the same, and told the same noise
    level.
    """
    said = {}
    for dtype in (torch.float32, torch.bfloat16):
        family = tiny_family(name, dtype, variant)
        assert family.dtype == dtype
        batch, net = (
            families.batch_of(tiny_family(name, variant=variant), ["a"]),
            families.first_of(family),
        )
        x_t = torch.randn(batch.x0.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            said[dtype] = family.predict(net, x_t, torch.tensor([731 / 999]), batch)
        assert said[dtype].dtype == torch.float32, "losses are taken in float32"
    exact, near = said.values()
    error = (exact - near).norm() / exact.norm()
    assert 0 < error < 0.03


@KINDS
def test_the_plan_counts_what_the_cache_keeps(family: Any) -> None:
    for shape in families.shapes_of(family):
        moments = family.encode_video(families.clip_of(family, shape, 0))
        kept = [
            moments.mean,
            *([] if moments.logvar is None else [moments.logvar]),
            *([] if moments.start is None else [moments.start]),
            *moments.extras.values(),
        ]
        assert family.spec.cached_numbers(shape) == sum(
            tensor.numel() for tensor in kept
        ), shape


@KINDS
def test_a_clip_that_is_shown_again_and_again_is_learnt(family: Any) -> None:
    """Fifteen steps on one clip lower the validation loss on it, for each expert at its
    own noise levels.
    """
    batch = families.batch_of(family, ["a red circle"], given=True)
    window = Window("a", 0.0, 1.0, families.small_shape(family))
    nets, readings = families.denoisers(family), []
    trained = {
        expert: list(
            add_lora(net, family.spec, Lora(rank=8, targets="linear"), seed=0).values()
        )
        for expert, net in nets.items()
    }
    whole = objective_of(family.spec)

    def read() -> dict[str, Any]:
        validation = ValidationLoss((), (window,), 0)
        return read_validation(validation, family, nets, whole, lambda _: batch)[
            "train"
        ]

    readings.append(read())
    for expert in family.spec.experts:
        own = objective_of(family.spec, expert.t_lo, expert.t_hi)
        optimizer = torch.optim.Adam(trained[expert.name], lr=0.03)
        for step in range(15):
            t = own.timesteps.draw(
                torch.from_numpy(generator_for(0, "t", expert.name, step).random(1))
            )
            noise = torch.from_numpy(
                generator_for(0, "n", expert.name, step).standard_normal(
                    batch.x0.shape, "float32"
                )
            )
            denoising_loss(
                family, nets[expert.name], own, batch, t.float(), noise
            ).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    readings.append(read())
    told = relative_to_first(readings[1], readings[0])
    assert told["normalised"] < 0.9, json.dumps(readings)


@KINDS
def test_blank_states_are_those_of_a_real_clip_and_caption(family: Any) -> None:
    """What a plan is made with has the form of what a training is told."""
    shape = families.small_shape(family)
    # in quotes, because some encoders read nothing else
    real = family.encode_text(['"' + "word " * 600 + '"'])[0]
    clip = families.clip_of(family, shape, 0)
    moments = family.encode_video(clip, generator_for(0, "image noise"))
    real |= families.shown_of(family, clip, moments)
    blank = family.blank_states(shape)
    assert {k: (v.shape, v.dtype) for k, v in blank.items()} == {
        k: (v.shape, v.dtype) for k, v in real.items()
    }
