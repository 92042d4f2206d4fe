"""Vision-language models that caption: a server with OpenAI's chat API, or a local
model.
"""

import base64
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len
from PIL import Image
from typing_extensions import TypedDict

from videotune.bounds import ANSWER_BYTES
from videotune.captioning.caption_cleanup import CaptionError
from videotune.captioning.frame_processor import load_frame_processor
from videotune.data.decode import Frames
from videotune.data.media_info import MediaInfo
from videotune.data.workers import default_workers
from videotune.errors import VideotuneError
from videotune.files import checked
from videotune.http_limits import AnswerLimits
from videotune.hub_errors import hub_problem, is_unreached
from videotune.lazy import huggingface_hub as hub
from videotune.lazy import openai, torch, transformers
from videotune.memory.accelerator import has_bf16, local_device

LONGEST_SIDE = 768
"""Pixels of a frame's longer side: models resize to about this, and requests stay
small.
"""

ANSWER_TOKENS = 1024
"""Most tokens of an answer, with room for thoughts before the caption."""

RETRIES = 3
"""Retries of the openai package after a lost connection, a timeout, 408, 409, 429 or
5xx, with growing delays.
"""

HUB_SECONDS = 10.0
"""Seconds after which the Hub counts as not reached."""

Captioner = Callable[[Frames, str], str]
"""Describes a clip: frames (T, H, W, 3) in order and a prompt -> the model's answer.

Raises CaptionError if this clip gets no caption, VideotuneError if no other clip would
get one either.
"""


def read_frames(info: MediaInfo, times: Sequence[float], count: int) -> Frames:
    """Decode frames of a clip, uncropped, evenly chosen among those at ``times``.

    Args:
        info: media info of the clip.
        times: seconds of the clip, ascending.
        count: most frames.

    Raises:
        ClipProblem: if a frame cannot be decoded.
    """
    last = min(count, len(times)) - 1
    step = (len(times) - 1) / max(1, last)
    chosen_times = [times[round(index * step)] for index in range(last + 1)]

    scale = min(1.0, LONGEST_SIDE / max(info.width, info.height))
    task = {
        "info": info,
        "times": chosen_times,
        "resize": "stretch",
        "height": round(info.height * scale) or 1,
        "width": round(info.width * scale) or 1,
    }
    return default_workers().submit("decode", task).result()


class _Message(TypedDict):
    content: str | None


class _Choice(TypedDict):
    message: _Message


class _Completion(TypedDict):
    """What is read of a server's answer; it may hold anything else."""

    choices: Annotated[list[_Choice], Len(1)]


class _ServerCaptioner:
    """Captions by a server with OpenAI's chat API; several threads may call it at once."""

    def __init__(self, url: str, model: str, key_env: str, timeout: float) -> None:
        self._model = model
        self._key_env = key_env
        self._key = os.environ.get(key_env, "").strip()
        self._timeout = timeout
        limits = AnswerLimits(timeout, ANSWER_BYTES)
        self._client = openai.OpenAI(
            base_url=url,
            api_key=self._key or "none",
            max_retries=RETRIES,
            timeout=timeout,
            # A redirect could lead into a network that only this machine reaches.
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False,
                event_hooks={
                    "request": [limits.watch_request],
                    "response": [limits.limit_response],
                },
            ),
        )

    def __call__(self, frames: Frames, prompt: str) -> str:
        content: list[Any] = []
        for frame in frames:
            content.append(
                {"type": "image_url", "image_url": {"url": _data_url(frame)}}
            )
        content.append({"type": "text", "text": prompt})
        messages: Any = [{"role": "user", "content": content}]

        try:
            reply = self._client.chat.completions.with_raw_response.create(
                model=self._model,
                messages=messages,
                max_completion_tokens=ANSWER_TOKENS,
            )
            completion = checked(_Completion, reply.http_response.content)
        except openai.OpenAIError as error:
            raise self._error(error) from error
        except ValueError as error:
            # The reply is not a chat completion, or is too large.
            raise self._error(error) from error
        return str(completion["choices"][0]["message"]["content"] or "")

    def _error(self, error: Exception) -> Exception:
        """Describe a failure without the key; VideotuneError if all clips would fail."""
        # openai's own text for what a limit raises is "Connection error."
        cause = error.__cause__
        shown_error = cause if isinstance(cause, VideotuneError) else error
        message = " ".join(str(shown_error).split())[:300]
        description = f"{type(error).__name__}: {message}"
        is_limit = isinstance(cause, VideotuneError)
        if isinstance(error, openai.APIConnectionError) and not is_limit:
            description += f" (--timeout is {self._timeout:g} s)"
        if self._key:
            description = description.replace(self._key, f"({self._key_env})")

        is_refused = isinstance(
            error,
            openai.AuthenticationError
            | openai.PermissionDeniedError
            | openai.NotFoundError,
        )
        if is_refused:
            return VideotuneError(
                f"{description}. Check --endpoint (most end in /v1), --model and "
                f"{self._key_env}."
            )
        return CaptionError(description)


