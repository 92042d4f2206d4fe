"""The training guide's three snippets load as they stand, and each trains on a model that is named beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.safety_kit import QUIET, of_kind, state, steps_of
from tests.shell import train
from videotune.errors import DONE
from videotune.files import read_json
from videotune.trainer.resolve_config import Overrides

SNIPPETS = {
    "LORA": """
{
    "training_method": "LORA",
    "batch_size": 2,
    "learning_rate": 0.0003,
    "transformer": {
        "train": true
    },
    "text_encoder": {
        "train": false
    }
}
""",
    "FINE_TUNE": """
{
    "training_method": "FINE_TUNE",
    "batch_size": 1,
    "learning_rate": 0.0001,
    "transformer": {
        "train": true
    },
    "text_encoder": {
        "train": true,
        "learning_rate": 0.00005
    }
}
""",
    "EMBEDDING": """
{
    "training_method": "EMBEDDING",
    "batch_size": 4,
    "learning_rate": 0.001,
    "embedding_learning_rate": 0.005
}
""",
}
RATES = {
    "LORA": {"transformer": 0.0003},
    "FINE_TUNE": {"transformer": 0.0001, "text_encoder": 0.00005},
    "EMBEDDING": {"embedding": 0.005},
}
TRAINED = {"LORA": {"blocks"}, "EMBEDDING": {"embedding"}}


@pytest.mark.parametrize("method", SNIPPETS)
def test_the_guide_s_snippet_trains_as_it_stands(
    method: str, small_clips: Path, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(SNIPPETS[method])
    short = ("steps=3", "resolution=32x32", "warmup_steps=0", f"cache_dir={tmp_path / 'cache'}", *QUIET)
    words = Overrides(
        data=str(small_clips), config=tmp_path / "config.json", sets=(f"base_model_name={tiny_bases('wan')}", *short)
    )
    assert train(words, tmp_path / "run") == DONE
    lines = steps_of(tmp_path / "run")
    assert [line["lr"] for line in lines] == [RATES[method]] * 3
    assert all(line["grad_norm"] > 0 for line in lines)
    names = {name.removeprefix("weights/") for name in state(tmp_path / "run", 3) if name.startswith("weights/")}
    parts = {name.partition(".")[0] for name in names}
    assert parts == TRAINED[method] if method in TRAINED else parts > {"blocks", "text_encoder"}
    notes = of_kind(tmp_path / "run", "start")[0]["notes"]
    unused = [note for note in notes if "unused" in note]
    new = method == "EMBEDDING"
    assert unused == (["learning_rate is unused: embedding_learning_rate is the new tokens' own"] if new else [])
    assert any("'<videotune>'" in note for note in notes) == new, "the default token is said"
    assert len(read_json(tmp_path / "run" / "exports.json")) == 1
