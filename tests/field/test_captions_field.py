"""Captions (musubi-tuner #209, #434, #990): what a step was fed can be said afterwards."""

import json
import shutil
from pathlib import Path

from tests.shell import Bases, train
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides


def test_musubi_tuner_434_the_exact_text_of_every_step_can_be_recovered(
    tmp_path: Path, small_clips: Path, tiny_bases: Bases
) -> None:
    data = shutil.copytree(small_clips, tmp_path / "data")
    for path in (data / "captions").iterdir():
        path.write_text(f"one of {path.stem}\ntwo of {path.stem}", encoding="utf-8")
    sets = [
        "steps=12",
        "batch_size=2",
        "caption_dropout=0.3",
        "resolution=32x32",
        "video_config.frames=9",
        "lora.rank=2",
    ]
    sets += ["sample_after=0", "validate_every=0", "save_every=0", f"base_model_name={tiny_bases('wan')}"]
    assert train(Overrides(data=str(data), sets=tuple(sets)), tmp_path / "run") == 0
    account = json.loads((tmp_path / "run" / "check.json").read_text())
    captions = {clip["id"][:12]: clip["captions"] for clip in account["clips"]}
    names = {clip["id"][:12]: Path(clip["path"]).stem for clip in account["clips"]}
    seen = set()
    for line in read_journal(tmp_path / "run"):
        if line["kind"] == "step":
            for window, number in zip(line["window_ids"], line["captions"], strict=True):
                text = "" if number is None else captions[window[:12]][number]
                assert text == "" or text.endswith(names[window[:12]])
                seen.add(text.split(" ")[0])
    assert seen == {"one", "two", ""}