def server(url: str, model: str, key_env: str, timeout: float) -> Captioner:
    """Connect to a server with OpenAI's chat API, which gets JPEG data URLs.

    Args:
        url: the server's base URL.
        model: the server's name of the model.
        key_env: environment variable of the API key; servers without keys need none.
        timeout: seconds for an answer, to its last byte.
    """
    return _ServerCaptioner(url, model, key_env, timeout)


class _LocalCaptioner:
    """Captions by a model of transformers on this machine."""

    def __init__(self, name: str) -> None:
        self._device = local_device()
        path = Path(name).expanduser()
        source = str(path) if path.is_dir() else name
        only_cached = path.is_dir() or not _hub_answers(name)
        dtype = torch.bfloat16 if has_bf16(self._device) else torch.float32

        try:
            self._processor = load_frame_processor(source, local_files_only=only_cached)
            model_class: Any = transformers.AutoModelForImageTextToText
            model: Any = model_class.from_pretrained(
                source,
                trust_remote_code=False,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=only_cached,
            )
            self._model = model.to(self._device).eval()
        except Exception as error:  # transformers raises any type for files of any kind
            raise VideotuneError(
                f"--model: {_loading_problem(name, error, is_folder=path.is_dir())} "
                "A server's model needs --endpoint."
            ) from error

    def __call__(self, frames: Frames, prompt: str) -> str:
        content: list[dict[str, Any]] = []
        for frame in frames:
            content.append({"type": "image", "image": Image.fromarray(frame)})
        content.append({"type": "text", "text": prompt})

        inputs = self._processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        ).to(self._device, self._model.dtype)
        with torch.inference_mode():
            output = self._model.generate(
                **inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False
            )
        answer_tokens = output[0, inputs["input_ids"].shape[1] :]
        return str(self._processor.decode(answer_tokens, skip_special_tokens=True))


def _hub_answers(name: str) -> bool:
    """Ask the Hub once, since transformers would ask again for minutes, file by file.

    Returns:
        False if it is not reached: a model in the cache does as well.

    Raises:
        VideotuneError: if the Hub has no such model, or does not give it.
    """
    try:
        hub.HfApi().model_info(name, timeout=HUB_SECONDS)
    except Exception as error:  # huggingface_hub raises a dozen classes
        if is_unreached(error):
            return False
        raise VideotuneError(
            f"--model: {hub_problem(name, error)} A server's model needs --endpoint."
        ) from error
    return True


def local_model(name: str) -> Captioner:
    """Load a model of transformers, in bfloat16 if the device computes in it.

    Args:
        name: a folder or an id of the Hub.
    """
    return _LocalCaptioner(name)


def _loading_problem(name: str, error: Exception, *, is_folder: bool) -> str:
    """Explain why a model could not be loaded."""
    if (
        isinstance(error, OSError)
        and isinstance(error.__cause__, Exception)
        and not is_folder
    ):
        return hub_problem(name, error.__cause__)
    message = " ".join(str(error).split())[:300]
    return f"{name} is not a vision-language model that can be loaded: {message}"


def _data_url(frame: Frames) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
