"""Commands beside a training, on the stand-in card: the cache by a streamed text
encoder, and samples of a checkpoint.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from tests.simcuda import card
from tests.simcuda.child import on_card
from tests.simcuda.lab import QUIET, Lab
from tests.support.command_line import cache, sample, train
from videotune.commands.sample_options import SampleOptions
from videotune.errors import DONE
from videotune.models.base import DiffusersModel


def cached(lab: Lab, name: str) -> dict[str, torch.Tensor]:
    """What a cache of its own holds, by entry and name."""
    assert (
        cache(
            lab.words("wan", "train_dtype=FLOAT_32", f"cache_dir={lab.folder / name}")
        )
        == DONE
    )
    files = (lab.folder / name).rglob("*.safetensors")
    return {
        f"{path.stem} {key}": value
        for path in files
        for key, value in load_file(path).items()
    }


def ran(folder: str) -> dict[str, Any]:
    """What the card finds in a cache whose text encoder has no room, and in samples of
    a run.
    """
    lab, own, asked = Lab(Path(folder)), DiffusersModel.text_length, []

    def short(
        family: Any, caption: str
    ) -> int:  # the first thing for which the encoder is loaded
        asked.append(family.stream_text is not None)
        if not asked[-1]:
            raise torch.OutOfMemoryError("no room")
        return own(family, caption)

    with card.watched() as found:
        plain = cached(lab, "plain")
        with patch.object(DiffusersModel, "text_length", short):
            streamed = cached(lab, "streamed")
        run, sets = lab.folder / "run", ("save_every=2", *QUIET[:-1])
        assert train(lab.words("wan", *sets), run) == DONE
        for place, step in (("last", None), ("earlier", 2)):
            options = SampleOptions(
                ("a red circle",), 1, run, step, sets=("sample.steps=2",)
            )
            assert sample(options, lab.folder / place) == DONE
    return {
        "errors": found.errors,
        "asked": asked,
        "same": plain.keys() == streamed.keys()
        and all(torch.equal(streamed[key], plain[key]) for key in plain),
        "entries": len(plain),
        "drawn": sum(
            x.stat().st_size > 0
            for name in ("last", "earlier")
            for x in (lab.folder / name).glob("*.mp4")
        ),
    }


def test_a_streamed_text_encoder_fills_the_same_cache_and_checkpoints_are_sampled(
    tmp_path: Path,
) -> None:
    seen = on_card(ran, tmp_path)
    assert seen["errors"] == []
    assert seen["asked"][0] is False
    assert any(seen["asked"])
    assert seen["same"]
    assert seen["entries"] > 4
    assert seen["drawn"] == 2
