"""The base model of a plan: its name, its licence, and its download."""

from collections.abc import Mapping
from typing import Any

from videotune.config.base_models import DownloadSize
from videotune.console import tell
from videotune.runs.plan_facts import samples_per_step_words
from videotune.text import counted
from videotune.user_settings import has_accepted


def show_model(model: str, facts: Mapping[str, Any]) -> None:
    """Print the model and the number of steps."""
    samples = samples_per_step_words(facts)
    tell(f"{model}: {counted(facts['steps'], 'step')} of {samples}")


def show_licence(facts: Mapping[str, Any]) -> None:
    """Print the base model's licence if it has to be accepted before a run."""
    licence = facts["licence"]
    if licence and not has_accepted(licence["terms"]):
        tell(f"licence to accept before the run: {licence['name']}: {licence['terms']}")


def show_download(facts: Mapping[str, Any]) -> None:
    """Print the size of the base model's download, if it is known, and the licence."""
    if facts["download"]:
        size = DownloadSize(**facts["download"])
        tell(f"base model: {size} to download, once; licence: {facts['licence_name']}")
