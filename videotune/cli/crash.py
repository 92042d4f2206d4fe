"""The last guard: an exception that nobody foresaw becomes one sentence and a file that can be sent with a bug report."""

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

_SECRET = re.compile(
    r"hf_\w{8,}|sk-[\w-]{8,}|(?i:(?<=token)|(?<=password)|(?<=secret)|(?<=api_key)|(?<=apikey))[\"']?\s*[:=]\s*[\"']?[^\s\"',}]+"
)
_NAMES = re.compile("TOKEN|KEY|SECRET|PASSWORD")


def without_secrets(text: str) -> str:
    """The text with tokens, passwords and values of such environment variables replaced by ***."""
    for name, value in os.environ.items():
        if _NAMES.search(name.upper()) and len(value) >= 8:
            text = text.replace(value, "***")
    return _SECRET.sub("***", text)


def crash_report(error: BaseException) -> Path | None:
    """Write what is needed to look for the fault: versions, the command, its config file and the traceback.

    The file lies in the user's cache folder, else in the system's for temporary files; None where neither can be written.
    """
    versions = [
        f"videotune {__version__}",
        f"Python {sys.version.split()[0]}",
        platform.platform(),
    ]
    versions += [
        f"{one.name} {one.version}" for one in metadata.distributions() if one.name in PACKAGES
    ]
    command = " ".join(word if len(word) <= 500 else f"{word[:500]}…" for word in sys.argv)
    trace = "".join(traceback.format_exception(error, limit=-60))
    report = [
        *versions,
        "",
        f"command: {command}",
        *_config(),
        "",
        trace[:80_000],
        trace[80_000:][-20_000:],
    ]
    text = without_secrets("\n".join(report))
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (user_cache() / "crashes", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
            return folder / name
        except OSError:
            continue
    return None


def _config() -> list[str]:
    """The text of the file that --config names, if it can be read."""
    if "--config" not in sys.argv[:-1]:
        return []
    path = Path(sys.argv[sys.argv.index("--config") + 1])
    try:
        with path.open("rb") as file:
            return [f"config: {path}", file.read(20_000).decode("utf-8", "backslashreplace")]
    except (OSError, ValueError):
        return [f"config: {path} cannot be read"]


def sentence(error: BaseException) -> str:
    """What the user is told of an exception that nobody foresaw."""
    text = " ".join(str(error).split())[:200]
    path = crash_report(error)
    where = f"please report it with {path}" if path else "no file for a report could be written"
    return f"videotune: unexpected {type(error).__name__}{f': {text}' if text else ''} (a fault of videotune; {where})"
