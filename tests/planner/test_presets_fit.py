"""Presets fit the cards that their names, or what is said of them, are for: by the plan, on published configs."""

from pathlib import Path

import pytest

from videotune.models.base_model import published
from videotune.planner.fit import asked_card, fit
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.run_spec import open_job

MODELS = {
    "wan 2.2 LoRA": ("wan2.2-ti2v-5b", 12),
    "wan 2.2 LoRA 8GB": ("wan2.2-ti2v-5b", 8),
    "wan 2.2 Finetune": ("wan2.2-ti2v-5b", 180),
    "wan 2.2 Embedding": ("wan2.2-ti2v-5b", 16),
    "wan 2.2 A14B LoRA 8GB": ("wan2.2-t2v-a14b", 8),
    "wan 2.2 A14B LoRA 12GB": ("wan2.2-t2v-a14b", 12),
    "wan 2.2 A14B LoRA 24GB": ("wan2.2-t2v-a14b", 24),
    "wan 2.2 A14B LoRA 48GB": ("wan2.2-t2v-a14b", 48),
    "wan 2.2 A14B I2V LoRA 24GB": ("wan2.2-i2v-a14b", 24),
    "wan 2.2 A14B I2V LoRA 48GB": ("wan2.2-i2v-a14b", 48),
    "wan 2.1 1.3B LoRA 16GB": ("wan2.1-t2v-1.3b", 16),
    "wan 2.1 14B LoRA 48GB": ("wan2.1-t2v-14b", 48),
    "wan 2.1 I2V 14B LoRA 48GB": ("wan2.1-i2v-14b-480p", 48),
    "ltx 2B LoRA 12GB": ("ltx-video-2b", 12),
    "ltx 2B LoRA 24GB": ("ltx-video-2b", 24),
    "ltx 13B LoRA 24GB": ("ltx-video-13b", 24),
    "ltx 13B LoRA 48GB": ("ltx-video-13b", 48),
    "hunyuan 13B LoRA 16GB": ("hunyuan-video-13b", 16),
    "hunyuan 13B LoRA 24GB": ("hunyuan-video-13b", 24),
    "hunyuan 13B LoRA 48GB": ("hunyuan-video-13b", 48),
    "hidream LoRA 16GB": ("hidream-i1", 16),
    "hidream LoRA 24GB": ("hidream-i1", 24),
    "hidream LoRA 48GB": ("hidream-i1", 48),
    "hidream LoRA 80GB": ("hidream-i1", 80),
    "cogvideox 2B LoRA 24GB": ("cogvideox-2b", 24),
    "cogvideox 5B LoRA 24GB": ("cogvideox-5b", 24),
    "cogvideox 5B I2V LoRA 24GB": ("cogvideox-5b-i2v", 24),
    "cogvideox 1.5 5B LoRA 80GB": ("cogvideox-1.5-5b", 80),
    "cogvideox 1.5 5B I2V LoRA 80GB": ("cogvideox-1.5-5b-i2v", 80),
}


@pytest.fixture(scope="module")
def long_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A square clip of seven seconds at 24 fps; the plan reads its facts alone."""
    import numpy as np

    from videotune.toy.dataset import encode_clip

    folder = tmp_path_factory.mktemp("long")
    ramp = np.linspace(0, 255, 168 * 32 * 32 * 3).reshape(168, 32, 32, 3).astype(np.uint8)
    encode_clip(folder / "a.mp4", ramp, 24.0)
    (folder / "a.txt").write_text("a ramp")
    return folder


def test_every_preset_of_a_model_is_planned() -> None:
    from videotune.config.load import memory_class, preset_names

    assert set(MODELS) == set(preset_names()) - {"toy"}
    assert all(memory_class(name) in (None, gb) for name, (_, gb) in MODELS.items())


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_preset_fits_its_cards(name: str, long_clip: Path, tmp_path: Path) -> None:
    model, gb = MODELS[name]
    sets = (f"base_model_name={published(model)}", f"cache_dir={tmp_path / 'cache'}")
    job = open_job(*resolve_config(Overrides(name, data=str(long_clip), sets=sets)))
    limit, card = asked_card(gb, None)
    assert fit(job, "BFLOAT_16", limit, card).fits, name
