"""The page carries its videos and pictures, shows before and after in step, and says
what it had no room for.

Clips, settings and files are all listed, and a file's use is shown in code that
compiles.
"""

import base64
import io
import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import av
import numpy as np
import pytest
from PIL import ImageFont

from tests.support import reports
from videotune.data.video_writer import CUT_MARK, FONT_SIZE, fitting_lines, write_video
from videotune.reporter import previews

RED, BLUE, GREEN = (200, 30, 30), (30, 30, 200), (30, 180, 30)
CONTROLS = {"controls", "loop", "muted", "playsinline"}


def flat(
    colour: tuple[int, int, int], frames: int = 5, height: int = 32, width: int = 48
) -> np.ndarray:
    return np.full((frames, height, width, 3), colour, np.uint8)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A prompt that the base drew red, step 60 green and the last step blue, and one
    that was drawn once.
    """
    shown = ((0, RED), (60, GREEN), (120, BLUE))
    records = [reports.sample(step, "a zorble moves left") for step, _ in shown]
    reports.write_journal(
        tmp_path, [reports.start(), *records, reports.sample(0, "drawn once")]
    )
    for record, (_, colour) in zip(
        [*records, reports.sample(0, "drawn once")], (*shown, (0, RED)), strict=True
    ):
        write_video(tmp_path / record["path"], flat(colour), 16.0)
    return tmp_path


def colours(page: str, anchor: str, *places: int) -> list[tuple[int, ...]]:
    """Of each frame of a chapter's first video, read from the page alone: its colours
    at places along the middle row.
    """
    found = re.search(
        rf'<section id="{anchor}">.*?src="data:video/mp4;base64,([^"]+)"',
        page,
        re.DOTALL,
    )
    assert found
    with av.open(io.BytesIO(base64.b64decode(found[1]))) as container:
        assert container.streams.video[0].average_rate == 16
        frames = [
            frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)
        ]

    def near(pixel: np.ndarray) -> np.ndarray | None:
        return next(
            (c for c in (RED, BLUE, GREEN) if abs(pixel.astype(int) - c).max() < 12),
            None,
        )

    return [tuple(near(frame[16, place]) for place in places) for frame in frames]  # type: ignore[misc]


def test_before_and_after_are_one_video_and_so_play_in_step(drawn: Path) -> None:
    page = reports.report(drawn)
    assert colours(page, "before", 24, 76) == [(RED, BLUE)] * 5
    said = reports.part(page, "before")
    assert "a zorble moves left seed 42" in said
    assert said.endswith("base step 120")
    assert "drawn once" not in said
    video = next(given for tag, given in reports.elements(page) if tag == "video")
    assert {"autoplay", "loop", "muted", "playsinline"} <= set(video)
    reports.write_file(
        drawn,
        "exports.json",
        [{"format": "diffusers", "path": "export/x-step-60.safetensors"}],
    )
    page = reports.report(drawn)
    assert colours(page, "before", 24, 76, 128) == [(RED, GREEN, BLUE)] * 5, (
        "the exported step stands between"
    )
    assert reports.part(page, "before").endswith("base step 60, exported step 120")


def test_the_page_alone_can_be_sent(drawn: Path) -> None:
    sources = reports.attributes(reports.report(drawn), "src", "video", "img")
    assert len(sources) == 1 + 4
    assert all(source.startswith("data:") for source in sources)


def test_what_is_over_the_budget_is_referred_to_and_counted(
    drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(map(len, reports.attributes(reports.report(drawn), "src", "video")))
    monkeypatch.setattr(previews, "BUDGET", whole - 1)
    page = reports.report(drawn)
    carried = [
        source
        for source in reports.attributes(page, "src", "video")
        if source.startswith("data:")
    ]
    assert (len(carried), sum(map(len, carried)) < whole) == (4, True)
    assert "1 picture or video more than the" in reports.part(page, "samples")
    monkeypatch.setattr(previews, "BUDGET", 0)
    page = reports.report(drawn)
    assert "the page is full" in reports.part(page, "before")
    assert "data:" not in page


def test_videos_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    cards = reports.chapters(reports.full_run(tmp_path / "run"))["before"]["cards"]
    assert [card["why"].partition(":")[0] for card in cards] == [
        "cannot be shown side by side"
    ] * 2


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (0, "caption of training clips"),
        (2, "caption of regularization clips"),
        (3, "a new prompt"),
    ],
)
def test_a_prompt_says_whether_it_is_a_caption(
    drawn: Path, row: int, kind: str
) -> None:
    checked = reports.account()
    for clip, name in zip(
        checked["clips"], ("train", "train", "regularization"), strict=False
    ):
        clip |= {"kind": name, "captions": ["something else"]}
    checked["clips"][row]["captions"] = ["a zorble moves left"]
    reports.write_file(drawn, "check.json", checked)
    assert kind in reports.part(reports.report(drawn), "before")


def test_previews_stand_in_a_grid_unless_they_stand_side_by_side_already(
    tmp_path: Path,
) -> None:
    run = reports.full_run(tmp_path / "run")
    page = reports.report(run)
    grid = page[
        page.index('<section id="samples">') : page.index('<section id="metrics">')
    ]
    videos = [given for tag, given in reports.elements(grid) if tag == "video"]
    assert len(videos) == 6
    assert all(
        set(video) >= CONTROLS and str(video["src"]).startswith("samples/")
        for video in videos
    )
    steps = "seed 42 base (step 0) step 60 step 120"
    assert (
        reports.part(page, "samples")
        == f"Samples a zorble moves left {steps} {reports.EVIL} {steps}"
    )
    assert "--columns:3" in page
    reports.write_journal(
        run, [reports.start(), reports.sample(0, "a"), reports.sample(60, "a")]
    )
    assert 'id="samples"' not in reports.report(run), "all stand side by side above"


def test_a_missing_or_foreign_video_is_reported_and_not_shown(tmp_path: Path) -> None:
    paths = (
        "../../etc/passwd",
        "/etc/passwd",
        "javascript:alert(1)",
        "a\0b",
        "x" * 5000,
    )
    records = [reports.sample(5, path, path=path) for path in paths]
    records += [
        reports.sample(0, "a"),
        {"kind": "sample", "prompt": "d", "path": "", "step": 0},
    ]
    reports.write_journal(tmp_path, [reports.start(), *records])
    page = reports.report(tmp_path)
    assert not reports.attributes(page, "src", "video", "script")
    said = reports.part(page, "samples")
    assert "no longer there: samples/step-000000" in said
    assert said.count("outside the run folder: passwd") == 2
    assert "folder: /etc" not in said
    assert "not generated" in said


def test_odd_names_of_videos_become_working_links(tmp_path: Path) -> None:
    names = ["samples/50 % & ünder#1?.mp4", 'samples/"quoted".mp4']
    reports.write_journal(
        tmp_path,
        [reports.start(), *(reports.sample(0, name, path=name) for name in names)],
    )
    (tmp_path / "samples").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(b"")
    found = reports.attributes(reports.report(tmp_path), "src", "video")
    assert list(map(unquote, found)) == names
    assert not any(letter in address for address in found for letter in ' "#?&')


def test_a_comparison_and_a_demos_detector_are_shown_where_there_are_any(
    drawn: Path,
) -> None:
    assert 'id="compare"' not in reports.report(drawn)
    entry = {
        "prompt": "a <cross>",
        "seed": 7,
        "steps": [0, 60],
        "video": "compare/x.mp4",
        "sheet": "compare/x.png",
    }
    reports.write_file(drawn / "compare", "compare.json", [entry])
    write_video(drawn / "compare" / "x.mp4", flat(GREEN), 16.0)
    shares = {
        "concept": {"before": 0.083, "after": 1, "n": 12},
        "control": {"before": 1.0, "after": 0.917, "n": 12},
    }
    reports.write_file(drawn, "demo.json", shares)
    page = reports.report(drawn)
    assert reports.part(page, "compare").endswith(
        "a <cross> seed 7 In rows, from the left: base, step 60."
    )
    assert colours(page, "compare", 16)[0] == (GREEN,)
    assert "the new concept 8% 100% 12" in reports.part(page, "verdict")
    assert "what the base knew 100% 92% 12" in reports.part(page, "verdict")


def compared(value: float | None, *names: str) -> dict[str, Any]:
    ratio = None if value is None else value / 0.5
    return {"value": value} | {
        key: of for name in names for key, of in ((name, 0.5), (f"to_{name}", ratio))
    }


def probe(number: int, mean: float, copies: int = 0, **changed: Any) -> dict[str, Any]:
    one = {
        "prompt": "a zorble",
        "seed": 42,
        "path": f"sample_metrics/step-{number:06d}-0badcafe-seed42.mp4",
    }
    one |= {"clip": "/clips/zorble left.mp4", "similarity": mean, "copy": copies > 0}
    found = {
        "mean": mean,
        "base": 0.3,
        "copies": copies,
        "base_copies": 0,
        "line": 0.7,
        "windows": 9,
        "held_out": None,
    }
    facts = {
        "kind": "sample_metrics",
        "step": number,
        "sample_metrics": "0badcafe",
        "embedding": "edges-1",
    }
    facts |= {
        "heuristic": True,
        "samples": [one],
        "replication": found | {"others": {"clips": 9, "median": 0.4, "p99": 0.6}},
    }
    motion = {
        name: compared(0.25, "base", "data")
        for name in ("energy", "flicker", "saturation")
    }
    return facts | {"diversity": compared(1.5, "base"), "motion": motion} | changed


def measured(folder: Path, *records: dict[str, Any]) -> str:
    """The chapter's text."""
    reports.write_journal(folder, [reports.start(), reports.step(1), *records])
    return reports.part(reports.report(folder), "metrics")


