"""Wan's two experts, its noise, its names in the authors' files, and the time that isolated frames take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from videotune.models.base import renamed
from videotune.models.wan import Wan
from videotune.sampling.pipeline import SampleSettings, draw
from videotune.types import ClipShape

Open = Callable[..., Any]
SHAPE = ClipShape(5, 32, 32, 16.0)


def test_each_expert_answers_on_its_own_side_of_the_boundary(tiny_family: Open) -> None:
    family = tiny_family("wan", variant="t2v-a14b")
    met: dict[str, list[float]] = {"high": [], "low": []}
    nets = {}
    for expert, levels in met.items():
        nets[expert] = family.denoiser(expert)

        def keep(module: Any, words: Any, named: dict[str, Any], out: Any, levels: list[float] = levels) -> None:
            levels.append(named["timestep"].item() / 1000)

        nets[expert].register_forward_hook(keep, with_kwargs=True)
    states = dict(zip(["a", ""], family.encode_text(["a", ""]), strict=True))
    draw(family, nets, SampleSettings(SHAPE, 12, 1.0), states.__getitem__, ["a"], [1])
    for expert in family.spec.experts:
        assert met[expert.name]
        assert all(expert.t_lo <= t and (t < expert.t_hi or expert.t_hi == 1.0) for t in met[expert.name])


def test_the_experts_have_weights_of_their_own(tiny_family: Open) -> None:
    family = tiny_family("wan", variant="i2v-a14b")
    high, low = (family.denoiser(name).state_dict() for name in ("high", "low"))
    assert not torch.equal(high["proj_out.weight"], low["proj_out.weight"])
    assert {"transformer", "transformer_2"} <= set(family.fingerprints())


@pytest.mark.parametrize("variant", Wan.variants)
def test_whole_weights_under_the_authors_names_are_read_by_diffusers(variant: str, tiny_family: Open) -> None:
    family = tiny_family("wan", variant=variant)
    state = family.skeleton().state_dict()
    marked = {name: (name, tuple(value.shape)) for name, value in state.items()}
    original = {family.full_key_maps()["original"](name): mark for name, mark in marked.items()}
    assert len(original) == len(marked)
    assert not any("condition_embedder" in name or "attn1" in name for name in original)

    def carrying(mark: tuple[str, tuple[int, ...]]) -> torch.Tensor:
        return torch.full((1,), float(list(marked).index(mark[0])))

    read = convert_wan_transformer_to_diffusers({name: carrying(mark) for name, mark in original.items()})
    assert {name: int(value) for name, value in read.items()} == {name: i for i, name in enumerate(marked)}
    assert {name: family.full_key_maps()["diffusers"](name) for name in marked} == {name: name for name in marked}


def test_the_authors_names_of_what_is_easy_to_get_wrong() -> None:
    names = {
        "blocks.3.norm2.weight": "blocks.3.norm3.weight",
        "blocks.3.attn1.norm_q.weight": "blocks.3.self_attn.norm_q.weight",
        "blocks.3.attn2.norm_added_k.weight": "blocks.3.cross_attn.norm_k_img.weight",
        "blocks.3.attn2.add_v_proj.bias": "blocks.3.cross_attn.v_img.bias",
        "blocks.3.scale_shift_table": "blocks.3.modulation",
        "scale_shift_table": "head.modulation",
        "proj_out.bias": "head.head.bias",
        "condition_embedder.image_embedder.norm2.weight": "img_emb.proj.4.weight",
        "condition_embedder.time_proj.weight": "time_projection.1.weight",
        "patch_embedding.weight": "patch_embedding.weight",
    }
    assert {name: renamed(name, Wan.original_names) for name in names} == names


def test_a_frame_alone_is_a_clip_of_one_frame(tiny_family: Open) -> None:
    """Isolated, the first frame of a clip is predicted as a still of it is: it stands at the same place."""
    from tests.models.models_kit import batch_of

    family = tiny_family("wan")
    batch = batch_of(family, ["a"], shape=ClipShape(9, 32, 32, 16.0))
    net, t = family.denoiser(), torch.tensor([0.5])
    family.isolate_frames(net, True)
    with torch.no_grad():
        together = family.predict(net, batch.x0, t, batch)
        alone = family.predict(net, batch.x0[:, :, :1], t, batch)
    torch.testing.assert_close(together[:, :, :1], alone, rtol=1e-5, atol=1e-5)
