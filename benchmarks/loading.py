"""Memory and seconds of loading 1.6 GB of random weights, by diffusers and by us, each
in a process of its own.

python benchmarks/loading.py [FOLDER] [--tiny] prints a line a way. FOLDER keeps the
weights for the next time.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import videotune  # noqa: F401  (before bitsandbytes, which it tells not to ask for a package)

WAYS = (
    "diffusers float32",
    "ours float32",
    "diffusers bfloat16",
    "ours bfloat16",
    "ours-one-file bfloat16",
    "text float32",
    "text bfloat16",
    "ours-FLOAT_8 bfloat16",
    "ours-NFLOAT_4 bfloat16",
    "text-FLOAT_8 bfloat16",
)


def make(folder: Path, tiny: bool) -> None:
    """A Wan of 0.4 billion parameters in five files, the same in one file with its
    authors' names, and a UMT5.
    """
    import torch
    from diffusers import WanTransformer3DModel
    from safetensors.torch import save_file
    from transformers import UMT5Config, UMT5EncoderModel

    from videotune.models.key_names import rename_key
    from videotune.models.registry import find

    torch.manual_seed(0)
    net = WanTransformer3DModel(
        num_attention_heads=1 if tiny else 12,
        attention_head_dim=128,
        ffn_dim=64 if tiny else 8960,
        num_layers=8,
        text_dim=64 if tiny else 4096,
    )
    net.save_pretrained(folder / "net", max_shard_size="400MB")
    (folder / "one").mkdir()
    (folder / "one" / "config.json").write_bytes(
        (folder / "net" / "config.json").read_bytes()
    )
    names: Any = find("wan")
    named = {
        rename_key(name, names.original_names): value
        for name, value in net.state_dict().items()
    }
    save_file(named, folder / "one" / "diffusion_pytorch_model.safetensors")
    sizes = (100, 64, 64, 1) if tiny else (60_000, 2048, 5120, 32)
    vocabulary, width, inner, heads = sizes
    text = UMT5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=64,
        d_ff=inner,
        num_layers=6,
        num_heads=heads,
    )
    UMT5EncoderModel(text).save_pretrained(folder / "text", max_shard_size="400MB")


def resident(what: str) -> float:
    """MB, as Linux counts them for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def measure(folder: Path, way: str, dtype_name: str) -> None:
    """Load once and print the peak and what stays; the peak is counted from just
    before.
    """
    import torch
    from diffusers import WanTransformer3DModel
    from transformers import UMT5EncoderModel

    from videotune.config.fields import ROUNDED
    from videotune.models.loading import load_model

    way, _, kept = way.rpartition("-") if way.endswith(ROUNDED) else (way, "", None)
    dtype = getattr(torch, dtype_name)
    part = {"ours-one-file": "one", "text": "text"}.get(way, "net")
    cls = UMT5EncoderModel if way == "text" else WanTransformer3DModel
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    if way == "diffusers":
        net = cls.from_pretrained(folder / part, dtype=dtype)
    else:
        net = load_model(
            cls,
            folder / part,
            dtype,
            torch.device("cpu"),
            kept,
            ("blocks",) if part != "text" else (),
        )
    seconds = time.perf_counter() - start
    size = sum(x.numel() * x.element_size() for x in net.parameters()) / 2**20
    peak = resident("VmHWM") - before
    after = resident("VmRSS") - before
    own = resident("RssAnon")
    print(
        f"{way:14} {kept or '':8} {dtype_name:9} "
        f"model {size:5.0f} MB, peak {peak:5.0f} MB ({peak / size:.2f}), after {after:5.0f} MB, "
        f"of the process's own {own:.0f} MB, {seconds:.1f} s",
        flush=True,
    )


def main() -> None:
    """Measure each way, on weights that are made where they are not there."""
    named = [word for word in sys.argv[1:] if word != "--tiny"]
    folder = Path(named[0]) if named else Path(tempfile.mkdtemp())
    tiny = "--tiny" in sys.argv
    if not (folder / "text").is_dir():
        make(folder, tiny)
    for way in WAYS[:2] if tiny else WAYS:
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        subprocess.run(
            [sys.executable, __file__, str(folder), *way.split()], env=env, check=True
        )


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        main()
