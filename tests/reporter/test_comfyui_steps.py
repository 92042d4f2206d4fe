"""How a run's files are used in ComfyUI, on every page and command that says it."""

import re
from pathlib import Path

import pytest

from tests.support import reports
from tests.support.command_line import Printed, run
from videotune.errors import DONE
from videotune.reporter.model_card import model_card
from videotune.reporter.read import read_run

HIGH = "behind the high-noise model"
LOW = "behind the low-noise model"


def folder_with(tmp_path: Path, experts: tuple[str, ...], **settings: object) -> Path:
    """A finished run that has exported a file for ComfyUI and diffusers of each expert."""
    folder = reports.full_run(tmp_path / "run")
    config = reports.config()
    config["settings"] |= settings
    reports.write_file(folder, "config.json", config)
    entries = []
    for ending in ("", "-comfyui"):
        for expert in experts or ("",):
            suffix = f"_{expert}_noise" if expert else ""
            path = f"export/run-step-120{ending}{suffix}.safetensors"
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(b"")
            entries.append(
                {
                    "format": ending.strip("-") or "diffusers",
                    "path": path,
                    "use": "pipe = WanPipeline.from_pretrained('x')",
                    "hash": "0" * 32,
                }
            )
    reports.write_file(folder, "exports.json", entries)
    return folder


def steps_in_report(folder: Path) -> list[str]:
    """The steps for ComfyUI of the report's chapter, as they are read."""
    page = reports.report(folder)
    chapter = re.split("In ComfyUI.*</h3>", page)[1].partition("</ol>")[0]
    items = re.findall(r"<li>(.*?)</li>", chapter, re.DOTALL)
    return [reports.visible_text(item) for item in items]


def nodes(steps: list[str]) -> list[str]:
    return [step for step in steps if "LoraLoaderModelOnly" in step]


def test_each_expert_has_its_own_loader_and_node(tmp_path: Path) -> None:
    steps = steps_in_report(folder_with(tmp_path, ("high", "low")))
    assert "run-step-120-comfyui_high_noise.safetensors" in steps[0]
    assert "run-step-120-comfyui_low_noise.safetensors" in steps[0]
    high, low = nodes(steps)
    assert "the high-noise model" in high
    assert "_high_noise" in high
    assert "low" not in high
    assert "the low-noise model" in low
    assert "_low_noise" in low
    assert any("two loaders" in step for step in steps)
    assert any("Never put both files" in step for step in steps)


@pytest.mark.parametrize("expert", ["high", "low"])
def test_the_expert_without_a_file_gets_none(tmp_path: Path, expert: str) -> None:
    steps = steps_in_report(folder_with(tmp_path, (expert,)))
    (node,) = nodes(steps)
    assert f"the {expert}-noise model" in node
    assert any("other model no file" in step for step in steps)
    assert not any("both files" in step for step in steps)


def test_a_model_with_one_expert_has_one_node(tmp_path: Path) -> None:
    steps = steps_in_report(folder_with(tmp_path, ()))
    (node,) = nodes(steps)
    assert "noise" not in " ".join(steps)
    assert "between the model's loader and the sampler" in node


def test_before_the_files_are_written_the_steps_know_the_experts(
    tmp_path: Path,
) -> None:
    folder = folder_with(tmp_path, ("high", "low"))
    entries = read_run(folder).exports or []
    diffusers = [entry for entry in entries if entry["format"] == "diffusers"]
    reports.write_file(folder, "exports.json", diffusers)
    steps = steps_in_report(folder)
    assert "--format comfyui" in steps[0]
    assert len(nodes(steps)) == 2


def test_a_whole_model_is_loaded_in_place_of_the_bases(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, ("high", "low"), training_method="FINE_TUNE")
    steps = steps_in_report(folder)
    assert nodes(steps) == []
    assert "diffusion_models" in " ".join(steps)
    assert sum("in place of the base's" in step for step in steps) == 2


def test_the_model_card_has_the_same_steps(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, ("high", "low"), family="wan")
    reports.write_file(folder, "plan.json", reports.plan() | {"buckets": []})
    steps = steps_in_report(folder)[1:]
    text = model_card(read_run(folder)).text
    card = [
        line.partition(". ")[2].replace("`", "")
        for line in text.splitlines()
        if re.match(r"\d+\. ", line)
    ]
    assert [text.replace(" ", "") for text in card] == [
        text.replace(" ", "") for text in steps
    ]


def test_status_says_which_model_a_file_goes_behind(
    tmp_path: Path, capsys: Printed
) -> None:
    assert run("status", folder_with(tmp_path, ("high", "low"))) == DONE
    lines = capsys.readouterr().out.splitlines()
    for_comfyui = [line for line in lines if "for ComfyUI" in line]
    assert [HIGH in line for line in for_comfyui] == [True, False]
    assert [LOW in line for line in for_comfyui] == [False, True]
