"""Vision-language models that caption: a server with OpenAI's chat API, or a local model of transformers."""

import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from videotune.captioning.answers import CaptionError
from videotune.data.media_info import MediaInfo
from videotune.data.workers import default_workers
from videotune.errors import VideotuneError
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub
from videotune.lazy import openai, torch, transformers
from videotune.memory.accelerator import has_bf16, local_device

Frames = NDArray[np.uint8]

LONGEST_SIDE = 768
"""Pixels of a frame's longer side: models resize to about as much, and requests stay small."""

ANSWER_TOKENS = 1024
"""The most that a model may answer, with room for thoughts before the caption."""

RETRIES = 3
"""Times that the openai package asks again after a lost connection, a timeout, 408, 409, 429 or 5xx, with growing waits."""

MODEL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
"""What is fetched of a model of the Hub: never code or pickles."""


class Captioner(Protocol):
    """What describes a clip: frames (T, H, W, 3) in their order and a prompt become the model's answer.

    CaptionError where this clip has none; VideotuneError where no other clip would have one either.
    """

    def __call__(self, frames: Frames, prompt: str, /) -> str: ...  # noqa: D102


def read_frames(info: MediaInfo, times: Sequence[float], count: int) -> Frames:
    """Up to ``count`` frames of a clip, evenly chosen among those at ``times`` (ascending), uncropped.

    ClipProblem where one cannot be decoded.
    """
    chosen = [times[round(i)] for i in np.linspace(0, len(times) - 1, min(count, len(times)))]
    scale = min(1.0, LONGEST_SIDE / max(info.width, info.height))
    size = {"height": max(1, round(info.height * scale)), "width": max(1, round(info.width * scale))}
    task = {"info": info, "times": chosen, "resize": "stretch", **size}
    return np.asarray(default_workers().submit("decode", task).result())


def server(url: str, model: str, key_env: str, timeout: float) -> Captioner:
    """A model behind an address with OpenAI's chat API, which gets JPEG data URLs; several threads may ask at once.

    The key comes from the environment variable ``key_env``; servers without keys need none. ``timeout``: seconds.
    """
    key = os.environ.get(key_env, "").strip()
    try:
        client = openai.OpenAI(base_url=url, api_key=key or "none", max_retries=RETRIES, timeout=timeout)
    except ModuleNotFoundError as error:
        raise VideotuneError('--endpoint needs the package openai: pip install "videotune[caption]"') from error

    def said(error: Exception) -> str:
        text = " ".join(str(error).split())[:300]
        return text.replace(key, f"({key_env})") if key else text

    def describe(frames: Frames, prompt: str) -> str:
        content: list[Any] = [{"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in frames]
        chat: Any = [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}]
        try:
            reply = client.chat.completions.create(model=model, messages=chat, max_completion_tokens=ANSWER_TOKENS)
            return (reply.choices[0].message.content or "") + ""
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            remedy = f"Check the address (most end in /v1), the key in {key_env} (--key-env) and --model {model}."
            raise VideotuneError(f"--endpoint {url}: {said(error)}. {remedy}") from error
        except openai.OpenAIError as error:
            raise CaptionError(said(error)) from error
        except (ValueError, AttributeError, LookupError, TypeError) as error:  # whatever else a server may send
            raise CaptionError(f"the server's answer is no chat completion ({type(error).__name__})") from error

    return describe


def local_model(name: str) -> Captioner:
    """A model of transformers, a folder or an id of the Hub, which gets images; bfloat16 where the device computes in it."""
    folder, device = Path(name).expanduser(), local_device()
    words: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        folder = folder if folder.is_dir() else Path(hub.snapshot_download(name, allow_patterns=MODEL_FILES))
    except Exception as error:  # the hub's library raises a dozen kinds; each is explained
        raise VideotuneError(f"--model: {hub_problem(name, error)}") from error
    try:
        processor: Any = transformers.AutoProcessor.from_pretrained(folder, **words)
        words |= {"dtype": torch.bfloat16 if has_bf16(device) else torch.float32, "use_safetensors": True}
        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, **words).to(device).eval()
    except Exception as error:  # transformers raises whatever its classes do on files of any kind
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = "Name a vision-language model in safetensors without code of its own; a server's needs --endpoint."
        raise VideotuneError(f"--model {name} cannot be loaded ({why}). {remedy}") from error

    def describe(frames: Frames, prompt: str) -> str:
        images = [{"type": "image", "image": Image.fromarray(frame)} for frame in frames]
        chat = [{"role": "user", "content": [*images, {"type": "text", "text": prompt}]}]
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        try:
            inputs = processor.apply_chat_template(chat, **how).to(device, model.dtype)
            with torch.inference_mode():
                out = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        except torch.OutOfMemoryError as error:
            raise VideotuneError(
                "--model: the device's memory is full: give fewer --frames, or a smaller model"
            ) from error
        return str(processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return describe


def _data_url(frame: Frames) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
