"""``report``: a run's page, as the run stands now."""

from pathlib import Path

from videotune.reporter.build import write_report


def report(run: Path | str) -> Path:
    """Write RUN/report.html, also of a run that is not done: its course, the recommended checkpoint, clips and settings."""
    return write_report(Path(run))
