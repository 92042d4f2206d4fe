"""The last guard: an unforeseen exception becomes one sentence and a file for a bug
report.
"""

import os
import platform
import re
import sys
import tempfile
import time
import traceback
from importlib import metadata
from pathlib import Path

from videotune._version import __version__
from videotune.files import user_cache

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "huggingface_hub",
    "av",
    "numpy",
)

_KEYS = r"(?<=token)|(?<=password)|(?<=secret)|(?<=api_key)|(?<=apikey)"
_SECRET = re.compile(
    r"hf_\w{8,}|sk-[\w-]{8,}|(?i:" + _KEYS + r")[\"']?\s*[:=]\s*[\"']?[^\s\"',}]+"
)
_SECRET_VARIABLE = re.compile("TOKEN|KEY|SECRET|PASSWORD")


def without_secrets(text: str) -> str:
    """Return the text with tokens, passwords and secret environment values replaced by
    ***.
    """
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name.upper()) and len(value) >= 8:
            text = text.replace(value, "***")
    return _SECRET.sub("***", text)


def without_addresses(text: str) -> str:
    """Return the text with URLs of Apprise cut off behind their scheme; those of web
    pages stay, unless they are an address for messages.
    """
    text = re.sub(
        r"(?i)\b(?!https?:)([a-z][a-z0-9+.-]*)://[^\s\"',\]]+", r"\1://***", text
    )
    return re.sub(
        r"(?i)(notify\S*\s*[:=\n]\s*[\[\-\s\"']*https?)://[^\s\"',\]]+",
        r"\1://***",
        text,
    )


def crash_report(error: BaseException) -> Path | None:
    """Write versions, the command, its config file and the traceback to a file.

    Returns:
        The file in the user's cache folder, or else in the system's temporary folder;
        None if neither can be written.
    """
    versions = [
        f"videotune {__version__}",
        f"Python {sys.version.split()[0]}",
        platform.platform(),
    ]
    for package in metadata.distributions():
        if package.name in PACKAGES:
            versions.append(f"{package.name} {package.version}")

    arguments = [text if len(text) <= 500 else f"{text[:500]}…" for text in sys.argv]
    trace = "".join(traceback.format_exception(error, limit=-60))
    lines = [*versions, "", f"command: {' '.join(arguments)}", *_config_lines(), ""]
    lines += [trace[:80_000], trace[80_000:][-20_000:]]
    text = without_addresses(without_secrets("\n".join(lines)))

    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (user_cache() / "crashes", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(
                text, encoding="utf-8", errors="backslashreplace"
            )
        except OSError:
            continue
        return folder / name
    return None


def _config_lines() -> list[str]:
    """Return the text of the file that --config names, if it can be read."""
    if "--config" not in sys.argv[:-1]:
        return []
    path = Path(sys.argv[sys.argv.index("--config") + 1])
    try:
        with path.open("rb") as file:
            text = file.read(20_000).decode("utf-8", "backslashreplace")
    except (OSError, ValueError):
        return [f"config: {path} cannot be read"]
    return [f"config: {path}", text]


def sentence(error: BaseException) -> str:
    """Return the sentence that the user reads about an unforeseen exception."""
    text = " ".join(str(error).split())[:200]
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    path = crash_report(error)
    advice = (
        f"please report it with {path}" if path else "no report file could be written"
    )
    return f"videotune: unexpected {reason} (a fault of videotune; {advice})"
