"""Own facts of the families with flow matching, against diffusers' pipelines: Wan,
HunyuanVideo, LTX-Video, HiDream-I1.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import (
    _convert_hunyuan_video_lora_to_diffusers as to_diffusers,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import (
    DEFAULT_PROMPT_TEMPLATE,
)
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.test_family_contract import same_words
from tests.support.families import (
    Bases,
    Open,
    batch_of,
    clip_of,
    edit_json,
    noisy_lora,
    open_family,
    small_shape,
)
from tests.support.oracles import unpacked
from videotune.adapters.layers import add_rows
from videotune.adapters.lora import matching
from videotune.config.data_schema import VideoConfig
from videotune.config.sections import Embedding
from videotune.data.clip_sizes import choose_size, parse_resolution
from videotune.data.frame_counts import planned_frames
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import export_lora
from videotune.exporter.formats import formats_of, refuse_format
from videotune.memory.checkpointing import checkpoint_blocks
from videotune.models.base import DiffusersModel
from videotune.models.hidream import HiDream, join
from videotune.models.hunyuan_video import CROP, TEMPLATE
from videotune.models.ltx_video import LTXVideo
from videotune.rng import generator_for
from videotune.types import ClipShape, SampleRequest


def test_only_the_first_frame_is_told(tiny_family: Open) -> None:
    family = tiny_family("wan", variant="i2v")
    clip = clip_of(family, small_shape(family), 0)
    other = clip.clone()
    other[:, 1:] = 0.5
    for name, value in family.encode_video(clip).extras.items():
        assert torch.equal(value, family.encode_video(other).extras[name])
        assert not torch.equal(value, family.encode_video(clip.flip(1)).extras[name])


def test_one_timestep_a_sample_is_one_a_token(tiny_family: Open) -> None:
    """From text TI2V's pipeline tells every token the same; one a sample, as we train
    then, is the same number.
    """
    family = tiny_family("wan", variant="ti2v")
    batch = batch_of(family, ["a"])
    net, x_t, t = family.denoiser(), torch.randn_like(batch.x0), torch.tensor([0.37])
    told: list[int] = []
    net.register_forward_hook(
        lambda m, w, named, out: told.append(named["timestep"].ndim), with_kwargs=True
    )
    with torch.no_grad():
        one, each = (
            family.predict(net, x_t, t, replace(batch, has_clean_frames=given))
            for given in (False, True)
        )
    assert told == [1, 2]
    torch.testing.assert_close(one, each, rtol=0, atol=3e-6)


def test_the_images_projections_may_be_trained_by_name(
    tiny_family: Open, tmp_path: Path
) -> None:
    """Not by the named sets; as patterns they are exported and read back, in both
    layouts.
    """
    family = tiny_family("wan", variant="i2v")
    targets = ["attn2.add_k_proj", "attn2.add_v_proj", "attn2.to_k", "attn2.to_v"]
    state = noisy_lora(family, family.denoiser(), targets=targets)
    for format in family.lora_formats():
        done = export_lora(
            family, format, state, 1.0, tmp_path / f"{format}.safetensors", {}
        )
        assert (done.modules, done.max_error <= 1e-6) == (8, True)


HUNYUAN = "hunyuan_video"


def test_the_template_is_the_pipelines() -> None:
    assert {"template": TEMPLATE, "crop_start": CROP} == DEFAULT_PROMPT_TEMPLATE


def test_a_tokenizer_is_read_as_its_file_says(
    tiny_bases: Bases, tmp_path: Path
) -> None:
    """The published index names Llama's own class, which in transformers 5 splits
    otherwise than the file: ours does not.
    """
    folder = Path(shutil.copytree(tiny_bases(HUNYUAN), tmp_path / "base"))
    edit_json(
        folder / "tokenizer" / "tokenizer_config.json",
        tokenizer_class="LlamaTokenizerFast",
    )
    edit_json(
        folder / "model_index.json", tokenizer=["transformers", "LlamaTokenizerFast"]
    )
    told = TEMPLATE.format("a red circle")
    one, other = (
        open_family(HUNYUAN, place).tokenizers()["text_encoder"](told)
        for place in (tiny_bases(HUNYUAN), folder)
    )
    assert one.input_ids == other.input_ids
    assert (
        diffusers.HunyuanVideoPipeline.from_pretrained(folder).tokenizer(told).input_ids
        != one.input_ids
    )


def test_another_tokenizer_is_refused(tiny_bases: Bases, tmp_path: Path) -> None:
    """Where other than 95 tokens stand in front of a caption, the pipeline would cut at
    another place.
    """
    folder = Path(shutil.copytree(tiny_bases(HUNYUAN), tmp_path / "base"))
    words = folder / "tokenizer" / "tokenizer.json"
    edit_json(folder / "tokenizer" / "tokenizer_config.json", padding_side="left")
    with pytest.raises(VideotuneError, match="pads on the left and reads 95 tokens"):
        open_family(HUNYUAN, folder).tokenizers()
    edit_json(words, added_tokens=json.loads(words.read_text())["added_tokens"][:-1])
    with pytest.raises(
        VideotuneError, match=r"is not HunyuanVideo's tokenizer: .* reads \d{3} tokens"
    ):
        open_family(HUNYUAN, folder).tokenizers()


def test_the_noise_level_is_told_in_float32(tiny_family: Open) -> None:
    family, said = tiny_family(HUNYUAN, torch.bfloat16), []
    net = family.denoiser()
    net.register_forward_pre_hook(
        lambda _, words, named: said.append(named), with_kwargs=True
    )
    with torch.no_grad():
        family.predict(
            net,
            torch.randn(1, 4, 2, 4, 4),
            torch.tensor([0.7317]),
            batch_of(tiny_family(HUNYUAN), ["a"]),
        )
    assert said[0]["timestep"].dtype == torch.float32
    assert said[0]["timestep"].item() == pytest.approx(731.7, abs=1e-4)
    assert said[0]["guidance"].tolist() == [1000.0]


def test_gradients_reach_every_weight_that_trains(tiny_family: Open) -> None:
    """Of all the network's weights: the text's side of the blocks and its refiner too,
    with captions of unequal length.
    """
    family = tiny_family(HUNYUAN)
    batch, net = (
        batch_of(family, ["a red circle", ""]),
        family.denoiser().requires_grad_(True),
    )
    family.predict(
        net, torch.randn_like(batch.x0), torch.tensor([0.3, 0.8]), batch
    ).square().mean().backward()
    assert [
        name
        for name, p in net.named_parameters()
        if p.grad is None or not bool(p.grad.any())
    ] == []


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, tiny_bases: Bases) -> Any:
    """The family over a config of the published width with one block of each kind; no
    weights are read for an export.
    """
    folder = tmp_path_factory.mktemp("wide") / "base"
    shutil.copytree(tiny_bases(HUNYUAN), folder)
    path = folder / "transformer" / "config.json"
    real = {
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 1,
        "num_single_layers": 1,
    }
    real |= {
        "mlp_ratio": 0.5
    }  # a feed-forward of 1,536: what is joined keeps its width of 3,072
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | real | {"rope_axes_dim": [16, 56, 56]}
        )
    )
    return open_family(HUNYUAN, folder)


def lora_on(family: Any, targets: Any, rank: int = 2) -> dict[str, torch.Tensor]:
    net, state = family.skeleton(), {}
    for number, path in enumerate(matching(net, family.spec, targets)):
        module, random = net.get_submodule(path), torch.Generator().manual_seed(number)
        state[f"{path}.lora_A.weight"] = torch.randn(
            rank, module.in_features, generator=random
        )
        state[f"{path}.lora_B.weight"] = torch.randn(
            module.out_features, rank, generator=random
        )
    return state


@pytest.mark.parametrize(
    "targets",
    ["attention", "feed_forward", ["single_transformer_blocks.*proj_out", "attn.to_k"]],
)
def test_diffusers_reads_the_joined_weights_back(
    targets: Any, wide: Any, tmp_path: Path
) -> None:
    """With modules of a joined weight that have no update, and without the one by which
    diffusers knows the form.
    """
    state = lora_on(wide, targets)
    done = export_lora(wide, "comfyui", state, 1.5, tmp_path / "c.safetensors", {})
    assert done.max_error <= 1e-6
    assert done.modules == len(state) // 2
    keys = set(load_file(done.path))
    assert not any(
        key.startswith("transformer.") or ".to_" in key or "proj_mlp" in key
        for key in keys
    )
    assert any("img_attn_qkv" in key for key in keys)
    assert set(to_diffusers(load_file(done.path))) >= {
        f"transformer.{name}" for name in state
    }


def test_a_form_that_cannot_be_proved_or_joined_is_refused(
    wide: Any, tiny_bases: Bases
) -> None:
    tiny = open_family(HUNYUAN, tiny_bases(HUNYUAN))
    assert formats_of(tiny, "LORA") == ("diffusers",)
    assert formats_of(wide, "LORA") == ("comfyui", "diffusers")
    for kind in ("LOHA", "LOKR"):
        assert formats_of(wide, kind) == ("peft",)
        with pytest.raises(
            VideotuneError, match=r"several modules into one weight.*--merge"
        ):
            refuse_format(wide, kind, "comfyui")


LTX = "ltx_video"
LTX_KINDS = pytest.mark.parametrize("variant", LTXVideo.variants)
LTX_SHAPE = ClipShape(17, 64, 96, 25.0)


def test_a_newer_checkpoint_is_known_by_its_vae_too(
    tiny_bases: Bases, tmp_path: Path
) -> None:
    """Whatever pipeline its index names: how it counts time goes with the weights."""
    titles = [
        LTXVideo.read_spec(tiny_bases(LTX, variant)).title
        for variant in LTXVideo.variants
    ]
    assert titles == ["LTX-Video 0.9.0", "LTX-Video 0.9.1", "LTX-Video 0.9.5+"]
    folder = Path(shutil.copytree(tiny_bases(LTX, "0.9.7"), tmp_path / "a"))
    edit_json(folder / "model_index.json", _class_name="LTXPipeline")
    assert open_family(LTX, folder).pipeline_class() is diffusers.LTXConditionPipeline
    assert (
        open_family(LTX, tiny_bases(LTX, "0.9.1")).pipeline_class()
        is diffusers.LTXPipeline
    )


def heard_by(net: Any) -> list[Any]:
    heard: list[Any] = []
    net.register_forward_pre_hook(
        lambda _, words, named: heard.append(("transformer", dict(named))),
        with_kwargs=True,
    )
    return heard


@LTX_KINDS
def test_each_sample_is_told_its_own_fps(variant: str, tiny_family: Open) -> None:
    """Two rates in one batch: each is predicted as in a batch of its own, which hears
    the pipeline's words.
    """
    family = tiny_family(LTX, variant=variant)
    net = family.denoiser()
    batch = replace(
        batch_of(family, ["a", "b"], shape=LTX_SHAPE),
        fps=torch.tensor([12.0, 25.0]),
        has_clean_frames=False,
    )
    x_t, t = torch.randn_like(batch.x0), torch.tensor([0.3, 0.8])
    heard = heard_by(net)
    with torch.no_grad():
        both = family.predict(net, x_t, t, batch)
        other = family.predict(net, x_t, t, replace(batch, fps=batch.fps.flip(0)))
        for i, one in enumerate(batch.split(1)):
            alone = family.predict(net, x_t[i : i + 1], t[i : i + 1], one)
            torch.testing.assert_close(alone, both[i : i + 1], rtol=1e-5, atol=1e-6)
            assert (other[i] - both[i]).abs().max() > 1e-5
            heard.clear()
            request = SampleRequest(
                replace(LTX_SHAPE, fps=float(one.fps)), 2, 1.0, (3,)
            )
            family.sample({"transformer": net}, one.conditioning, None, request)
            assert same_words(family, net, one, heard[0][1], heard) == []


@LTX_KINDS
def test_a_first_frame_is_fed_as_the_pipeline_feeds_it(
    variant: str, tiny_family: Open
) -> None:
    """Clean, its tokens told 0; every word of a draw from an image, replayed with that
    frame given, is the same.
    """
    family = tiny_family(LTX, variant=variant)
    net = family.denoiser()
    batch, heard = (
        batch_of(family, ["a red circle"], given=True, shape=LTX_SHAPE),
        heard_by(net),
    )
    first = batch.x0[:, :, :1]
    with torch.no_grad():
        request = SampleRequest(LTX_SHAPE, 4, 1.0, (3,), first=first)
        drawn = family.sample({"transformer": net}, batch.conditioning, None, request)
    assert torch.equal(drawn[:, :, :1], first)
    size = batch.x0.shape[2:]
    a_frame = size[1] * size[2]
    for _, theirs in list(heard):
        assert theirs["timestep"].shape == (1, size[0] * a_frame)
        assert not theirs["timestep"][:, :a_frame].any()
        assert same_words(family, net, batch, theirs, heard) == []
        fed = unpacked(LTXVideo.spec, theirs["hidden_states"], size)[:, :, :1]
        noise = (
            0.15 * float(theirs["timestep"].max() / 1000) ** 2
            if family.is_newer
            else 0.0
        )  # the pipeline's own
        assert (fed - first).abs().max() <= 6 * noise


@LTX_KINDS
def test_the_decoder_is_told_a_timestep_and_noise_that_are_always_the_same(
    variant: str, tiny_family: Open
) -> None:
    """0.05, over latents with 2.5 % of noise, where the VAE is told a timestep; nobody
    else's draws move.
    """
    family = tiny_family(LTX, variant=variant)
    latents = family.encode_video(clip_of(family, LTX_SHAPE, 0)).mean
    before = torch.get_rng_state()
    ours = family.decode(latents)
    assert torch.equal(ours, family.decode(latents)), (
        "also where the decoder draws noise inside"
    )
    assert torch.equal(torch.get_rng_state(), before)
    vae: Any = diffusers.AutoencoderKLLTXVideo.from_pretrained(
        family.folder / "vae", torch_dtype=torch.float32
    )
    raw, words = DiffusersModel.raw_latents(family, latents)[None], []
    if variant == "0.9.1":  # it draws inside: only its timestep can be looked at
        with pytest.raises(Exception, match="NoneType"):
            vae.decode(raw)
        return
    if variant == "0.9.7":
        noise = torch.from_numpy(
            generator_for(0, "decode noise").standard_normal(
                tuple(raw.shape[1:]), "float32"
            )
        )
        raw, words = 0.975 * raw + 0.025 * noise, [torch.tensor([0.05])]
    with torch.no_grad():
        torch.testing.assert_close(
            ours, vae.decode(raw, *words).sample[0].clamp(-1, 1), rtol=1e-4, atol=1e-5
        )


def test_the_shift_of_a_sample_is_the_schedulers_or_the_asked_one(
    tiny_family: Open,
) -> None:
    older, since = (tiny_family(LTX, variant=variant) for variant in ("0.9.0", "0.9.7"))
    assert older.pipeline({}).scheduler.config.use_dynamic_shifting
    asked = older.pipeline({}, 3.0).scheduler
    asked.set_timesteps(sigmas=[1.0, 0.5])
    assert (asked.config.use_dynamic_shifting, asked.config.shift) == (False, 3.0)
    with pytest.raises(VideotuneError, match="fixed schedule"):
        since.pipeline({}, 3.0)
    assert LTXVideo.spec.timestep_shift == 4.48, (
        "e^1.5: half way between 1024 and 4096 tokens"
    )


PICTURES = [ClipShape(1, 32, 32, 1.0), ClipShape(1, 64, 48, 1.0)]
"""A square one, and one that is padded."""


def test_a_checkpoint_says_what_it_is(tiny_bases: Bases, tmp_path: Path) -> None:
    full, dev = (
        HiDream.read_spec(tiny_bases("hidream", variant)) for variant in ("full", "dev")
    )
    assert (
        full.title,
        full.timestep_shift,
        full.sample_steps,
        full.sample_guidance,
    ) == (
        "HiDream-I1 Full",
        3,
        50,
        5,
    )
    assert (dev.title, dev.timestep_shift, dev.sample_steps, dev.sample_guidance) == (
        "HiDream-I1 Dev",
        6,
        28,
        1,
    )
    folder = shutil.copytree(tiny_bases("hidream", "dev"), tmp_path / "fast")
    edit_json(folder / "scheduler" / "scheduler_config.json", shift=3.0)
    fast = HiDream.read_spec(folder)
    assert (
        fast.title,
        fast.timestep_shift,
        fast.sample_steps,
        fast.sample_guidance,
    ) == (
        "HiDream-I1 Fast",
        3,
        16,
        1,
    )


def test_llama_is_missed_and_joined(
    tiny_bases: Bases, tiny_family: Open, tmp_path: Path
) -> None:
    """As published, without its fourth text encoder; then with the folder that is made
    of both.
    """
    whole, base, llama = tiny_bases("hidream"), tmp_path / "base", tmp_path / "llama"
    shutil.copytree(whole, base)
    shutil.move(base / "text_encoder_4", llama)
    for path in (base / "tokenizer_4").iterdir():
        shutil.move(path, llama / path.name)
    (base / "tokenizer_4").rmdir()
    index = json.loads((base / "model_index.json").read_text())
    kept = {key: value for key, value in index.items() if not key.endswith("_4")}
    (base / "model_index.json").write_text(json.dumps(kept))
    with pytest.raises(
        VideotuneError,
        match=r"no text_encoder_4.*Llama-3.1-8B-Instruct.*videotune.models.hidream",
    ):
        HiDream.read_spec(base)
    new = join(base, llama, tmp_path / "new")
    assert HiDream.read_spec(new) == HiDream.read_spec(whole)
    ours = open_family("hidream", new).encode_text(["a red circle"])[0]
    theirs = tiny_family("hidream").encode_text(["a red circle"])[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(VideotuneError, match="already exists"):
        join(base, llama, new)
    with pytest.raises(
        VideotuneError,
        match=r"is a clip_text_model of 1 layers; HiDream-I1 reads a llama of 2",
    ):
        join(base, base / "text_encoder", tmp_path / "other")


def test_a_new_token_does_not_move_the_end_of_a_caption(
    tiny_bases: Bases, tmp_path: Path
) -> None:
    """Older configs of CLIP name 2 as its end mark; then the highest number of a
    caption counted, that of the new token.
    """

    folder = shutil.copytree(tiny_bases("hidream"), tmp_path / "older")
    for part in ("text_encoder", "text_encoder_2"):
        edit_json(folder / part / "config.json", eos_token_id=2)
    pooled = []
    for place in (tiny_bases("hidream"), folder):
        family = open_family("hidream", place)
        plain = family.encode_text(["a red circle"])[0]["pooled"]
        add_rows(family.text_parts(), Embedding(token="<x>"), seed=0)
        pooled.append(
            [
                plain,
                *(
                    family.encode_text([text])[0]["pooled"]
                    for text in ("<x> a", "<x> b")
                ),
            ]
        )
    for newer, older in zip(*pooled, strict=True):
        assert torch.equal(newer, older)
    assert not torch.equal(pooled[1][1], pooled[1][2]), (
        "what stands behind the token is heard"
    )


def told(
    family: Any, shape: ClipShape, seed: int = 0
) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """(batch, the words of a call of the transformer for it, t)."""
    batch, t = (
        batch_of(family, ["a red circle", "b"], seed, shape=shape),
        torch.tensor([0.3, 0.9]),
    )
    words = {
        "hidden_states": batch.x0[:, :, 0],
        "timesteps": 1000 * t,
        "encoder_hidden_states_t5": batch.conditioning.text,
        "encoder_hidden_states_llama3": batch.conditioning.extras["llama"].transpose(
            0, 1
        ),
        "pooled_embeds": batch.conditioning.extras["pooled"],
        "return_dict": False,
    }
    return batch, words, t


def by_hand(tokens: torch.Tensor, shape: ClipShape) -> torch.Tensor:
    """What diffusers' transformer answers in training, (B,C,S,p·p), as pictures
    (B,C,H,W).
    """
    rows, columns = shape.height // 16, shape.width // 16
    tokens = (
        tokens[:, :, : rows * columns]
        .unflatten(2, (rows, columns))
        .unflatten(4, (2, 2))
    )
    return tokens.permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)


def gradients(net: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {
        name: p.grad
        for name, p in net.named_parameters()
        if p.grad is not None and bool(p.grad.any())
    }


@pytest.mark.parametrize(
    ("shape", "checkpointing"), [(PICTURES[0], "ON"), (PICTURES[1], "OFF")], ids=str
)
def test_gradients_are_those_of_diffusers_in_training(
    shape: ClipShape, checkpointing: str, tiny_bases: Bases, tiny_family: Open
) -> None:
    """Of every weight, gates and routed experts among them, also where the network is
    set to evaluate.

    As diffusers' comes, in evaluation its routed experts get none, and what is before
    them others.
    """
    family = tiny_family("hidream")
    batch, words, t = told(family, shape)
    theirs = diffusers.HiDreamImageTransformer2DModel.from_pretrained(
        tiny_bases("hidream") / "transformer"
    ).train()
    wanted = gradients(theirs, by_hand(theirs(**words)[0], shape).square().mean())
    routed = [name for name in wanted if ".experts." in name or ".gate." in name]
    assert len(routed) >= 4 * 3 * 3 + 4, "of four layers most experts, and each gate"
    theirs.zero_grad()
    lost = gradients(theirs.eval(), theirs(**words)[0].square().mean())
    assert not set(routed) & set(lost), (
        "diffusers' own loses them: else nothing of this is needed"
    )
    for training in (False, True):
        net = family.denoiser().requires_grad_(True).train(training)
        checkpoint_blocks(net, checkpointing)
        found = gradients(net, family.predict(net, batch.x0, t, batch).square().mean())
        assert set(found) == set(wanted)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-7)


def test_positions_that_are_kept_are_those_of_the_pipeline(tiny_family: Open) -> None:
    """Of tensors without numbers none are kept, and they meet no kept ones."""
    family: Any = tiny_family("ltx_video", variant="0.9.7")
    ids = diffusers.LTXConditionPipeline._prepare_video_ids(2, 3, 4, 5)
    wanted = diffusers.LTXConditionPipeline._scale_video_ids(
        ids, 32, 8, 0, None
    ).float()
    wanted[:, 0] /= torch.tensor([[8.0], [16.0]])
    for _ in range(2):
        with FakeTensorMode():
            assert (
                family._positions(torch.ones(2), (3, 4, 5), ())["video_coords"].shape
                == wanted.shape
            )
        torch.testing.assert_close(
            family._positions(torch.tensor([8.0, 16.0]), (3, 4, 5), ())["video_coords"],
            wanted,
        )


@pytest.mark.parametrize("tokens", [7, 1])
def test_routed_experts_are_those_of_diffusers_to_the_bit(
    tokens: int, tiny_bases: Bases, tiny_family: Open
) -> None:
    """Two samples of so many tokens; of one each, some experts may get none.

    A sum of gradients has another order.
    """
    theirs = diffusers.HiDreamImageTransformer2DModel.from_pretrained(
        tiny_bases("hidream") / "transformer"
    ).train()
    nets, found = (
        (theirs, tiny_family("hidream").denoiser().requires_grad_(True).eval()),
        [],
    )
    x = generator_for(0, "routing").standard_normal((2, tokens, 16), "float32")
    for moe in (net.double_stream_blocks[0].block.ff_i for net in nets):
        states = torch.from_numpy(x.copy()).requires_grad_()
        out = moe(states)
        weights = dict(moe.named_parameters())
        found.append(
            (
                out,
                torch.autograd.grad(
                    out.square().sum(), [states, *weights.values()], allow_unused=True
                ),
            )
        )
    assert torch.equal(found[0][0], found[1][0])
    for wanted, gradient in zip(found[0][1], found[1][1], strict=True):
        assert (wanted is None) == (gradient is None)
        if wanted is not None and gradient is not None:
            torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8)


def test_every_size_is_drawn_as_it_is(tiny_bases: Bases, tmp_path: Path) -> None:
    """The pipeline's arithmetic rounds down after a division; none of these loses a row
    by it.
    """
    folder = shutil.copytree(tiny_bases("hidream"), tmp_path / "large")
    edit_json(folder / "transformer" / "config.json", max_resolution=[128, 128])
    family = open_family("hidream", folder)
    conditioning = family.collate_states(family.encode_text(["a"]))

    class Silent(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
            return (torch.zeros_like(hidden_states),)

    sides = (16, 48, 336, 512, 656, 880, 1008, 1024)
    for shape in (ClipShape(1, h, w, 1.0) for h in sides for w in sides):
        drawn = family.sample(
            {"transformer": Silent()},
            conditioning,
            None,
            SampleRequest(shape, 1, 1.0, (1,)),
        )
        assert drawn.shape[3:] == (shape.height // 8, shape.width // 8)


def test_more_than_one_frame_and_more_than_its_area_are_refused(
    tiny_family: Open,
) -> None:
    family = tiny_family("hidream")
    batch, _, t = told(family, PICTURES[0])
    with pytest.raises(VideotuneError, match=r"generates images.*these are 9 frames"):
        family.encode_video(torch.zeros(3, 9, 32, 32))
    with pytest.raises(VideotuneError, match="these are 2 frames"):
        family.predict(family.denoiser(), torch.cat([batch.x0] * 2, 2), t, batch)
    with pytest.raises(VideotuneError, match="at most 9216 pixels"):
        family.sample(
            {},
            batch.conditioning,
            None,
            SampleRequest(ClipShape(1, 112, 96, 1.0), 3, 1.0, (1,)),
        )
    rules = HiDream.spec.rules
    with pytest.raises(
        VideotuneError, match=r"frames is 17, but this model takes single frames"
    ):
        planned_frames(VideoConfig(frames=17), rules)
    assert planned_frames(VideoConfig(frames=1), rules) == (1, None)
    assert planned_frames(VideoConfig(), rules)[0] == 1
    with pytest.raises(VideotuneError, match="at most 1048576 pixels, as 1024x1024"):
        parse_resolution(1040, rules)
    for width, height in (
        (1024, 1000),
        (1920, 1080),
        (3000, 1000),
        (900, 1600),
        (1537, 1100),
    ):
        high, wide = choose_size(width, height, parse_resolution(1024, rules), rules)
        assert 0.9 * 1024**2 < high * wide <= 1024**2
