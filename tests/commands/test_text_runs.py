"""New tokens and text encoders that train: whole runs, what they leave on the disk, and
who reads it.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.command_line import Bases, export, sample, train
from tests.support.run_processes import Finished, Work, resume
from tests.support.run_results import of_kind, state, steps_of
from videotune.adapters.layers import LiveText, add_rows
from videotune.commands.sample_options import SampleOptions
from videotune.config.sections import Embedding, token_names
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json
from videotune.latent_cache.store import LatentCache
from videotune.reporter.build import environment, fill
from videotune.reporter.inventory import use
from videotune.reporter.read import read_run
from videotune.trainer.text_encoders import encode_live_text
from videotune.types import Batch

TOKEN = "<zorble>"
NAME = "weights/embedding.text_encoder"
TOKENS = (
    "training_method=EMBEDDING",
    f"embedding.token={TOKEN}",
    "embedding.vectors=2",
    "learning_rate=0.05",
)
RATES = ("learning_rate=0.001", "text_encoder.learning_rate=0.01")
TEXT = ("training_method=FINE_TUNE", "text_encoder.train=true", *RATES)


SHORT = ("steps=3", "sample.steps=1", "samples=1", "gradient_checkpointing=OFF")


@pytest.fixture
def run(finished: Finished) -> Path:
    """A run whose new tokens are exported in both forms, over a cache of its own."""
    return finished(
        *SHORT, *TOKENS, "ema=0.5", 'output_model_format=["diffusers", "comfyui"]'
    )


def exported(run: Path) -> list[Path]:
    return [run / line["path"] for line in read_json(run / "exports.json")]


def test_new_tokens_alone_are_saved_and_the_cache_holds_latents_alone(
    work: Work,
) -> None:
    run = work.finished(*SHORT, *TOKENS, "ema=0.5", f"cache_dir={work.tmp / 'cache'}")
    weights = state(run, 3)
    assert {name for name in weights if name.startswith("weights/")} == {NAME}
    assert weights[NAME].shape == (2, 16)
    assert not torch.equal(weights[NAME], weights[NAME.replace("weights", "ema")])
    assert [line["lr"] for line in steps_of(run)] == [{"embedding": 0.05}] * 3
    assert {entry.kind for entry in LatentCache(work.tmp / "cache").entries()} == {
        "latents"
    }
    notes = of_kind(run, "start")[0]["notes"]
    assert (
        f"6 of 6 captions do not contain '{TOKEN}': it is put in front of them" in notes
    )
    for key in ("embedding.token=<y>", 'text_encoder.layers=["shared"]'):
        with pytest.raises(VideotuneError, match=key.partition("=")[0]):
            resume(run, key)


def test_diffusers_reads_the_file_to_the_very_prompt_embeddings(
    run: Path, tiny_bases: Bases, tiny_family: Callable[..., Any]
) -> None:
    """By its own loader, beside a pipeline that has none; and so does transformers by
    hand, as its documentation shows.
    """
    from diffusers import WanPipeline
    from diffusers.loaders import TextualInversionLoaderMixin

    class Pipeline(WanPipeline, TextualInversionLoaderMixin):
        pass

    file, comfy = exported(run)
    rows = load_file(file)[TOKEN]
    assert torch.equal(rows, state(run, 3)["ema/embedding.text_encoder"]), (
        "averages are exported where they are kept"
    )
    family = tiny_family("wan")
    settings = Embedding(token=TOKEN, vectors=2)
    (ours,) = add_rows(family.text_parts(), settings, seed=0).values()
    ours.data.copy_(rows)
    prompt = f"a {TOKEN} moves left"
    with torch.no_grad():
        wanted = family.encode_in_loop(
            [LiveText(settings.tokens).with_all_tokens(prompt)]
        ).text

    theirs = Pipeline.from_pretrained(tiny_bases("wan"))
    theirs.load_textual_inversion(str(file))
    by_hand = WanPipeline.from_pretrained(tiny_bases("wan"))
    names = token_names(TOKEN, 2)
    by_hand.tokenizer.add_tokens(list(names))
    by_hand.text_encoder.resize_token_embeddings(len(by_hand.tokenizer))
    table = by_hand.text_encoder.get_input_embeddings().weight
    with torch.no_grad():
        table[by_hand.tokenizer.convert_tokens_to_ids(list(names))] = rows
        texts = (
            theirs.maybe_convert_prompt(prompt, theirs.tokenizer),
            prompt.replace(TOKEN, " ".join(names)),
        )
        for pipe, text in zip((theirs, by_hand), texts, strict=True):
            found, _ = pipe.encode_prompt(
                text, do_classifier_free_guidance=False, max_sequence_length=512
            )
            assert torch.equal(found, wanted)
    assert set(load_file(comfy)) == {"umt5xxl"}
    assert torch.equal(load_file(comfy)["umt5xxl"], rows)


def test_the_code_of_the_report_generates_with_the_new_tokens(
    run: Path, tiny_bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It converted a prompt that it had not named, and generated with another."""
    monkeypatch.chdir(tiny_bases("wan").parent)
    templates = environment("videotune.reporter").overlay(autoescape=False)
    chapter = use(read_run(run)) | {"prompt": f"a {TOKEN} moves left"}
    code = fill(templates, "use_code.j2", {"d": chapter})
    generating, _, _ = code.partition("export_to_video(video")
    values: dict[str, Any] = {}
    exec(compile(generating, "report", "exec"), values)
    assert f"{TOKEN} {TOKEN}_1" in values["prompt"], "two vectors are two tokens"
    assert len(values["video"]) > 0


