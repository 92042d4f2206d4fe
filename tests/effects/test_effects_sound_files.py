"""What the config decides about the sound of clips: which windows have it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.datasets import scanned
from tests.support.sounds import sounds_by_clip, write_sounding_folder

BOTH = ["video", "sound"]
SHORT: dict[str, Any] = {"frames": 9, "target_fps": 24.0}


@pytest.mark.effect("sound.changed_speed")
@pytest.mark.parametrize(
    "video", [SHORT | {"stretch": True}, SHORT | {"temporal_augmentation": True}]
)
def test_what_does_not_run_as_filmed_has_no_sound_or_is_refused(
    tmp_path: Path, video: Mapping[str, Any]
) -> None:
    folder = write_sounding_folder(tmp_path / "clips")
    dropped = scanned(
        folder, video=video, generate=BOTH, sound={"changed_speed": "drop"}
    )
    assert sounds_by_clip(dropped)["loud.mov"] == {False}
    assert not dropped.skipped

    refused = scanned(
        folder, video=video, generate=BOTH, sound={"changed_speed": "refuse"}
    )
    reasons = {Path(path).name: reason for path, reason, _ in refused.skipped}
    assert reasons == {"loud.mov": "sound_speed"}
    assert set(sounds_by_clip(refused)) == {"silent.mov", "none.mov", "still.png"}

    # Nothing is left that only sound could be learnt from.
    foley = scanned(folder, video=video, generate=["sound"])
    assert {reason for _, reason, _ in foley.skipped} == {"no_sound"}
    assert not foley.windows
