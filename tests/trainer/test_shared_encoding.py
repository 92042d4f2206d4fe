"""Processes that encode together: no entry is written twice, and none is missing, however
often one of them is killed.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.support.launcher import overrides_of, processes, said_by_all
from tests.support.run_processes import KILLED
from videotune.errors import DONE
from videotune.latent_cache.store import LatentCache


def cache_command(clips: Path, base: Path, cache: Path, *sets: str) -> list[str]:
    """Return the command that encodes these clips into a cache."""
    overrides = overrides_of(clips, base, cache, *sets)
    options = [part for text in overrides.sets for part in ("--set", text)]
    return ["cache", "--data", str(clips), *options]


def test_killed_processes_leave_nothing_out_and_repeat_nothing(
    small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    cache = tmp_path / "shared" / "cache"
    for _ in range(2):
        ended = processes(
            3,
            tmp_path / "logs",
            cache_command(small_clips, tiny_bases("wan"), cache),
            "killed after an entry",
        )
        assert KILLED in ended.codes, ended.said
        assert DONE not in ended.codes
    ended = processes(
        3,
        tmp_path / "logs",
        cache_command(small_clips, tiny_bases("wan"), cache),
        "entries noted",
    )
    assert ended.codes == (DONE,) * 3, ended.failures

    alone = tmp_path / "alone" / "cache"
    ended = processes(
        1,
        tmp_path / "logs",
        cache_command(small_clips, tiny_bases("wan"), alone),
        "entries noted",
    )
    assert ended.codes == (DONE,), ended.failures

    lines = (cache.parent / "written.log").read_text().splitlines()
    writes = Counter(line.split()[0] for line in lines)
    assert len({line.split()[1] for line in lines}) == 3, "all three had a share"
    names = {f"{kind}/{key}" for kind, key in LatentCache(alone).names()}
    assert set(writes) == names
    assert set(writes.values()) == {1}
    assert {f"{kind}/{key}" for kind, key in LatentCache(cache).names()} == names


def test_what_is_found_in_the_cache_is_said_by_several_processes(
    small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    command = cache_command(small_clips, tiny_bases("wan"), cache)
    ended = processes(1, tmp_path / "logs", command)
    assert ended.codes == (DONE,), ended.failures
    damaged = LatentCache(cache).path(*LatentCache(cache).names()[0])
    damaged.write_bytes(damaged.read_bytes()[:50])

    ended = processes(2, tmp_path / "logs", command)

    assert ended.codes == (DONE, DONE), ended.failures
    outputs = re.sub(r"\s+", " ", "".join(ended.said))
    assert outputs.count("1 entry is damaged or not of this model") == 1, outputs


def test_masks_without_effect_are_counted_over_all_processes(
    small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    """At this size each drawn box reaches all cells."""
    counts = []
    for number in (1, 2):
        cache = tmp_path / f"cache-{number}"
        mask = 'conditions=[{"type": "mask"}]'
        command = cache_command(small_clips, tiny_bases("wan"), cache, mask)
        ended = processes(number, tmp_path / "logs", command)
        assert ended.codes == (DONE,) * number, ended.failures
        outputs = re.sub(r"\s+", " ", "".join(ended.said))
        counts.append(re.findall(r"(\d+) masks? hides? everything", outputs))
    alone, shared = counts
    assert len(alone) == 1
    assert int(alone[0]) > 1
    assert shared == alone


def test_a_cache_that_another_run_writes_ends_all_processes(
    small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    """Only the leader finds the folder locked; the others wait for it."""
    cache = tmp_path / "cache"
    command = cache_command(small_clips, tiny_bases("wan"), cache)
    with LatentCache(cache).write_lock():
        outputs = said_by_all(2, tmp_path / "logs", command)
    assert "is being written by" in outputs[0], outputs
