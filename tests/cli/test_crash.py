"""An exception that nobody foresaw is one sentence and a file for a bug report, which
holds no secret.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from videotune.cli.crash import crash_report, without_addresses, without_secrets

FAIL = """
import sys
import videotune.cli.main as command_line
def fail(*words, **options):
    raise {error}
import videotune.config.schema
videotune.config.schema.leaves = fail
command_line.main()
"""


def failing(
    tmp_path: Path, error: str, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A real process in which ``videotune presets keys`` meets a fault of the program."""
    return subprocess.run(
        [sys.executable, "-c", FAIL.format(error=error), "presets", "keys", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment},
    )


@pytest.mark.parametrize(
    "error",
    ["KeyError('x')", "RecursionError()", "MemoryError()", "IndexError('a' * 10**6)"],
)
def test_a_fault_is_a_sentence_with_the_path_of_a_report(
    tmp_path: Path, error: str
) -> None:
    done = failing(tmp_path, error)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 600
    [report] = (tmp_path / "videotune" / "crashes").iterdir()
    assert str(report) in done.stderr
    text = report.read_text()
    for part in (
        error.partition("(")[0],
        "Traceback",
        "torch 2",
        "videotune 0",
        "presets keys",
    ):
        assert part in text
    assert len(text) < 200_000


def test_a_report_names_no_secret(tmp_path: Path) -> None:
    done = failing(
        tmp_path,
        "ValueError('hf_abcdefghijkl and my-own-secret-1')",
        MY_API_KEY="my-own-secret-1",
    )
    [report] = (tmp_path / "videotune" / "crashes").iterdir()
    assert done.returncode == 1
    for secret in ("hf_abcdefghijkl", "my-own-secret-1"):
        assert secret not in report.read_text()
    text = without_secrets("token: abc password='def' api_key = ghi learning_rate: 1")
    assert not {"abc", "def", "ghi"} & set(text.replace("'", " ").split())
    assert "learning_rate: 1" in text


def test_a_report_has_the_config_without_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.json").write_text('{"steps": 12345, "token": "abcdef"}')
    monkeypatch.setattr(
        sys, "argv", ["videotune", "train", "--config", str(tmp_path / "c.json")]
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = crash_report(KeyError("x"))
    assert report is not None
    assert "12345" in report.read_text()
    assert "abcdef" not in report.read_text()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_end_that_nobody_can_read_is_still_an_end(
    tmp_path: Path, stream: str
) -> None:
    with open("/dev/full", "w") as full:
        words = ("plan", "--config", str(tmp_path / "none.json"))
        done = subprocess.run(
            [sys.executable, "-m", "videotune", *words], check=False, **{stream: full}
        )
    assert done.returncode == 1


def test_letters_that_a_console_does_not_have_are_shown_by_their_codes(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "videotune", "check", str(tmp_path / "映画")],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 1
    assert b"\\u6620" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--set notify=ntfy://topic", "--set notify=ntfy://***"),
        ('{"notify": ["tgram://1:2/3"]}', '{"notify": ["tgram://***"]}'),
        ("notify:\n  - https://discord.com/api/1/2", "notify:\n  - https://***"),
        ('notify = ["https://a.b/c"]', 'notify = ["https://***"]'),
        ("see https://example.org/page", "see https://example.org/page"),
    ],
)
def test_no_report_has_an_address_for_messages(text: str, shown: str) -> None:
    assert without_addresses(text) == shown