def film(path: Path) -> torch.Tensor:
    with av.open(str(path)) as container:
        return torch.stack(
            [
                torch.from_numpy(frame.to_ndarray(format="rgb24"))
                for frame in container.decode(video=0)
            ]
        )


def sampled(out: Path, **words: Any) -> torch.Tensor:
    sets = (
        "sample.steps=1",
        "sample.guidance=1",
        "sample.frames=5",
        "sample.resolution=32x32",
    )
    assert sample(SampleOptions((f"a {TOKEN}",), 1, sets=sets, **words), out) == DONE
    (path,) = out.glob("*.mp4")
    return film(path)


def test_a_run_and_its_files_sample_alike(
    run: Path, tiny_bases: Bases, tmp_path: Path
) -> None:
    base = str(tiny_bases("wan"))
    file, comfy = exported(run)
    plain = tmp_path / "emb" / f"{TOKEN}.safetensors"
    plain.parent.mkdir()
    save_file({"emb_params": load_file(file)[TOKEN]}, plain)
    own = sampled(tmp_path / "run", run=run)
    for number, path in enumerate((file, comfy, plain)):
        assert torch.equal(
            sampled(tmp_path / str(number), base=base, embeddings=(path,)), own
        ), path
    assert not torch.equal(sampled(tmp_path / "base", base=base), own)
    with pytest.raises(VideotuneError, match=r"--embedding needs --base"):
        sampled(tmp_path / "no", run=run, embeddings=(file,))
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "odd.safetensors")
    with pytest.raises(
        VideotuneError, match=r"odd.safetensors holds no new tokens of Wan.*keys a, b"
    ):
        sampled(tmp_path / "odd", base=base, embeddings=(tmp_path / "odd.safetensors",))


@pytest.mark.parametrize("from_file", [True, False], ids=["file", "checkpoint"])
def test_a_run_begins_with_the_tokens_of_another(
    from_file: bool, run: Path, work: Work
) -> None:
    """Under another name too; a fresh optimizer."""
    source = exported(run)[0] if from_file else run / "checkpoints" / "step-3"
    wanted = load_file(source)[TOKEN] if from_file else state(run, 3)[NAME]
    still = ("learning_rate=1e-20", "optimizer.weight_decay=0")
    sets = (*TOKENS, "embedding.token=<other>", f"init_from={source}", *still)
    work.train(*SHORT, *sets)
    assert torch.equal(state(work.run, 3)[NAME], wanted)
    with pytest.raises(
        VideotuneError, match=r"has 2 rows .* 3 of 16 train here. Set embedding.vectors"
    ):
        train(work.overrides(*SHORT, *sets, "embedding.vectors=3"), work.tmp / "three")


def test_both_experts_train_the_same_tokens(work: Work) -> None:
    """The tokens are the run's: every step moves them, whichever expert it is of, and
    there is one file.
    """
    sets = (
        *SHORT,
        *TOKENS,
        "expert_period=1",
        "expert_share=0.5",
        "steps=4",
        "save_every=1",
    )
    run = work.finished(*sets, base=("wan", "t2v-a14b"))
    assert {line["expert"] for line in steps_of(run)} == {"high", "low"}
    rows = [state(run, step)[NAME] for step in (1, 2, 3, 4)]
    assert all(not torch.equal(a, b) for a, b in pairwise(rows))
    assert int(state(run, 4)["optimizer/embedding.text_encoder.step"]) == 4
    assert [path.name for path in exported(run)] == [
        "run-step-4.safetensors",
        "run-step-4-comfyui.safetensors",
    ]
    assert sampled(work.tmp / "out", run=run).shape[0] == 5


