"""Licences whose terms pass to what is trained are asked for once."""

import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.command_line import train
from tests.support.run_processes import Make
from videotune.errors import VideotuneError
from videotune.models.licences import require_licence
from videotune.models.registry import find, names
from videotune.user_settings import ACCEPT_VARIABLE, accepted_terms

ASK = (
    "from videotune.models.licences import require_licence\n"
    "from videotune.models.registry import find\n"
    "require_licence(find('ltx2').spec, False)\n"
)


@pytest.fixture(autouse=True)
def nothing_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ACCEPT_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_a_run_is_refused_before_it_writes_and_trains_once_accepted(
    overrides: Make, tmp_path: Path
) -> None:
    words = overrides("steps=1", base=("ltx2",))
    run = tmp_path / "run"
    with pytest.raises(VideotuneError, match="--accept-licence"):
        train(words, run)
    assert not (run / "config.json").exists()
    assert train(replace(words, accept_licence=True), run) == 0
    assert train(words, tmp_path / "another") == 0


def test_models_without_such_terms_are_not_asked_for(overrides: Make) -> None:
    with_terms = {name for name in names() if find(name).spec.licence_terms}
    assert with_terms == {"ltx2"}
    require_licence(find("wan").spec, accepts=False)


def test_a_variable_accepts_for_machines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = find("ltx2").spec
    monkeypatch.setenv(ACCEPT_VARIABLE, "0")
    with pytest.raises(VideotuneError):
        require_licence(spec, accepts=False)
    monkeypatch.setenv(ACCEPT_VARIABLE, "1")
    require_licence(spec, accepts=False)
    assert spec.licence_terms not in accepted_terms(), "it is not kept"


@pytest.mark.parametrize(
    ("answer", "accepted"), [("y", True), ("n", False), ("", False)]
)
def test_at_a_terminal_it_is_asked_and_the_answer_is_kept(
    answer: str, accepted: bool
) -> None:
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ASK],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=dict(os.environ),
        close_fds=True,
    )
    os.close(terminal)
    os.write(main, f"{answer}\n".encode())
    said = _all_of(main)
    assert process.wait(60) == (0 if accepted else 1), said
    assert find("ltx2").spec.licence_terms in said
    assert (find("ltx2").spec.licence_terms in accepted_terms()) is accepted


def _all_of(terminal: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode().replace("\r\n", "").replace("\n", "")


def test_settings_that_hold_something_else_are_as_none(tmp_path: Path) -> None:
    path = tmp_path / "config" / "videotune" / "settings.json"
    path.parent.mkdir(parents=True)
    for content in ('{"accepted_licences": 5}', "[1]", '{"models_folder": "x"}'):
        path.write_text(content)
        assert find("ltx2").spec.licence_terms not in accepted_terms()
    require_licence(find("ltx2").spec, accepts=True)
    assert find("ltx2").spec.licence_terms in accepted_terms()
    assert '"models_folder": "x"' in path.read_text()