def test_every_sample_that_a_remark_counts_is_marked(tmp_path: Path) -> None:
    """Previews, the measured samples of the latest step, and those of steps before."""

    def faulty(number: int, fault: str | None) -> dict[str, Any]:
        record = probe(number, 0.5)
        record["samples"][0]["picture"] = reports.picture(fault)
        return record

    records = [
        reports.sample(60, "a cat", picture=reports.picture("noise")),
        faulty(60, "black"),
        faulty(90, None),
        faulty(120, "frozen"),
        *({"kind": "save", "step": step, "path": "x"} for step in (60, 90, 120)),
    ]
    reports.write_journal(tmp_path, [reports.start(), reports.step(1), *records])

    page = reports.report(tmp_path)
    files = reports.part(page, "files")
    assert (
        "of 1 preview, 1 is noise; of 1 sample of the sample metrics, 1 is black"
        in files
    )
    assert "of 1 sample of the sample metrics, 1 is without motion" in files
    assert "step 60 noise" in reports.part(page, "samples")

    metrics = reports.part(page, "metrics")
    nearest, _, others = metrics.partition("Samples with a fault at other steps")
    assert "without motion" in nearest
    assert "step 60" in others
    assert "a zorble (seed 42) black" in others
    assert "step 90" not in others


def test_each_sample_has_the_name_of_its_nearest_clip(tmp_path: Path) -> None:
    path = tmp_path / "sample_metrics" / "step-000250-0badcafe-seed42.mp4"
    path.parent.mkdir()
    path.write_bytes(b"video")
    said = measured(tmp_path, probe(0, 0.3), probe(250, 0.85, copies=1))
    [width] = re.findall(r"td video\{[^}]*width:(\d+)px", reports.report(tmp_path))
    assert int(width) >= 200, "a smaller picture is covered by its controls"
    assert "1 of 1 sample of step 250 nearer to a training clip than 0.7" in said
    assert "a zorble (seed 42) zorble left.mp4 0.85 likely copy" in said
    assert "heuristic" in said
    assert "3.00 × base" in said
    assert "0.50 × clips" in said
    assert reports.attributes(reports.report(tmp_path), "src", "video") == [
        "sample_metrics/step-000250-0badcafe-seed42.mp4"
    ]
    assert len(reports.chapters(tmp_path)["metrics"]["charts"]) == 2