def test_a_model_conditioned_on_images_trains_new_tokens_too(
    finished: Finished,
) -> None:
    run = finished(*SHORT, *TOKENS, base=("wan", "i2v"))
    assert all(line["grad_norm"] > 0 for line in steps_of(run))
    assert load_file(exported(run)[0])[TOKEN].shape == (2, 16)


def test_a_trained_text_encoder_is_in_the_folder_that_diffusers_opens(
    finished: Finished, tiny_bases: Bases
) -> None:
    from diffusers import WanPipeline
    from transformers import UMT5EncoderModel

    run = finished(*SHORT, *TEXT)
    weights = state(run, 3)
    (folder,) = exported(run)
    pipe = WanPipeline.from_pretrained(folder)
    trained = {
        name: value
        for name, value in weights.items()
        if name.startswith("weights/text_encoder.")
    }
    held = dict(
        UMT5EncoderModel.from_pretrained(folder / "text_encoder").named_parameters()
    )
    base = dict(
        UMT5EncoderModel.from_pretrained(
            tiny_bases("wan") / "text_encoder"
        ).named_parameters()
    )
    assert set(trained) == {f"weights/text_encoder.{name}" for name in held}
    for name, value in held.items():
        assert torch.equal(value, trained[f"weights/text_encoder.{name}"])
        assert not torch.equal(value, base[name]), name
        assert torch.equal(value, pipe.text_encoder.get_parameter(name))
    table = pipe.text_encoder.encoder.embed_tokens.weight
    assert torch.equal(table, pipe.text_encoder.shared.weight), (
        "T5's two tables are one"
    )
    assert [set(line["lr"].values()) for line in steps_of(run)] == [{0.001, 0.01}] * 3
    assert not any(
        "text_encoder" in str(line.get("text")) for line in of_kind(run, "warning")
    )


def test_the_text_encoder_alone_can_train_and_is_sampled_and_exported_again(
    work: Work, tiny_bases: Bases
) -> None:
    run = work.finished(
        *SHORT, *TEXT, "transformer.train=false", 'text_encoder.layers=["block.0"]'
    )
    names = {name for name in state(run, 3) if name.startswith("weights/")}
    assert names
    assert all(
        name.startswith("weights/text_encoder.encoder.block.0.") for name in names
    )
    (folder,) = exported(run)
    before = {path: path.stat().st_ino for path in folder.rglob("*.safetensors")}
    assert before[folder / "transformer" / "diffusion_pytorch_model.safetensors"] == (
        (tiny_bases("wan") / "transformer" / "diffusion_pytorch_model.safetensors")
        .stat()
        .st_ino
    ), "what did not train is the base's own file"
    own = sampled(work.run, run=run)
    assert torch.equal(sampled(work.tmp / "folder", base=str(folder)), own)
    assert not torch.equal(sampled(work.tmp / "base", base=str(tiny_bases("wan"))), own)
    assert export(run, out=work.tmp / "again") == DONE
    (again,) = (work.tmp / "again").iterdir()
    for name, value in load_file(again / "text_encoder" / "model.safetensors").items():
        assert torch.equal(
            value, load_file(folder / "text_encoder" / "model.safetensors")[name]
        )


def test_a_planted_row_is_found_again_through_the_frozen_denoiser(
    tiny_family: Callable[..., Any],
) -> None:
    """What the denoiser says under a planted row is the target; from another beginning
    the row is found again.
    """
    family, settings, spell = (
        tiny_family("wan"),
        Embedding(token="<x>"),
        LiveText(("<x>",)),
    )
    net, family.spec = (
        family.denoiser(),
        replace(family.spec, text_tokens=16),
    )  # padding to 512 takes most of the time
    (rows,) = add_rows(family.text_parts(), settings, seed=5).values()
    generator = torch.Generator().manual_seed(0)
    x_t, t = (
        torch.randn(3, 4, 1, 4, 4, generator=generator),
        torch.tensor([0.2, 0.5, 0.9]),
    )
    captions = ("a <x> b", "red <x>", "<x>")
    text = family.collate_states(family.encode_text(captions))
    batch = Batch.of(x_t, text, captions=captions)

    def predicted() -> torch.Tensor:
        return family.predict(net, x_t, t, encode_live_text(family, spell, batch))

    with torch.no_grad():
        target = predicted()
        planted = rows.detach().clone()
        rows.normal_(std=planted.std().item(), generator=generator)
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(rows.detach(), planted).item() < 0.5
    numbers = {
        "max_iter": 60,
        "max_eval": 60,
        "history_size": 20,
        "tolerance_change": 1e-18,
    }
    optimizer = torch.optim.LBFGS([rows], **numbers, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        off = 1e6 * (predicted() - target).square().mean()
        off.backward()
        return off

    optimizer.step(loss)
    assert cosine(rows.detach(), planted).item() > 0.95
