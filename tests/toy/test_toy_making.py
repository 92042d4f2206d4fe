"""research/make_toy.py at a setting of seconds: every stage runs, and a kill at any of
them changes nothing.
"""

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_toy
import pytest
import torch
from safetensors.torch import load_file
from toymaking import autoencoder, text, whole_clip
from toymaking.recipe import TINY

from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.models.base_model import place, spec_for
from videotune.toy.shapes import HELD_OUT, KNOWN
from videotune.trainer import saving

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole making that nothing disturbed."""
    out = tmp_path_factory.mktemp("made")
    make_toy.main(["--out", str(out), "--tiny"])
    return out


def killed_after(module: Any, name: str, calls: int, work: Callable[[], None]) -> None:
    """Run ``work`` in a process that is killed once ``module.name`` has returned so
    many times.
    """
    child = os.fork()
    if child == 0:
        own, done = getattr(module, name), 0

        def counted(*words: Any, **named: Any) -> Any:
            nonlocal done
            out = own(*words, **named)
            done += 1
            if done == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return out

        setattr(module, name, counted)
        try:
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it was to be killed"


def test_one_command_makes_a_checkpoint_that_the_real_code_loads(made: Path) -> None:
    base = place(str(made / "toy-0"))
    spec = spec_for(None, base)
    assert (spec.title, spec.latent_channels, spec.text_width) == (
        "Wan 2.1 T2V",
        TINY.channels,
        TINY.text_width,
    )
    facts = read_json(made / "toy.json")
    assert facts["recipe"]["transformer_steps"] == TINY.transformer_steps
    assert set(facts["checkpoints"]) == {"seed 0, float16", "seed 0, float32"}
    assert all(
        scored["n"] == 1 and scored["psnr"]["base"] > 0
        for scored in facts["checkpoints"].values()
    )
    assert [line["step"] for line in facts["curves"]["autoencoder"]] == [1, 2, 3, 4]
    assert facts["curves"]["transformer 0"][-1]["step"] == TINY.transformer_steps
    stored = load_file(made / "toy-0" / "transformer" / WEIGHTS)
    assert {value.dtype for value in stored.values()} == {torch.float16}
    assert not any(
        str(made) in path.read_text() for path in (made / "toy-0").rglob("*.json")
    )
    assert {path.name for path in (made / "pictures").iterdir()} == {
        "toy-samples.png",
        "toy-autoencoder.png",
    }


def test_the_transformer_is_trained_on_no_held_out_look(made: Path) -> None:
    names = {
        path.stem.split("-", 1)[1]
        for path in (made / "clips" / "known" / "videos").iterdir()
    }
    assert names == {"-".join(look) for look in KNOWN[: TINY.looks]}
    assert not names & {"-".join(look) for look in HELD_OUT}
    kept = read_json(made / "run-0" / "config.json")["settings"]["datasets"]
    assert [Path(row["path"]).name for row in kept if row["kind"] != "validation"] == [
        "known"
    ]


def test_a_making_that_was_killed_in_two_stages_makes_the_same_bits(
    made: Path, tmp_path: Path
) -> None:
    def work() -> None:
        make_toy.main(["--out", str(tmp_path), "--tiny", "--until", "assemble"])

    killed_after(autoencoder, "keep", 2, work)
    killed_after(saving, "save", 2, work)
    work()
    for part in ("vae", "transformer"):
        ours, theirs = (
            load_file(folder / "toy-0" / part / WEIGHTS) for folder in (tmp_path, made)
        )
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_folder_of_another_recipe_is_refused(made: Path) -> None:
    with pytest.raises(
        VideotuneError, match="begun with another recipe \\(autoencoder_steps 4\\)"
    ):
        make_toy.main(["--out", str(made), "--tiny", "--steps-autoencoder", "5"])


def test_a_whole_clip_at_once_is_the_autoencoders_own_walk_through_it() -> None:
    vae = autoencoder.fresh(TINY)
    clip = autoencoder.batch(0, 1, 9, 2)
    with torch.no_grad():
        for parameter in vae.parameters():
            # biases begin at 0, and would hide what padding does
            if parameter.ndim == 1:
                parameter.normal_(std=0.2)
        latents = vae.encode(clip).latent_dist.mode()
        assert (whole_clip.encode(vae, clip) - latents).abs().max() < 1e-5
        assert (
            whole_clip.decode(vae, latents).clamp(-1, 1) - vae.decode(latents).sample
        ).abs().max() < 1e-5


def test_the_words_of_the_captions_are_single_pieces_and_any_other_word_is_spelt() -> (
    None
):
    words = text.tokenizer()
    assert words.tokenize("a purple triangle going down") == [
        "▁a",
        "▁purple",
        "▁triangle",
        "▁going",
        "▁down",
    ]
    assert words.tokenize("zorble") == ["▁", *"zorble"]
    assert words.unk_token not in words.tokenize("The Zorble, 7 of (them)!")
