"""Learning rates that are usual for a training method, and which of a config's are far
above them.
"""

from collections.abc import Iterator

from videotune.config.optimizer_classes import is_class
from videotune.config.optimizers import finds_its_rate
from videotune.config.schema import Config
from videotune.text import plain

USUAL_RATES = {"LORA": 1e-4, "FINE_TUNE": 1e-5, "EMBEDDING": 1e-3}
"""The learning rate of each training method by default."""

TOY = "asset:toy"
TOY_RATE = 1e-3
"""The usual rate of the toy model, by any method: it is small."""

FAR_RATE = 30
"""From this multiple of the usual rate on, a run is warned before it begins. Presets set
at most 10 times the usual rate.
"""

TOO_HIGH = "the training may break"
"""What a rate far above the usual one does."""

TOO_LOW = "it hardly learns"
"""What a rate far below the usual one does."""


def far_rates(config: Config) -> dict[str, str]:
    """Return a sentence for each learning rate far above the usual one, by its key."""
    if not _has_usual_scale(config.optimizer.name):
        return {}

    notes = {}
    for key, rate, usual in _rates(config):
        if rate < FAR_RATE * usual:
            continue
        times = plain(round(rate / usual))
        notes[key] = (
            f"{key} {rate:g} is {times} times the usual {usual:g}: {TOO_HIGH}, and its "
            f"samples become noise. If it is not meant, set {key}={usual:g}"
        )
    return notes


def _has_usual_scale(optimizer: str) -> bool:
    """Return whether an optimizer's updates are of the rate's size, as AdamW's are.

    PRODIGY and its like multiply a rate that they find. The updates of other classes, such
    as SGD, follow the size of the gradient, and their rates may be 0.1 and more.
    """
    if finds_its_rate(optimizer):
        return False
    return not is_class(optimizer) or "Adam" in optimizer or "Lion" in optimizer


def _rates(config: Config) -> Iterator[tuple[str, float, float]]:
    """Yield the key of each learning rate, its value and the usual one."""
    usual = USUAL_RATES[config.training_method]
    usual_of_embeddings = USUAL_RATES["EMBEDDING"]
    if config.base_model_name == TOY:
        usual = usual_of_embeddings = TOY_RATE

    yield "learning_rate", config.learning_rate, usual
    optional_rates = {
        "learning_rate_low": (config.learning_rate_low, usual),
        "embedding_learning_rate": (
            config.embedding_learning_rate,
            usual_of_embeddings,
        ),
        "text_encoder.learning_rate": (config.text_encoder.learning_rate, usual),
    }
    for key, (rate, usual_rate) in optional_rates.items():
        if rate is not None:
            yield key, rate, usual_rate
    for modules in config.lora.modules:
        if modules.learning_rate is not None:
            yield "lora.modules.learning_rate", modules.learning_rate, usual
