"""Vision-language models that caption: a server with OpenAI's chat API, or a local model of transformers."""

import base64
import io
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from videotune.captioning.answers import CaptionError
from videotune.errors import VideotuneError
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub
from videotune.lazy import openai, torch, transformers
from videotune.memory.accelerator import has_bf16, local_device

Frames = NDArray[np.uint8]

ANSWER_TOKENS = 1024
"""The most that a model may answer, with room for thoughts before the caption."""

RETRIES = 3
"""Times that the openai package asks again after a lost connection, a timeout, 408, 409, 429 or 5xx, with growing waits."""

MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
"""What is fetched of a model of the Hub: never code or pickles."""


class Captioner(Protocol):
    """What describes a clip."""

    def describe(self, frames: Frames, prompt: str) -> str:
        """The model's answer on frames (T, H, W, 3) in their order.

        CaptionError where this clip has none; VideotuneError where no other clip would have one either.
        """
        ...


class Endpoint:
    """A server with OpenAI's chat API; several threads may ask at once.

    The key comes from the environment variable ``key_env``; servers without keys need none.
    """

    def __init__(self, url: str, model: str, key_env: str, timeout: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise VideotuneError(f"--endpoint {url}: write an address such as http://localhost:8000/v1")
        self.url, self.model, self.key_env, self._key = url, model, key_env, os.environ.get(key_env, "").strip()
        try:
            self._client = openai.OpenAI(
                base_url=url, api_key=self._key or "none", max_retries=RETRIES, timeout=timeout
            )
        except ModuleNotFoundError as error:
            raise VideotuneError('--endpoint needs the package openai: pip install "videotune[caption]"') from error

    def describe(self, frames: Frames, prompt: str) -> str:
        """As ``Captioner``; frames go as JPEG data URLs."""
        images: list[Any] = [{"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in frames]
        content = [*images, {"type": "text", "text": prompt}]
        try:
            reply = self._client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": content}], max_completion_tokens=ANSWER_TOKENS
            )
            answer: Any = reply.choices[0].message.content
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            remedy = (
                f"Check the address (most end in /v1), the key in {self.key_env} (--key-env) and --model {self.model}."
            )
            raise VideotuneError(f"--endpoint {self.url}: {self._said(error)}. {remedy}") from error
        except openai.OpenAIError as error:
            raise CaptionError(self._said(error)) from error
        except (ValueError, AttributeError, LookupError, TypeError) as error:  # whatever else a server may send
            raise CaptionError(f"the server's answer is no chat completion ({type(error).__name__})") from error
        if not isinstance(answer, str):
            raise CaptionError("the answer holds no text")
        return answer

    def _said(self, error: Exception) -> str:
        """What the server said, without the key."""
        text = " ".join(str(error).split())[:300]
        return text.replace(self._key, f"({self.key_env})") if self._key else text


class LocalModel:
    """A vision-language model of transformers: a folder, or an id of the Hub; bfloat16 where the device computes in it."""

    def __init__(self, name: str) -> None:
        folder, self.device = _folder(name), local_device()
        dtype = torch.bfloat16 if has_bf16(self.device) else torch.float32
        words: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        try:
            self._processor: Any = transformers.AutoProcessor.from_pretrained(folder, **words)
            model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, **words
            )
        except Exception as error:  # transformers raises whatever its classes do on files of any kind
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise VideotuneError(
                f"--model {name}: transformers cannot load it as a vision-language model ({why}). Name one in safetensors "
                "without code of its own; for a server's model name its --endpoint."
            ) from error
        self._model = model.to(self.device).eval()

    def describe(self, frames: Frames, prompt: str) -> str:
        """As ``Captioner``; frames go as images, which all such models take."""
        images = [{"type": "image", "image": Image.fromarray(frame)} for frame in frames]
        chat = [{"role": "user", "content": [*images, {"type": "text", "text": prompt}]}]
        try:
            inputs = self._processor.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            ).to(self.device, self._model.dtype)
            with torch.inference_mode():
                out = self._model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        except torch.OutOfMemoryError as error:
            raise VideotuneError(
                "--model: the device's memory is full. Give fewer --frames, or a smaller model."
            ) from error
        answer = out[0, inputs["input_ids"].shape[1] :]
        return str(self._processor.decode(answer, skip_special_tokens=True))


def open_captioner(model: str, endpoint: str | None, key_env: str, timeout: float) -> Captioner:
    """The server's model, or without an endpoint the local one."""
    return LocalModel(model) if endpoint is None else Endpoint(endpoint, model, key_env, timeout)


def _data_url(frame: NDArray[np.uint8]) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _folder(name: str) -> Path:
    """Where a model lies: the folder itself, or in the Hub's cache, fetched as far as it is not there."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except Exception as error:  # the hub's library raises a dozen kinds; each is explained
        raise VideotuneError(f"--model: {hub_problem(name, error)}") from error
