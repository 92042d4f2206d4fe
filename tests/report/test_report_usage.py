"""Time by phase sums to the wall time, and the file's use is told in code that compiles."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from report_kit import config, put, sample, start, step, write_journal
from test_report_html import part, report

SPENT = {"starting": 2.0, "encoding": 10.0, "loading": 3.0, "training": 40.0, "saving": 1.0, "exporting": 4.0}
USE = "pipe = SomePipeline.from_pretrained('owner/base'); pipe.load_lora_weights(THIS_FILE)"


def rows(page: str) -> dict[str, float]:
    """Shares of all, in percent, by what stands before them."""
    table = re.search(r'<section id="time">(.*?)</section>', page, re.DOTALL)
    assert table
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table[1])]
    plain = [[unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in cells if row]
    return {row[0]: float(row[2].rstrip("%")) for row in plain}


def test_time_by_phase_sums_to_the_wall_time(tmp_path: Path) -> None:
    end = {"kind": "end", "step": 2, "why": "done", "seconds": SPENT}
    write_journal(tmp_path, [start(), step(1), step(2), end])
    page = report(tmp_path)
    shares = rows(page)
    assert "wall time 60 s 100%" in part(page, "time")
    inner = ("waiting for clips", "forward", "backward", "optimizer", "between the steps")
    outer = [share for name, share in shares.items() if name not in (*inner, "wall time")]
    assert sum(outer) == pytest.approx(100, abs=0.3)
    assert sum(shares[name] for name in inner) == pytest.approx(shares["training"], abs=0.3)
    assert list(shares)[:2] == ["training", "waiting for clips"]


def test_the_time_of_a_run_without_an_end_is_its_last_heartbeats(tmp_path: Path) -> None:
    write_journal(tmp_path, [start(), step(1)])
    pulse = {"pid": 1, "host": "elsewhere", "started": 1.0, "step": 1, "state": "training", "since": 1.0, "time": 2.0}
    put(tmp_path, "heartbeat.json", {**pulse, "seconds": {"training": 3.0, "encoding": 1.0}})
    assert "encoding clips and captions 1 s 25.0%" in part(report(tmp_path), "time")


def test_a_run_that_counted_nothing_shows_its_steps(tmp_path: Path) -> None:
    write_journal(tmp_path, [start(), step(1), step(2)])
    said = part(report(tmp_path), "time")
    assert "did not count its other phases" in said
    assert "forward 0.2 s 33.3%" in said


def exported(run: Path, *entries: dict[str, Any]) -> str:
    write_journal(run, [start(), sample(0, "a zorble moves left")])
    settings = config()
    settings["settings"] |= {"sample": {"guidance": 2.0, "steps": 20, "seed": 42, "frames": 9, "resolution": "32x48"}}
    settings["settings"]["datasets"] = [{"path": "x", "trigger": "zorble"}]
    put(run, "config.json", settings)
    put(run, "exports.json", list(entries))
    return report(run)


def test_the_use_of_the_file_is_told_in_code(tmp_path: Path) -> None:
    page = exported(tmp_path, {"format": "diffusers", "path": "export/x-step-9.safetensors", "use": USE})
    found = re.search(r"<pre><code>(.*?)</code></pre>", page, re.DOTALL)
    assert found
    code = unescape(found[1])
    compile(code, "page", "exec")
    assert f"pipe.load_lora_weights('{tmp_path}/export/x-step-9.safetensors')" in code
    assert "pipe( 'a zorble moves left', num_frames=9, height=32, width=48, guidance_scale=2, num_" in " ".join(
        code.split()
    )
    assert "from diffusers import SomePipeline" in code
    assert "export_to_video(video, 'video.mp4', fps=16)" in code
    said = part(page, "use")
    assert "Write into the prompt: zorble" in said
    assert f"videotune export {tmp_path} --format comfyui" in said


def test_a_base_that_comes_along_is_named_by_its_folder(tmp_path: Path) -> None:
    said = part(
        exported(tmp_path, {"format": "diffusers", "path": "x", "use": USE.replace("owner/base", "asset:toy")}), "use"
    )
    assert "from videotune.models.base_model import place" in said
    assert "SomePipeline.from_pretrained(place('asset:toy').folder)" in said


def test_new_tokens_and_whole_models_have_other_steps_in_comfyui(tmp_path: Path) -> None:
    entry = {"format": "diffusers", "path": "x-step-1", "use": USE}
    exported(tmp_path, entry)
    for method, words in (
        ("EMBEDDING", "ComfyUI/models/embeddings"),
        ("FINE_TUNE", "is a folder in diffusers' layout"),
    ):
        put(tmp_path, "config.json", {"settings": {"training_method": method}})
        said = part(report(tmp_path), "use")
        assert words in said
        assert "LoraLoader" not in said


def test_two_experts_files_are_both_loaded_and_older_exports_are_not(tmp_path: Path) -> None:
    second = USE.replace("THIS_FILE", "THIS_FILE, load_into_transformer_2=True")
    old, high, low = (f"export/x-step-{name}.safetensors" for name in ("9", "10-high", "10-low"))
    page = exported(
        tmp_path,
        {"format": "diffusers", "path": old, "use": USE},
        {"format": "diffusers", "path": high, "use": USE},
        {"format": "diffusers", "path": low, "use": second},
        {"format": "comfyui", "path": "export/x-step-10-comfyui.safetensors", "use": USE},
    )
    said = part(page, "use")
    assert said.count("from_pretrained") == 1
    assert said.count("load_lora_weights") == 2
    assert old not in said
    assert f"The file with ComfyUI's names: {tmp_path}/export/x-step-10-comfyui.safetensors" in said
    assert "LoraLoaderModelOnly" in said


def test_without_exports_it_says_so(tmp_path: Path) -> None:
    write_journal(tmp_path, [start()])
    assert "Not there yet: exports.json" in part(report(tmp_path), "use")
