"""Twenty losses of a tiny model, written down once: a change that moves them must say
so.

`make golden` compares bit for bit, on the machine that wrote them; elsewhere 1e-4 is
allowed. Written anew by `python tests/trainer/test_golden.py`.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from videotune.adapters.lora import add_lora
from videotune.config.schema import Config, Optimizer
from videotune.config.sections import Lora
from videotune.diffusion.loss import objective_for_prediction
from videotune.diffusion.timesteps import TimestepSampler
from videotune.distributed import DistributedContext
from videotune.latent_cache.batch_source import BatchSource
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.sampler import ExpertSchedule, Schedule
from videotune.latent_cache.store import LatentCache
from videotune.models.registry import find
from videotune.rng import generator_for
from videotune.trainer.expert_pool import ExpertPool
from videotune.trainer.loop import train_steps
from videotune.trainer.lr_schedule import LRSchedule
from videotune.trainer.optimizers import make_optimizer
from videotune.trainer.step_context import TrainableState
from videotune.types import Clip, ClipShape, Window

GOLDEN = Path(__file__).parent.parent / "golden" / "wan_tiny_lora.json"


def losses(base: Path, folder: Path) -> list[float]:
    """20 steps of batch 3 in micro-batches of 2, two buckets, over latents that no
    encoder made.
    """
    torch.set_num_threads(1)
    family = find("wan")(base, torch.device("cpu"), torch.float32)
    store, keys = LatentCache(folder), CacheKeys("none", "none", 512, 7)
    shapes = (ClipShape(9, 32, 32, 16.0), ClipShape(5, 32, 48, 16.0))
    buckets, clips = [], {}
    for shape in shapes:
        bucket = []
        for i in range(4):
            window = Window(f"{shape.frames}{i}" * 16, 0.0, 1.0, shape)
            size = (4, *family.spec.rules.latent_size(shape))
            latents = generator_for(0, "golden", window.id).standard_normal(
                size, "float32"
            )
            store.put(
                "latents",
                keys.latents_key(keys.frame_sample(window, 0)),
                {"mean": torch.from_numpy(latents)},
                {},
            )
            clips[window.clip_id] = Clip(
                window.clip_id, "", "", (f"clip {i}", f"the same clip {i}")
            )
            bucket.append(window)
        buckets.append(tuple(bucket))
    captions = ["", *(caption for clip in clips.values() for caption in clip.captions)]
    for caption, states in zip(captions, family.encode_text(captions), strict=True):
        store.put("text", keys.text_key(caption), states, {})
    loss = objective_for_prediction(
        "flow", {}, TimestepSampler("LOGIT_NORMAL", 3.0), temporal_consistency=0.3
    )
    config = Config(
        caption_dropout=0.1, gradient_accumulation_steps=2, dataloader_threads=0
    )
    source = BatchSource(
        config=config,
        spec=family.spec,
        store=store,
        keys=keys,
        collate_states=family.collate_states,
        clips=clips,
        buckets=tuple(buckets),
        schedule=Schedule(7, tuple(len(bucket) for bucket in buckets), (3, 3)),
        objective=loss,
        sizes={},
    )
    net = family.denoiser()
    parameters = add_lora(net, family.spec, Lora(rank=4, targets="linear"), seed=7)
    optimizer = make_optimizer({"transformer": list(parameters.values())}, Optimizer())
    trainable = TrainableState(
        parameters, optimizer, {"transformer": LRSchedule(3e-2, "COSINE", 3, 20)}
    )
    pool = ExpertPool(ExpertSchedule(("transformer",)), ("transformer",), lambda _: net)
    pool.trainables = {"transformer": trainable}
    assert pool["transformer"] is net, "it is in memory"
    job = SimpleNamespace(config=config, steps=20, processes=1)
    alone = {
        "first_step": 1,
        "dist": DistributedContext(),
        "weights_sharded": False,
        "gradient_norms": None,
        "peaks": {},
    }
    trainer: Any = SimpleNamespace(
        job=job,
        family=family,
        device=family.device,
        pool=pool,
        net=net,
        source=source,
        **alone,
    )
    records = train_steps(trainer)
    return [float(record.read()["loss"]) for record in records]


def test_golden_losses(
    tiny_bases: Callable[[str], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected: list[Any] = json.loads(GOLDEN.read_text())
    got = losses(tiny_bases("wan"), tmp_path)
    if request.config.getoption("--bit-for-bit"):
        assert got == expected
    assert got == pytest.approx(expected, rel=1e-4)
    assert len(set(got)) == 20


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        found = losses(find("wan").tiny(Path(name) / "base"), Path(name) / "cache")
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
        print(GOLDEN.read_text(), file=sys.stderr)
