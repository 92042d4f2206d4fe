"""Keys of a config that do not go together with products in eight bits."""

from collections.abc import Iterator

from videotune.config.schema import Config


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
