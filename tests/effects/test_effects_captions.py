"""What the keys of a dataset's captions do to the texts that are trained."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.clips import noise, write_clip
from tests.support.trainers import Lab, job_of, source_of, text_of
from videotune.data.dataset import to_json
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.latent_cache.store import LatentCache

TAGS = "zorble, red, blue, green, gold"


def one_clip(folder: Path, caption: str, suffix: str = ".txt") -> Path:
    """A folder of one clip with this caption."""
    if not folder.exists():
        write_clip(folder / "clip.mp4", noise(9, 32, 32, seed=1), 16)
    (folder / f"clip{suffix}").write_text(caption, encoding="utf-8")
    return folder


def captions_of(lab: Lab, caption: str, **keys: Any) -> tuple[str, ...]:
    """The captions of a clip under these keys, as its account shows them too."""
    row = {"path": str(one_clip(lab.tmp / "data", caption)), **keys}
    library = job_of(lab, {"datasets": [row]}).library
    (clip,) = library.clips
    (account,) = to_json(library)["clips"]
    assert account["captions"] == list(clip.captions)
    return clip.captions


def drawn(lab: Lab, steps: int, caption: str, **keys: Any) -> Counter[str]:
    """How often each text is trained; each has its own states in the cache."""
    row = {"path": str(one_clip(lab.tmp / "data", caption)), **keys}
    source = source_of(lab, {"datasets": [row]})
    counts: Counter[str] = Counter()
    for step in range(1, steps + 1):
        batch = make_step_batch(source, step).batch
        (text,) = batch.captions
        counts[text] += 1
        if counts[text] == 1 and len(counts) < 4:
            assert torch.equal(batch.conditioning.text, text_of(lab, text))
    return counts


@pytest.mark.effect("datasets.caption_prefix", "datasets.caption_suffix")
def test_a_prefix_and_a_suffix_frame_every_caption(lab: Lab) -> None:
    assert captions_of(lab, "a cat") == ("a cat",)
    framed = captions_of(lab, "a cat", caption_prefix="photo:", caption_suffix=", 4k")
    assert framed == ("photo: a cat, 4k",)
    assert captions_of(lab, "a cat", caption_suffix="at night") == ("a cat at night",)
    assert captions_of(lab, "a cat", caption_prefix="x \n") == ("x \na cat",)

    # The trigger is put in front of all, unless the prefix has it.
    keys = {"trigger": "ohwx", "caption_prefix": "photo of [trigger],"}
    assert captions_of(lab, "a cat", **keys) == ("photo of ohwx, a cat",)
    assert drawn(lab, 2, "a cat", caption_prefix="b") == {"b a cat": 2}


@pytest.mark.effect("datasets.caption_extension")
def test_captions_are_read_from_files_of_the_extension(lab: Lab) -> None:
    folder = one_clip(lab.tmp / "data", "of the txt")
    one_clip(folder, "of the tags", ".tags")
    for extension, caption in ((".txt", "of the txt"), (".tags", "of the tags")):
        row = {"path": str(folder), "caption_extension": extension}
        (clip,) = job_of(lab, {"datasets": [row]}).library.clips
        assert clip.captions == (caption,)


@pytest.mark.effect(
    "datasets.caption_shuffle",
    "datasets.caption_keep_tokens",
    "datasets.caption_separator",
)
def test_tags_are_shuffled_behind_those_that_are_kept(lab: Lab) -> None:
    assert captions_of(lab, TAGS) == (TAGS,)

    shuffled = captions_of(lab, TAGS, caption_shuffle=True, caption_variants=20)
    assert len(shuffled) > 10
    assert shuffled[0] == TAGS
    assert {tuple(sorted(text.split(", "))) for text in shuffled} == {
        tuple(sorted(TAGS.split(", ")))
    }
    assert {text.split(", ")[0] for text in shuffled} != {"zorble"}

    kept = captions_of(lab, TAGS, caption_shuffle=True, caption_keep_tokens=2)
    assert {tuple(text.split(", ")[:2]) for text in kept} == {("zorble", "red")}
    assert len(kept) > 2

    keys = {"caption_shuffle": True, "caption_separator": "."}
    assert captions_of(lab, TAGS, **keys) == (TAGS,)
    sentences = captions_of(lab, "A cat sits. It sleeps.", **keys)
    assert set(sentences) == {
        "A cat sits. It sleeps.",
        "A cat sits. It sleeps",
        "It sleeps. A cat sits",
    }


@pytest.mark.effect("datasets.caption_tag_dropout")
def test_a_share_of_the_tags_is_left_out(lab: Lab) -> None:
    def share(probability: float) -> float:
        texts: list[str] = []
        for letter in "abcdef":
            tags = ", ".join(f"{letter}{number}" for number in range(20))
            keys = {"caption_tag_dropout": probability, "caption_variants": 40}
            variants = captions_of(lab, tags, **keys)
            assert variants[0] == tags
            texts += variants[1:]
            for text in texts:
                numbers = [int(tag[1:]) for tag in text.split(", ")]
                assert numbers == sorted(numbers), "the order stays"
        return 1 - sum(len(text.split(", ")) for text in texts) / (20 * len(texts))

    assert captions_of(lab, TAGS, caption_tag_dropout=0.0) == (TAGS,)
    assert share(0.1) == pytest.approx(0.1, abs=0.03)
    assert share(0.5) == pytest.approx(0.5, abs=0.03)


@pytest.mark.effect("datasets.caption_wildcards")
def test_a_wildcard_becomes_one_of_its_choices(lab: Lab) -> None:
    written = "a {red|blue} {cat|{big|small} dog} {as it is}"
    assert captions_of(lab, written) == (written,)
    variants = captions_of(lab, written, caption_wildcards=True, caption_variants=64)
    assert variants[0] == "a red cat {as it is}"
    assert set(variants) == {
        f"a {colour} {animal} {{as it is}}"
        for colour in ("red", "blue")
        for animal in ("cat", "big dog", "small dog")
    }


@pytest.mark.effect("datasets.caption_wildcards")
def test_a_wildcard_becomes_a_line_of_its_file(lab: Lab) -> None:
    folder = one_clip(lab.tmp / "data", "x") / "wildcards"
    (folder / "animals").mkdir(parents=True)
    (folder / "colour.txt").write_text("# of wool\nred\n\n{blue|green}\n")
    (folder / "animals" / "pet.txt").write_text("__colour__ cat\ndog")
    written = "a {__animals/pet__|snake}, __init"
    assert captions_of(lab, written) == (written,)

    keys = {"caption_wildcards": True, "caption_variants": 64}
    variants = captions_of(lab, written, **keys)
    assert variants[0] == "a red cat, __init"
    pets = ("red cat", "blue cat", "green cat", "dog", "snake")
    assert set(variants) == {f"a {pet}, __init" for pet in pets}
    assert captions_of(lab, written, **keys) == variants

    # Another line changes what is trained.
    (folder / "colour.txt").write_text("pink")
    assert "a pink cat, __init" in captions_of(lab, written, **keys)


def test_wildcards_reach_no_other_file(lab: Lab) -> None:
    folder = one_clip(lab.tmp / "data", "x") / "wildcards"
    folder.mkdir()
    (lab.tmp / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(lab.tmp / "secret.txt")
    (folder / "large.txt").write_text("a" * 20_000)
    (folder / "huge.txt").write_text("a\n" * (1 << 20))
    (folder / "empty.txt").write_text("# nothing\n")
    (folder / "binary.txt").write_bytes(b"\xff\xfe")
    (folder / "one.txt").write_text("__two__")
    (folder / "two.txt").write_text("__one__")
    (folder / "more.txt").write_text("__more__ __more__ __more__ __more__ " * 20)
    os.mkfifo(folder / "pipe.txt")
    for name, words in (
        ("none", "does not exist"),
        ("link", "is a link to"),
        ("large", "Shorten it"),
        ("huge", "at most"),
        ("empty", "has no line"),
        ("binary", "not UTF-8"),
        ("one", "in a circle"),
        ("more", "Shorten it"),
        ("pipe", "named pipe"),
    ):
        with pytest.raises(VideotuneError, match=words):
            captions_of(lab, f"a __{name}__", caption_wildcards=True)
    for text in ("__../../secret__", "__/etc/hosts__", "a__.__b"):
        assert captions_of(lab, text, caption_wildcards=True) == (text,)


@pytest.mark.effect("datasets.caption_variants")
def test_variants_are_so_many_texts_each_encoded_once(lab: Lab) -> None:
    """All are trained, the same in each run, and with another seed others."""
    for number in (2, 6):
        keys = {"caption_shuffle": True, "caption_variants": number}
        variants = captions_of(lab, TAGS, **keys)
        assert len(variants) == number
        assert captions_of(lab, TAGS, **keys) == variants
        counts = drawn(lab, 120, TAGS, **keys)
        assert set(counts) == set(variants)
        assert min(counts.values()) > 120 / number / 3

        row = {"path": str(lab.tmp / "data"), **keys}
        cache = lab.tmp / f"cache {number}"
        source_of(lab, {"datasets": [row], "cache_dir": str(cache)})
        texts = [
            entry for entry in LatentCache(cache).entries() if entry.kind == "text"
        ]
        assert {entry.about["caption"] for entry in texts} == {*variants, ""}

    row = {"path": str(lab.tmp / "data"), **keys}
    (clip,) = job_of(lab, {"datasets": [row], "seed": 7}).library.clips
    assert clip.captions[0] == TAGS
    assert clip.captions != variants


def test_the_weights_of_captions_hold_for_all_variants_of_each(lab: Lab) -> None:
    keys = {"caption_weights": [3, 1], "caption_wildcards": True}
    counts = drawn(lab, 400, "a {cat|dog}\na fish", **keys)
    assert counts["a fish"] == pytest.approx(100, abs=35)
    assert counts["a cat"] + counts["a dog"] == 400 - counts["a fish"]


def test_clips_that_are_held_out_keep_their_captions(lab: Lab, twenty: Path) -> None:
    keys = {"caption_shuffle": True, "caption_separator": " ", "caption_variants": 4}
    row = {"path": str(twenty), **keys}
    knobs = {"validation_fraction": 0.3, "video_config.frames": 5}
    library = job_of(lab, {"datasets": [row], **knobs}).library
    held_out = [clip.captions for clip in library.clips if clip.held_out]
    assert len(held_out) == 6
    for (caption,) in held_out:
        assert caption.startswith("a clip called ")
    trained = [clip.captions for clip in library.clips if not clip.held_out]
    assert max(len(captions) for captions in trained) == 4
    texts = {text for clip in library.clips for text in clip.captions}
    assert any(f"20 captions give {len(texts)} texts" in note for note in library.notes)


def test_hostile_captions_are_refused_or_take_no_time(lab: Lab) -> None:
    nested = "{" * 20_000 + "a|b" + "}" * 20_000
    (first, *_) = captions_of(lab, nested, caption_wildcards=True, caption_variants=2)
    assert len(first) < len(nested)
    bars = "{" + "|" * 50_000
    assert captions_of(lab, bars, caption_wildcards=True) == (bars,)
    with pytest.raises(VideotuneError, match="caption_variants"):
        captions_of(lab, "a, " * 50_000, caption_shuffle=True)