def test_what_was_not_measured_says_why_once(tmp_path: Path) -> None:
    reasons = [
        {
            "kind": "sample_metrics",
            "step": n,
            "not_measured": f"budget: one takes {n} s",
        }
        for n in (250, 500)
    ]
    assert "Not measured at step 250, step 500: budget: one takes 500 s." in measured(
        tmp_path, *reasons
    )


USE = "pipe = SomePipeline.from_pretrained('owner/base'); pipe.load_lora_weights(THIS_FILE)"


def test_every_clip_is_accounted_for(run: Path) -> None:
    said = reports.part(reports.report(run), "clips")
    order = (
        "5 found = 3 used + 1 kept aside + 1 skipped.",
        "64x64, 17 frames 4 80",
        "short.mp4 skipped too short 64x64, 17 frames, 16 fps 3 frames at 16 fps; 5 are needed",
        "42% 60 42 % of its frames repeat the one before <b>",
        "held back.mp4 kept aside",
        "two windows.mov used 64x64, 17 frames, 29.97 fps 2 windows of 64x64, 17 frames 0.19 s 120",
    )
    places = [said.index(words) for words in order]
    assert places == sorted(places)
    reports.write_file(run, "check.json", reports.account() | {"found": 6})
    assert "do not add up" in reports.part(reports.report(run), "clips")


