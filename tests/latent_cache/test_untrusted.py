"""A dataset may bring a cache that was made to do harm: nothing outside of it changes,
nothing odd is trained on.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.latent_cache.test_store import filled, holds, lost, silent, value
from tests.support.clips import noise, write_clip
from tests.support.index_files import read_index, write_index
from videotune.commands.cache import verify_cache
from videotune.data.file_checks import refuse_linked_folder
from videotune.data.index_rows import Examined
from videotune.data.media_index import MediaIndex
from videotune.errors import VideotuneError
from videotune.files import read_json, read_typed, write_json
from videotune.latent_cache.encode import cut_captions, tensors_of
from videotune.latent_cache.entry import new_entry
from videotune.latent_cache.fitting import fits_of
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.maintenance import listing, prune, verify
from videotune.latent_cache.store import LatentCache
from videotune.models.registry import find, names
from videotune.planner import read_step
from videotune.planner.ledger import Reading, Work
from videotune.planner.step_spec import MODES, StepSpec
from videotune.types import ClipShape, Window


def everything_done_to(folder: Path) -> None:
    """All that opens, reads, cleans and deletes; a sentence is as good as an end."""
    for do in (
        lambda: listing(LatentCache(folder), silent),
        lambda: cut_captions(LatentCache(folder), CacheKeys("", "e", 1, 0), []),
        lambda: verify(LatentCache(folder), silent),
        lambda: prune(LatentCache(folder), set(), yes=True),
    ):
        with suppress(VideotuneError):
            do()


def relabel(folder: Path, key: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """An entry whose file says something else of itself."""
    path = LatentCache(folder).path("latents", key)
    with safe_open(path, framework="pt") as file:
        label = json.loads(file.metadata()["videotune"])
        tensors = {name: file.get_tensor(name) for name in tuple(file.keys())}
    save_file(tensors, path, metadata={"videotune": json.dumps(change(label))})


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim" / "thesis.safetensors"
    path.parent.mkdir()
    path.write_text("precious")
    return path


def test_no_name_in_a_file_leads_out_of_the_cache(tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "data" / ".videotune-cache"
    filled(folder, 6)
    names = [
        str(victim),
        "../../victim/thesis",
        f"latents/{victim}",
        "latents/../../../victim/thesis",
        "x\0",
        "",
    ]
    for i, name in enumerate(names):
        relabel(
            folder,
            f"k{i}",
            lambda label, name=name, i=i: label | {("key", "kind")[i % 2]: name},
        )
    everything_done_to(folder)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    "odd", [None, 3, -1, 1e999, [], {}, True, "x", ["x"], {"x": 1}], ids=repr
)
def test_odd_types_anywhere_in_a_label_are_damage_and_no_crash(
    tmp_path: Path, odd: Any
) -> None:
    folder = tmp_path / "cache"
    filled(folder, 6)
    for field in (
        "kind",
        "key",
        "tensors",
        "bytes",
        "hash",
        "about",
        "made",
        "versions",
    ):
        relabel(folder, "k0", lambda label, field=field: label | {field: odd})
        everything_done_to(shutil.copytree(folder, folder.with_name(f"copy-{field}")))
        LatentCache(folder).put("latents", "k0", value(0), {})
    for name in ("clip", "variant", "length"):
        relabel(
            folder,
            "k1",
            lambda label, name=name: label | {"about": {**label["about"], name: odd}},
        )
        everything_done_to(shutil.copytree(folder, folder.with_name(f"copy-{name}")))
        LatentCache(folder).put("latents", "k1", value(1), {})
    relabel(folder, "k2", lambda label: odd)
    everything_done_to(folder)


LINKS = [
    "lock",
    "lock.owner",
    "index.sqlite",
    "latents",
    "text",
    "archives",
    "plans",
    "latents/.part-1-k9.safetensors",
]


@pytest.mark.parametrize("link", LINKS)
def test_nothing_is_written_through_a_link_in_a_cache(
    tmp_path: Path, victim: Path, link: str
) -> None:
    folder = tmp_path / "cache"
    filled(folder, 6)
    (folder / "lock").unlink(missing_ok=True)
    place = folder / link
    if place.is_dir():
        os.rename(place, tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.unlink(missing_ok=True)
        place.symlink_to(victim)
    if link in ("text", "archives", "plans"):
        place.unlink()
        place.symlink_to(victim.parent)
    with pytest.raises(VideotuneError):
        LatentCache(folder)
    assert victim.read_text() == "precious"


def test_a_datasets_cache_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "mine", 6)
    (tmp_path / ".videotune-cache").symlink_to(tmp_path / "mine")
    with pytest.raises(VideotuneError):
        refuse_linked_folder(tmp_path / ".videotune-cache")
    assert len(LatentCache(tmp_path / "mine").entries()) == 7


@pytest.mark.parametrize("named", ["dataset", "cache"])
def test_the_commands_of_a_cache_do_not_follow_a_datasets_link(
    tmp_path: Path, named: str
) -> None:
    """Named by its dataset or by itself; nothing is written where it leads."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "d").mkdir()
    link = tmp_path / "d" / ".videotune-cache"
    link.symlink_to(elsewhere)
    with pytest.raises(VideotuneError):
        verify_cache(link if named == "cache" else link.parent)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("name", ["lock", "lock.owner", "latents"])
