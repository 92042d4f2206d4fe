"""The bare script that ``step.py`` measures against: load, add a LoRA, read one cached
batch, take a step. Nothing else.

Usage: python benchmarks/bare.py TRANSFORMER_FOLDER CACHED_BATCH
"""

import sys

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from safetensors.torch import load_file

net = WanTransformer3DModel.from_pretrained(
    sys.argv[1], dtype=torch.float32
).requires_grad_(False)
net.add_adapter(
    LoraConfig(
        r=16,
        target_modules=[
            "to_q",
            "to_k",
            "to_v",
            "to_out.0",
            "ffn.net.0.proj",
            "ffn.net.2",
        ],
    )
)
parameters = [p for p in net.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
batch = load_file(sys.argv[2])
x_t = (1 - batch["t"].view(-1, 1, 1, 1, 1)) * batch["x0"] + batch["t"].view(
    -1, 1, 1, 1, 1
) * batch["noise"]
out = net(
    hidden_states=x_t,
    timestep=batch["t"] * 1000,
    encoder_hidden_states=batch["text"],
    return_dict=False,
)[0]
loss = (out - (batch["noise"] - batch["x0"])).square().mean()
loss.backward()
optimizer.step()
print(f"first step {loss.item():.4f}", flush=True)