def test_settings_stand_with_their_origin_the_users_first(run: Path) -> None:
    found = reports.chapters(run)["settings"]
    own, defaults = found["own"], found["defaults"]
    assert own[0] == ("steps", "120", "user")
    assert own[-1] == ("video_config.target_fps", "16", "family")
    assert {
        ("learning_rate", "0.001", "preset"),
        ("lora.targets", "linear", "preset"),
    } <= set(own[1:-1])
    assert {
        ("lora.rank", "16", "default"),
        ("video_config.strict_frames", "no", "default"),
    } < set(defaults)
    assert "3 settings at the default" in reports.part(reports.report(run), "settings")


def test_files_are_listed_with_their_check(run: Path) -> None:
    page = reports.report(run)
    said = "diffusers export/zorble.safetensors 1.4 MB verified largest error 2.5e-08 by diffusers"
    assert said in reports.part(page, "files")
    assert {"export/zorble.safetensors", "checkpoints/step-120"} <= set(
        reports.attributes(page, "href", "a")
    )
    elsewhere, inside = (
        run.parent / "lora.safetensors",
        (run / "export" / "zorble.safetensors").resolve(),
    )
    elsewhere.write_bytes(bytes(2_000_000))
    reports.write_file(
        run,
        "exports.json",
        [{"format": "a", "path": str(elsewhere)}, {"format": "b", "path": str(inside)}],
    )
    page = reports.report(run)
    said = reports.part(page, "files")
    assert f"a {elsewhere.name} 2.0 MB unverified not read back" in said
    assert "export/zorble.safetensors" in reports.attributes(page, "href", "a"), (
        "an absolute path inside the run"
    )
    assert str(elsewhere) not in reports.attributes(page, "href", "a")
    inside.unlink()
    said = reports.part(reports.report(run), "files")
    assert "b export/zorble.safetensors not found" in said


def use_of(run: Path, *entries: dict[str, Any], **settings: Any) -> str:
    reports.write_journal(
        run, [reports.start(), reports.sample(0, "a zorble moves left")]
    )
    whole = reports.config()
    whole["settings"] |= {
        "sample": {
            "guidance": 2.0,
            "steps": 20,
            "seed": 42,
            "frames": 9,
            "resolution": "32x48",
        }
    }
    whole["settings"] |= {"datasets": [{"path": "x", "trigger": "zorble"}]} | settings
    reports.write_file(run, "config.json", whole)
    reports.write_file(run, "exports.json", list(entries))
    return reports.report(run)


