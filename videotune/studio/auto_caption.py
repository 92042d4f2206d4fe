"""Captions by a vision-language model: which ones there are, a test of a server, and the
job that writes.
"""

import os
import re
from pathlib import Path
from typing import Any

import httpx2 as httpx
from fastapi import APIRouter, Response

from videotune.errors import VideotuneError
from videotune.files import checked
from videotune.http_limits import AnswerLimits
from videotune.studio import captions_edit, projects
from videotune.studio.field_errors import FieldError, at_field
from videotune.studio.projects import CLIPS
from videotune.studio.web import CurrentPage, PageContext, PostedForm, json_reply, reply

routes = APIRouter()

HUB_MODEL = re.compile(r"[\w.-]+/[\w.-]+")

TEST_SECONDS = 5.0
"""Seconds that a server has to answer a test, or the Hub to be reached."""

MAX_LIST_BYTES = 1_000_000
"""Size limit of a server's list of models."""

MAX_MODELS = 40
"""Models of a server that the page lists."""


@routes.post("/data/auto-caption")
def auto_caption(page: CurrentPage, form: PostedForm) -> Response:
    """Let a vision-language model write captions.

    Raises:
        VideotuneError: if the model is not named, or neither it nor the Hub is there.
    """
    project = page.current_project
    option_names = ("model", "endpoint", "purpose", "trigger", "max-words")
    options = {name: form[name].strip() for name in option_names}
    if form["how"] not in ("", "server"):
        options |= {"model": form["how"], "endpoint": ""}
    if form["how"] == "server" and not options["endpoint"]:
        raise FieldError(
            "server: type its address, such as http://localhost:8000/v1", "endpoint"
        )

    # Only a user on the server may name a model by a path of this computer.
    may_name_any_model = not page.path_rule.is_restricted or options["endpoint"]
    if options["endpoint"]:
        with at_field("endpoint"):
            page.path_rule.check_server(options["endpoint"])
    if not options["model"] or not (
        may_name_any_model or HUB_MODEL.fullmatch(options["model"])
    ):
        raise FieldError(
            "model: choose one, or name a model of the server or of the Hub, such as "
            "Qwen/Qwen2.5-VL-7B-Instruct",
            "model",
        )
    if options["endpoint"]:
        environment = {}
    else:
        environment = _prepare_local_model(options["model"])

    projects.update(project, captioning=options)
    arguments = ["caption", str(project.folder / CLIPS)]
    arguments += projects.preset_arguments(project)
    arguments += projects.clip_setting_arguments(project)
    arguments += [f"--{name}={value}" for name, value in options.items() if value]
    if form["overwrite"]:
        arguments.append("--overwrite")
    captions_edit.start_captioning(project, arguments, environment)
    return reply("Writing captions")


def _prepare_local_model(model: str) -> dict[str, str]:
    """Return the environment for a model that runs here.

    Raises:
        VideotuneError: if it is not on this computer and the Hub is out of reach, which
            the job would try for minutes.
    """
    if Path(model).expanduser().is_dir() or _reaches_hub():
        return {}
    if not _is_cached(model):
        raise VideotuneError(
            f"{model} is not on this computer, and the Hugging Face Hub is not reached: "
            "check the network, or use a server"
        )
    return {"HF_HUB_OFFLINE": "1"}


def _is_cached(model: str) -> bool:
    """Return whether something of a model is in the Hub's cache on this computer."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        return False


def _reaches_hub() -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        return False
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        _get(address, "HEAD")
    except (httpx.HTTPError, httpx.InvalidURL, VideotuneError):
        return False
    return True


@routes.post("/data/test-server")
def test_server(page: CurrentPage, form: PostedForm) -> Response:
    """Say whether a caption server answers, and which models it has."""
    endpoint = form["endpoint"].strip()
    names, problem = _models_of_server(page, endpoint)
    model = form["model"].strip()
    if problem:
        return json_reply({"good": False, "said": problem, "models": []})
    if not names:
        said = "It answers, and lists no models. Type the name of its model."
    elif model and model not in names:
        said = f"It answers, but has no model {model[:80]}. Choose one of its models."
        return json_reply({"good": False, "said": said, "models": names})
    else:
        said = f"It answers and has {'this model' if model else 'these models'}."
    return json_reply({"good": True, "said": said, "models": names})


def _models_of_server(page: PageContext, endpoint: str) -> tuple[list[str], str]:
    """Return the models of a server with OpenAI's API, and what is wrong with it."""
    if not endpoint:
        return [], "Type the address of the server first."
    page.path_rule.check_server(endpoint)
    try:
        answer = _get(f"{endpoint.rstrip('/')}/models")
        if answer.status_code in (401, 403):
            return [], ""  # it wants the key, which only the job sends
        if answer.status_code != 200:
            code = answer.status_code
            return [], f"It answers with error {code}. Most addresses end in /v1."
        listed = checked(dict[str, Any], answer.content).get("data")
    except (httpx.HTTPError, httpx.InvalidURL, VideotuneError, ValueError) as error:
        reason = str(error) or type(error).__name__
        return [], f"It does not answer as such a server: {reason[:120]}."

    names = []
    for row in listed if isinstance(listed, list) else []:
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            names.append(row["id"][:200])
    return names[:MAX_MODELS], ""


def _get(address: str, method: str = "GET") -> Any:
    """Ask a server; its answer is bounded in seconds and bytes.

    A redirect is not followed: it could lead into a network that only this computer
    reaches.

    Raises:
        httpx.HTTPError, httpx.InvalidURL, VideotuneError: if there is no answer within
            the bounds.
    """
    limits = AnswerLimits(TEST_SECONDS, MAX_LIST_BYTES)
    with httpx.Client(follow_redirects=False) as client, limits.attached(client):
        return client.request(method, address)
