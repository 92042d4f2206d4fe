"""LoRA files of other programs: read exactly, alpha included, or refused with a
sentence; never read wrongly.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.run_results import updates
from videotune.adapters.lora import ADAPTER, add_lora
from videotune.config.sections import Lora
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import export_lora, read_adapter, read_parts
from videotune.exporter.lora_inspect import inspect
from videotune.exporter.lora_target import adapter_path

Open = Callable[..., Any]
State = dict[str, torch.Tensor]
FAMILIES = (
    "wan",
    "cogvideox",
    "ltx_video",
    "hunyuan_video",
    "hunyuan_video15",
    "hidream",
    "kandinsky5",
)
SCALE = 0.5
RANK = 4


def trained(family: Any, targets: Any = "attention") -> State:
    """A and B of each module, drawn."""
    state = add_lora(
        family.denoiser(), family.spec, Lora(rank=RANK, targets=targets), 0
    )
    random = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(value.shape, generator=random)
        for name, value in state.items()
    }


def modules(state: State) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for name in state:
        if name.endswith(".lora_A.weight"):
            path = name.removesuffix(".lora_A.weight")
            yield path, state[name], state[f"{path}.lora_B.weight"]


def joined(family: Any, state: State) -> State:
    """As the authors' code has it: modules that share a name there have one A, and B
    one below the other.
    """
    rows: dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
    for path, a, b in modules(state):
        rows.setdefault(family.to_comfyui_name(path), []).append((path, a, b))
    order = [
        own
        for _, group in family.spec.fused_modules.get("comfyui", ())
        for own in group
    ]
    out = {}
    for name, members in rows.items():
        members.sort(
            key=lambda each: next(
                (i for i, own in enumerate(order) if each[0].endswith(f".{own}")), 0
            )
        )
        for path, _, _ in members[1:]:
            state[f"{path}.lora_A.weight"] = members[0][1]
        out[f"{name}.lora_A.weight"] = members[0][1]
        out[f"{name}.lora_B.weight"] = torch.cat([b for _, _, b in members])
    return out


def with_alpha(state: State, down: str, up: str, name: Callable[[str], str]) -> State:
    out = {}
    for path, a, b in modules(state):
        out |= {f"{name(path)}.{down}.weight": a, f"{name(path)}.{up}.weight": b}
        out[f"{name(path)}.alpha"] = torch.tensor(SCALE * len(a))
    return out


def kohya(path: str) -> str:
    return f"lora_unet_{path.replace('.', '_')}"


FORMS: dict[str, tuple[bool, str, str, Callable[[str], str]]] = {
    "diffusers with alpha": (False, "lora_A", "lora_B", "transformer.{}".format),
    "diffusers, down and up": (False, "lora_down", "lora_up", "transformer.{}".format),
    "comfyui with alpha": (True, "lora_A", "lora_B", "diffusion_model.{}".format),
    "comfyui, down and up": (True, "lora_down", "lora_up", "diffusion_model.{}".format),
    "kohya": (False, "lora_down", "lora_up", kohya),
    "musubi": (True, "lora_down", "lora_up", kohya),
    "the authors' names alone": (True, "lora_A", "lora_B", str),
    "PEFT": (False, "lora_A", "lora_B", "base_model.model.{}".format),
    "an adapter's name": (False, "lora_A.default", "lora_B.default", str),
}
"""Whether modules have the authors' names, what A and B are called, and what stands
around a module's name.
"""


def effect(family: Any, path: Path) -> State:
    parts, scales = read_parts(family, path)
    return {
        name: scales[name] * own["lora_B"].double() @ own["lora_A"].double()
        for name, own in parts.items()
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_form_does_what_it_did_where_it_was_trained(
    name: str,
    form: str,
    tiny_family: Open,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    family = tiny_family(name)
    state = trained(family, "linear")
    path = tmp_path / "x.safetensors"
    authors, down, up, name_of = FORMS[form]
    tensors = with_alpha(joined(family, state) if authors else state, down, up, name_of)
    save_file({key: value.clone() for key, value in tensors.items()}, path)
    wanted, found = updates(state, SCALE), effect(family, path)
    assert set(found) == set(wanted)
    for module, delta in wanted.items():
        torch.testing.assert_close(found[module], delta, rtol=1e-6, atol=1e-6)
    assert "alpha" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "scale"),
    [
        ("lora_adapter_metadata", {"transformer.r": RANK, "transformer.lora_alpha": 2}, 0.5),
        ("lora_adapter_metadata", {"transformer.r": RANK, "transformer.lora_alpha": 2, "transformer.use_rslora": True}, 1.0),
        ("lora_adapter_metadata", {"transformer.lora_alpha": 2, "transformer.exclude_modules": "(.*)*x"}, 0.5),
        ("adapter_config", {"lora_alpha": 2, "target_modules": "(a+)+$", "exclude_modules": "(.*)*x", "peft_type": 7}, 0.5),
        ("lora_config", {"r": RANK, "lora_alpha": 2, "target_modules": "(a+)+$", "rank_pattern": {"(a+)+$": 5}}, 0.5),
    ],
)  # fmt: skip
def test_alpha_may_stand_in_the_header(
    key: str, value: Any, scale: float, family: Any, tmp_path: Path
) -> None:
    """diffusers and finetrainers write it there; no pattern that stands beside it is
    ever looked at.
    """
    state = trained(family)
    path = tmp_path / "x.safetensors"
    save_file(
        {f"transformer.{name}": x for name, x in state.items()},
        path,
        {key: json.dumps(value)},
    )
    wanted, found = updates(state, scale), effect(family, path)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


def test_pefts_own_settings_stand_beside_the_file(family: Any, tmp_path: Path) -> None:
    state = trained(family)
    first = next(modules(state))[0]
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2,
        "alpha_pattern": {first: 4},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(
        {f"base_model.model.{name}": x for name, x in state.items()},
        tmp_path / "adapter_model.safetensors",
    )
    found = effect(family, tmp_path / "adapter_model.safetensors")
    half, whole = updates(state, 0.5), updates(state, 1.0)
    for name in half:
        torch.testing.assert_close(
            found[name], (whole if name == first else half)[name], rtol=1e-6, atol=1e-6
        )


def test_a_file_without_alpha_is_told(
    family: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, path = trained(family), tmp_path / "x.safetensors"
    save_file({f"transformer.{name}": x for name, x in state.items()}, path)
    effect(family, path)
    assert "alpha" in capsys.readouterr().err
    ours = export_lora(
        family, "comfyui", state, 2.0, tmp_path / "ours.safetensors", {}
    ).path
    effect(family, ours)
    assert "alpha" not in capsys.readouterr().err, "in a file of ours it is in B"


KEYS = ("lora_adapter_metadata", "lora_config")
HEADERS: list[dict[str, str]] = [
    *(
        {key: text}
        for key in KEYS
        for text in ("[]", "5", "{", '"x"', "null", '{"a": ' * 5000)
    ),
    {"lora_adapter_metadata": '{"transformer.lora_alpha": "(a+)+$"}'},
    {
        "lora_adapter_metadata": '{"transformer.lora_alpha": 2, "transformer.alpha_pattern": {"(a+)+$": 5}}'
    },
    {"lora_config": '{"lora_alpha": true}'},
    {"lora_config": '{"lora_alpha": 0}'},
    {"videotune": "[]"},
    {"adapter_config": "[]"},
    {"adapter_config": '{"peft_type": "LOHA", "alpha_pattern": {"(a+)+$": 5}}'},
]


@pytest.mark.parametrize(
    "header",
    HEADERS,
    ids=lambda header: json.dumps(header)[:60].replace("\\", ""),
)
def test_settings_that_are_damaged_or_patterns_are_refused(
    header: dict[str, str], family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(
        {f"transformer.{name}": x for name, x in trained(family).items()}, path, header
    )
    with pytest.raises(VideotuneError, match=r"x\.safetensors"):
        effect(family, path)


A, B = (
    "transformer.blocks.0.attn1.to_q.lora_A.weight",
    "transformer.blocks.0.attn1.to_q.lora_B.weight",
)
ALPHA = "transformer.blocks.0.attn1.to_q.alpha"


def pair(state: State, name: str) -> State:
    return {
        f"{name}.lora_A.weight": state[A].clone(),
        f"{name}.lora_B.weight": state[B].clone(),
    }


DAMAGE: dict[str, Callable[[State], Any]] = {
    "NaN": lambda s: s[B].fill_(float("nan")),
    "integers": lambda s: s.update({A: s[A].int()}),
    "A without its B": lambda s: s.pop(B),
    "two ranks": lambda s: s.update({A: s[A][:2]}),
    "no rank": lambda s: s.update({A: s[A][:0], B: s[B][:, :0]}),
    "another width": lambda s: s.update({A: torch.cat([s[A], s[A]], 1)}),
    "vectors": lambda s: s.update({A: s[A][0].clone(), B: s[B][:, 0].clone()}),
    "alpha 1e38": lambda s: s.update({ALPHA: torch.tensor(1e38)}),
    "alpha 0": lambda s: s.update({ALPHA: torch.tensor(0.0)}),
    "alpha as a list": lambda s: s.update({ALPHA: torch.ones(3)}),
    "a module that is not there": lambda s: s.update(pair(s, "transformer.blocks.99.attn1.to_q")),
    "a module twice": lambda s: s.update(pair(s, "diffusion_model.blocks.0.self_attn.q")),
    "two adapters": lambda s: s.update({A.replace("lora_A", "lora_A.other"): s[A].clone()}),
    "B is zero everywhere": lambda s: [x.zero_() for key, x in s.items() if "lora_B" in key],
    "a bias of unknown use": lambda s: s.update({"transformer.blocks.9.attn1.to_q.lora_B.bias": torch.zeros(3)}),
    "a DoRA of modules that are not there": lambda s: s.update(
        pair(s, "transformer.foo") | {"transformer.foo.lora_magnitude_vector": torch.ones(3)}
    ),
    "a tensor that nobody knows": lambda s: s.update({"foo": torch.zeros(3)}),
    "weights of a text encoder": lambda s: s.update(pair(s, "text_encoder.q")),
    "nothing": lambda s: s.clear(),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_tensors_are_refused(how: str, family: Any, tmp_path: Path) -> None:
    state = {f"transformer.{name}": x for name, x in trained(family).items()}
    DAMAGE[how](state)
    path = tmp_path / "x.safetensors"
    save_file(state, path)
    with pytest.raises(VideotuneError, match=r"x\.safetensors"):
        effect(family, path)


def test_a_file_that_was_trained_on_other_weights_is_told(
    family: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = family.fingerprints()
    others = dict.fromkeys(own, "another")
    warned = []
    for fingerprints in (own, others, {}, None):
        base = {"name": "mine", "fingerprints": fingerprints}
        facts = {} if fingerprints is None else {"base": base}
        path = export_lora(
            family, "diffusers", trained(family), 1.0, tmp_path / "x.safetensors", facts
        ).path
        capsys.readouterr()
        effect(family, path)
        warned.append("was trained on mine" in capsys.readouterr().err)
    assert warned == [False, True, False, False]


def test_a_file_of_ours_is_held_against_its_own_digest(
    family: Any, tmp_path: Path
) -> None:
    path = export_lora(
        family, "diffusers", trained(family), 1.0, tmp_path / "x.safetensors", {}
    ).path
    effect(family, path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(VideotuneError, match="damaged"):
        effect(family, path)


def test_biases_are_sampled_with_and_no_run_begins_with_them(
    family: Any, tmp_path: Path
) -> None:
    """diffusers' converter takes a distilled LoRA's ``diff_b`` for biases; in ours
    there is no place for them.
    """
    name, path = "diffusion_model.blocks.0.self_attn.q", tmp_path / "x.safetensors"
    tensors = {
        f"{name}.lora_down.weight": torch.ones(2, 24),
        f"{name}.lora_up.weight": torch.ones(24, 2),
    }
    save_file(
        tensors
        | {
            f"{name}.diff_b": torch.full((24,), 3.0),
            f"{name}.alpha": torch.tensor(1.0),
        },
        path,
    )
    net = family.denoiser()
    read_adapter(family, net, path, ADAPTER)
    layer = net.get_submodule("blocks.0.attn1.to_q")
    off = layer(torch.ones(1, 24)) - layer.base_layer(torch.ones(1, 24))
    torch.testing.assert_close(off, torch.full((1, 24), 0.5 * 48 + 3.0))
    with pytest.raises(VideotuneError, match="bias"):
        effect(family, path)


def test_cogvideox_in_comfyuis_names(tiny_family: Open, tmp_path: Path) -> None:
    """The names of comfy/ldm/cogvideo/model.py."""
    family = tiny_family("cogvideox")
    state = trained(family, "linear")
    done = export_lora(family, "comfyui", state, 1.0, tmp_path / "x.safetensors", {})
    keys = [
        key.removeprefix("diffusion_model.blocks.0.")
        for key in load_file(done.path)
        if ".0." in key
    ]
    assert {key.split(".lora")[0] for key in keys} == {
        "q",
        "k",
        "v",
        "attn_out",
        "ff_proj",
        "ff_out",
    }
    assert done.max_error == 0.0
    assert "videotune" in done.reader


def test_weights_of_8_bits_are_read(family: Any, tmp_path: Path) -> None:
    state = {
        f"transformer.{name}": x.to(torch.float8_e4m3fn)
        for name, x in trained(family).items()
    }
    save_file(state, tmp_path / "eight.safetensors")
    save_file(
        {name: x.float() for name, x in state.items()}, tmp_path / "full.safetensors"
    )
    eight, full = (
        effect(family, tmp_path / f"{name}.safetensors") for name in ("eight", "full")
    )
    assert all(torch.equal(eight[name], full[name]) for name in full)


def test_a_folder_stands_for_its_only_adapter_or_says_what_to_name(
    tmp_path: Path,
) -> None:
    """PEFT's and diffusers' names come before others; hidden files do not count."""
    folder = tmp_path / "folder"
    folder.mkdir()

    def refused(text: str) -> None:
        with pytest.raises(VideotuneError) as caught:
            adapter_path(folder)
        assert str(caught.value) == f"{folder} {text}"

    refused(
        "is a folder without a safetensors file. Give the .safetensors file of a LoRA, "
        "or the folder that holds it"
    )
    (folder / "config.json").touch()
    refused(
        "is a folder without a safetensors file. Give the .safetensors file of a LoRA, "
        "or the folder that holds it"
    )
    (folder / "journal.jsonl").touch()
    refused(f"is a run without exports. Write them: videotune export {folder}")
    export = folder / "export"
    export.mkdir()
    for name in ("b.safetensors", "a.safetensors", ".part.safetensors"):
        (export / name).touch()
    refused(
        "is a run; its files are in export. Name one:"
        f" {export / 'a.safetensors'}, {export / 'b.safetensors'}"
    )

    (folder / ".hidden.safetensors").touch()
    (folder / "x.safetensors").touch()
    assert adapter_path(folder) == folder / "x.safetensors"
    (folder / "y.safetensors").touch()
    refused(
        "holds 2 safetensors files. Name the one to read: x.safetensors, y.safetensors"
    )
    (folder / "adapter_model.safetensors").touch()
    assert adapter_path(folder) == folder / "adapter_model.safetensors"
    (folder / "pytorch_lora_weights.safetensors").touch()
    refused(
        "holds 2 safetensors files. Name the one to read:"
        " adapter_model.safetensors, pytorch_lora_weights.safetensors"
    )


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".ckpt"])
def test_a_file_that_can_run_code_is_not_read(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match="can run code when it is read"):
        adapter_path(tmp_path / f"x{suffix}")


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\0\0\0\x20ftypisom", "a video (MP4 or MOV)"),
        (b"\x1aE\xdf\xa3\x9f", "a video (Matroska or WebM)"),
        (b"RIFF\0\0\0\0AVI LIST", "a video (AVI)"),
        (b"\x89PNG\r\n\x1a\n", "a picture (PNG)"),
        (b"PK\x03\x04", "a zip archive"),
        (b"GGUF\x03", "weights in GGUF form"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"trigger: ohwx\n", "a text file"),
        (b"", "an empty file"),
    ],
)
@pytest.mark.parametrize("name", ["clip.mp4", "adapter.safetensors"])
def test_a_file_that_is_no_lora_is_called_what_it_is(
    tmp_path: Path, head: bytes, kind: str, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(head)
    with pytest.raises(VideotuneError) as error:
        inspect(path)
    assert f"{path} is {kind}, not a LoRA" in str(error.value)
    assert ".safetensors" in str(error.value).removeprefix(str(path))
    assert "damaged" not in str(error.value)


def test_a_truncated_lora_is_damaged_and_not_called_something_else(
    tmp_path: Path,
) -> None:
    path = tmp_path / "adapter.safetensors"
    save_file({"a.lora_A.weight": torch.ones(2, 3)}, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(VideotuneError, match="damaged, or was not copied"):
        inspect(path)
