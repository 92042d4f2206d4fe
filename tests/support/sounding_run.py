"""Small runs of a model that makes sound."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.command_line import train
from tests.support.sounding_clips import write_sounding_clips
from videotune.errors import DONE
from videotune.job.overrides import Overrides


def sounding_overrides(
    home: Path, tiny_bases: Callable[..., Path], *, generate: Sequence[str]
) -> Overrides:
    """Return the words of a run of three steps on clips of which one has no sound.

    Args:
        home: folder of the clips and of the cache.
        tiny_bases: the fixture.
        generate: what it learns.
    """
    clips = home / "clips"
    held_out = home / "held-out"
    if not clips.is_dir():
        write_sounding_clips(clips, sounding=5, silent=1)
        for index in (0, 1):
            for name in (f"videos/clip-{index}.mov", f"captions/clip-{index}.txt"):
                (held_out / name).parent.mkdir(parents=True, exist_ok=True)
                (clips / name).rename(held_out / name)

    datasets = [{"path": str(clips)}, {"path": str(held_out), "kind": "validation"}]
    return Overrides(
        sets=(
            f"base_model_name={tiny_bases('ltx2', '2.3')}",
            f"cache_dir={home / 'cache'}",
            f"datasets={json.dumps(datasets)}",
            f"generate={json.dumps(list(generate))}",
            "resolution=32x32",
            "video_config.frames=17",
            "steps=3",
            "learning_rate=0.01",
            "lora.rank=4",
            "validate_every=1",
            "save_every=0",
            "sample_after=3",
            "sample.steps=2",
            "samples=1",
        )
    )


def sounding_run(home: Path, overrides: Overrides) -> Path:
    """Train a run of these words and return its folder."""
    folder = home / "run"
    assert train(overrides, folder) == DONE
    return folder
