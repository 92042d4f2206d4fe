"""The page carries its videos and pictures, shows before and after in step, and says what it had no room for."""

import base64
import io
import re
from pathlib import Path

import av
import numpy as np
import pytest
from report_kit import CLIPS, account, config, full_run, put, sample, start, write_journal
from test_report_html import elements, part, report

from videotune.data.video_writer import write_video
from videotune.report import media
from videotune.report.beside import read_video, side_by_side

RED, BLUE, GREEN = (200, 30, 30), (30, 30, 200), (30, 180, 30)


def flat(colour: tuple[int, int, int], frames: int = 5, height: int = 32, width: int = 48) -> np.ndarray:
    return np.full((frames, height, width, 3), colour, np.uint8)


def drawn_run(folder: Path) -> Path:
    """A prompt that the base drew red, step 60 green and the last step blue, and one that was drawn once."""
    shown = ((0, RED), (60, GREEN), (120, BLUE))
    records = [sample(step, "a zorble moves left") for step, _ in shown]
    write_journal(folder, [start(), *records, sample(0, "drawn once")])
    for record, (_, colour) in zip(records, shown, strict=True):
        write_video(folder / record["path"], flat(colour), 16.0)
    write_video(folder / sample(0, "drawn once")["path"], flat(RED), 16.0)
    return folder


def carried_video(page: str, anchor: str = "before") -> tuple[list[np.ndarray], float]:
    """The frames of a section's first video, and frames a second, read from the page alone."""
    found = re.search(rf'<section id="{anchor}">.*?src="data:video/mp4;base64,([^"]+)"', page, re.DOTALL)
    assert found
    with av.open(io.BytesIO(base64.b64decode(found[1]))) as container:
        rate = container.streams.video[0].average_rate
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)], float(rate or 0)


