"""Runs over a dataset on an object store are those over the folder, bit for bit."""

import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.support.clips import write_image
from tests.support.command_line import check, options_of, run, train
from tests.support.object_stores import LargestSize, Store
from tests.support.run_processes import Work
from tests.support.run_results import assert_same_run
from videotune.config.schema import Config
from videotune.data.object_files import objects_folder
from videotune.data.workers import close_default_workers
from videotune.errors import DONE, VideotuneError
from videotune.files import user_cache
from videotune.job.job import cache_folder

LIVE = ("steps=4", "save_every=4", "video_config.frames=9", "video_config.variants=0")


def given(address: str) -> Path:
    """An address in the place of a folder."""
    return cast(Path, address)


def test_a_run_from_a_store_is_the_run_from_the_folder(
    work: Work, objects: Store, clips: Path, tmp_path: Path
) -> None:
    masks = clips / "masks"
    for path in (clips / "videos").glob("*.mp4"):
        picture = np.zeros((32, 32, 3), np.uint8)
        picture[:, :16] = 255
        write_image(masks / f"{path.stem}.png", picture)
    sets = (*LIVE, "loss_mask.inside=2")
    local = tmp_path / "local"
    overrides = work.overrides(*sets, f"cache_dir={tmp_path / 'a'}", data=clips)
    assert train(overrides, local) == DONE

    address = objects.put_folder(clips, objects.bucket(), "data/clips")
    files = [path for path in clips.rglob("*") if path.suffix in (".mp4", ".png")]
    bound = 3 * max(path.stat().st_size for path in files)
    assert sum(path.stat().st_size for path in files) > bound
    overrides = work.overrides(
        *sets,
        f"cache_dir={tmp_path / 'b'}",
        f"object_cache_gb={bound / 1e9}",
        data=given(address),
    )
    with LargestSize(objects_folder() / "blobs") as largest:
        assert train(overrides, work.run) == DONE

    assert_same_run(work.run, local, 4)
    assert 0 < largest.most <= bound
    # What was removed for others has been fetched again.
    assert len(objects.fetched(".mp4")) > len(list((clips / "videos").iterdir()))


def test_a_run_that_is_resumed_lists_the_store_again(
    work: Work, objects: Store, clips: Path
) -> None:
    bucket = objects.bucket()
    address = objects.put_folder(clips, bucket, "clips")
    overrides = work.overrides("steps=2", data=given(address))
    assert train(overrides, work.run) == DONE
    name = next(iter((clips / "captions").iterdir())).name
    objects.put(bucket, {f"clips/captions/{name}": b"another caption"})
    objects.forget()
    assert check(overrides) == DONE
    assert objects.fetched(".txt") == [f"/{bucket}/clips/captions/{name}"]


def test_the_cache_of_a_store_is_the_users(tmp_path: Path, objects: Store) -> None:
    def folder_of(path: str) -> Path:
        return cache_folder(Config.model_validate({"datasets": [{"path": path}]}))

    addresses = ("s3://b/a/c", "s3://b/a--c", "s3://b/a-c", f"s3://b/{'x' * 900}")
    folders = {folder_of(address) for address in addresses}
    assert len(folders) == len(addresses)
    assert {folder.parent for folder in folders} == {user_cache()}
    assert folder_of("s3://b/a/c/") == folder_of("s3://b/a/c")
    for folder in folders:
        folder.mkdir(parents=True)


COMMANDS: list[tuple[Any, ...]] = [
    ("dataset", "split", "s3://bucket/clips", "--out", "scenes"),
    ("dataset", "derive", "s3://bucket/clips", "--kind", "edges"),
    (
        "caption",
        "s3://bucket/clips",
        "--model",
        "x",
        "--endpoint",
        "http://localhost:1",
    ),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[1])
def test_commands_that_write_beside_clips_refuse_a_store(
    words: tuple[Any, ...], objects: Store
) -> None:
    with pytest.raises(VideotuneError, match="need a folder of this machine"):
        run(*words)
    assert objects.requests == []


def test_a_mirror_is_no_folder_to_write_captions_in(
    work: Work, objects: Store, clips: Path
) -> None:
    address = objects.put_folder(clips, objects.bucket(), "clips")
    assert check(work.overrides(data=given(address))) == DONE
    (mirror,) = objects_folder().glob("mirrors/*/*/clips")
    with pytest.raises(VideotuneError, match="need a folder of this machine"):
        run("caption", mirror, "--model", "x", "--endpoint", "http://localhost:1")
    shutil.rmtree(mirror)


def test_masks_of_a_store_elsewhere_are_refused(work: Work, objects: Store) -> None:
    overrides = work.overrides(
        'datasets=[{"path": "s3://bucket/clips", "loss_masks": "s3://bucket/masks"}]',
        "loss_mask.inside=2",
    )
    with pytest.raises(VideotuneError, match=r"datasets\.loss_masks"):
        check(overrides)


def test_one_machine_encodes_and_another_trains_without_opening_a_clip(
    work: Work,
    objects: Store,
    clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = objects.bucket()
    address = objects.put_folder(clips, bucket, "clips")
    local = tmp_path / "local"
    sets = ("steps=4", "save_every=4", "video_config.frames=9")
    overrides = work.overrides(*sets, f"cache_dir={tmp_path / 'a'}", data=clips)
    assert train(overrides, local) == DONE

    cached = work.overrides(
        *sets, f"cache_dir=s3://{bucket}/cache", data=given(address)
    )
    assert run("cache", **options_of(cached)) == DONE
    assert f"/{bucket}/cache/index.sqlite" in {path for _, path in objects.requests}
    assert objects.fetched(".mp4")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another home"))
    close_default_workers()
    objects.forget()
    assert train(cached, work.run) == DONE
    assert objects.fetched(".mp4") == []
    assert objects.fetched(".safetensors")
    assert not [path for method, path in objects.requests if method == "PUT"]
    assert_same_run(work.run, local, 4)


def test_a_run_is_not_done_before_its_entries_are_on_the_store(
    work: Work, objects: Store, clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = objects.bucket()
    overrides = work.overrides("steps=1", f"cache_dir=s3://{bucket}/cache", data=clips)
    objects.refuse = lambda method, path: (
        "403 Forbidden" if method == "PUT" and path.endswith("safetensors") else None
    )
    with pytest.raises(VideotuneError, match=r"refuses access"):
        train(overrides, work.run)
    objects.refuse = None
    assert train(overrides, work.run.with_name("again")) == DONE
    entries = objects.keys(bucket, "cache/")
    assert len(entries) > 6
    assert run("cache", "prune", yes=True, **options_of(overrides)) == DONE
    assert objects.keys(bucket, "cache/") == entries
    assert run("cache", "ls", f"s3://{bucket}/cache") == DONE
    listed = capsys.readouterr().out
    count = sum(key.endswith(".safetensors") for key in entries)
    assert f"{count} entries" in listed.replace("\n", " ")
    assert f"s3://{bucket}/cache" in listed
    assert run("cache", "verify", f"s3://{bucket}/cache") == DONE
    with pytest.raises(VideotuneError, match=f"s3://{bucket}/elsewhere"):
        run("cache", "ls", f"s3://{bucket}/elsewhere")
