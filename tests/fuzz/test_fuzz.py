"""Thousands of damaged files, of every kind that videotune reads: each is read or
refused in a sentence, and none hangs.

More of them: ``VIDEOTUNE_FUZZ=100000 pytest tests/fuzz``.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.command_line import train
from tests.support.damaged_files import COUNT, try_each
from tests.support.run_parts import open_run
from videotune.commands.sample import open_sampler
from videotune.commands.sample_options import SampleOptions
from videotune.errors import DONE
from videotune.exporter.adapter_export import read_adapter, read_parts
from videotune.job.overrides import Overrides, resolve_config, user_keys
from videotune.models.base_model import place, spec_for
from videotune.models.registry import find
from videotune.presets.shipped import preset_names, read_preset
from videotune.reporter.build import write_report
from videotune.reporter.diagnosis import diagnose
from videotune.runs.checkpoint import complete_checkpoints, last_checkpoint
from videotune.runs.journal import History
from videotune.trainer.build import open_models
from videotune.trainer.resume import Resume

pytestmark = pytest.mark.filterwarnings("ignore")

YAML = """
# comments are read too
steps: 100
learning_rate: 1e-4
datasets:
  - path: clips
    repeats: 2
lora: {rank: 8, targets: [attn1.to_q]}
samples:
  - a cat
  - "a dog: black"
"""


def test_configs(tmp_path: Path) -> None:
    files = []
    for number, name in enumerate(
        [name for name in preset_names() if name != "toy"][::6]
    ):
        config = read_preset(name) | {
            "base_model_name": "asset:toy",
            "datasets": [{"path": "clips", "trigger": "x"}],
        }
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(config, indent=1))
    files.append(tmp_path / "a.yaml")
    files[-1].write_text(YAML)

    def read() -> None:
        for path in files:
            user_keys(Overrides(config=path))
        resolve_config(Overrides(config=files[0]))

    assert min(try_each(files, read, 2 * COUNT).values()) > 0


def test_base_models(tiny_bases: Callable[..., Path], tmp_path: Path) -> None:
    for family in (
        "wan",
        "cogvideox",
        "hunyuan_video",
        "hunyuan_video15",
        "ltx_video",
        "hidream",
        "kandinsky5",
    ):
        base = Path(shutil.copytree(tiny_bases(family), tmp_path / family))
        files = sorted(path for path in base.rglob("*") if path.suffix == ".json")

        def read(base: Path = base) -> None:
            found = place(str(base))
            spec = spec_for(None, found)
            opened = find(spec.name)(found.folder, torch.device("cpu"), torch.float32)
            opened.skeleton(spec.experts[0].name)

        read()
        assert try_each(files, read, COUNT // 5, seed=len(family))["refused"] > 0


def test_weights_of_a_base_model(
    tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_bases("wan"), tmp_path / "base"))
    files = [
        path
        for part in ("transformer", "vae")
        for path in sorted((base / part).glob("*.safetensors"))
    ]
    config = resolve_config(Overrides(base=str(base)))[0].config

    def read() -> None:
        found = place(str(base), weights=False)
        open_models(spec_for(None, found), found, config).denoiser()

    assert try_each(files, read, COUNT // 8)["refused"] > 0


def test_adapters(tiny_family: Callable[..., Any], tmp_path: Path) -> None:
    family = tiny_family("wan")
    files = [
        tmp_path / f"{kind}.safetensors" for kind in ("diffusers", "kohya", "peft")
    ]
    linears = family.skeleton().named_modules()
    sizes = {
        name: module.weight.shape
        for name, module in linears
        if name.endswith(("to_q", "to_k"))
    }
    state, kohya = {}, {}
    for name, (rows, columns) in sizes.items():
        a, b = torch.randn(4, columns), torch.randn(rows, 4)
        (
            state[f"transformer.{name}.lora_A.weight"],
            state[f"transformer.{name}.lora_B.weight"],
        ) = a, b
        flat = f"lora_unet_{family.to_comfyui_name(name).replace('.', '_')}"
        kohya |= {
            f"{flat}.lora_down.weight": a,
            f"{flat}.lora_up.weight": b,
            f"{flat}.alpha": torch.tensor(2.0),
        }
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": sorted(sizes),
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    save_file(
        state,
        files[0],
        metadata={
            "format": "pt",
            "lora_adapter_metadata": json.dumps({"transformer.r": 4}),
        },
    )
    save_file(
        kohya, files[1], metadata={"ss_network_dim": "4", "ss_network_alpha": "2"}
    )
    save_file(
        state,
        files[2],
        metadata={"adapter_config": json.dumps(settings | {"peft_type": "LORA"})},
    )

    for path in files[:2]:
        read_parts(family, path)
    for number, path in enumerate(files):

        def read_one(path: Path = path) -> None:
            read_adapter(family, family.skeleton(), path, "x")

        assert try_each([path], read_one, COUNT // 3, seed=number)["refused"] > 0


@pytest.fixture(scope="module")
def run(
    small_clips: Path,
    tiny_bases: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run that was interrupted after step 4, with readings of validation, previews
    and an average of its weights.
    """
    home = tmp_path_factory.mktemp("fuzz")
    sets = (
        f"base_model_name={tiny_bases('wan')}", f"cache_dir={home / 'cache'}", "resolution=32x32", "lora.rank=2", "steps=4",
        "save_every=2", "validate_every=2", "sample_after=4", "sample.steps=1", "samples=1", "sample_metrics.budget=0",
        "ema=0.9", "validation_fraction=0.4", "dataloader_threads=0",
    )  # fmt: skip
    assert train(Overrides(data=str(small_clips), sets=sets), home / "run") == DONE
    journal = home / "run" / "journal.jsonl"
    lines = [
        line
        for line in journal.read_text().splitlines(keepends=True)
        if '"kind": "end"' not in line
    ]
    journal.write_text("".join(lines))
    return home / "run"


