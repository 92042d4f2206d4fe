"""Vision-language models that caption: a server with OpenAI's chat API, or a local model of transformers."""

import base64
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from videotune.captioning.caption_cleanup import CaptionError
from videotune.data.decode import Frames
from videotune.data.media_info import MediaInfo
from videotune.data.workers import default_workers
from videotune.errors import VideotuneError
from videotune.hub_errors import hub_problem
from videotune.lazy import openai, torch, transformers
from videotune.memory.accelerator import has_bf16, local_device

LONGEST_SIDE = 768
"""Pixels of a frame's longer side: models resize to about as much, and requests stay small."""

ANSWER_TOKENS = 1024
"""The most that a model may answer, with room for thoughts before the caption."""

RETRIES = 3
"""Times that the openai package asks again after a lost connection, a timeout, 408, 409, 429 or 5xx, with growing waits."""


Captioner = Callable[[Frames, str], str]
"""What describes a clip: frames (T, H, W, 3) in their order and a prompt become the model's answer.

CaptionError where this clip has none; VideotuneError where no other clip would have one either.
"""


def read_frames(info: MediaInfo, times: Sequence[float], count: int) -> Frames:
    """Up to ``count`` frames of a clip, evenly chosen among those at ``times`` (ascending), uncropped.

    ClipProblem where one cannot be decoded.
    """
    last = min(count, len(times)) - 1
    chosen = [times[round(i * (len(times) - 1) / max(1, last))] for i in range(last + 1)]
    scale = min(1.0, LONGEST_SIDE / max(info.width, info.height))
    size = {"height": round(info.height * scale) or 1, "width": round(info.width * scale) or 1}
    task = {"info": info, "times": chosen, "resize": "stretch", **size}
    return default_workers().submit("decode", task).result()


def server(url: str, model: str, key_env: str, timeout: float) -> Captioner:
    """A model behind an address with OpenAI's chat API, which gets JPEG data URLs; several threads may ask at once.

    The key comes from the environment variable ``key_env``; servers without keys need none. ``timeout``: seconds.
    """
    key = os.environ.get(key_env, "").strip()
    try:
        client = openai.OpenAI(
            base_url=url, api_key=key or "none", max_retries=RETRIES, timeout=timeout
        )
    except ModuleNotFoundError as error:
        raise VideotuneError(
            '--endpoint needs the package openai: pip install "videotune[caption]"'
        ) from error

    def describe(frames: Frames, prompt: str) -> str:
        content: list[Any] = [
            {"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in frames
        ]
        chat: Any = [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}]
        try:
            reply = client.chat.completions.create(
                model=model, messages=chat, max_completion_tokens=ANSWER_TOKENS
            )
            return "" + (reply.choices[0].message.content or "")
        except (
            openai.OpenAIError,
            ValueError,
            AttributeError,
            LookupError,
            TypeError,
        ) as error:  # no chat completion
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".replace(
                key or "\0", f"({key_env})"
            )
            if isinstance(
                error,
                openai.AuthenticationError
                | openai.PermissionDeniedError
                | openai.NotFoundError,
            ):
                raise VideotuneError(
                    f"{said}. Check --endpoint (most end in /v1), --model and {key_env}."
                ) from error
            raise CaptionError(said) from error

    return describe


def local_model(name: str) -> Captioner:
    """A model of transformers, a folder or an id of the Hub, which gets images; bfloat16 where the device computes in it."""
    device = local_device()
    place = Path(name).expanduser()
    source = str(place) if place.is_dir() else name
    dtype = torch.bfloat16 if has_bf16(device) else torch.float32
    words: Any = {"dtype": dtype, "use_safetensors": True}
    try:
        processor: Any = transformers.AutoProcessor.from_pretrained(
            source, trust_remote_code=False
        )
        kind: Any = transformers.AutoModelForImageTextToText
        model: Any = (
            kind.from_pretrained(source, trust_remote_code=False, **words).to(device).eval()
        )
    except (
        Exception
    ) as error:  # transformers raises whatever its classes do on files of any kind
        why = f"{name} is no vision-language model that can be loaded: {' '.join(str(error).split())[:300]}"
        if (
            isinstance(error, OSError)
            and isinstance(error.__cause__, Exception)
            and not place.is_dir()
        ):
            why = hub_problem(name, error.__cause__)
        raise VideotuneError(f"--model: {why} A server's model needs --endpoint.") from error

    def describe(frames: Frames, prompt: str) -> str:
        images = [{"type": "image", "image": Image.fromarray(frame)} for frame in frames]
        chat = [{"role": "user", "content": [*images, {"type": "text", "text": prompt}]}]
        how = {
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": True,
            "return_tensors": "pt",
        }
        inputs = processor.apply_chat_template(chat, **how).to(device, model.dtype)
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        return str(
            processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )

    return describe


def _data_url(frame: Frames) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
