"""``report``: write a run's page as of now."""

from pathlib import Path

from videotune.reporter.build import write_report


def report(run: Path | str) -> Path:
    """Write RUN/report.html: the run's course, the recommended checkpoint, clips and
    settings. The run need not be done.
    """
    return write_report(Path(run))