def test_a_link_that_came_after_the_cache_was_opened_is_refused(
    tmp_path: Path, victim: Path, name: str
) -> None:
    cache = LatentCache(tmp_path / "cache")
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / name).symlink_to(victim)
    with pytest.raises(VideotuneError), cache.write_lock():
        pass
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("damage", ["a bit", "zeros", "another's"])
def test_a_damaged_entry_is_not_read_and_its_clip_is_named(
    tmp_path: Path, damage: str
) -> None:
    path = filled(tmp_path, 6).path("latents", "k5")
    own, other = (value(i)["mean"].numpy().tobytes() for i in (5, 4))
    data = path.read_bytes()
    if damage == "another's":
        path.write_bytes(data.replace(own, other))
    else:
        path.write_bytes(
            data.replace(
                own,
                bytes(len(own)) if damage == "zeros" else bytes([own[0] ^ 1]) + own[1:],
            )
        )
    assert len(path.read_bytes()) == len(data)
    with pytest.raises(VideotuneError, match=r"5\.mp4.*videotune cache verify"):
        LatentCache(tmp_path).get("latents", "k5")
    healing = LatentCache(tmp_path, keep_bytes=1 << 20)
    healing.mark_unusable(
        {("latents", f"k{i}"): None for i in range(6)}, lambda entry, shape: True
    )
    assert lost(healing, 6) == [5]
    healing.put("latents", "k5", value(5), {})
    assert all(holds(store, range(6)) for store in (healing, LatentCache(tmp_path)))


def test_an_entry_with_a_true_hash_is_refused_for_what_it_holds(tmp_path: Path) -> None:
    store = filled(tmp_path, 6)
    store.put("latents", "nan", {"mean": torch.tensor([float("nan")])}, {})
    with pytest.raises(VideotuneError):
        LatentCache(tmp_path).get("latents", "nan")
    relabel(
        tmp_path,
        "k5",
        lambda label: (
            label | {"tensors": {**label["tensors"], "mean": ["float32", [3, 4, 2, 2]]}}
        ),
    )
    with pytest.raises(VideotuneError):
        LatentCache(tmp_path).get("latents", "k5")
    assert {row.key for row in verify(LatentCache(tmp_path), silent)} == {"nan", "k5"}


@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name in names() for variant in find(name).variants],
)
def test_what_a_family_encodes_fits_it_and_other_shapes_do_not(
    name: str, variant: str, tiny_family: Any
) -> None:
    family = tiny_family(name, torch.bfloat16, variant)
    rules = family.spec.rules
    side = 2 * rules.side_multiple  # LTX-2 decodes no side of one latent
    frames = rules.frame_step + rules.frame_rest if rules.most_frames != 1 else 1
    high, wide = rules.size or (side, 2 * side)
    shape = ClipShape(frames, high, wide, rules.fps)
    fits = fits_of(family, shape)
    video = tensors_of(family.encode_video(torch.zeros(3, frames, high, wide)))
    text = family.encode_text(["a red circle"])[0]
    latents, states = (
        new_entry(kind, "k", own, {})
        for kind, own in (("latents", video), ("text", text))
    )
    sample = (Window("clip", 0.0, 1.0, shape), 0)
    caption = "a red circle"
    assert fits(latents, sample)
    assert fits(states, caption)
    assert not fits(states, sample)
    assert not fits(latents, caption)
    for entry, item in ((latents, sample), (states, caption)):
        for missing in entry.tensors:
            others = {
                key: form for key, form in entry.tensors.items() if key != missing
            }
            assert not fits(replace(entry, tensors=others), item), missing
    for kind, (dtype, size) in {
        "huge": ("float32", (4096, 1, 1, 1)),
        "dtype": ("int8", (1,)),
    }.items():
        odd = {"mean": (dtype, size), "text": (dtype, size)}
        other_latents = replace(latents, tensors=dict(latents.tensors) | odd)
        assert not fits(other_latents, sample), kind
        other_states = replace(states, tensors=dict(states.tensors) | odd)
        assert not fits(other_states, caption), kind


