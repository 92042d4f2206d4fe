"""Real models by their published configs, laid out without weights; and what a real step really allocates."""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[2]
UMT5 = {"model_type": "umt5", "d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24}
T5 = {"model_type": "t5", "d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24}
T5_XXL = T5 | {"vocab_size": 32128, "feed_forward_proj": "gated-gelu"}
CLIP = {"model_type": "clip_text_model", "max_position_embeddings": 248, "vocab_size": 49408}
CLIP_L = CLIP | {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
TEXT: dict[str, dict[str, dict[str, Any]]] = {
    "wan": {"text_encoder": UMT5 | {"vocab_size": 256384, "feed_forward_proj": "gated-gelu"}},
    "cogvideox": {"text_encoder": T5_XXL},
    "hunyuan": {
        "text_encoder": LLAMA | {"vocab_size": 128320, "rope_theta": 500000.0},
        "text_encoder_2": CLIP_L | {"eos_token_id": 2, "max_position_embeddings": 77},
    },
    "hidream": {
        "text_encoder": CLIP_L | {"projection_dim": 768},
        "text_encoder_2": CLIP | {
            "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
            "projection_dim": 1280, "hidden_act": "gelu",
        },
        "text_encoder_3": T5_XXL,
        "text_encoder_4": LLAMA,
    },
}  # fmt: skip
"""Public configs of text encoders, by a model's first word: UMT5-XXL, T5 v1.1 XXL, Llama 3.1 8B, CLIP-L and CLIP-G."""


def writer() -> ModuleType:
    if "write_manifests" not in sys.modules:
        spec = importlib.util.spec_from_file_location("write_manifests", ROOT / "scripts" / "write_manifests.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["write_manifests"] = module
        spec.loader.exec_module(module)
    return sys.modules["write_manifests"]


def laid_out(name: str, folder: Path | None = None) -> Path:
    """The published model ``name`` as a folder of configs: enough for a plan."""
    made = writer().lay_out(name, (folder or Path(tempfile.mkdtemp())) / name)
    for part, config in next((TEXT[word] for word in TEXT if name.startswith(word)), TEXT["cogvideox"]).items():
        (made / part).mkdir(exist_ok=True)
        (made / part / "config.json").write_text(json.dumps(config))
    return made


def allocated(step: Any, standing: int) -> int:
    """Bytes that were held at the most while ``step()`` ran on the CPU, by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    held, most = standing, standing
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def bytes_of(net: nn.Module, *more: Any) -> int:
    """Bytes of a network's storages and of other tensors."""
    tensors = [*net.parameters(), *net.buffers(), *(t for group in more for t in group if isinstance(t, torch.Tensor))]
    return sum(s.nbytes() for s in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())