def near(pixel: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool(np.abs(pixel.astype(int) - colour).max() < 12)


def test_before_and_after_stand_in_one_video_and_so_play_in_step(tmp_path: Path) -> None:
    page = report(drawn_run(tmp_path))
    frames, rate = carried_video(page)
    assert (len(frames), rate) == (5, 16.0)
    assert frames[0].shape == (32, 2 * 48 + 4, 3)
    assert all(near(frame[16, 24], RED) and near(frame[16, 76], BLUE) for frame in frames)
    said = part(page, "before")
    assert "a zorble moves left seed 42" in said
    assert said.endswith("base step 120")
    assert "drawn once" not in said
    video = next(attributes for tag, attributes in elements(page) if tag == "video")
    assert {"autoplay", "loop", "muted", "playsinline"} <= set(video)


def test_the_exported_step_stands_between_base_and_latest(tmp_path: Path) -> None:
    run = drawn_run(tmp_path)
    put(run, "exports.json", [{"format": "diffusers", "path": "export/x-step-60.safetensors"}])
    page = report(run)
    frames, _ = carried_video(page)
    assert [near(frames[0][16, x], c) for x, c in ((24, RED), (76, GREEN), (128, BLUE))] == [True] * 3
    assert part(page, "before").endswith("base step 60, exported step 120")


def test_the_page_alone_can_be_sent(tmp_path: Path) -> None:
    page = report(drawn_run(tmp_path))
    sources = [str(attributes["src"]) for tag, attributes in elements(page) if tag in ("video", "img")]
    assert len(sources) == 1 + 4
    assert all(source.startswith("data:") for source in sources)


def test_what_is_over_the_budget_is_referred_to_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = drawn_run(tmp_path)
    whole = sum(len(str(attributes.get("src", ""))) for tag, attributes in elements(report(run)) if tag == "video")
    monkeypatch.setattr(media, "BUDGET", whole - 1)
    page = report(run)
    sources = [str(attributes["src"]) for tag, attributes in elements(page) if tag == "video"]
    assert [source.startswith("data:") for source in sources].count(False) == 1
    assert sum(len(source) for source in sources if source.startswith("data:")) < whole
    assert "1 picture or video more than the" in part(page, "samples")
    monkeypatch.setattr(media, "BUDGET", 0)
    page = report(run)
    assert "the page is full" in part(page, "before")
    assert "data:" not in page


def test_videos_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    said = part(report(full_run(tmp_path / "run")), "before")
    assert said.count("Not in step: cannot be shown side by side") == 2


def test_wide_videos_are_made_smaller(tmp_path: Path) -> None:
    write_video(tmp_path / "wide.mp4", flat(RED, 2, 90, 160), 16.0)
    frames, rate = read_video(tmp_path / "wide.mp4", 64)
    assert [frame.shape for frame in frames] == [(36, 64, 3)] * 2
    assert rate == 16


def test_side_by_side_in_rows_and_a_shorter_one_keeps_its_last_frame() -> None:
    videos = [[np.full((2, 2, 3), 10 * (n + 1), np.uint8)] * (1 + n) for n in range(3)]
    frames = side_by_side(videos, 2)
    assert [frame.shape for frame in frames] == [(8, 8, 3)] * 3
    assert [[int(frame[0, 0, 0]), int(frame[0, 6, 0]), int(frame[6, 0, 0])] for frame in frames] == [[10, 20, 30]] * 3
    with pytest.raises(ValueError, match="different sizes"):
        side_by_side([videos[0], [np.zeros((4, 4, 3), np.uint8)]])


def test_a_prompt_says_whether_it_is_a_caption(tmp_path: Path) -> None:
    run = drawn_run(tmp_path)
    checked = account()
    for row, kind in zip(checked["clips"], ("train", "train", "regularization"), strict=False):
        row |= {"kind": kind, "captions": ["something else"]}
    for row, words in (
        (0, "caption of training clips"),
        (2, "caption of regularization clips"),
        (3, "caption of no clip"),
    ):
        for clip in checked["clips"]:
            clip["captions"] = ["something else"]
        checked["clips"][row]["captions"] = ["a zorble moves left"]
        put(run, "check.json", checked)
        assert words in part(report(run), "before"), row


def test_pictures_and_captions_of_clips_stand_in_the_table(tmp_path: Path) -> None:
    from PIL import Image

    run = drawn_run(tmp_path)
    checked = account()
    checked["clips"][0]["captions"] = ["a caption " * 40]
    put(run, "check.json", checked)
    put(run, "config.json", config())
    (run / "pictures").mkdir()
    Image.new("RGB", (96, 32), RED).save(run / "pictures" / f"{next(iter(CLIPS))[:16]}.jpg")
    page = report(run)
    images = [str(attributes["src"]) for tag, attributes in elements(page) if tag == "img"]
    assert len(images) == 1
    assert Image.open(io.BytesIO(base64.b64decode(images[0].partition(",")[2]))).size == (96, 32)
    assert "a caption a caption" in part(page, "clips")
    assert "…" in part(page, "clips")


def test_previews_that_stand_side_by_side_already_are_not_shown_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_journal(run, [start(), sample(0, "a"), sample(60, "a")])
    assert "All previews so far stand above" in part(report(run), "samples")
    write_journal(run, [start(), sample(0, "a"), sample(60, "a"), sample(90, "a")])
    assert "All previews so far stand above" not in part(report(run), "samples")
    assert "<title>Run " + tmp_path.name in report(run), "a folder that is called run is named after its own"


def test_a_comparison_is_shown_where_there_is_one(tmp_path: Path) -> None:
    run = drawn_run(tmp_path)
    assert 'id="compare"' not in report(run)
    entry = {"prompt": "a <cross>", "seed": 7, "steps": [0, 60], "video": "compare/x.mp4", "sheet": "compare/x.png"}
    put(run / "compare", "compare.json", [entry])
    write_video(run / "compare" / "x.mp4", flat(GREEN), 16.0)
    page = report(run)
    assert part(page, "compare").endswith("a <cross> seed 7 In rows, from the left: base, step 60.")
    assert near(carried_video(page, "compare")[0][0][16, 16], GREEN)
