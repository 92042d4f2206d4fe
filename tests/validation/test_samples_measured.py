"""What measures samples, held against what is known: copies that were planted, sets of
known diversity, known motion.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.landscapes import pan
from videotune.errors import VideotuneError
from videotune.validation import embeddings, metrics
from videotune.validation.metrics import Baselines, Gallery, ReferenceWindow

EMBEDDING = embeddings.default_embedding()


def film(seed: int, frames: int = 9) -> np.ndarray:
    return pan(seed, [i * (0.5 + seed % 3) for i in range(frames)], 64, 96)


@pytest.fixture(scope="module")
def gallery() -> Gallery:
    """Ten clips, each of a video of its own; one is shorter."""
    films = {f"{seed}.mp4": film(seed, 7 if seed == 4 else 9) for seed in range(10)}
    return Gallery(
        ReferenceWindow(name, name, embeddings.embed_views(EMBEDDING, frames))
        for name, frames in films.items()
    )


@pytest.fixture(scope="module")
def usual(gallery: Gallery) -> Baselines:
    training = [
        (f"{seed}.mp4", embeddings.embed_with_mirror(EMBEDDING, film(seed)[:5]))
        for seed in range(10)
    ]
    return metrics.measure_baselines(gallery, {}, training)


def test_the_vendi_score_counts_what_differs() -> None:
    rng = np.random.default_rng(0)
    one = rng.normal(size=12)
    alike = np.stack([one, one * 3, one * 0.1])
    assert metrics.vendi_score(alike) == pytest.approx(1, abs=1e-9), (
        "the same, whatever its length"
    )
    assert metrics.vendi_score(np.eye(7)) == pytest.approx(7, abs=1e-9), (
        "nothing in common"
    )
    assert metrics.vendi_score(np.repeat(np.eye(3), 4, 0)) == pytest.approx(
        3, abs=1e-9
    ), "three kinds of four"
    uneven = np.concatenate([np.repeat(np.eye(2)[:1], 9, 0), np.eye(2)[1:]])
    assert metrics.vendi_score(uneven) == pytest.approx(
        np.exp(-(0.9 * np.log(0.9) + 0.1 * np.log(0.1))), abs=1e-9
    )
    turned = np.linalg.qr(rng.normal(size=(2, 2)))[0]
    assert metrics.vendi_score(uneven @ turned) == pytest.approx(
        metrics.vendi_score(uneven), abs=1e-9
    )
    for wrong in (np.zeros((0, 3)), np.zeros((2, 3)), np.ones(3)):
        with pytest.raises(ValueError, match="Vendi"):
            metrics.vendi_score(wrong)


def test_diversity_is_of_the_samples_of_one_prompt() -> None:
    same, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert metrics.diversity([[same, same], [other, other]]) == pytest.approx(1), (
        "prompts differ anyway"
    )
    assert metrics.diversity([[same, other], [same, same]]) == pytest.approx(1.5)
    assert metrics.diversity([[same], [other]]) is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cropped", lambda x: x[:, 3:54, 9:85]),
        ("mirrored", lambda x: x[:, :, ::-1]),
        ("both", lambda x: x[:, 10:61, 2:78, :][:, :, ::-1]),
        ("darker", lambda x: (x * 0.7).astype(np.uint8)),
        ("smaller", lambda x: x[:, ::2, ::2]),
        ("later", lambda x: x),
    ],
)
def test_a_copy_is_found_and_its_clip_named(
    gallery: Gallery, usual: Baselines, name: str, change: object
) -> None:
    line = usual.line()
    for seed in range(10):
        part = film(seed, 7 if seed == 4 else 9)[2 if name == "later" else 0 :][:5]
        found = gallery.nearest(embeddings.embed_with_mirror(EMBEDDING, change(part)))  # type: ignore[operator]
        assert found.clip == f"{seed}.mp4"
        assert found.similarity > line
        if name == "later":
            assert found.similarity == pytest.approx(1, abs=1e-4)


def test_clips_of_other_videos_are_no_copies(
    gallery: Gallery, usual: Baselines
) -> None:
    line = usual.line()
    for seed in range(100, 120):
        found = gallery.nearest(embeddings.embed_with_mirror(EMBEDDING, film(seed)[:5]))
        assert found.similarity < line


def test_likeness_keeps_the_order_of_frames() -> None:
    """The same frames backwards are less like, and a clip longer than the other is
    compared with its beginning.
    """
    whole = embeddings.embed_views(EMBEDDING, film(2))[None]
    forward, backward = (
        embeddings.embed_with_mirror(EMBEDDING, frames)
        for frames in (film(2)[:5], film(2)[:5][::-1])
    )
    assert metrics.similarities(forward, whole)[0] == pytest.approx(1, abs=1e-4)
    assert metrics.similarities(backward, whole)[0] < 0.97
    short = embeddings.embed_views(EMBEDDING, film(2)[:4])[None]
    assert metrics.similarities(
        embeddings.embed_with_mirror(EMBEDDING, film(2)), short
    )[0] == pytest.approx(1, abs=1e-4)


def test_the_line_lies_a_quarter_of_the_way_from_clips_that_are_no_copies() -> None:
    many = tuple(i / 1000 for i in range(1001))
    assert Baselines((), many).line() == pytest.approx(0.99 + 0.01 / 4)
    assert Baselines((0.2,), (0.6,)).line() == pytest.approx(0.596 + 0.404 / 4)
    by_base = Baselines((), ()).line([0.1, 0.4])
    assert by_base == pytest.approx(0.4 + 0.6 / 4), (
        "from the base's, where there is nothing else"
    )
    assert Baselines((), ()).line() is None
    told = Baselines((), many).to_json()
    assert told == {
        "held_out": None,
        "others": {"clips": 1001, "median": 0.5, "p99": 0.99},
    }


def test_vectors_have_length_one_and_a_flat_frame_is_no_error() -> None:
    flat = np.full((2, 32, 32, 3), 90, np.uint8)
    for frames in (film(0), flat):
        vectors = embeddings.edge_features(embeddings.to_pictures(frames))
        assert vectors.isfinite().all()
        assert (vectors.norm(dim=1) < 1 + 1e-5).all()
    black = np.zeros((2, 32, 32, 3), np.uint8)
    seen = embeddings.edge_features(embeddings.to_pictures(black))
    assert torch.allclose(seen.norm(dim=1), torch.ones(2)), (
        "a model that draws black is measured too"
    )
    alike, other = (
        torch.stack([seen[0], seen[1]]),
        embeddings.edge_features(embeddings.to_pictures(film(0))),
    )
    assert metrics.diversity([[alike, alike]]) == pytest.approx(1)
    assert metrics.diversity([[seen[:1], other[:1]]]) > 1.5
    assert embeddings.crop_view(torch.zeros(1, 3, 40, 60), (0.2, 0.2, 0.8)).shape == (
        1,
        3,
        32,
        48,
    )


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints in transformers' own layout, with random weights."""
    import transformers

    shared = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small, text = (
        shared | {"image_size": 32, "patch_size": 16},
        shared | {"intermediate_size": 16, "vocab_size": 32},
    )
    siglip = transformers.SiglipConfig(
        text_config=text, vision_config=small | {"intermediate_size": 16}
    )
    size = {"height": 32, "width": 32}
    torch.manual_seed(0)
    models = {
        "clip": transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(**small, intermediate_size=16)
        ),
        "dino": transformers.Dinov2Model(
            transformers.Dinov2Config(**small, mlp_ratio=1)
        ),
        "siglip": transformers.SiglipModel(siglip),
    }
    folder = tmp_path_factory.mktemp("encoders")
    for name, model in models.items():
        model.save_pretrained(folder / name)
        transformers.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size=size
        ).save_pretrained(folder / name)
    return {name: folder / name for name in models}


