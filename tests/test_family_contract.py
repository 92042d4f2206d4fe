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

from videotune.adapters.lora import LoraSettings, add_lora, matching, updates
from videotune.diffusion.objective import objective
from videotune.diffusion.timesteps import Timesteps
from videotune.export.lora import export_lora
from videotune.families.find import find, names, of_base, spec_for
from videotune.types import BasePlace, Batch, ClipShape, SampleRequest

FAMILIES = pytest.mark.parametrize("name", names())
Open = Callable[..., Any]


def small_shape(family: Any) -> ClipShape:
    """The smallest shape of more than one latent frame, if the family takes one."""
    rules = family.spec.rules
    side = 2 * rules.side_multiple
    return ClipShape(rules.frame_step + rules.frame_rest, side, side, rules.fps)


def batch_of(family: Any, captions: list[str], seed: int = 0) -> Batch:
    shape = small_shape(family)
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.randn(
        len(captions), family.spec.latent_channels, *family.spec.rules.latent_size(shape), generator=generator
    )
    none = torch.zeros(len(captions), 1, x0.shape[2], 1, 1, dtype=torch.bool)
    return Batch(
        x0=x0,
        given=none,
        dropped=none,
        weight=torch.ones_like(none, dtype=torch.float32),
        scale=torch.ones(len(captions)),
        anchored=torch.zeros(len(captions), dtype=torch.bool),
        cond=family.condition(family.encode_text(captions)),
        captions=tuple(captions),
        window_ids=(),
        fps=torch.full((len(captions),), shape.fps),
    )


@FAMILIES
def test_the_spec_is_read_without_torch(name: str, tiny_bases: Callable[[str], Path]) -> None:
    folder = tiny_bases(name)
    code = (
        "import sys; from videotune.families.find import of_base; from pathlib import Path;"
        f"m = of_base(Path({str(folder)!r})); s = m.read_spec(Path({str(folder)!r}));"
        "print(s.name, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == [name, "False"]


@FAMILIES
def test_the_base_says_its_family(name: str, tiny_bases: Callable[[str], Path]) -> None:
    folder = tiny_bases(name)
    assert of_base(folder) is find(name)
    assert spec_for(name, BasePlace("tiny", folder)) == find(name).read_spec(folder)


@FAMILIES
def test_tiny_is_the_same_for_the_same_seed(name: str, tmp_path: Path, tiny_bases: Callable[[str], Path]) -> None:
    again = find(name).tiny(tmp_path / "again")
    first = tiny_bases(name)
    for path in sorted(first.rglob("*.safetensors")):
        assert path.read_bytes() == (again / path.relative_to(first)).read_bytes()


@FAMILIES
def test_latents_have_the_shape_that_the_rules_say(name: str, tiny_family: Open) -> None:
    family = tiny_family(name)
    shape = small_shape(family)
    frames = torch.rand(3, shape.frames, shape.height, shape.width) * 2 - 1
    moments = family.encode_video(frames)
    assert moments.mean.shape == (family.spec.latent_channels, *family.spec.rules.latent_size(shape))
    assert moments.mean.dtype == torch.float32
    pixels = family.decode(moments.mean)
    assert pixels.shape == frames.shape
    assert pixels.abs().max() <= 1


@FAMILIES
def test_predict_gives_gradients_to_the_adapter_alone(name: str, tiny_family: Open) -> None:
    family = tiny_family(name)
    batch = batch_of(family, ["a red circle", ""])
    net = family.denoiser()
    parameters = add_lora(net, family.spec, LoraSettings(rank=2), seed=0)
    v = family.predict(net, torch.randn_like(batch.x0), torch.tensor([0.3, 0.9]), batch)
    assert v.shape == batch.x0.shape
    assert v.dtype == torch.float32
    v.square().mean().backward()
    trained = {id(parameter) for parameter in parameters.values()}
    for parameter in net.parameters():
        assert (parameter.grad is not None) == (id(parameter) in trained)
    assert any(p.grad.abs().max() > 0 for n, p in parameters.items() if "lora_B" in n)


@FAMILIES
def test_a_batch_is_its_samples(name: str, tiny_family: Open) -> None:
    """No sample's prediction depends on its neighbours, and captions of unequal length are padded rightly."""
    family = tiny_family(name)
    batch = batch_of(family, ["a", "a much longer caption than the other"])
    net, x_t, t = family.denoiser(), torch.randn_like(batch.x0), torch.tensor([0.2, 0.7])
    with torch.no_grad():
        together = family.predict(net, x_t, t, batch)
        apart = [family.predict(net, x_t[i : i + 1], t[i : i + 1], part) for i, part in enumerate(batch.split(1))]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-4, atol=1e-5)


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


