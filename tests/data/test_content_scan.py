"""A content scan: frozen, black, cuts, jitter, damage; what is none of these; and that it is small and repeatable."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clips import noise, write_clip
from tests.scenery import pan, scenery, shots
from videotune.data.content_scan import ContentScan, scan_content
from videotune.data.media_info import probe


def seen(path: Path, frames: np.ndarray, fps: float = 24, until: float = 10.0, **how: object) -> ContentScan:
    return scan_content(probe(write_clip(path, frames, fps, **how)), until)  # type: ignore[arg-type]


def breathing(count: int, fps: float = 24) -> np.ndarray:
    """A picture of which a part rises and falls by 1.5 pixels in 3.5 s, as a chest does before a tripod."""
    still = scenery(3, 240, 320).astype(np.float32)
    rows, columns = np.mgrid[:240, :320]
    bump = np.exp(-(((columns - 160) / 60) ** 2 + ((rows - 120) / 60) ** 2))
    frames = []
    for i in range(count):
        at = (rows + 1.5 * np.sin(2 * np.pi * i / fps / 3.5) * bump).clip(0, 238)
        low, part = at.astype(int), (at - at.astype(int))[..., None]
        frames.append((1 - part) * still[low, columns] + part * still[low + 1, columns])
    return np.stack(frames).astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("x264.mp4", {"options": {"crf": "23"}}),
        ("x264-poor.mp4", {"options": {"crf": "38", "preset": "veryfast"}}),
        ("vp9.webm", {"options": {"deadline": "realtime", "cpu-used": "8"}}),
        ("mpeg4.avi", {"options": {"b": "2000000"}}),
    ],
)
def test_a_still_with_codec_noise_is_frozen(tmp_path: Path, name: str, how: dict) -> None:
    frames = np.repeat(scenery(1, 240, 320)[None], 60, 0)
    assert seen(tmp_path / name, frames, **how).frozen > 0.9


@pytest.mark.parametrize("crf", ["18", "35"])
def test_a_breathing_person_before_a_tripod_is_not_frozen(tmp_path: Path, crf: str) -> None:
    assert seen(tmp_path / "a.mp4", breathing(96), options={"crf": crf}).frozen < 0.6


def test_a_frame_held_for_long_is_a_rest_at_a_variable_rate_too(tmp_path: Path) -> None:
    times = [i / 24 for i in range(24)] + [3 + i / 24 for i in range(24)]
    found = seen(tmp_path / "a.mp4", pan(1, [i * 3.0 for i in range(48)]), times=times)
    assert found.frozen == pytest.approx(2 / 4, abs=0.06)
    assert found.jitter == pytest.approx(1 / 47, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "fps", "crf"),
    [("a.mp4", 24, "20"), ("a.mp4", 59.94, "20"), ("a.mp4", 8, "35"), ("a.mkv", 23.976, "20"), ("a.avi", 25, "20")],
)
def test_a_cut_is_the_timestamp_of_the_first_frame_after_it(tmp_path: Path, name: str, fps: float, crf: str) -> None:
    options = {} if name.endswith(".avi") else {"crf": crf}
    info = probe(write_clip(tmp_path / name, shots([1, 2, 3, 4], 20), fps, options=options))
    assert scan_content(info, 99).cuts == tuple(info.timestamps[i] for i in (20, 40, 60))


def test_a_higher_ratio_finds_fewer_cuts(tmp_path: Path) -> None:
    info = probe(write_clip(tmp_path / "a.mp4", shots([1, 2], 24, 4)))
    assert len(scan_content(info, 99, 3.0).cuts) == 1
    assert scan_content(info, 99, 300.0).cuts == ()


def changed(where: Any, change: Callable[[np.ndarray], Any], of: np.ndarray) -> np.ndarray:
    of[where] = change(of[where])
    return of


def crossed(frames: np.ndarray) -> np.ndarray:
    for i in range(10, 40):  # an object crosses the picture within a second
        left = (i - 10) * 8 - 60
        frames[i, 30:90, max(0, left) : max(0, left + 60)] = (230, 40, 40)
    return frames


def covered(frames: np.ndarray) -> np.ndarray:
    frames[:, :14], frames[:, -14:] = 0, 0
    frames[:, 20:30, 120:150:2] = 255
    return frames


def panned(speed: float) -> np.ndarray:
    return pan(1, [max(0, min(i - 12, 24)) * speed for i in range(48)])


FOUND: dict[str, tuple[Callable[[], np.ndarray], dict[str, Any]]] = {
    "a slow pan": (lambda: pan(1, [i * 0.3 for i in range(60)]), {"frozen": 0, "cuts": ()}),
    "stops halfway": (lambda: pan(1, [min(i, 48) * 2 for i in range(96)]), {"frozen": 0.5}),
    "a slideshow": (lambda: np.repeat(np.stack([scenery(i) for i in range(3)]), 36, 0), {"cuts": (1.5, 3.0), "frozen": 1}),
    **{
        f"one tone, {tone}": (lambda tone=tone: changed(slice(24), lambda _: tone, shots([1], 48)), {"black": 0.5})
        for tone in (0, 255, 90)
    },
    "a dark room": (lambda: (shots([1], 24) * 0.2).astype(np.uint8), {"black": 0}),
    "dark shots": (lambda: (shots([1, 2], 24) * 0.25).astype(np.uint8), {"cuts": (1.0,)}),
    "bars and a logo": (lambda: covered(shots([1, 2, 3], 24)), {"cuts": (1.0, 2.0)}),
    "a flash": (lambda: changed(slice(20, 23), lambda _: 255, shots([1], 48)), {"cuts": ()}),
    "a flicker": (lambda: changed(slice(10, 40, 3), lambda x: x // 3, shots([1], 48)), {"cuts": ()}),
    "the light goes out": (lambda: changed(slice(24, 48), lambda x: x // 3, shots([1], 48)), {"cuts": ()}),
    "an object": (lambda: crossed(shots([1], 48)), {"cuts": ()}),
    **{f"a pan of {speed}": (lambda speed=speed: panned(speed), {"cuts": ()}) for speed in (3, 12, 40)},
    "noise that never repeats": (lambda: noise(48), {"cuts": ()}),
    "two frames": (lambda: shots([1], 2), {"cuts": ()}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_a_scan_finds(tmp_path: Path, name: str) -> None:
    frames, wanted = FOUND[name]
    found = seen(tmp_path / "a.mp4", frames())
    assert len(found.signatures) == 3
    for field, value in wanted.items():
        assert getattr(found, field) == (value if field == "cuts" else pytest.approx(value, abs=0.05)), field


def test_only_the_first_seconds_are_scanned_and_the_very_last_frame(tmp_path: Path) -> None:
    info = probe(write_clip(tmp_path / "a.mp4", shots([1, 2, 3], 24), options={"g": "24"}))
    first, whole = scan_content(info, 0.5), scan_content(info, 10.0)
    assert first.cuts == ()
    assert whole.cuts == (1.0, 2.0)
    assert first.signatures[0] == whole.signatures[0]
    assert first.signatures[2] == whole.signatures[2]
    assert first.signatures[1] != whole.signatures[1]


def test_damage_late_in_a_file_is_told_and_condemns_nothing(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", shots([1, 2], 48), options={"g": "12", "bf": "0"})
    content = bytearray(path.read_bytes())
    at = content.index(b"mdat")
    size = int.from_bytes(content[at - 4 : at], "big")
    begin = at + size * 3 // 4
    content[begin : begin + 3000] = np.random.default_rng(0).bytes(3000)
    path.write_bytes(content)
    found = scan_content(probe(path), 10.0)
    assert found.damaged_at is not None
    assert 2 < found.damaged_at < 4
    assert scan_content(probe(path), 1.0).damaged_at is None


def test_a_rotated_file_has_the_signatures_of_an_upright_one(tmp_path: Path) -> None:
    frames = shots([1], 12)
    upright = seen(tmp_path / "a.mp4", frames)
    turned = seen(tmp_path / "b.mp4", np.rot90(frames, -1, (1, 2)), rotation=90)
    cells = [np.frombuffer(base64.b64decode(x.signatures[0]), np.uint8) for x in (upright, turned)]
    assert np.abs(cells[0].astype(int) - cells[1]).max() <= 3


def test_an_image_has_a_signature_alone(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(scenery(1)).save(tmp_path / "a.png")
    found = scan_content(probe(tmp_path / "a.png"), 10.0)
    assert len(found.signatures) == 1
    assert (found.frozen, found.black, found.cuts, found.jitter) == (0.0, 0.0, (), 0.0)