def test_the_use_of_the_file_is_shown_in_code(tmp_path: Path) -> None:
    page = use_of(
        tmp_path,
        {"format": "diffusers", "path": "export/x-step-9.safetensors", "use": USE},
    )
    found = re.search(r"<pre><code>(.*?)</code></pre>", page, re.DOTALL)
    assert found
    code = unescape(found[1])
    compile(code, "page", "exec")
    for words in (
        "pipe.load_lora_weights('export/x-step-9.safetensors')",
        "pipe( 'a zorble moves left', num_frames=9, height=32, width=48, guidance_scale=2, num_inference_steps=20,",
        "generator=torch.Generator('cpu').manual_seed(42), ).frames[0]",
        "# pip install torch diffusers transformers sentencepiece ftfy peft imageio imageio-ffmpeg "
        "import torch from diffusers import SomePipeline from diffusers.utils import export_to_video",
        "export_to_video(video, 'video.mp4', fps=16)",
    ):
        assert words in " ".join(code.split())
    said = reports.part(page, "use")
    assert "Write into the prompt: zorble" in said
    assert f"videotune export {tmp_path.name} --format comfyui" in said
    image_use = USE.replace("SomePipeline", "SomeImageToVideoPipeline")
    image_page = use_of(
        tmp_path, {"format": "diffusers", "path": "x", "use": image_use}
    )
    found = re.search(r"<pre><code>(.*?)</code></pre>", image_page, re.DOTALL)
    assert found
    code = " ".join(unescape(found[1]).split())
    assert "pipe( image=load_image('first-frame.png'), prompt='a zorble" in code
    assert "import export_to_video, load_image" in code
    assert "LoadImage" in reports.part(image_page, "use")

    toy = USE.replace("owner/base", "asset:toy")
    base = reports.part(
        use_of(tmp_path, {"format": "diffusers", "path": "x", "use": toy}), "use"
    )
    assert "from videotune.models.base_model import place" in base
    assert "SomePipeline.from_pretrained(place('asset:toy').folder)" in base


@pytest.mark.parametrize(
    ("name", "takes_size"),
    [
        ("HunyuanVideo15Pipeline", True),
        ("HunyuanVideo15ImageToVideoPipeline", False),
    ],
)
def test_a_pipeline_with_a_guider_and_one_with_a_size_of_its_own(
    name: str, takes_size: bool, tmp_path: Path
) -> None:
    load = "pipe.transformer.load_lora_adapter(THIS_FILE)"
    use = f"pipe = {name}.from_pretrained('owner/base'); {load}"
    page = use_of(tmp_path, {"format": "diffusers", "path": "x", "use": use})
    found = re.search(r"<pre><code>(.*?)</code></pre>", page, re.DOTALL)
    assert found
    code = " ".join(unescape(found[1]).split())
    compile(unescape(found[1]), "page", "exec")
    assert "pipe.transformer.load_lora_adapter('x')" in code
    assert "pipe.guider = pipe.guider.new(guidance_scale=2) video = pipe(" in code
    assert code.count("guidance_scale") == 1
    assert ("num_frames=9, height=32, width=48," in code) == takes_size
    assert "num_frames=9," in code


def test_conditions_have_their_share_their_grade_and_the_call_that_uses_them(
    tmp_path: Path,
) -> None:
    use = USE.replace("SomePipeline", "WanPipeline")
    entry = {"format": "diffusers", "path": "x", "use": use}
    without = use_of(tmp_path, entry)
    assert "learnt with" not in without
    assert "In videotune" not in without
    assert "ImageToVideo" not in without

    shares = {"first_frame": 0.5, "last_frame": 0.25, "suffix": 1.0, "mask": 0.7}
    rows = [
        {
            "type": name,
            "probability": share,
            "latent_frames": 2 if name == "suffix" else None,
            "in_diffusers": name == "first_frame",
        }
        for name, share in shares.items()
    ]
    odd_rows: list[Any] = [{"type": ["x"], "probability": 1.0}, {"type": "<b>"}, 3]
    odd_rows.append({"type": "new_kind", "probability": 1.0, "in_diffusers": False})
    reports.write_file(tmp_path, "plan.json", {"conditions": [*rows, *odd_rows]})
    page = use_of(tmp_path, entry)
    said = reports.part(page, "use")
    for words in (
        "first frame 50% of the samples sampled by diffusers",
        "last frame 25% of the samples sampled by videotune only",
        "new kind 100% of the samples sampled by videotune only",
        "leads to, 2 latent frames 100% of the samples sampled by videotune only",
    ):
        assert words in said

    codes = [
        unescape(code)
        for code in re.findall(r"<pre><code>(.*?)</code></pre>", page, re.DOTALL)
    ]
    plain, with_image, commands = codes
    for code in (plain, with_image):
        compile(code, "page", "exec")
    assert "load_image" not in plain
    for words in (
        "from diffusers import WanImageToVideoPipeline, WanPipeline",
        "pipe = WanImageToVideoPipeline(**pipe.components",
        "image=load_image('first-frame.png'), prompt='a zorble moves left'",
    ):
        assert words in with_image
    sample = f'videotune sample {tmp_path.name} --prompt "…"'
    assert commands.splitlines() == [
        f"{sample} --last-frame end.png",
        f"{sample} --suffix after.mp4",
        f"{sample} --video clip.mp4 --mask mask.png",
    ]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("EMBEDDING", "ComfyUI/models/embeddings"),
        ("FINE_TUNE", "is a folder in diffusers' layout"),
    ],
)
def test_new_tokens_and_whole_models_have_other_steps_in_comfyui(
    tmp_path: Path, method: str, words: str
) -> None:
    entry = {"format": "diffusers", "path": "x-step-1", "use": USE}
    said = reports.part(use_of(tmp_path, entry, training_method=method), "use")
    assert words in said
    assert "LoraLoader" not in said


