"""LTX-2: what trains of a transformer of video and sound, what its pipelines are told,
and what is refused of its files.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import families, reports
from tests.support.families import Open
from videotune.adapters.layers import add_full, lay_rows
from videotune.adapters.lora import idle_targets, matching
from videotune.config.schema import Config
from videotune.diffusion.timesteps import TimestepSampler, shift_of_tokens
from videotune.errors import VideotuneError
from videotune.models.base_model import place
from videotune.models.hub import wanted
from videotune.models.ltx2_conditions import last_frame_coords
from videotune.models.model_files import missing
from videotune.models.registry import find
from videotune.planner.network_facts import named_and_idle
from videotune.reporter.condition_code import condition_code
from videotune.reporter.read import read_run
from videotune.sampling.given_files import GivenFiles, refuse_given
from videotune.sampling.given_latents import read_given
from videotune.types import SampleRequest
from videotune.validation.selection import settings_at

VERSIONS = pytest.mark.parametrize("version", find("ltx2").variants)


@pytest.fixture
def family(version: str, tiny_family: Open) -> Any:
    return tiny_family("ltx2", variant=version)


def velocity(family: Any, net: Any, batch: Any) -> torch.Tensor:
    t = torch.full((len(batch),), 0.6)
    with torch.no_grad():
        predicted: torch.Tensor = family.predict(net, batch.x0, t, batch)
    return predicted


@VERSIONS
def test_what_is_called_idle_has_no_gradient_and_all_else_has(family: Any) -> None:
    batch = families.batch_of(family, ["a red circle"])
    net = families.first_of(family).requires_grad_(True)
    # Gates that begin at zero would hide what lies behind them.
    for parameter in net.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    family.predict(net, batch.x0, torch.tensor([0.6]), batch).square().sum().backward()

    acting = set()
    for name, parameter in net.named_parameters():
        if parameter.grad is not None and bool(parameter.grad.any()):
            acting.add(name)
    idle = {name for name, _ in net.named_parameters() if family.spec.is_idle(name)}
    assert acting.isdisjoint(idle)
    # A token table of one entry has a gradient of 0 in the bias of its keys.
    quiet = {name for name, _ in net.named_parameters()} - acting - idle
    assert all(name.endswith("to_k.bias") for name in quiet)


@VERSIONS
def test_targets_that_reach_sound_train_the_video_alone(family: Any) -> None:
    net = family.skeleton()
    everything = matching(net, family.spec, "all")
    by_suffix = matching(net, family.spec, ["to_k"])
    left_out = idle_targets(net, family.spec, ["to_k"])

    assert len(by_suffix) == 4  # attn1 and attn2 of two blocks
    assert len(left_out) == 8  # two attentions of sound, two between both
    assert not any("audio" in path for path in [*everything, *by_suffix])
    assert idle_targets(net, family.spec, "attention") == []
    with pytest.raises(VideotuneError):
        matching(net, family.spec, ["audio_attn1.to_k"])


@VERSIONS
def test_whole_fine_tuning_leaves_sound_as_it_is(family: Any) -> None:
    trained = add_full(family.skeleton(), family.spec)
    assert trained
    assert not any(family.spec.is_idle(name) for name in trained)
    some = add_full(family.skeleton(), family.spec, ["to_k", "proj_in"])
    assert {name for name in some if "to_k" not in name} == {
        "proj_in.weight",
        "proj_in.bias",
    }
    with pytest.raises(VideotuneError):
        add_full(family.skeleton(), family.spec, ["audio_ff"])


@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
def test_what_is_left_out_is_counted_in_modules(method: str, tiny_family: Open) -> None:
    config = Config.model_validate(
        {
            "training_method": method,
            "lora": {"targets": ["to_k"]},
            "transformer": {"layers": ["to_k"] if method == "FINE_TUNE" else None},
        }
    )
    left_out = named_and_idle(tiny_family("ltx2"), config)
    assert len(left_out) == 8  # as in the targets above, not once for weight and bias
    assert all(path.endswith(".to_k") for path in left_out)


@VERSIONS
def test_the_video_sees_no_sound(family: Any) -> None:
    """The states of the caption for sound change nothing, those for the video do."""
    batch = families.batch_of(family, ["a red circle"])
    net = families.first_of(family)
    usual = velocity(family, net, batch)
    for name, changes in (("audio_text", False), ("text", True)):
        conditioning = batch.conditioning
        if name == "text":
            conditioning = replace(conditioning, text=conditioning.text + 1)
        else:
            sound = {name: conditioning.extras[name] + 1}
            conditioning = replace(conditioning, extras=conditioning.extras | sound)
        other = velocity(family, net, replace(batch, conditioning=conditioning))
        assert torch.equal(other, usual) is not changes


def test_captions_are_the_connectors_of_the_pipeline(tiny_family: Open) -> None:
    """A whole pipeline, given the caption's words, calls its transformer with what the
    cache keeps.
    """
    family = tiny_family("ltx2")
    whole = find("ltx2").tiny_pipeline("2.3")
    for part in ("text_encoder", "connectors", "transformer"):
        module = getattr(whole, part)
        loaded = (
            family.denoiser()
            if part == "transformer"
            else getattr(family.text_pipeline(), part)
        )
        module.load_state_dict(loaded.state_dict())
    calls: list[dict[str, Any]] = []

    def keep(_: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        calls.append(keywords)

    whole.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    whole.set_progress_bar_config(disable=True)
    whole(
        prompt="a red circle",
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=1.0,
        audio_guidance_scale=1.0,
        stg_scale=0.0,
        audio_stg_scale=0.0,
        modality_scale=1.0,
        audio_modality_scale=1.0,
        output_type="latent",
    )
    states = family.encode_text(["a red circle"])[0]
    torch.testing.assert_close(calls[0]["encoder_hidden_states"][0], states["text"])
    sound = calls[0]["audio_encoder_hidden_states"][0]
    torch.testing.assert_close(sound, states["audio_text"])
    assert bool(calls[0]["encoder_attention_mask"].all())


def test_another_connector_is_another_cache(tiny_bases: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    before = families.open_family("ltx2", folder).fingerprints()["text_encoder"]
    weights = folder / "connectors" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    name = next(iter(state))
    state[name] = state[name] + 1
    save_file(state, weights)
    after = families.open_family("ltx2", folder).fingerprints()["text_encoder"]
    assert before != after


def test_a_vae_without_statistics_is_refused(tiny_bases: Any, tmp_path: Path) -> None:
    """diffusers would normalise by 0 and 1, and train on latents of another scale."""
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    del state["latents_mean"], state["latents_std"]
    save_file(state, weights)
    with pytest.raises(VideotuneError):
        families.open_family("ltx2", folder).vae()


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("vae", {"spatial_compression_ratio": None}),
        ("vae", {"timestep_conditioning": True}),
        ("transformer", {"patch_size": 2}),
        ("transformer", {"cross_attention_dim": 64}),
        ("connectors", {"video_connector_num_learnable_registers": None}),
    ],
)
def test_configs_of_no_published_checkpoint_are_refused(
    part: str, values: dict[str, Any], tiny_bases: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    families.edit_json(folder / part / "config.json", **values)
    with pytest.raises(VideotuneError):
        find("ltx2").read_spec(folder)


def test_a_strange_text_encoder_is_refused(tiny_bases: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    index = folder / "model_index.json"
    families.edit_json(index, text_encoder=["transformers", "T5EncoderModel"])
    with pytest.raises(VideotuneError):
        find("ltx2").read_spec(folder)


@VERSIONS
def test_a_guided_step_is_four_evaluations_and_an_unguided_one_is_one(
    family: Any,
) -> None:
    batch = families.batch_of(family, ["a red circle"])
    net = families.first_of(family)
    samples_of: list[int] = []

    def count(_: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        samples_of.append(len(keywords["hidden_states"]))

    net.register_forward_pre_hook(count, with_kwargs=True)
    nets = {"transformer": net}
    request = SampleRequest(families.small_shape(family), 2, 3.0, (1,))
    family.sample(nets, batch.conditioning, batch.conditioning, request)
    assert sum(samples_of) == 2 * family.spec.sample_passes == 8
    samples_of.clear()
    family.sample(nets, batch.conditioning, None, replace(request, guidance=1.0))
    assert samples_of == [1, 1]


@VERSIONS
def test_samples_do_not_depend_on_their_neighbours(family: Any) -> None:
    batch = families.batch_of(family, ["a red circle", "b"])
    nets = families.denoisers(family)
    request = SampleRequest(
        families.small_shape(family), 2, 3.0, (1, 2), first=batch.x0[:, :, :1]
    )
    together = family.sample(nets, batch.conditioning, batch.conditioning, request)
    for i, part in enumerate(batch.split(1)):
        alone = family.sample(
            nets,
            part.conditioning,
            part.conditioning,
            replace(request, seeds=(i + 1,), first=request.first[[i]]),
        )
        torch.testing.assert_close(alone[0], together[i], rtol=1e-4, atol=1e-4)


def given_batch(family: Any, names: list[str]) -> Any:
    """A batch of one clip of three latent frames with these conditions."""
    rules = family.spec.rules
    shape = replace(families.small_shape(family), frames=2 * rules.frame_step + 1)
    batch = families.batch_of(family, ["a red circle"], shape=shape)
    generator = torch.Generator().manual_seed(7)
    extras = dict(batch.conditioning.extras)
    mask = batch.conditioning_mask.clone()
    for name in names:
        if name == "prefix":
            mask[:, :, :2] = True
        else:
            count = 1 if name == "last_frame" else 3
            size = (1, batch.x0.shape[1], count, *batch.x0.shape[3:])
            extras[name] = torch.randn(size, generator=generator)
    conditioning = replace(batch.conditioning, extras=extras)
    return shape, replace(
        batch,
        conditioning=conditioning,
        conditioning_mask=mask,
        loss_mask=(~mask).float(),
        has_clean_frames=bool(mask.any()),
    )


@pytest.mark.parametrize(
    "names",
    [["prefix"], ["last_frame"], ["reference"], ["prefix", "last_frame", "reference"]],
    ids="-".join,
)
@VERSIONS
def test_given_frames_are_told_as_the_pipeline_tells_them(
    family: Any, names: list[str]
) -> None:
    """The same tokens, positions and timesteps, and samples keep what is given."""
    shape, batch = given_batch(family, names)
    net = families.first_of(family)
    calls: list[dict[str, Any]] = []

    def keep(_: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        calls.append(dict(keywords))

    net.register_forward_pre_hook(keep, with_kwargs=True)
    known = None if "prefix" not in names else batch.x0
    cells = batch.conditioning_mask.expand(-1, -1, -1, *batch.x0.shape[3:])
    request = SampleRequest(
        shape,
        2,
        1.0,
        (3,),
        known=known,
        known_mask=None if known is None else cells,
    )
    drawn = family.sample({"transformer": net}, batch.conditioning, None, request)
    if known is not None:
        assert torch.equal(
            drawn.where(cells, 0.0 * drawn), known.where(cells, 0.0 * drawn)
        )

    for theirs in list(calls):
        count = batch.x0.shape[2:].numel()
        x_t = theirs["hidden_states"][:, :count].transpose(1, 2)
        t = theirs["sigma"] / 1000
        calls.clear()
        with torch.no_grad():
            family.predict(net, x_t.reshape(batch.x0.shape), t, batch)
        for word in ("hidden_states", "timestep", "sigma", "video_coords"):
            torch.testing.assert_close(
                calls[0][word].expand_as(theirs[word]), theirs[word]
            )


def test_a_last_frame_stands_at_the_first_pixel_frame_of_its_latent(
    tiny_family: Open,
) -> None:
    rules = tiny_family("ltx2").spec.rules
    coords = last_frame_coords(3, 2, 2, rules, torch.device("cpu"))
    assert coords.shape == (1, 3, 4, 2)
    assert coords[0, 0].unique().tolist() == [9.0, 10.0]


def test_the_index_decides_between_the_text_encoders(tiny_family: Open) -> None:
    names = {
        version: type(
            tiny_family("ltx2", variant=version).text_parts()["text_encoder"].encoder
        ).__name__
        for version in find("ltx2").variants
    }
    assert names == {
        "2.3": "Gemma3ForConditionalGeneration",
        "2.0": "Gemma3ForConditionalGeneration",
        "2.5": "Gemma4UnifiedForConditionalGeneration",
    }
    titles = {
        version: tiny_family("ltx2", variant=version).spec.title
        for version in find("ltx2").variants
    }
    assert titles == {"2.3": "LTX-2.3", "2.0": "LTX-2", "2.5": "LTX-2.5"}


@VERSIONS
def test_new_tokens_are_read_as_rows_of_the_table(family: Any) -> None:
    """Gemma multiplies what its table returns, so also the new rows."""
    part = family.text_parts()["text_encoder"]
    table = part.encoder.get_input_embeddings()
    rows = torch.randn(1, table.weight.shape[1], generator=torch.Generator())
    first = int(part.tokenizer.convert_tokens_to_ids("q"))
    table.weight.data[first] = rows[0]

    lay_rows(part, ("<q>",), rows)
    expected_of_q = part.encoder.get_input_embeddings()(torch.tensor([first]))
    number = int(part.tokenizer.convert_tokens_to_ids("<q>"))
    of_new = part.encoder.get_input_embeddings()(torch.tensor([number]))
    torch.testing.assert_close(of_new, expected_of_q)
    states = family.encode("a <q> circle")
    assert bool(states["text"].isfinite().all())


@VERSIONS
def test_the_authors_file_of_everything_gives_the_transformer(
    version: str, family: Any, tmp_path: Path
) -> None:
    """With connectors, VAE and vocoder in it, under ComfyUI's prefix, and in fp8 or
    not.
    """
    net = family.denoiser()
    state = {
        f"model.diffusion_model.{family.original(name)}": value.clone()
        for name, value in net.state_dict().items()
    }
    prefix = "model.diffusion_model.video_embeddings_connector"
    state[f"{prefix}.learnable_registers"] = torch.ones(4000)
    state["vae.encoder.conv_in.conv.weight"] = torch.ones(4000)
    state["vocoder.conv_pre.weight"] = torch.ones(4000)
    path = tmp_path / f"ltx-{version}.safetensors"
    save_file(state, path)

    base = place(str(family.folder), files={"transformer": path})
    read = families.open_family("ltx2", base.folder).denoiser()
    for name, value in read.state_dict().items():
        assert torch.equal(value, net.state_dict()[name])


def test_samples_have_the_steps_that_the_scheduler_needs(
    tiny_family: Open,
) -> None:
    """Of one step diffusers' schedule is NaN where its last noise level is set."""
    for name, version, least in (
        ("ltx2", "2.3", 2),
        ("ltx_video", "0.9.0", 2),
        ("ltx_video", "0.9.7", 1),
    ):
        family = tiny_family(name, variant=version)
        shape = families.small_shape(family)
        assert settings_at(Config(), family.spec, shape, least).steps == least
        if least > 1:
            with pytest.raises(VideotuneError):
                settings_at(Config(), family.spec, shape, least - 1)


