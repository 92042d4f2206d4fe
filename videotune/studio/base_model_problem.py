"""A base model that cannot be had: not reached, not found, or its licence not accepted.

The page Setup says it at the model, and the page Train at the run, each with the ways
out of it.
"""

import re
from dataclasses import dataclass

from videotune.queue.entries import QueueEntry
from videotune.queue.jobs import QueuedJob, describe_outcome
from videotune.reporter.read import Run
from videotune.studio.setting_names import in_page_words
from videotune.studio.terms import in_studio_terms

PREFIX = "base_model_name: "
"""How every message about a base model begins."""

LICENCE = re.compile(
    r" is gated\.|the Hub refuses the account|the Hub rejects HF_TOKEN"
)
NOT_FOUND = re.compile(
    r" is not on the Hub|neither a local folder nor an id of the Hub"
)
NOT_REACHED = re.compile(
    r"the Hub is not reached|the Hub cannot be reached|the Hub may not be asked"
    r"|the Hub is switched off"
)
ADDRESS = re.compile(r"https://[^\s;,]+[^\s;,.]")


@dataclass(frozen=True)
class BaseModelProblem:
    """Why a base model cannot be had."""

    sentence: str

    page: str = ""
    """Address of the model's page, where its licence is accepted."""

    entry: str = ""
    """The entry of the queue that is tried again; empty if it is the plan."""


def problem_of(message: str, model: str, entry: str = "") -> BaseModelProblem | None:
    """Return what a message says about a base model; None if it is about something else.

    Args:
        message: the message of a plan or of a run.
        model: name of the model.
        entry: the entry of the queue that it is of.
    """
    if not message.startswith(PREFIX):
        return None

    if LICENCE.search(message):
        address = ADDRESS.search(message)
        is_token = "rejects HF_TOKEN" in message
        sentence = (
            f"{model} needs an account at the Hugging Face Hub: accept its licence on its "
            "page, then log in on this computer with “hf auth login” in a terminal."
        )
        page = address[0] if address and not is_token else ""
        return BaseModelProblem(sentence, page, entry)
    if NOT_FOUND.search(message):
        sentence = (
            f"{model} is not on the Hugging Face Hub: the name is misspelt, or the model "
            "is private."
        )
        return BaseModelProblem(sentence, entry=entry)
    if NOT_REACHED.search(message):
        sentence = (
            f"{model} could not be downloaded, because this computer does not reach the "
            "Hugging Face Hub."
        )
        return BaseModelProblem(sentence, entry=entry)
    return BaseModelProblem(in_page_words(message.removeprefix(PREFIX)), entry=entry)


def plain_reason(message: str) -> str:
    """Return a message of a process as all pages say it: one sentence on a base model that
    cannot be had, and any other message without options of a terminal.
    """
    problem = problem_of(message, _model_in(message))
    return in_studio_terms(message) if problem is None else problem.sentence


def _model_in(message: str) -> str:
    """Return the base model that a message about one names first."""
    return message.removeprefix(PREFIX).partition(" ")[0].rstrip(":,")


def problem_of_run(
    run: Run,
    entry: QueueEntry | None,
    job: QueuedJob | None,
    code: str,
    model: str = "",
) -> BaseModelProblem | None:
    """Return why a run could not have its base model; None if it ended otherwise.

    Args:
        run: the run.
        entry: its entry of the queue.
        job: its last process.
        code: its status.
        model: only if it is of this base model; empty for any.
    """
    if code != "failed" or job is None or run.journal:
        return None

    message = describe_outcome(job)
    trained = run.setting("base_model_name") or _model_in(message)
    if model and trained != model and model not in message:
        return None
    return problem_of(message, str(trained), entry.name if entry is not None else "")
