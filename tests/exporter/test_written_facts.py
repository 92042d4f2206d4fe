"""What an export says of itself, what stands in its header, which bounds its checks have,
and what becomes of the files of the base.
"""

import errno
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.adapters import network_with_adapter
from tests.support.command_line import Printed
from tests.support.lora_files import peft_file
from videotune.adapters.adapter_types import by_module
from videotune.adapters.effect import new_weight
from videotune.config.nested_keys import unflatten
from videotune.config.resolve import parse
from videotune.config.sections import BaseLora, LoraFile
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import (
    _verify_rows,
    export_embedding,
    export_lora,
    read_embedding,
)
from videotune.exporter.adapter_modules import DORA_HEADER
from videotune.exporter.base_loras import merge_into_base, weight_changes
from videotune.exporter.comfyui_dora import verify_dora
from videotune.exporter.formats import (
    TOLERANCE,
    check_formats,
    check_updates,
    configured_formats,
    refuse_format,
    write_verified,
)
from videotune.exporter.full import (
    export_full,
    export_merged,
    link_or_copy,
    model_folder,
)
from videotune.exporter.merged_file import export_merged_file
from videotune.exporter.preview_loras import preview_updates
from videotune.exporter.single_file_export import export_single_file

Open = Callable[..., Any]
Tensors = dict[str, torch.Tensor]
WEIGHTS = "diffusion_pytorch_model.safetensors"
QUERY = "blocks.0.attn1.to_q"


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


# checks


