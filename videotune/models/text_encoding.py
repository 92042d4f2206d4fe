"""Captions in states: how a checkpoint's tokenizers and text encoders are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from videotune.errors import VideotuneError
from videotune.lazy import torch
from videotune.models.autoencoding import AutoencodingCheckpoint
from videotune.models.loading import count_tokens
from videotune.types import Conditioning

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.model_spec import ModelSpec
    from videotune.types import ClipShape


class TextEncodingCheckpoint(AutoencodingCheckpoint):
    """A checkpoint whose text encoders read captions."""

    embedding_names: ClassVar[Mapping[str, str]] = {}
    """Key of new tokens in ComfyUI's embedding files, by text encoder.

    Empty: no such files.
    """

    tokens_in_front: ClassVar[int] = 0
    """Tokens that ``clean`` adds before the caption."""

    @classmethod
    def with_authors_text(cls, spec: ModelSpec) -> ModelSpec:
        """Return the spec of a checkpoint whose captions are read as by the authors'
        code.

        Raises:
            VideotuneError: if diffusers' pipeline reads them alike.
        """
        if not spec.authors_read_otherwise:
            raise VideotuneError(
                f"text_encoder.convention: for {spec.title} no other than diffusers' is "
                "known here. Remove the key."
            )
        return replace(spec, authors_text=True)

    @classmethod
    def clean(cls, caption: str) -> str:
        """Return the text that the tokenizer reads; T5's reads any white space as one
        space.
        """
        return " ".join(caption.split())

    @classmethod
    def token_lengths(cls, folder: Path, captions: Sequence[str]) -> list[int] | None:
        """Return each caption's number of tokens, marks included, without torch.

        None if there is no tokenizer.json.
        """
        texts = [cls.clean(caption) for caption in captions]
        counts = count_tokens(folder / "tokenizer", texts)
        if counts is None:
            return None
        return [count - cls.tokens_in_front for count in counts]

    def text_length(self, caption: str) -> int:
        """Return the caption's number of tokens, marks included, before any cut.

        Captions with more than ``spec.text_tokens`` are cut.
        """
        ids = (
            self.text_pipeline().tokenizer(self.clean(caption), verbose=False).input_ids
        )
        return len(ids) - self.tokens_in_front

    def encode_prompt(self, caption: str, **arguments: Any) -> Any:
        """Call the pipeline's ``encode_prompt`` for a caption in full length."""
        return self.text_pipeline().encode_prompt(
            caption,
            max_sequence_length=self.spec.text_tokens,
            device=self.device,
            **arguments,
        )

    def encode(self, caption: str) -> dict[str, Tensor]:
        """Return the pipeline's states of a caption in full length, as ``collate_states``
        takes them.

        "text" (L,D), and "mask" (L,) if the pipeline gives one, True where the caption
        is.
        """
        text, mask, *_ = self.encode_prompt(caption, do_classifier_free_guidance=False)
        states = {"text": text[0]}
        if mask is not None:
            states["mask"] = mask[0]
        return states

    def trimmed(self, caption: str, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the states to cache: all, if the states of padding act on the sample."""
        return states

    def encode_text(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """Return the states of each caption that the cache keeps (see ``trimmed``), on the
        CPU: {"text": (l, D), …}.
        """
        encoded = []
        with torch.no_grad():
            for caption in captions:
                states = self.trimmed(caption, self.encode(caption))
                encoded.append(
                    {name: value.cpu().clone() for name, value in states.items()}
                )
        return encoded

    def encode_in_loop(self, captions: Sequence[str]) -> Conditioning:
        """Encode captions now, on the run's device, with gradients if they are on.

        Each distinct caption is encoded on its own, so no caption depends on its
        neighbours.
        """
        states = {caption: self.encode(caption) for caption in dict.fromkeys(captions)}
        return self.collate_states([states[caption] for caption in captions])

    def collate_states(self, states: Sequence[Mapping[str, Tensor]]) -> Conditioning:
        """Pad and stack cached states exactly as the pipeline feeds them.

        Text becomes (B,L,D) with zeros after its end, "mask" (B,L) the text's mask, and
        all other states (a clip's extras) are stacked in ``extras``. L is the model's
        limit of tokens (``spec.text_tokens``) or, for a network that reads one length at a
        time, the length of the longest of these captions.
        """
        lengths = tuple(len(state["text"]) for state in states)
        by_length = self.spec.text_by_length
        longest = max(lengths) if by_length else self.spec.text_tokens
        text_rows = []
        for state in states:
            missing = longest - len(state["text"])
            text_rows.append(torch.nn.functional.pad(state["text"], (0, 0, 0, missing)))
        extras = {}
        for name in states[0]:
            if name != "text":
                extras[name] = torch.stack([state[name] for state in states])
        mask = extras.pop("mask", None)
        return Conditioning(
            torch.stack(text_rows), mask, extras, lengths if by_length else None
        )

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of the states of one clip and a caption of full
        length.
        """
        size = (self.spec.text_tokens, self.spec.text_width)
        text = {"text": torch.zeros(size, dtype=self.text_dtype)}
        return text | self.blank_channels(shape)

    def embedding_keys(self) -> Mapping[str, Mapping[str, str]]:
        """Return each text encoder's key in embedding files, by format.

        An empty mapping: the token is the key, and each token has a file of its own.
        """
        keys: dict[str, Mapping[str, str]] = {"diffusers": {}}
        if self.embedding_names:
            keys["comfyui"] = self.embedding_names
        return keys
