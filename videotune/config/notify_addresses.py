"""Addresses that messages about a run go to.

An address is the name of an environment variable, which a config may show to everybody,
or a URL of Apprise, which holds a password or a token. A URL leaves the config only
masked: whatever is written from a checked config has its scheme and nothing else.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, PlainSerializer, SerializationInfo

NotifyEvent = Literal["done", "failed", "stopped", "verdict"]

WITH_SECRETS = {"with_secrets": True}
"""Context of ``model_dump`` for code that needs the URLs themselves."""

HIDDEN = "(hidden)"
MAX_LETTERS = 2000

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})://\S+")


def is_variable(address: str) -> bool:
    """Return whether an address is the name of an environment variable."""
    return _VARIABLE.fullmatch(address) is not None


def is_masked(address: str) -> bool:
    """Return whether an address is what ``masked`` leaves of a URL."""
    return address.endswith(f"://{HIDDEN}")


def masked(address: str) -> str:
    """Return an address without its secret: the scheme of a URL; a variable's name."""
    if is_variable(address):
        return address
    url = _URL.fullmatch(address)
    return f"{url[1]}://{HIDDEN}" if url else HIDDEN


def masked_list(value: Any) -> Any:
    """Return unchecked addresses, as a config file has them, each masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, list):
        return [masked_list(item) for item in value]
    return HIDDEN


def _checked(address: str) -> str:
    is_address = is_variable(address) or _URL.fullmatch(address) is not None
    if not is_address or len(address) > MAX_LETTERS:
        raise ValueError(
            "is neither the name of an environment variable nor a URL of Apprise such as "
            "ntfy://TOPIC"
        )
    return address


def _shown(address: str, info: SerializationInfo) -> str:
    keeps_secrets = info.context is not None and info.context.get("with_secrets")
    return address if keeps_secrets else masked(address)


NotifyAddress = Annotated[
    str, AfterValidator(_checked), PlainSerializer(_shown, return_type=str)
]
