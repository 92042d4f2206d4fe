"""Clips, settings and files are all listed, and the file's use is shown in code that compiles."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.reporter import report_kit as kit

USE = "pipe = SomePipeline.from_pretrained('owner/base'); pipe.load_lora_weights(THIS_FILE)"


def test_every_clip_is_accounted_for(run: Path) -> None:
    said = kit.part(kit.report(run), "clips")
    order = (
        "5 found = 3 used + 1 held out + 1 skipped.",
        "17x64x64 4 80",
        "short.mp4 skipped too_short 64×64, 17 frames, 16 fps 3 frames at 16 fps; 5 are needed",
        "held back.mp4 held out",
        "42% 60 high 42 % of its frames repeat the one before <b>",
        "two windows.mov used 64×64, 17 frames, 29.97 fps 2 windows, 34 frames, each 64x64, 17 frames 0.19 s 120 high",
    )
    places = [said.index(words) for words in order]
    assert places == sorted(places)
    kit.put(run, "check.json", kit.account() | {"found": 6})
    assert "do not add up" in kit.part(kit.report(run), "clips")


def test_settings_stand_with_their_origin_the_users_first(run: Path) -> None:
    found = kit.chapters(run)["settings"]
    own, defaults = found["own"], found["defaults"]
    assert own[0] == ("steps", "120", "user")
    assert own[-1] == ("video_config.target_fps", "16", "family")
    assert {("learning_rate", "0.001", "preset"), ("lora.targets", "linear", "preset")} <= set(own[1:-1])
    assert {("lora.rank", "16", "default"), ("video_config.strict_frames", "no", "default")} < set(defaults)
    assert "3 settings at the default" in kit.part(kit.report(run), "settings")


def test_files_are_listed_with_their_check(run: Path) -> None:
    page = kit.report(run)
    said = "diffusers export/zorble.safetensors 1.45 MB verified largest error 2.5e-08 by diffusers"
    assert said in kit.part(page, "files")
    assert {"export/zorble.safetensors", "checkpoints/step-120"} <= set(kit.attributes(page, "href", "a"))
    elsewhere, inside = run.parent / "lora.safetensors", (run / "export" / "zorble.safetensors").resolve()
    elsewhere.write_bytes(bytes(2_000_000))
    kit.put(run, "exports.json", [{"format": "a", "path": str(elsewhere)}, {"format": "b", "path": str(inside)}])
    page = kit.report(run)
    assert f"a {elsewhere} 2.00 MB unverified not read back" in kit.part(page, "files")
    assert "export/zorble.safetensors" in kit.attributes(page, "href", "a"), "an absolute path inside the run"
    assert str(elsewhere) not in kit.attributes(page, "href", "a")
    inside.unlink()
    assert f"{inside} not found" in kit.part(kit.report(run), "files")


def use_of(run: Path, *entries: dict[str, Any], **settings: Any) -> str:
    kit.write_journal(run, [kit.start(), kit.sample(0, "a zorble moves left")])
    whole = kit.config()
    whole["settings"] |= {"sample": {"guidance": 2.0, "steps": 20, "seed": 42, "frames": 9, "resolution": "32x48"}}
    whole["settings"] |= {"datasets": [{"path": "x", "trigger": "zorble"}]} | settings
    kit.put(run, "config.json", whole)
    kit.put(run, "exports.json", list(entries))
    return kit.report(run)


def test_the_use_of_the_file_is_shown_in_code(tmp_path: Path) -> None:
    page = use_of(tmp_path, {"format": "diffusers", "path": "export/x-step-9.safetensors", "use": USE})
    found = re.search(r"<pre><code>(.*?)</code></pre>", page, re.DOTALL)
    assert found
    code = unescape(found[1])
    compile(code, "page", "exec")
    for words in (
        f"pipe.load_lora_weights('{tmp_path}/export/x-step-9.safetensors')",
        "pipe( 'a zorble moves left', num_frames=9, height=32, width=48, guidance_scale=2, num_inference_steps=20,",
        "generator=torch.Generator('cpu').manual_seed(42), ).frames[0]",
        "import torch from diffusers import SomePipeline from diffusers.utils import export_to_video",
        "export_to_video(video, 'video.mp4', fps=16)",
    ):
        assert words in " ".join(code.split())
    said = kit.part(page, "use")
    assert "Write into the prompt: zorble" in said
    assert f"videotune export {tmp_path} --format comfyui" in said
    base = kit.part(
        use_of(tmp_path, {"format": "diffusers", "path": "x", "use": USE.replace("owner/base", "asset:toy")}), "use"
    )
    assert "from videotune.models.base_model import place" in base
    assert "SomePipeline.from_pretrained(place('asset:toy').folder)" in base


@pytest.mark.parametrize(
    ("method", "words"), [("EMBEDDING", "ComfyUI/models/embeddings"), ("FINE_TUNE", "is a folder in diffusers' layout")]
)
def test_new_tokens_and_whole_models_have_other_steps_in_comfyui(tmp_path: Path, method: str, words: str) -> None:
    entry = {"format": "diffusers", "path": "x-step-1", "use": USE}
    said = kit.part(use_of(tmp_path, entry, training_method=method), "use")
    assert words in said
    assert "LoraLoader" not in said


@pytest.mark.parametrize("names", [("10-high", "10-low"), ("10_high_noise", "10_low_noise")])
def test_two_experts_files_are_both_loaded_and_older_exports_are_not(tmp_path: Path, names: tuple[str, str]) -> None:
    second = USE.replace("THIS_FILE", "THIS_FILE, load_into_transformer_2=True")
    old, high, low = (f"export/x-step-{name}.safetensors" for name in ("9", *names))
    loaded = [
        {"format": "diffusers", "path": path, "use": how} for path, how in ((old, USE), (high, USE), (low, second))
    ]
    comfyui = {"format": "comfyui", "path": "export/x-step-10-comfyui.safetensors", "use": USE}
    said = kit.part(use_of(tmp_path, *loaded, comfyui), "use")
    assert (said.count("from_pretrained"), said.count("load_lora_weights"), old in said) == (1, 2, False)
    assert f"The file with ComfyUI's names: {tmp_path}/export/x-step-10-comfyui.safetensors" in said
    assert "LoraLoaderModelOnly" in said
