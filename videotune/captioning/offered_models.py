"""The vision-language models that videotune offers for captions, with what they need."""

from functools import cache
from pathlib import Path
from typing import Any

from videotune.files import read_json


@cache
def offered_models() -> list[dict[str, Any]]:
    """Return the models that run here, the smallest first."""
    rows: list[dict[str, Any]] = read_json(
        Path(__file__).with_name("offered_models.json")
    )
    return rows


def advice() -> str:
    """Return which model a user may give, in words for an error of the command line."""
    choices = [
        f"--model {row['model']} (a download of {row['download_gb']:g} GB, which needs "
        f"{row['memory_gb']:g} GB of memory)"
        for row in offered_models()
    ]
    return (
        f"give a model: {', '.join(choices[:-1])} or {choices[-1]}; or a server with "
        "OpenAI's chat API: --endpoint URL --model NAME"
    )
