"""A length or an interval in steps wins over one in epochs of an earlier layer."""

from pathlib import Path
from typing import Any

import pytest

from videotune.config.resolve import resolve
from videotune.files import write_json
from videotune.job.overrides import Overrides, user_keys

KEYS = ("steps", "save_every", "validate_every", "sample_after")


def epochs_key(key: str) -> str:
    return "epochs" if key == "steps" else f"{key}_epochs"


@pytest.mark.parametrize("key", KEYS)
def test_steps_of_the_command_line_win_over_epochs_of_the_file(
    key: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    write_json(config, {epochs_key(key): 30, "learning_rate": 0.5})

    def keys_with(*sets: str) -> dict[str, Any]:
        return user_keys(Overrides(config=config, sets=sets))

    assert keys_with()[epochs_key(key)] == 30
    changed = keys_with(f"{key}=160")
    assert changed[key] == 160
    assert epochs_key(key) not in changed
    assert changed["learning_rate"] == 0.5

    both = keys_with(f"{key}=160", f"{epochs_key(key)}=2")
    assert both[epochs_key(key)] == 2, "who gives both is told which one decides"


@pytest.mark.parametrize("key", KEYS)
def test_steps_of_the_user_win_over_epochs_of_the_preset(key: str) -> None:
    preset = {epochs_key(key): 30}
    assert getattr(resolve({}, preset, None).config, epochs_key(key)) == 30
    resolved = resolve({key: 160}, preset, None)
    assert getattr(resolved.config, epochs_key(key)) is None
    assert getattr(resolved.config, key) == 160
    assert resolved.origins[key] == "user"