ODD = [
    None,
    3,
    -1,
    1e999,
    [],
    {},
    True,
    "x",
    ["x"],
    {"x": 1},
    "9" * 4000,
    "0 1x9999999999",
    "1" * 400,
]


def test_an_index_that_a_dataset_brought_is_believed_in_nothing_absurd(
    tmp_path: Path,
) -> None:
    clip = write_clip(tmp_path / "a.mp4", noise(5, 32, 48))
    index = tmp_path / ".videotune-cache" / "index.sqlite"

    def read() -> Examined:
        (one,) = MediaIndex(index).examine([clip], [tmp_path], 10.0)
        return one

    good = read()
    text = json.dumps(read_index(index))

    def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inner = (
            node.items()
            if isinstance(node, dict)
            else enumerate(node)
            if isinstance(node, list)
            else ()
        )
        return [
            path,
            *(place for name, one in inner for place in places(one, (*path, name))),
        ]

    for place in places(json.loads(text)["contents"])[1:]:
        for odd in ODD:
            value = json.loads(text)
            node = value["contents"]
            for name in place[:-1]:
                node = node[name]
            if node[place[-1]] == odd and type(node[place[-1]]) is type(odd):
                continue
            node[place[-1]] = odd
            write_index(index, value)
            info = read().info
            assert info is None or info.path == str(clip)
    cells = [odd for odd in ODD if isinstance(odd, str | float | None)]
    for odd in ["../../../../tmp/x", "", *cells]:
        value = json.loads(text)
        next(iter(value["files"].values()))["content"] = odd
        write_index(index, value)
        assert read() == good
    value = json.loads(text)
    next(iter(value["contents"].values()))["info"]["path"] = "/etc/hostname"
    write_index(index, value)
    assert read() == good


def test_a_memory_plan_that_a_dataset_brought_is_numbers_or_nothing(
    tmp_path: Path,
) -> None:
    reading = {
        mode: Reading({"forward": {"weights": 4}, "backward": {}}, Work(1.0))
        for mode in MODES
    }
    facts = StepSpec(
        reading,
        reading,
        (4,),
        (0, 0),
        dict.fromkeys(MODES, (1,)),
        ((3, 2.0),),
        encoding_flops_per_pixel=5.0,
    )
    good = asdict(facts)
    place = tmp_path / "plan.json"
    write_json(place, good)
    assert read_step._read_cached(place) == facts
    for name in good:
        for odd in (None, -1, 1e999, True, "x", ["x"], "9" * 4000):
            place.write_text(json.dumps(good | {name: odd}))
            assert read_step._read_cached(place) is None
    shorter = {
        "trained": [0],
        "kept": {"OFF": [], "ON": []},
        "one_sample": {"OFF": good["one_sample"]["OFF"]},
    }
    for name, odd in shorter.items():
        write_json(place, good | {name: odd})
        assert read_step._read_cached(place) is None
    place.write_text("[" * 100_000)
    assert read_step._read_cached(place) is None
    place.unlink()
    os.mkfifo(place)
    assert read_step._read_cached(place) is None, "a pipe is not waited for"


@pytest.mark.parametrize("read", [read_json, lambda path: read_typed(path, dict)])
def test_json_is_read_of_files_only(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe would be waited for, and a device never ends."""
    path = tmp_path / "own.json"
    with pytest.raises(FileNotFoundError):
        read(path)
    write_json(path, {"a": "ü"})
    assert read(path) == {"a": "ü"}
    monkeypatch.setattr("videotune.files.MAX_OWN_JSON_BYTES", 5)
    if read is read_json:
        with pytest.raises(ValueError, match="bytes"):
            read(path)
    path.unlink()
    os.mkfifo(path)
    for odd in (path, Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match="not a file"):
            read(odd)


def test_entries_that_were_exchanged_are_missing(tmp_path: Path) -> None:
    """Each file names its own entry, so that none is trained as another."""
    folder = tmp_path / "cache"
    store = filled(folder, 3)
    first = store.path("latents", "k0")
    second = store.path("latents", "k1")
    first_bytes = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(first_bytes)

    store = LatentCache(folder)
    assert [store.has("latents", f"k{i}") for i in range(3)] == [False, False, True]
    with pytest.raises(VideotuneError):
        store.get("latents", "k0")
