"""The report's settings of a run whose lengths were given in passes over the data."""

from pathlib import Path

from tests.support import reports
from videotune.reporter.inventory import settings
from videotune.reporter.read import read_run


def test_lengths_are_as_they_were_given_and_steps_follow_from_them(
    tmp_path: Path,
) -> None:
    reports.write_journal(tmp_path, [reports.start()])
    config = reports.config()
    config["settings"] |= {
        "steps": 300,
        "epochs": None,
        "save_every": 50,
        "save_every_epochs": None,
        "sample_after": 20,
        "sample_after_epochs": None,
    }
    config["origins"] |= {
        "steps": "default",
        "epochs": "user",
        "save_every_epochs": "preset",
        "sample_after": "user",
    }
    config["asked"] = {
        "epochs": 48.0,
        "save_every_epochs": 8.0,
        "sample_after_epochs": None,
    }
    reports.write_file(tmp_path, "config.json", config)

    chapter = settings(read_run(tmp_path))
    rows = {key: (value, origin) for key, value, origin in chapter["own"]}
    assert rows["epochs"] == ("48", "user")
    assert rows["steps"] == ("300", "epochs")
    assert rows["save_every_epochs"] == ("8", "preset")
    assert rows["save_every"] == ("50", "save_every_epochs")
    assert rows["sample_after"] == ("20", "user")
