"""Captions of LTX-2: Gemma, the connectors behind it, and the states that are cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from videotune.lazy import torch
from videotune.models.base import DiffusersModel
from videotune.models.fingerprint import fingerprint
from videotune.models.loading import load_model
from videotune.models.ltx2_configs import CONNECTORS, text_encoder_class
from videotune.models.ltx2_connectors import (
    AUDIO_CONNECTOR,
    CONNECTOR_BLOCKS,
    CONNECTORS_CLASS,
    VIDEO_CONNECTOR,
    connect,
    has_shared_projection,
    states_before_connectors,
    without_projections,
)
from videotune.models.ltx2_parts import with_connectors
from videotune.models.model_files import read_config
from videotune.models.pipelines import without_logits
from videotune.models.skeletons import on_meta
from videotune.models.tiny import class_of_part
from videotune.types import ClipShape, Conditioning, FillFn

if TYPE_CHECKING:
    from torch import Tensor, nn


class LTX2Text(DiffusersModel):
    """An LTX-2 checkpoint, as far as captions are read.

    Captions are cached after the connectors; if an adapter trains on these
    (``spec.connectors_in_step``), before them.
    """

    @classmethod
    def clean(cls, caption: str) -> str:
        """Return the text that the tokenizer reads."""
        return caption.strip()

    def class_of_text(self, part: str) -> str:
        """Return the class of Gemma, by the checkpoint's index."""
        return text_encoder_class(self.folder)

    def _load_text(self) -> Any:
        """Return a pipeline of tokenizer and Gemma, with the connectors beside them."""
        pipe = super()._load_text()
        pipe.register_modules(connectors=self._connectors_of_text())
        return pipe

    def _connectors_of_text(self, fill: FillFn = None) -> Any:
        """Load what a caption runs through before it is cached.

        What it does not need never takes memory of the device.
        """
        is_before = self.spec.connectors_in_step
        connectors = load_model(
            class_of_part(CONNECTORS_CLASS),
            self.folder / CONNECTORS,
            self.text_dtype,
            self.device,
            stay=torch.device("cpu") if is_before else None,
            fill=fill,
        )
        if not is_before:
            return connectors
        connectors = states_before_connectors(connectors)
        return connectors if fill is not None else connectors.to(self.device)

    def _text_encoder(self, part: str, fill: FillFn = None) -> nn.Module:
        """Load Gemma, without its logits."""
        return without_logits(super()._text_encoder(part, fill))

    def part(self, name: str, fill: FillFn = None) -> nn.Module:
        """Load a part; a text encoder with the connectors, for a plan."""
        net: Any = super().part(name, fill)
        if name == "text_encoder":
            return with_connectors(net, self._connectors_of_text(fill))
        return net

    def encode(self, caption: str) -> dict[str, Tensor]:
        """Return the connectors' states of a caption: "text" (L,D) for the video's
        tokens, "audio_text" (L,D') for the sound's.

        Registers stand where the caption has no token, so all states count. If the
        connectors run in the step, it is what they read of the caption's own tokens;
        without "audio_text" both read the same.
        """
        states, mask, *_ = self.encode_prompt(
            caption, do_classifier_free_guidance=False
        )
        pipe = self.text_pipeline()
        video, sound, _ = pipe.connectors(
            states, mask, padding_side=pipe.tokenizer.padding_side
        )
        if not self.spec.connectors_in_step:
            return {"text": video[0], "audio_text": sound[0]}

        is_token = mask[0].bool()
        encoded = {"text": video[0][is_token]}
        if not self._shares_projection:
            encoded["audio_text"] = sound[0][is_token]
        return encoded

    @property
    def _shares_projection(self) -> bool:
        return has_shared_projection(
            read_config(self.folder / CONNECTORS / "config.json")
        )

    def collate_states(self, states: Sequence[Mapping[str, Tensor]]) -> Conditioning:
        """Stack cached states; those before the connectors are padded with zeros, which
        the mask leaves out.
        """
        if not self.spec.connectors_in_step:
            return super().collate_states(states)
        return super().collate_states([self._padded(each) for each in states])

    def _padded(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a caption's states with those for sound in full length, and its mask."""
        length = len(states["text"])
        missing = self.spec.text_tokens - length
        padded = dict(states)
        if "audio_text" in states:
            padded["audio_text"] = torch.nn.functional.pad(
                states["audio_text"], (0, 0, 0, missing)
            )
        padded["mask"] = torch.arange(self.spec.text_tokens) < length
        return padded

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of a clip's states."""
        states = super().blank_states(shape)
        width = self.spec.text_numbers // self.spec.text_tokens
        if width:
            size = (self.spec.text_tokens, width)
            states["audio_text"] = torch.zeros(size, dtype=self.text_dtype)
        return states

    # connectors in the step

    def denoiser(
        self,
        expert: str | None = None,
        device: torch.device | None = None,
        fill: FillFn = None,
    ) -> nn.Module:
        """Load the transformer, with the connectors as a module of it if they run in the
        step.
        """
        net = super().denoiser(expert, device, fill)
        if self.spec.connectors_in_step:
            net.connectors = self._connectors_of_step(device, fill)
        return net

    def _connectors_of_step(self, device: torch.device | None, fill: FillFn) -> Any:
        """Load the connectors without their projections, quantized as the transformer.

        They are read to the host first, so that the projections never take memory of
        the device.
        """
        connectors = load_model(
            class_of_part(CONNECTORS_CLASS),
            self.folder / CONNECTORS,
            self.dtype,
            self.device,
            packed=self.weights.transformer,
            blocks=CONNECTOR_BLOCKS,
            stay=torch.device("cpu"),
            fill=fill,
            changes=self.weight_changes.get(CONNECTORS),
        )
        connectors = without_projections(connectors)
        if fill is not None:
            return connectors
        return connectors.to(device or self.device)

    def skeleton(self, expert: str | None = None) -> nn.Module:
        """Build the transformer on the meta device, with the connectors as ``denoiser``."""
        net = super().skeleton(expert)
        if self.spec.connectors_in_step:
            net.connectors = without_projections(self.part_skeleton(CONNECTORS))
        return net

    def part_skeleton(self, part: str) -> nn.Module:
        """Build the transformer or the connectors on the meta device."""
        if part != CONNECTORS:
            return super().part_skeleton(part)
        return on_meta(class_of_part(CONNECTORS_CLASS), self.folder / CONNECTORS)

    def text_for_video(self, net: nn.Module, conditioning: Conditioning) -> Tensor:
        """Return the states (B,L,D) of captions that the video's tokens read."""
        text = conditioning.text.to(self.dtype)
        if not self.spec.connectors_in_step:
            return text
        assert conditioning.text_mask is not None
        connector = net.get_submodule(f"{CONNECTORS}.{VIDEO_CONNECTOR}")
        return connect(connector, text, conditioning.text_mask)

    def text_for_sound(self, net: nn.Module, conditioning: Conditioning) -> Tensor:
        """Return the states (B,L,D') of captions that the sound's tokens read."""
        text = conditioning.extras.get("audio_text", conditioning.text).to(self.dtype)
        if not self.spec.connectors_in_step:
            return text
        assert conditioning.text_mask is not None
        connector = net.get_submodule(f"{CONNECTORS}.{AUDIO_CONNECTOR}")
        return connect(connector, text, conditioning.text_mask)

    def blank_text_for_sound(
        self, net: nn.Module, conditioning: Conditioning
    ) -> Tensor:
        """Return one state (B,1,D') for a sound that nothing reads."""
        if not self.spec.connectors_in_step:
            return conditioning.extras["audio_text"][:, :1].to(self.dtype)
        connector: Any = net.get_submodule(f"{CONNECTORS}.{AUDIO_CONNECTOR}")
        samples = len(conditioning.text)
        return conditioning.text.new_zeros(
            samples, 1, connector.inner_dim, dtype=self.dtype
        )

    def fingerprints(self) -> dict[str, str]:
        """Return the parts' hashes; the text encoder's has the connectors', because the
        cache holds their states, or those of their projections.
        """
        prints = super().fingerprints()
        connectors = fingerprint(self.folder / CONNECTORS)
        prints["text_encoder"] = f"{prints['text_encoder']}-{connectors}"
        return prints


def captions_of(conditioning: Conditioning) -> Conditioning:
    """Return only the captions' states of a conditioning."""
    extras = {}
    if "audio_text" in conditioning.extras:
        extras["audio_text"] = conditioning.extras["audio_text"]
    return Conditioning(conditioning.text, conditioning.text_mask, extras)


def joined(first: Conditioning, second: Conditioning) -> Conditioning:
    """Return the captions of two conditionings in one batch."""
    mask = None
    if first.text_mask is not None and second.text_mask is not None:
        mask = torch.cat([first.text_mask, second.text_mask])
    extras = {
        name: torch.cat([value, second.extras[name]])
        for name, value in first.extras.items()
    }
    return Conditioning(torch.cat([first.text, second.text]), mask, extras)