@pytest.mark.parametrize(
    "names", [("10-high", "10-low"), ("10_high_noise", "10_low_noise")]
)
def test_two_experts_files_are_both_loaded_and_older_exports_are_not(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    second = USE.replace("THIS_FILE", "THIS_FILE, load_into_transformer_2=True")
    old, high, low = (f"export/x-step-{name}.safetensors" for name in ("9", *names))
    paths = {old: USE, high: USE, low: second}
    loaded = [
        {"format": "diffusers", "path": path, "use": how} for path, how in paths.items()
    ]
    comfyui = {
        "format": "comfyui",
        "path": "export/x-step-10-comfyui.safetensors",
        "use": USE,
    }
    said = reports.part(use_of(tmp_path, *loaded, comfyui), "use")
    assert (
        said.count("from_pretrained"),
        said.count("load_lora_weights"),
        old in said,
    ) == (
        1,
        2,
        False,
    )
    assert "The file with ComfyUI's names: export/x-step-10-comfyui.safetensors" in said
    assert "LoraLoaderModelOnly" in said


def test_the_file_of_the_recommended_step_is_loaded_if_it_was_exported(
    tmp_path: Path,
) -> None:
    """A run that overfits exports its best step and its last one."""
    exports = [
        {"format": "diffusers", "path": f"export/x-step-{step}.safetensors", "use": USE}
        for step in (80, 240)
    ]
    use_of(tmp_path, *exports)
    for recommended, loaded in ((80, 80), (240, 240), (160, 240)):
        end = {
            "kind": "end",
            "step": 240,
            "why": "done",
            "take": {"step": recommended, "why": "clips kept aside were best there"},
        }
        reports.write_journal(tmp_path, [reports.start(), end])
        said = reports.part(reports.report(tmp_path), "use")
        assert f"load_lora_weights('export/x-step-{loaded}.safetensors')" in said
        assert said.count("load_lora_weights") == 1


@pytest.mark.parametrize(
    "text",
    ["W" * 60, "a kitten in the garden " * 9, "Ж" * 90, "name.mp4\nused, 64x64", ""],
)
def test_no_text_of_a_sheet_is_behind_its_pictures(text: str) -> None:
    font = ImageFont.load_default(FONT_SIZE)
    lines = fitting_lines(text, 352, most_lines=99)
    assert all(font.getlength(line) <= 352 for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split()), "nothing is lost"
    cut = fitting_lines("one\ntwo\nthree", 352, most_lines=2)
    assert cut == ["one", CUT_MARK]


@pytest.mark.parametrize(
    ("similarity", "sentence"),
    [(0.3, "saw no copies at step 250"), (0.85, "found likely copies: 1 of 1 sample")],
)
def test_without_a_verdict_the_outcome_repeats_what_the_metrics_say(
    tmp_path: Path, similarity: float, sentence: str
) -> None:
    copies = int(similarity > 0.7)
    records = [probe(0, 0.3), probe(250, similarity, copies=copies)]
    verdict = {"kind": "verdict", "time": 1.0, "step": 250, "verdict": None}
    verdict |= {"reason": "no clip is kept aside for checking"}
    save = {"kind": "save", "step": 250, "path": "x"}
    reports.write_journal(
        tmp_path, [reports.start(), reports.step(1), *records, verdict, save]
    )
    outcome = reports.part(reports.report(tmp_path), "verdict")
    assert sentence in outcome
    assert "nothing else warns" not in outcome


@pytest.mark.parametrize("copies", [0, 1])
def test_likely_copies_are_named_beside_a_verdict_too(
    tmp_path: Path, copies: int
) -> None:
    verdict = {"kind": "verdict", "time": 1.0, "step": 250, "verdict": "LEARNING"}
    verdict |= {"reason": "it falls", "best_step": 250, "turned": False}
    records = [probe(0, 0.3), probe(250, 0.85, copies=copies), verdict]
    reports.write_journal(tmp_path, [reports.start(), reports.step(1), *records])
    outcome = reports.part(reports.report(tmp_path), "verdict")
    assert ("likely copies 1 of 1 sample at step 250" in outcome) == bool(copies)


@pytest.mark.parametrize(
    ("held_out", "budget", "sentence"),
    [
        (0.9, 0, "if that on clips kept aside rises"),
        (0.9, 0.1, "if that on clips kept aside rises"),
        (None, 0.1, "none is measured yet"),
        (None, 0, "so nothing else warns of copying"),
    ],
)
def test_what_warns_of_copying_is_that_of_the_run(
    tmp_path: Path, held_out: float | None, budget: float, sentence: str
) -> None:
    verdict = {"kind": "verdict", "time": 1.0, "step": 250, "verdict": None}
    verdict |= {"reason": "a verdict takes three validations"}
    records = [reports.start(), reports.step(1)]
    records += [reports.reading(step, held_out, 0.8) for step in (0, 250)]
    records += [verdict, {"kind": "save", "step": 250, "path": "x"}]
    reports.write_journal(tmp_path, records)
    config = reports.config()
    config["settings"]["sample_metrics"] = {"budget": budget}
    reports.write_file(tmp_path, "config.json", config)
    outcome = reports.part(reports.report(tmp_path), "verdict")
    assert sentence in outcome
    assert ("nothing else warns" in outcome) == (held_out is None and not budget)


def test_the_outcome_links_to_where_a_faulty_sample_is_marked(tmp_path: Path) -> None:
    measured_sample = probe(60, 0.5)
    measured_sample["samples"][0]["picture"] = reports.picture("flat")
    records = [
        reports.sample(60, "a cat"),
        measured_sample,
        {"kind": "save", "step": 60, "path": "x"},
    ]
    reports.write_journal(tmp_path, [reports.start(), reports.step(1), *records])
    page = reports.report(tmp_path)
    outcome = page.partition('id="verdict"')[2].partition("</section>")[0]
    assert "of 1 preview, none has a fault" in outcome
    links = re.findall(r'href="#(\w+)"', outcome.partition("Marked under")[2])
    assert links[0] == "metrics"
    assert "samples" not in links
    assert 'id="metrics"' in page


@pytest.mark.parametrize("has_finished", [True, False])
def test_only_a_run_that_goes_on_promises_more(
    tmp_path: Path, has_finished: bool
) -> None:
    lines = [reports.start(), reports.sample(0, "a cat"), reports.sample(2, "a dog")]
    lines.append({"kind": "end", "step": 2, "why": "done" if has_finished else "stop"})
    reports.write_journal(tmp_path, lines)
    reports.write_file(tmp_path, "config.json", reports.config())
    page = reports.report(tmp_path)
    said = reports.part(page, "before")
    assert ("Not there yet" in said) != has_finished
    assert ("No prompt was sampled at two steps" in said) == has_finished
    assert ("Not there yet" in reports.visible_text(page)) != has_finished


def test_previews_that_a_setting_switches_off_are_not_awaited(tmp_path: Path) -> None:
    reports.write_journal(tmp_path, [reports.start()])
    changed = reports.config()
    changed["settings"]["samples"] = 0
    reports.write_file(tmp_path, "config.json", changed)
    assert "before" not in reports.chapters(tmp_path)
