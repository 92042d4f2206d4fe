"""Settings of the Hub's library, which reads them once, when it is imported."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants


@contextmanager
def hub_settings(
    cache: Path, environment: Mapping[str, str]
) -> Iterator[pytest.MonkeyPatch]:
    """This process, as if it had begun with these variables and this cache of the Hub.

    Nothing of it stays, nor what else is set by the patch that it gives.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "HF_HUB_CACHE"):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)

        endpoint = environment.get("HF_ENDPOINT", constants.ENDPOINT)
        values = {
            "ENDPOINT": endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": environment.get("HF_HUB_OFFLINE") == "1",
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in values.items():
            patch.setattr(constants, name, value)
        patch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
        yield patch