@FAMILIES
def test_oracle(name: str, tiny_family: Open) -> None:
    """A transformer that returns the exact velocity to a known latent, in the family's own pipeline, ends at that latent.

    That settles sign, units, layout and schedule at once; ``predict`` over the same transformer must give our v.
    """
    family = tiny_family(name)
    batch = batch_of(family, ["a red circle"])
    oracle = Oracle(family.denoiser(), find(name).oracle(batch.x0))
    t, noise = torch.tensor([0.4]), torch.randn_like(batch.x0)
    path = objective(family.spec.path, family.spec.path_constants, Timesteps()).path(t)
    v = family.predict(oracle, path.alpha * batch.x0 + path.sigma * noise, t, batch)
    torch.testing.assert_close(v, path.d_alpha * batch.x0 + path.d_sigma * noise, rtol=1e-4, atol=1e-4)
    nets = {expert.name: oracle for expert in family.spec.experts}
    drawn = family.sample(nets, batch.cond, None, SampleRequest(small_shape(family), 20, 1.0, (3,)))
    # some schedulers round the timestep that they tell, which leaves an error of a thousandth of the noise
    torch.testing.assert_close(drawn, batch.x0, rtol=0, atol=1e-2)


@FAMILIES
def test_named_targets_lie_inside_the_blocks(name: str, tiny_family: Open) -> None:
    family = tiny_family(name)
    net = family.skeleton()
    counts = {preset: len(matching(net, family.spec, preset)) for preset in family.spec.lora_targets}
    assert all(count > 0 for count in counts.values())
    assert counts["attention"] < counts["linear"]


@FAMILIES
def test_exports_read_back(name: str, tiny_family: Open, tmp_path: Path) -> None:
    family = tiny_family(name)
    net = family.denoiser()
    state = add_lora(net, family.spec, LoraSettings(rank=3, alpha=7.5, targets="linear"), seed=1)
    for parameter in state.values():
        parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    for format in family.key_maps():
        done = export_lora(family, format, state, 2.5, tmp_path / f"{format}.safetensors", {"step": 1})
        assert done.max_error <= 1e-6
        assert done.modules == len(updates(state, 1.0))


@FAMILIES
def test_the_skeleton_is_the_denoiser_without_weights(name: str, tiny_family: Open) -> None:
    family = tiny_family(name)
    shapes = {key: tuple(value.shape) for key, value in family.denoiser().state_dict().items()}
    skeleton = family.skeleton()
    assert {key: tuple(value.shape) for key, value in skeleton.state_dict().items()} == shapes
    assert all(parameter.is_meta for parameter in skeleton.parameters())


@FAMILIES
def test_fingerprints_follow_the_bytes(name: str, tiny_bases: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(tiny_bases(name), folder)
    module, cpu = find(name), torch.device("cpu")
    before = module.open_family(folder, cpu, torch.float32).fingerprints()
    assert before == module.open_family(tiny_bases(name), cpu, torch.float32).fingerprints()
    config = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").write_text(json.dumps(config | {"note": 1}))
    after = module.open_family(folder, cpu, torch.float32).fingerprints()
    assert {part for part in before if before[part] != after[part]} == {"vae"}


def test_fingerprints_see_the_middle_of_a_file(tmp_path: Path) -> None:
    from videotune.families import find as room

    content = bytearray(3 << 20)
    (tmp_path / "weights").write_bytes(content)
    before = room.fingerprint(tmp_path)
    content[1_500_000] = 1
    (tmp_path / "weights").write_bytes(content)
    assert room.fingerprint(tmp_path) != before


def test_large_files_are_read_all_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from videotune.families import find as room

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
