"""The evidence for a verdict, as the page Train shows it."""

from typing import Any

from videotune.reporter.outcome import grounds
from videotune.reporter.read import Run, mapping
from videotune.studio.setting_names import in_page_words


def validation_grounds(run: Run) -> Any:
    """Return the evidence for the verdict, its reasons by the names of settings."""
    if not run.validations:
        return None
    evidence = grounds(run)
    changes = []
    for record in evidence["changes"]:
        reason = record.get("reason")
        in_page = {"reason": in_page_words(str(reason))} if reason else {}
        changes.append(mapping({**record, **in_page}))
    return {**evidence, "changes": changes}
