"""Keys of earlier versions are read under their old names, with a warning, and mean
what they meant.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from videotune.config.aliases import KEYS, renamed, renamed_run
from videotune.config.load import parse_sets, read_config
from videotune.config.nested_keys import flatten
from videotune.config.schema import leaves
from videotune.errors import VideotuneError
from videotune.files import digest


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_an_old_name_stands_for_the_new_one(
    old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "a" if old.endswith("encoder") else 3
    assert flatten(parse_sets([f"{old}={json.dumps(value)}"])) == {new: value}
    assert capsys.readouterr().err.count("warning") == 1
    assert new in leaves()
    assert old not in leaves()


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(VideotuneError, match="both"):
        parse_sets(["ruler_after=1", "validate_every=2"])


@pytest.mark.parametrize(("target", "kept"), [("base", True), ("clip", False)])
def test_the_target_of_regularization(tmp_path: Path, target: str, kept: bool) -> None:
    row: dict[str, Any] = {"path": "a", "kind": "regularization"}
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "datasets": [row | {"target": target}],
                "probe": {"steps": 2},
                "probe_budget": 0.1,
            }
        )
    )
    metrics = {"steps": 2, "budget": 0.1}
    assert read_config(path) == {
        "datasets": [row | {"prior_preservation": kept}],
        "sample_metrics": metrics,
    }


def test_a_run_of_an_earlier_version_has_todays_names_and_a_digest_that_holds() -> None:
    origins = {"ruler_after": "user", "seed": "default"}
    old: dict[str, Any] = {
        "settings": {"ruler_after": 5},
        "origins": origins,
        "steps": 1,
    }
    new = renamed_run(old | {"digest": digest(old)})
    assert (new["settings"], new["origins"]) == (
        {"validate_every": 5},
        {"validate_every": "user", "seed": "default"},
    )
    assert new["digest"] == digest(
        {key: value for key, value in new.items() if key != "digest"}
    )
    assert renamed_run(old | {"digest": "edited"})["digest"] == "edited"


def test_what_is_new_stays_as_it_is() -> None:
    layer = {
        "validate_every": 1,
        "datasets": "a folder",
        "sample_metrics": {"budget": 0},
    }
    assert renamed(layer, "here", pytest.fail) == layer
