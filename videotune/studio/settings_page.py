"""The page Settings: what all projects share. ComfyUI's folder, the base models of this
computer, the login at the Hub, and the cards.
"""

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Response
from huggingface_hub import constants, get_token

from videotune import __version__
from videotune.errors import VideotuneError
from videotune.studio import gpu, header
from videotune.studio.field_errors import at_field
from videotune.studio.hub_models import downloaded_models
from videotune.studio.result_files import COMFYUI_VARIABLE, comfyui_loras
from videotune.studio.settings import change_settings, read_settings
from videotune.studio.web import (
    CurrentPage,
    PageContext,
    PostedForm,
    Regions,
    page_response,
    render,
    reply,
)

routes = APIRouter()

SHOWN_PACKAGES = ("torch", "diffusers", "transformers")
"""Packages whose versions the page shows, since they decide what can be trained."""


def package_versions() -> dict[str, str]:
    """Return the versions of videotune and of what it trains with."""
    versions = {"videotune": __version__}
    for name in SHOWN_PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def computer(page: PageContext) -> str:
    """Render ComfyUI's folder, models, login, cards and versions."""
    settings = read_settings(page.root)
    loras = None
    fault = ""
    try:
        loras = comfyui_loras(settings.get("comfyui"))
    except VideotuneError as error:
        fault = str(error)

    return render(
        "settings_computer",
        settings=settings,
        loras=loras,
        fault=fault,
        variable=COMFYUI_VARIABLE,
        models=downloaded_models(),
        models_folder=constants.HF_HUB_CACHE,
        has_login=get_token() is not None,
        gpus=gpu.list_gpus(),
        versions=package_versions(),
        root=page.root,
    )


REGIONS: Regions = {"computer": computer}


@routes.get("/settings")
def show(page: CurrentPage) -> Response:
    """Show the page."""
    return page_response(page, "settings", header.REGIONS | REGIONS, "Settings")


@routes.post("/settings")
def save(page: CurrentPage, form: PostedForm) -> Response:
    """Save ComfyUI's folder; an empty field forgets it."""
    folder = form["comfyui"].strip()
    if folder:
        with at_field("comfyui"):
            page.path_rule.check_path(folder, "ComfyUI's folder")
            comfyui_loras(folder)
    change_settings(page.root, {"comfyui": folder})
    return reply("Saved")