def test_optional_parts_of_a_pipeline_are_not_taken_for_settings(
    tiny_bases: Any, tmp_path: Path
) -> None:
    """An index that names a processor or a head for durations."""
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    index = json.loads((folder / "model_index.json").read_text())
    index["duration_head"] = ["ltx2", "LTX2DurationHead"]
    index["processor"] = ["transformers", "Gemma3Processor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    family = families.open_family("ltx2", folder)
    pipe = family.pipeline({"transformer": torch.nn.Identity()})
    assert pipe.duration_head is None
    assert pipe.processor is None


def test_noise_levels_of_very_many_tokens_are_those_of_many() -> None:
    """The law hardly changes from 30,000 tokens on."""
    shares = [0.05, 0.25, 0.5, 0.75, 0.95]
    quantiles = []
    for tokens in (60_000, 130_000):
        shift = shift_of_tokens(tokens, find("ltx2").spec.shift_by_tokens)
        sampler = TimestepSampler("STRETCHED_LOGIT_NORMAL", shift=shift)
        quantiles.append(sampler.at(shares))
    torch.testing.assert_close(quantiles[1], quantiles[0])


def test_the_reports_code_compresses_no_frame_that_is_given(tmp_path: Path) -> None:
    """A prefix of one latent frame is one picture, which the pipeline would compress."""
    rows = []
    for name in ("first_frame", "prefix", "last_frame"):
        rows.append(
            {
                "type": name,
                "probability": 1.0,
                "latent_frames": 1,
                "in_diffusers": True,
            }
        )
    reports.write_journal(tmp_path, [reports.start()])
    reports.write_file(tmp_path, "plan.json", {"conditions": rows})
    code = condition_code(read_run(tmp_path), ["LTX2Pipeline"], (33, 64, 96))
    assert code is not None
    names: dict[str, Any] = {
        "load_image": lambda name: name,
        "load_video": lambda name: [name] * 40,
        "pipe": find("ltx2").tiny_pipeline("2.3"),
    }
    exec("\n".join([*code.imports, *code.lines]), names)
    assert len(names["conditions"]) == 3
    assert all(condition.crf == 0 for condition in names["conditions"])


def test_a_base_knows_no_clip_beside_its_own(tiny_family: Open) -> None:
    """Not without an adapter that learnt it; a last frame it takes as it is."""
    spec = tiny_family("ltx2").spec
    refuse_given(GivenFiles(last_frame="a"), spec, Config(), "sample")
    with pytest.raises(VideotuneError):
        refuse_given(GivenFiles(reference="a"), spec, Config(), "sample")
    learnt = Config(conditions=[{"type": "reference"}])  # type: ignore[list-item]
    refuse_given(GivenFiles(reference="a"), spec, learnt, "sample")


def test_a_picture_has_no_last_frame(tiny_family: Open) -> None:
    """A pipeline would put it in the place of the picture, and return it."""
    shape = replace(families.small_shape(tiny_family("ltx2")), frames=1)
    with pytest.raises(VideotuneError, match="no last frame"):
        read_given(GivenFiles(last_frame="a"), shape, "sample")


def test_helpers_of_a_base_are_neither_downloaded_nor_missed(
    tiny_bases: Any, tmp_path: Path
) -> None:
    """What writes prompts is as large as the text encoder, and nothing reads it."""
    folder = Path(shutil.copytree(tiny_bases("ltx2"), tmp_path / "base"))
    index = json.loads((folder / "model_index.json").read_text())
    index["prompt_enhancer"] = ["transformers", "Gemma4ForConditionalGeneration"]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert missing(folder, weights=True) == []
    listed = ["prompt_enhancer/config.json", "prompt_enhancer/model.safetensors"]
    listed += [
        f"{part}/diffusion_pytorch_model.safetensors"
        for part in ("transformer", "vae", "audio_vae", "connectors", "vocoder")
    ]
    listed.append("text_encoder/model.safetensors")
    files = wanted("a/b", index, listed, weights=True)
    assert not any(file.startswith("prompt_enhancer") for file in files)
    assert "text_encoder/model.safetensors" in files


def test_a_side_of_one_latent_is_refused_where_the_decoder_mirrors(
    tiny_family: Open,
) -> None:
    clip = torch.zeros(3, 9, 32, 64)
    assert tiny_family("ltx2", variant="2.3").encode_video(clip).mean.shape[2] == 1
    with pytest.raises(VideotuneError):
        tiny_family("ltx2", variant="2.0").encode_video(clip)
