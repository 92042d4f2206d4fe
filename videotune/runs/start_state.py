"""What a run began with: the base model, or weights that ``init_from`` names.

Errors, previews and samples of step 0 are of that state, and later ones are relative to it.
"""

from dataclasses import dataclass
from typing import Any

KINDS = {
    "LORA": "the LoRA it began with",
    "FINE_TUNE": "the weights it began with",
    "EMBEDDING": "the embedding it began with",
}
"""How the weights of ``init_from`` are called, by the training method."""


@dataclass(frozen=True)
class StartState:
    """The state of a run before its first step, as sentences name it."""

    name: str = "the base model"
    """In a sentence."""

    label: str = "base"
    """Beside a picture or a curve."""

    source: str = ""
    """The file or folder that ``init_from`` names; empty for the base model."""

    @property
    def is_base(self) -> bool:
        """Whether the run began with the base model alone."""
        return not self.source

    @property
    def emphasised(self) -> str:
        """The name where the run is compared with nothing less."""
        return f"{self.name} itself" if self.is_base else self.name

    @property
    def error_share(self) -> str:
        """What errors are shares of: behind a percentage."""
        return f"{self.name}'s" if self.is_base else f"that of {self.name}"

    @property
    def error(self) -> str:
        """What errors are shares of."""
        return f"{self.name}'s error" if self.is_base else f"the error of {self.name}"

    def error_on(self, clips: str) -> str:
        """Return what errors on some clips are shares of."""
        if self.is_base:
            return f"{self.name}'s error on {clips}"
        return f"the error that {self.name} had on {clips}"


def start_state(init_from: Any, training_method: Any) -> StartState:
    """Return what a run began with, by its settings, which may be damaged."""
    if not isinstance(init_from, str) or not init_from:
        return StartState()
    name = KINDS.get(str(training_method), "what it began with")
    return StartState(name=name, label="start", source=init_from)
