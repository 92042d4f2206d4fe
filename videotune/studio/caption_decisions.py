"""What becomes of a project's clips that have no caption.

It answers a question about these clips, so a preset neither holds it nor replaces it.
"""

from collections.abc import Mapping
from typing import Any

from videotune.studio.projects import Project, draft

DECISIONS = {"missing_caption", "missing_caption_text"}
"""The settings that decide it."""


def without_decisions(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that decide it."""
    return {key: value for key, value in keys.items() if key not in DECISIONS}


def with_decisions(project: Project, new_keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that replace a project's, with what the project has decided unless
    they decide it themselves.
    """
    if not DECISIONS.isdisjoint(new_keys):
        return dict(new_keys)
    decided = {key: value for key, value in draft(project).items() if key in DECISIONS}
    return {**new_keys, **decided}