@pytest.mark.parametrize("name", ["clip", "dino", "siglip"])
def test_a_persons_own_encoder_takes_the_heuristics_place(
    encoders: dict[str, Path], name: str
) -> None:
    """By transformers: its vectors are those of its own processor and model, called by
    hand.
    """
    from transformers import AutoImageProcessor, AutoModel

    embedding = embeddings.open_encoder(str(encoders[name]))
    assert embedding.name != embeddings.HEURISTIC
    names = [embeddings.open_encoder(str(path)).name for path in encoders.values()]
    assert names.count(embedding.name) == 1, (
        "each has a name of its own, always the same"
    )
    frames = film(0)[:3]
    seen = embeddings.embed_with_mirror(embedding, frames)
    assert seen.shape == (2, 3, 16)
    processor = AutoImageProcessor.from_pretrained(encoders[name])
    model = AutoModel.from_pretrained(encoders[name]).eval()
    with torch.no_grad():
        pixels = processor(images=list(frames), return_tensors="pt")["pixel_values"]
        vision = model.vision_model if name == "siglip" else model
        wanted = vision(pixel_values=pixels).pooler_output
    assert torch.allclose(seen[0], wanted / wanted.norm(dim=1, keepdim=True), atol=2e-3)
    gallery = Gallery(
        ReferenceWindow(str(i), str(i), embeddings.embed_views(embedding, film(i)))
        for i in range(3)
    )
    found = gallery.nearest(seen)
    assert found.clip == "0"
    assert found.similarity == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("left", [0.5, None])
def test_an_encoder_that_is_damaged_or_none_is_refused(
    left: float | None, encoders: dict[str, Path], tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(encoders["clip"], tmp_path / "damaged"))
    weights = (damaged / "model.safetensors").read_bytes()
    if left is None:
        (damaged / "config.json").write_text("{}")
    else:
        (damaged / "model.safetensors").write_bytes(weights[: int(left * len(weights))])
    with pytest.raises(
        VideotuneError,
        match=r"sample_metrics.encoder: .+ has no image encoder that transformers ",
    ):
        embeddings.open_encoder(str(damaged))