def updates(**values: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    return {name: (lambda value=value: value) for name, value in values.items()}


def test_updates_are_compared_relative_to_the_largest_of_each_module() -> None:
    expected = updates(
        a=torch.tensor([4.0, 2.0]), b=torch.tensor([0.5]), zero=ones(1) * 0
    )
    actual = updates(
        a=torch.tensor([4.0, 2.0 + 2**-20]), b=torch.tensor([0.5]), zero=ones(1) * 0
    )
    assert check_updates(expected, actual, Path("x"), "PEFT") == 2**-22
    # A form that joins modules has some that change nothing.
    assert check_updates(expected, actual | updates(c=ones(2) * 0), Path("x"), "PEFT")
    assert check_updates({}, {}, Path("x"), "PEFT") == 0.0


@pytest.mark.parametrize(
    ("actual", "fault"),
    [
        (updates(a=ones(2)), "PEFT reads 1 of 2 modules.* is b"),
        (updates(a=ones(2), b=ones(2), c=ones(1)), "PEFT reads 3 of 2 modules.* is c"),
        (updates(c=ones(1)), "PEFT reads 1 of 2 modules.* is a"),
        (updates(a=ones(2) + 2e-6, b=ones(2)), "PEFT, ΔW differs by 2.*e-06"),
        (updates(a=ones(2), b=ones(2) - 2e-6), "PEFT, ΔW differs by 2.*e-06"),
    ],
)
def test_an_update_that_is_missing_extra_or_another_is_refused(
    actual: dict[str, Callable[[], torch.Tensor]], fault: str
) -> None:
    expected = updates(a=ones(2), b=ones(2))
    with pytest.raises(VideotuneError, match=f"Verification of x failed.*{fault}"):
        check_updates(expected, actual, Path("x"), "PEFT")


def test_a_difference_of_exactly_the_tolerance_is_allowed() -> None:
    expected = updates(a=torch.ones(1, dtype=torch.float64) * 0)
    at_bound = updates(a=torch.full((1,), TOLERANCE, dtype=torch.float64))
    assert check_updates(expected, at_bound, Path("x"), "PEFT") == TOLERANCE


def test_a_written_file_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.safetensors"

    def verify(written: Path) -> tuple[float, str]:
        assert load_file(written).keys() == {"a"}
        return 0.25, "PEFT"

    written = write_verified("peft", path, 3, {"a": ones(2)}, {"step": 1}, verify)
    assert (written.format, written.path, written.modules) == ("peft", path, 3)
    assert (written.max_error, written.reader, written.use) == (0.25, "PEFT", "")
    header = header_of(path)
    assert set(header) == {"format", "videotune"}
    assert header["format"] == "pt", "transformers and diffusers ask for it"

    header = {"more": "x"}
    used = write_verified("peft", path, 3, {"a": ones(2)}, {"use": "y"}, verify, header)
    assert used.use == "y"
    assert header_of(path)["more"] == "x"


# formats

CANNOT_BE_JOINED = (
    "updates of this kind cannot be joined. `videotune export RUN --merge` works with"
    " every program"
)


@pytest.mark.parametrize(
    ("name", "kind", "format", "end"),
    [
        ("wan", "LORA", "peft", "Wan 2.1 T2V has comfyui, diffusers, not 'peft'"),
        ("wan", "LORA", "kohya", "`videotune lora convert FILE --to kohya` writes it of an export"),
        ("wan", "LORA", "original", "`videotune lora convert FILE --to original` writes it of an export"),
        ("wan", "DORA", "peft", "DORA for Wan 2.1 T2V has comfyui, diffusers, not 'peft'"),
        ("hunyuan_video", "DORA", "comfyui", CANNOT_BE_JOINED),
        ("hunyuan_video", "LOHA", "comfyui", CANNOT_BE_JOINED),
    ],
)  # fmt: skip
def test_a_format_that_is_not_written_is_refused_with_what_is(
    name: str, kind: str, format: str, end: str, tiny_family: Open
) -> None:
    with pytest.raises(VideotuneError) as refused:
        refuse_format(tiny_family(name), kind, format)
    assert str(refused.value).endswith(end)


def test_dora_for_comfyui_is_refused_where_comfyui_joins_modules(
    tiny_family: Open, tmp_path: Path
) -> None:
    family = tiny_family("hunyuan_video")
    _, state = network_with_adapter(family, "DORA")
    with pytest.raises(
        VideotuneError, match=r"DORA for .* has diffusers, not 'comfyui'"
    ):
        export_lora(family, "comfyui", state, 2.0, tmp_path / "x.safetensors", {})


@pytest.mark.parametrize(
    "settings",
    [
        {"output_model_format": "peft"},
        {"output_model_format": ["diffusers", "peft"]},
        {"output_model_format": "comfyui", "lora.variant": "OFT"},
        {"output_model_format": "peft", "training_method": "EMBEDDING"},
    ],
)
def test_a_format_that_could_not_be_written_is_refused_before_the_training(
    settings: dict[str, Any], family: Any
) -> None:
    with pytest.raises(VideotuneError, match=r"^output_model_format: .* not '"):
        check_formats(parse(unflatten(settings)), family)


def test_a_list_of_formats_is_kept_in_its_order(family: Any) -> None:
    config = parse(unflatten({"output_model_format": ["comfyui", "diffusers"]}))
    assert configured_formats(config, family) == ["comfyui", "diffusers"]
    check_formats(config, family)


# adapters


@pytest.mark.parametrize(
    ("kind", "format", "reader"),
    [
        ("LORA", "diffusers", "diffusers load_lora_weights"),
        ("LORA", "comfyui", "diffusers load_lora_weights"),
        ("DORA", "comfyui", "ComfyUI's formula"),
        ("LOKR", "peft", "PEFT inject_adapter_in_model"),
    ],
)
def test_an_exported_adapter_names_its_format_and_its_reader(
    kind: str, format: str, reader: str, family: Any, tmp_path: Path
) -> None:
    _, state = network_with_adapter(family, kind)
    path = tmp_path / "x.safetensors"
    exported = export_lora(family, format, state, 2.0, path, {"use": "load it"})
    assert (exported.format, exported.modules) == (format, 20)
    assert (exported.reader, exported.use) == (reader, "load it")
    mark = "comfyui" if kind == "DORA" else None
    assert header_of(path).get(DORA_HEADER) == mark


def dora_of_low_noise(family: Any, folder: Path) -> tuple[Path, dict[str, Any]]:
    _, state = network_with_adapter(family, "DORA", expert="low")
    path = folder / "x.safetensors"
    export_lora(family, "comfyui", state, 2.0, path, {}, expert="low")
    return path, state


def test_dora_for_comfyui_divides_by_the_weights_of_its_expert(
    tiny_family: Open, tmp_path: Path
) -> None:
    family = tiny_family("wan", variant="t2v-a14b")
    path, state = dora_of_low_noise(family, tmp_path)
    tensors = load_file(path)
    parts = by_module(state)[QUERY]
    lora = {name: parts[name] for name in ("lora_A", "lora_B")}
    name = f"diffusion_model.{family.to_comfyui_name(QUERY)}.dora_scale"
    matches = []
    for expert in ("low", "high"):
        weight = family.denoiser(expert).get_submodule(QUERY).weight
        magnitude = parts["lora_magnitude_vector"] * weight.norm(dim=1)
        dora_scale = magnitude / new_weight(weight, lora, 2.0).norm(dim=1)
        matches.append(torch.allclose(tensors[name][:, 0], dora_scale.float()))
    assert matches == [True, False]


@pytest.mark.parametrize(("change", "is_refused"), [(8e-7, False), (1e-5, True)])
def test_dora_for_comfyui_is_compared_relative_to_the_largest_weight(
    change: float, is_refused: bool, tiny_family: Open, tmp_path: Path
) -> None:
    family = tiny_family("wan", variant="t2v-a14b")
    path, state = dora_of_low_noise(family, tmp_path)
    tensors = load_file(path)
    name = f"diffusion_model.{family.to_comfyui_name(QUERY)}.dora_scale"
    tensors[name] = (tensors[name].double() * (1 + change)).double()
    save_file(tensors, path)
    if is_refused:
        with pytest.raises(VideotuneError, match=r"formula differs by 1\.0e-05"):
            verify_dora(family, state, 2.0, "low", path)
        return
    error, _ = verify_dora(family, state, 2.0, "low", path)
    assert error == pytest.approx(change, rel=0.2)


# new tokens


def test_rows_that_are_not_finite_are_not_exported(family: Any, tmp_path: Path) -> None:
    ((encoder, skeleton),) = family.text_skeletons().items()
    width = skeleton.get_input_embeddings().embedding_dim
    rows = {encoder: torch.full((1, width), float("nan"))}
    with pytest.raises(VideotuneError, match="NaN"):
        export_embedding(family, "comfyui", rows, "<x>", tmp_path / "x", {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_token_or_other_rows_is_not_the_written_one(
    family: Any, tmp_path: Path
) -> None:
    ((encoder, skeleton),) = family.text_skeletons().items()
    rows = {encoder: ones(1, skeleton.get_input_embeddings().embedding_dim)}
    path = tmp_path / "x"
    (exported,) = export_embedding(family, "comfyui", rows, "<x>", path, {})
    _verify_rows(family, "<x>", rows, None, exported.path)
    with pytest.raises(VideotuneError, match=r"x\.safetensors failed.* token is '<x>'"):
        _verify_rows(family, "<y>", rows, None, exported.path)
    others = {encoder: rows[encoder] * 2}
    with pytest.raises(VideotuneError, match=r"x\.safetensors failed.* not match"):
        _verify_rows(family, "<x>", others, None, exported.path)


def test_rows_belong_to_the_encoder_of_the_header_or_to_the_first(
    tiny_family: Open, tmp_path: Path
) -> None:
    family = tiny_family("hunyuan_video")
    first, second = family.text_skeletons()
    path = tmp_path / "x.safetensors"
    save_file({"<x>": ones(1, 8)}, path)
    assert list(read_embedding(family, path)[1]) == [first]
    for encoder in (second, "another"):
        save_file({"<x>": ones(1, 8)}, path, {"videotune": json.dumps({"text_encoder": encoder})})  # fmt: skip
        if encoder == second:
            assert list(read_embedding(family, path)[1]) == [second]
            continue
        with pytest.raises(VideotuneError, match=r"it has the keys <x>$"):
            read_embedding(family, path)
    save_file({name: ones(1, 8) for name in "dbca"}, path)
    with pytest.raises(VideotuneError, match=r"it has the keys a, b, c$"):
        read_embedding(family, path)


# whole models


def test_the_files_of_the_base_go_into_a_model_folder_without_hidden_ones(
    tmp_path: Path,
) -> None:
    """A part is left out at the top only: folders below may have its name."""
    base = tmp_path / "base"
    for name in (
        "vae/a",
        "vae/transformer/b",
        "transformer/c",
        ".git/d",
        "vae/.e",
        "f",
    ):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(name)
    out = tmp_path / "out"
    with model_folder(base, out, ["transformer"], {"step": 3}) as temporary:
        assert not out.exists()
        (temporary / "transformer").mkdir()
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {"vae/a", "vae/transformer/b", "f", "videotune.json"}
    assert json.loads((out / "videotune.json").read_text()) == {"step": 3}
    assert (out / "vae" / "a").samefile(base / "vae" / "a")


def test_a_file_that_cannot_be_linked_is_copied(tmp_path: Path) -> None:
    """Here because there is a file of that name; a link's target is linked."""
    source, link, target = (tmp_path / name for name in ("source", "link", "target"))
    source.write_text("new")
    link.symlink_to(source)
    target.write_text("old")
    assert link_or_copy(str(source), str(target)) == str(target)
    assert target.read_text() == "new"
    assert not target.samefile(source)
    other = tmp_path / "other"
    assert link_or_copy(str(link), str(other)) == str(other)
    assert other.samefile(source)
    assert not other.is_symlink()


def test_a_whole_model_says_what_trained_and_keeps_the_dtypes(
    family: Any, tmp_path: Path
) -> None:
    """Weights that diffusers keeps in float32 stay so."""
    ((name, encoder),) = family.text_skeletons().items()
    norm_name = "encoder.final_layer_norm.weight"
    text = {
        norm_name: torch.full_like(encoder.get_parameter(norm_name), 3, device="cpu")
    }
    state = {f"{QUERY}.bias": ones(24), f"{QUERY}.weight": ones(24, 24)}
    exported = export_full(
        family=family,
        expert="transformer",
        state=state,
        base=family.folder,
        folder=tmp_path / "m",
        facts={"use": "load it"},
        text={name: text},
        dtype=torch.bfloat16,
    )
    assert (exported.format, exported.modules, exported.max_error) == ("diffusers", 3, 0.0)  # fmt: skip
    assert (exported.reader, exported.use) == ("diffusers from_pretrained", "load it")

    weights = load_file(tmp_path / "m" / "transformer" / WEIGHTS)
    base = load_file(family.folder / "transformer" / WEIGHTS)
    assert weights[f"{QUERY}.bias"].dtype == torch.bfloat16
    assert weights["blocks.0.scale_shift_table"].dtype == torch.float32
    for key, value in weights.items():
        assert torch.equal(value, state.get(key, base[key]).to(value.dtype)), key
    (file,) = (tmp_path / "m" / name).glob("*.safetensors")
    norm = load_file(file)[norm_name]
    assert (norm.dtype, set(norm.tolist())) == (torch.bfloat16, {3.0})

    text_only = export_full(family, "transformer", {}, family.folder, tmp_path / "t", {}, {name: text})  # fmt: skip
    assert (text_only.modules, text_only.use) == (1, "")
    linked = tmp_path / "t" / "transformer" / WEIGHTS
    assert linked.samefile(family.folder / "transformer" / WEIGHTS)


@pytest.mark.parametrize("write", [export_full, export_single_file])
def test_weights_that_did_not_train_have_the_lora_files_under_the_training(
    write: Callable[..., Any], family: Any, tmp_path: Path
) -> None:
    below = tmp_path / "below.safetensors"
    peft_file(family, below, targets=[r"blocks\.1\.attn1\.to_k"])
    merge_into_base(family, [BaseLora(file=str(below), strength=0.5)])
    merged = family.denoiser().state_dict()
    out = tmp_path / "out.safetensors"
    state = {f"{QUERY}.bias": ones(24)}
    exported = write(family, "transformer", state, family.folder, out, {})
    file = out / "transformer" / WEIGHTS if out.is_dir() else out
    values = list(load_file(file).values())
    wanted = merged["blocks.1.attn1.to_k.weight"]
    assert any(value.shape == wanted.shape and torch.equal(value, wanted) for value in values)  # fmt: skip
    assert (exported.modules, exported.max_error) == (1, 0.0)
    name = "comfyui" if write is export_single_file else "diffusers"
    assert exported.format == name


def two_files(family: Any, folder: Path) -> Path:
    """The base with its first block and all other weights in two files, and files that
    are no weights.
    """
    shutil.copytree(family.folder, folder)
    part = folder / "transformer"
    weights = load_file(part / WEIGHTS)
    (part / WEIGHTS).unlink()
    weight_map = {}
    for file, is_first in (("one.safetensors", True), ("two.safetensors", False)):
        chosen = {
            name: value
            for name, value in weights.items()
            if name.startswith("blocks.0.") == is_first
        }
        save_file(chosen, part / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (part / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (part / ".hidden").write_text("x")
    (part / "folder").mkdir()
    return folder


def test_only_a_file_with_changed_weights_is_copied(
    family: Any, tmp_path: Path
) -> None:
    base = two_files(family, tmp_path / "base")
    _, state = network_with_adapter(family)
    first = {name: value for name, value in state.items() if name.startswith(QUERY)}
    facts = {"use": "load it"}
    exported = export_merged(
        family, {"transformer": first}, 2.0, base, tmp_path / "m", facts
    )
    assert (exported.modules, exported.max_error) == (1, 0.0)
    assert (exported.reader, exported.use) == ("safetensors", "load it")
    part = tmp_path / "m" / "transformer"
    was = {path.name: path for path in (base / "transformer").iterdir()}
    assert {path.name for path in part.iterdir()} == set(was) - {".hidden", "folder"}
    linked = {path.name for path in part.iterdir() if path.samefile(was[path.name])}
    assert linked == {"two.safetensors", "config.json", f"{WEIGHTS}.index.json"}


def test_weights_in_their_authors_names_that_become_too_large_are_refused(
    family: Any, tmp_path: Path
) -> None:
    _, state = network_with_adapter(family)
    state[f"{QUERY}.lora_B.weight"].data.fill_(1e6)
    base = Path(shutil.copytree(family.folder, tmp_path / "base"))
    file = base / "transformer" / WEIGHTS
    weights = {family.original(name): value.half() for name, value in load_file(file).items()}  # fmt: skip
    save_file(weights, file)
    with pytest.raises(VideotuneError, match="infinite"):
        export_merged(family, {"transformer": state}, 2.0, base, tmp_path / "m", {})
    assert not (tmp_path / "m").exists()


def test_the_header_of_one_merged_file(family: Any, tmp_path: Path) -> None:
    """Its length is a multiple of 8, as safetensors has it, so numbers are aligned."""
    for word in ("x", "xx"):
        path = tmp_path / f"{word}.safetensors"
        facts = {"word": word}
        done = export_merged_file(family, "transformer", family.folder, path, facts)
        assert done.modules == len(family.denoiser().state_dict())
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
        assert header_of(path) == {"format": "pt", "videotune": json.dumps(facts)}


def test_a_merged_model_says_what_was_written_and_by_whom_it_was_read(
    family: Any, tmp_path: Path
) -> None:
    _, state = network_with_adapter(family)
    adapters = {"transformer": state}
    folder, file = tmp_path / "m", tmp_path / "m.safetensors"
    merged = export_merged(family, adapters, 2.0, family.folder, folder, {})
    one_file = export_merged_file(family, "transformer", folder, file, {"use": "open"})
    count = len(family.denoiser().state_dict())
    for exported, format, path, modules, use in (
        (merged, "merged", folder, 20, ""),
        (one_file, "merged-comfyui", file, count, "open"),
    ):
        assert (exported.format, exported.path) == (format, path)
        assert (exported.modules, exported.max_error) == (modules, 0.0)
        assert exported.use == use
    assert merged.reader == "safetensors"


@pytest.mark.parametrize("write", [export_full, export_single_file])
def test_a_model_with_weights_that_are_not_finite_is_not_exported(
    write: Callable[..., Any], family: Any, tmp_path: Path
) -> None:
    state = {f"{QUERY}.bias": torch.full((24,), float("nan"))}
    out = tmp_path / "out.safetensors"
    with pytest.raises(VideotuneError, match=r"^the model holds NaN"):
        write(family, "transformer", state, family.folder, out, {})
    (name,) = family.text_skeletons()
    if write is export_full:
        text = {name: {"encoder.final_layer_norm.weight": state[f"{QUERY}.bias"]}}
        with pytest.raises(VideotuneError, match=r"^the model holds NaN"):
            write(family, "transformer", {}, family.folder, out, {}, text)
    adapters = {"transformer": {f"{QUERY}.lora_A.weight": state[f"{QUERY}.bias"]}}
    with pytest.raises(VideotuneError, match=r"^the adapter holds NaN"):
        export_merged(family, adapters, 2.0, family.folder, out, {})
    assert not out.exists()


def on_a_disk_for_small_files(write: Callable[[], object]) -> OSError:
    """The error of what cannot be written where no file may have more than 4 kB."""
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard_limit))
    try:
        with pytest.raises(OSError) as failed:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))
    assert failed.value.errno == errno.EFBIG
    return failed.value


def test_a_file_that_the_disk_does_not_hold_is_named(
    family: Any, tmp_path: Path
) -> None:
    _, state = network_with_adapter(family)
    path = tmp_path / "x.safetensors"
    weights = {f"{QUERY}.weight": ones(24, 24)}
    ((name, encoder),) = family.text_skeletons().items()
    norm = "encoder.final_layer_norm.weight"
    text = {name: {norm: torch.ones(encoder.get_parameter(norm).shape)}}
    for write in (
        lambda: export_lora(family, "diffusers", state, 2.0, path, {}),
        lambda: export_single_file(family, "transformer", weights, family.folder, path, {}),
        lambda: export_full(family, "transformer", weights, family.folder, path, {}),
        lambda: export_full(family, "transformer", {}, family.folder, path, {}, text),
    ):  # fmt: skip
        assert on_a_disk_for_small_files(write).filename == str(path)
    assert list(tmp_path.iterdir()) == []


# LoRA files under the training


def test_what_a_file_under_the_training_lacks_is_said_once(
    family: Any, tmp_path: Path, capsys: Printed
) -> None:
    path = tmp_path / "x.safetensors"
    peft_file(family, path, targets="attention")
    merge_into_base(family, [BaseLora(file=str(path))])
    assert "x.safetensors does not say its alpha" in capsys.readouterr().err
    family.denoiser()
    assert "alpha" not in capsys.readouterr().err
    (changes,) = weight_changes(family, [BaseLora(file=str(path))]).values()
    assert len(changes.digest) == 16


def test_a_difference_outside_the_blocks_has_its_authors_name(
    family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    weight = family.skeleton().get_parameter("condition_embedder.time_proj.bias")
    difference = {"diffusion_model.time_projection.1.diff_b": ones(*weight.shape)}
    factors = {
        f"transformer.{QUERY}.lora_A.weight": ones(1, 24),
        f"transformer.{QUERY}.lora_B.weight": ones(24, 1),
    }
    save_file(difference | factors, path)
    changes = weight_changes(family, [BaseLora(file=str(path))])["transformer"].read()
    assert set(changes) == {"condition_embedder.time_proj.bias", f"{QUERY}.weight"}

    save_file(difference | factors | {"foo": ones(2)}, path)
    with pytest.raises(VideotuneError, match="do not belong to an adapter"):
        merge_into_base(family, [BaseLora(file=str(path))])
    short = {name: value[1:].clone() for name, value in difference.items()}
    save_file(short | factors, path)
    with pytest.raises(VideotuneError, match="differs in size"):
        merge_into_base(family, [BaseLora(file=str(path))])


@pytest.mark.parametrize("strength", [0.0, 2.0])
def test_the_key_of_a_file_that_cannot_have_its_strength_is_named(
    strength: float, family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    _, state = network_with_adapter(family, "DORA")
    export_lora(family, "diffusers", state, 2.0, path, {})
    with pytest.raises(VideotuneError, match=r"^base_loras: x\.safetensors"):
        merge_into_base(family, [BaseLora(file=str(path), strength=strength)])
    lora = LoraFile(file=str(path), strength=strength)
    with pytest.raises(VideotuneError, match=r"^sample\.loras: x\.safetensors"):
        preview_updates(family, [], [lora], with_base_loras=True)


def test_the_key_of_a_file_of_no_expert_is_named(
    tiny_family: Open, tmp_path: Path
) -> None:
    family = tiny_family("wan", variant="t2v-a14b")
    path = tmp_path / "x.safetensors"
    peft_file(family, path, targets="attention")
    with pytest.raises(VideotuneError, match=r"^base_loras: x.* high or low"):
        weight_changes(family, [BaseLora(file=str(path))])
    lora = LoraFile(file=str(path))
    with pytest.raises(VideotuneError, match=r"^sample\.loras: x.* high or low"):
        preview_updates(family, [], [lora], with_base_loras=True)


def test_previews_say_once_what_they_leave_out(
    family: Any, tmp_path: Path, capsys: Printed
) -> None:
    """Of files under the training nothing: that was said when they were merged."""
    path = tmp_path / "x.safetensors"
    peft_file(family, path, targets="attention")
    norm = {"diffusion_model.blocks.0.self_attn.norm_q.diff": ones(24)}
    save_file(load_file(path) | norm, path)
    lora = LoraFile(file=str(path))
    below = BaseLora(file=str(path), training_only=True)

    preview_updates(family, [below], [lora], with_base_loras=True)
    printed = capsys.readouterr().err
    assert printed.count("does not say its alpha") == 1
    assert printed.count("1 differences of other weights, such as blocks.0.attn1.norm_q.weight") == 1  # fmt: skip
    preview_updates(family, [below], [lora], with_base_loras=True, quiet=True)
    preview_updates(family, [below], [], with_base_loras=True)
    assert capsys.readouterr().err == ""