def test_journals(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))

    def read() -> None:
        History(copy)
        diagnose(copy)
        write_report(copy)

    read()
    assert try_each([copy / "journal.jsonl"], read, COUNT // 2)["refused"] > 0
    lines = (copy / "journal.jsonl").read_text().splitlines()
    for number, kind in enumerate(sorted({json.loads(line)["kind"] for line in lines})):
        # one line of each kind, damaged as JSON, among the others
        chosen = next(line for line in lines if json.loads(line)["kind"] == kind)
        (copy / "line.json").write_text(chosen)

        def read_line(chosen: str = chosen) -> None:
            others = [line.encode() for line in lines]
            others[lines.index(chosen)] = (copy / "line.json").read_bytes()
            (copy / "journal.jsonl").write_bytes(b"\n".join(others) + b"\n")
            read()

        try_each([copy / "line.json"], read_line, COUNT // 8, seed=number)


def test_files_of_a_run(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    names = ("config.json", "plan.json", "check.json", "exports.json", "heartbeat.json")
    files = [copy / name for name in names if (copy / name).is_file()]

    def read() -> None:
        diagnose(copy)
        write_report(copy)
        open_run(Overrides(sets=("steps=6",)), copy, Resume())

    read()
    assert try_each(files, read, COUNT // 4)["refused"] > 0


def test_checkpoints(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    step = max(
        (copy / "checkpoints").iterdir(),
        key=lambda folder: int(folder.name.rpartition("-")[2]),
    )
    files = sorted(path for path in step.iterdir() if path.is_file())

    def read() -> None:
        assert len(complete_checkpoints(copy)) <= 2
        newest = last_checkpoint(copy)
        newest.state()
        for part in ("weights", "optimizer", "ema"):
            newest.load(part)

    read()
    assert try_each(files, read, COUNT)["refused"] > 0
    words = SampleOptions(("a cat",), 0, copy, None, None, (), 1.0, (), (), ())
    try_each(
        [step / "state.json", step / "COMPLETE"],
        lambda: open_sampler(words),
        COUNT // 20,
        seed=1,
    )
