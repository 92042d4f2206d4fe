"""Dtypes of weights and products that do not go together with other keys."""

from collections.abc import Iterator
from typing import Any

from videotune.config.schema import Config


def faults_with_float16(config: Config) -> Iterator[str]:
    """Yield what does not go together with train_dtype FLOAT_16."""
    reason = cannot_train_in_float16(config)
    if config.train_dtype == "FLOAT_16" and reason:
        yield f"train_dtype: {reason}. Set it to BFLOAT_16 or FLOAT_32"


def cannot_train_in_float16(config: Config) -> str | None:
    """Return why a config cannot train in float16, or None."""
    if config.training_method == "FINE_TUNE":
        return "FLOAT_16 is for an adapter or new tokens; weights of FINE_TUNE would train in float16 themselves"
    if config.optimizer.step_in_backward:
        return "in FLOAT_16 gradients are used once all are known to be finite, not within backward (optimizer.step_in_backward)"
    return None


def faults_with_eight_bits(config: Config) -> Iterator[str]:
    """Yield what does not go together with ``transformer.matmul_dtype``."""
    matmul_dtype = config.transformer.matmul_dtype
    if matmul_dtype == "auto":
        return

    if config.training_method == "FINE_TUNE" and config.transformer.train:
        yield (
            f"transformer.matmul_dtype: FINE_TUNE trains the transformer, and {matmul_dtype} is for frozen weights: "
            "updates are smaller than its steps. Leave it out"
        )

    is_own_key = config.transformer.weight_dtype != "auto"
    weight_dtype = config.weight_dtype
    if is_own_key:
        weight_dtype = config.transformer.weight_dtype
    if weight_dtype not in ("auto", config.train_dtype, matmul_dtype):
        key = "transformer.weight_dtype" if is_own_key else "weight_dtype"
        yield (
            f"{key}: products in {matmul_dtype} (transformer.matmul_dtype) keep their weights in {matmul_dtype}, not in "
            f"{weight_dtype}. Set transformer.weight_dtype to {matmul_dtype}"
        )


def faults_with_trained_weights(config: Config) -> Iterator[str]:
    """Yield faults of weights that train and would be stored in another dtype, whose
    steps are larger than updates.
    """
    parts: dict[str, Any] = {
        "transformer": config.transformer,
        "text_encoder": config.text_encoder,
    }
    for name, part in parts.items():
        is_own_key = part.weight_dtype != "auto"
        weight_dtype = part.weight_dtype if is_own_key else config.weight_dtype
        if not part.train or weight_dtype in ("auto", config.train_dtype):
            continue

        key = f"{name}.weight_dtype" if is_own_key else "weight_dtype"
        remedy = "Leave it out."
        if not is_own_key:
            frozen_part = "text_encoder" if name == "transformer" else "transformer"
            remedy = f"Leave it out, or set only {frozen_part}.weight_dtype."
        yield (
            f"{key}: FINE_TUNE trains the {name.replace('_', ' ')}, and {weight_dtype} is for frozen weights: "
            f"weights that train are in train_dtype. {remedy}"
        )
