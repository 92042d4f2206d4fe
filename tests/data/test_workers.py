"""Child processes that open clips: their answers, their crashes and hangs, and that
none of them is left over.

Damaged files of every kind go through them too: each ends in frames or in a reason.
"""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest

from tests.support.clips import noise, write_clip, write_image
from tests.support.damaged_files import damaged_bytes
from tests.support.waiting import wait_until
from videotune.data.content_scan import scan_content
from videotune.data.decode import decode
from videotune.data.file_checks import REASONS, ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.data.workers import DecoderCrash, Workers
from videotune.files import hash_file

posix = pytest.mark.skipif(
    os.name == "nt", reason="needs pipes with names, and signals"
)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clips") / "a.mp4", noise(40), 24)


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def ask(
    workers: Workers, path: Path, limit: float | None = None, known: Sequence[str] = ()
) -> Future[Any]:
    return workers.submit(
        "examine", {"path": str(path), "until": 9.0, "known_ids": list(known)}, limit
    )


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Path]:
    """A file that is read for hours: 4 TB without content."""
    path = tmp_path / "endless.mp4"
    path.touch()
    os.truncate(path, 1 << 42)
    yield path
    path.unlink()


OTHERS: set[int] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Other tests of this process may have started the pool that the process shares."""
    OTHERS.clear()
    OTHERS.update(children())


def children() -> set[int]:
    """This process's children that are workers, but those that were there before the
    test.
    """
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.ZombieProcess):  # one that has ended
            if child.pid not in OTHERS and "videotune.data.worker_process" in " ".join(
                child.cmdline()
            ):
                found.add(child.pid)
    return found


def reading(path: Path) -> bool:
    """Whether a child has opened the file."""
    for pid in children():
        with suppress(psutil.Error):
            opened = psutil.Process(pid).open_files()
            if any(file.path == str(path) for file in opened):
                return True
    return False


def gone(pids: set[int]) -> bool:
    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != "zombie"
        except psutil.NoSuchProcess:
            return False

    return not any(lives(pid) for pid in pids)


def test_answers_are_what_the_same_calls_say_here(clip: Path, workers: Workers) -> None:
    answer = ask(workers, clip).result()
    info = probe(clip)
    expected = {
        "id": hash_file(clip),
        "info": info.to_json(),
        "scan": scan_content(info, 9.0).to_json(),
    }
    assert answer == json.loads(json.dumps(expected))
    assert MediaInfo.from_json(answer["info"]) == info
    assert ask(workers, clip, known=[answer["id"]]).result() == {"id": answer["id"]}
    words = {
        "times": [1.0, 0.0, 1.0],
        "height": 640,
        "width": 640,
        "resize": "random",
        "crop_position": (0.0, 1.0),
    }
    wanted = decode(
        info, [1.0, 0.0, 1.0], 640, 640, resize="random", crop_position=(0.0, 1.0)
    )  # more than a pipe holds
    for given in (info, answer["info"]):
        frames = workers.submit("decode", {"info": given, **words}).result()
        assert frames.dtype == np.uint8
        assert frames.flags.writeable
        np.testing.assert_array_equal(frames, wanted)
    assert workers.submit(
        "decode", {"info": info, **words, "times": []}
    ).result().shape == (
        0,
        640,
        640,
        3,
    )


def test_a_clips_problem_is_raised_here(
    clip: Path, tmp_path: Path, workers: Workers
) -> None:
    words = {"info": probe(clip), "times": [99.0], "height": 32, "width": 32}
    with pytest.raises(ClipProblem, match="is outside the clip") as caught:
        workers.submit("decode", words).result()
    assert (caught.value.reason, type(caught.value)) == ("decode_error", ClipProblem)
    (tmp_path / "text.mp4").write_text("hello " * 100)
    answer = ask(workers, tmp_path / "text.mp4").result()
    assert answer["problem"][0] == "not_a_video"


def test_a_file_that_the_disk_no_longer_gives_is_no_fact_of_its_content(
    tmp_path: Path, workers: Workers
) -> None:
    path = write_clip(tmp_path / "a.mp4", noise(9))
    words = {"info": probe(path), "times": [0.0], "height": 32, "width": 32}
    path.unlink()
    with pytest.raises(DecoderCrash):
        workers.submit("decode", words).result()
    assert ask(workers, path).result()["id"] == ""


def test_frames_that_do_not_fit_here_leave_the_pool_sound(
    clip: Path, workers: Workers
) -> None:
    words = {"info": probe(clip), "times": [0.0], "height": 640, "width": 960}
    full = patch("videotune.data.workers.np.empty", side_effect=MemoryError)
    with full, pytest.raises(DecoderCrash, match="not enough memory"):
        workers.submit("decode", words).result()
    assert workers.submit("decode", words).result().shape == (1, 640, 960, 3)


def test_a_bug_is_raised_with_its_traceback_and_the_clip(
    clip: Path, workers: Workers
) -> None:
    with pytest.raises(RuntimeError, match="KeyError") as caught:
        workers.submit("no such task", {"path": str(clip)}).result()
    assert str(clip) in str(caught.value)
    assert "Traceback" in str(caught.value)
    assert ask(workers, clip).result()["info"]  # and the pool goes on


@posix
@pytest.mark.parametrize(
    ("sign", "limit"), [("SIGSEGV", None), (None, 1.0), ("SIGSTOP", 4.0)]
)
def test_a_crash_or_a_hang_costs_one_clip(
    clip: Path, endless: Path, workers: Workers, sign: Any, limit: Any
) -> None:
    broken = ask(workers, endless, limit)
    wait_until(lambda: reading(endless))
    (pid,) = children()
    others = [ask(workers, clip) for _ in range(4)]
    assert others[0].result(20)
    if sign:
        os.kill(pid, signal.Signals[sign])
    said = (
        f"no answer within {limit:g} s" if limit else rf"the decoder crashed \({sign}\)"
    )
    with pytest.raises(DecoderCrash, match=said) as caught:
        broken.result(20)
    assert caught.value.reason == "unreadable"
    others += [ask(workers, clip) for _ in range(3)]
    assert [other.result(20)["id"] for other in others] == [hash_file(clip)] * 7
    workers.close()
    assert children() == set()


@posix
def test_a_child_that_died_between_tasks_is_not_the_next_clips_fault(
    clip: Path,
) -> None:
    with Workers(1) as workers:
        ask(workers, clip).result()
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ask(workers, clip).result()["id"] == hash_file(clip)


@pytest.mark.parametrize("ahead", [1, 3, 8])
def test_ordered_pulls_no_further_than_said(
    clip: Path, tmp_path: Path, workers: Workers, ahead: int
) -> None:
    (tmp_path / "text.mp4").write_text("hello " * 100)
    info, pulled = probe(clip), []

    def tasks() -> Iterator[tuple[str, dict[str, Any]]]:
        for i in range(20):
            pulled.append(i)
            time_asked = 99.0 if i == 7 else i / 24
            yield (
                "decode",
                {"info": info, "times": [time_asked], "height": 64, "width": 96},
            )

    whole = decode(info, [i / 24 for i in range(20)], 64, 96)
    assert pulled == []
    for i, answer in enumerate(workers.map(tasks(), ahead)):
        assert len(pulled) <= i + ahead
        if i == 7:
            assert isinstance(answer, ClipProblem)
        else:
            np.testing.assert_array_equal(answer[0], whole[i])
    assert pulled == list(range(20))


@posix
def test_closing_ends_everything_also_when_an_exception_flies(
    clip: Path, endless: Path
) -> None:
    futures = []

    def work(workers: Workers) -> None:
        with workers:
            futures.extend(ask(workers, endless) for _ in range(5))
            wait_until(lambda: len(children()) == 2 and reading(endless))
            raise ZeroDivisionError

    workers = Workers(2)
    with pytest.raises(ZeroDivisionError):
        work(workers)
    assert children() == set()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(0)
    with pytest.raises(RuntimeError, match="closed"):
        ask(workers, clip)
    workers.close()


def test_a_child_that_cannot_start_says_why(
    clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "path", [path for path in sys.path if "site-packages" not in path]
    )
    with (
        Workers(1) as workers,
        pytest.raises(RuntimeError, match=r"(?s)could not start.*ModuleNotFoundError"),
    ):
        ask(workers, clip).result()
    assert children() == set()


PARENT = """
    import json, os, sys
    from pathlib import Path
    from videotune.data.workers import Workers
    clip, endless, said = sys.argv[1:]
    workers = Workers(2)
    answer = workers.submit("examine", {"path": clip, "until": 9.0}).result()
    busy = workers.submit("examine", {"path": endless, "until": 9.0})  # one child is busy, and another idle
    workers.submit("examine", {"path": clip, "until": 9.0}).result()
    pids = sorted(child.pid for child in workers._children)
    Path(said + ".part").write_text(json.dumps({"answer": answer, "pids": pids}))
    os.replace(said + ".part", said)
    try:
        busy.result()
    except KeyboardInterrupt:
        sys.exit(7)
"""


@posix
@pytest.mark.parametrize(
    ("sign", "redirect", "code"),
    [
        ("SIGKILL", "", -signal.SIGKILL),
        ("SIGKILL", "<&- >&- 2>&-", -signal.SIGKILL),
        ("SIGINT", "", 7),
    ],
)
def test_a_parent_that_ends_leaves_no_child(
    clip: Path, endless: Path, sign: str, redirect: str, code: int
) -> None:
    """Killed outright, without standard streams, by a Ctrl-C that reaches its whole
    session; started in a folder with files that are called as libraries are, which are
    not taken for them.
    """
    (folder := endless.with_name("folder")).mkdir()
    for name in ("av", "numpy", "queue"):
        (folder / f"{name}.py").write_text("raise SystemExit('not this one')")
    script, said = endless.with_name("script.py"), endless.with_name("said")
    script.write_text(textwrap.dedent(PARENT))
    command = [
        "sh",
        "-c",
        f'exec "$0" "$@" {redirect}',
        sys.executable,
        *map(str, (script, clip, endless, said)),
    ]
    parent = subprocess.Popen(command, start_new_session=True, cwd=folder)
    wait_until(lambda: said.exists() or parent.poll() is not None)
    told = json.loads(said.read_text())
    assert told["answer"]["id"] == hash_file(clip)
    assert told["pids"]
    assert not any(gone({pid}) for pid in told["pids"])
    os.killpg(parent.pid, signal.Signals[sign])
    assert parent.wait(20) == code
    wait_until(lambda: gone(set(told["pids"])))


def test_what_libraries_print_does_not_disturb_the_answers(clip: Path) -> None:
    code = """
        import os, sys
        from videotune.data import worker_process as worker
        examine = worker.examine
        def noisy(path, until):
            os.write(1, b"noise ")
            os.write(2, b"noise ")
            print("more noise", flush=True)
            print("still more", file=sys.stderr)
            return examine(path, until)
        worker.TASKS["examine"] = noisy
        worker.main()
    """
    requests = 2 * (json.dumps(["examine", {"path": str(clip), "until": 9.0}]) + "\n")
    words = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        child.stdin.write(requests.encode())
        child.stdin.flush()
        ready, *answers = (json.loads(child.stdout.readline()) for _ in range(3))
        assert (ready, [answer[1]["id"] for answer in answers]) == (
            ["ok", "ready"],
            [hash_file(clip)] * 2,
        )
        assert (*child.communicate(timeout=20), child.returncode) == (b"", b"", 0)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Small whole files of every container, codec and image format."""
    folder, frames = tmp_path_factory.mktemp("seeds"), noise(14, 64, 96)
    fast = {"cpu-used": "8", "deadline": "realtime"}
    fragments = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    files = [
        write_clip(
            folder / "a.mp4", frames, options={"g": "5", "bf": "2"}, rotation=90
        ),
        write_clip(
            folder / "first.mp4", frames, container_options={"movflags": "faststart"}
        ),
        write_clip(
            folder / "fragmented.mp4",
            frames,
            options={"g": "5"},
            container_options=fragments,
        ),
        write_clip(
            folder / "hevc.mp4",
            frames,
            codec="libx265",
            options={"x265-params": "log-level=none:keyint=6"},
        ),
        write_clip(folder / "mpeg4.mp4", frames, codec="mpeg4"),
        write_clip(folder / "a.mov", frames, codec="prores_ks", pix_fmt="yuv422p10le"),
        write_clip(folder / "png.mov", frames[:4], codec="png", pix_fmt="rgba"),
        write_clip(folder / "a.mkv", frames, options={"g": "5"}),
        write_clip(folder / "ffv1.mkv", frames[:5], codec="ffv1"),
        write_clip(folder / "a.webm", frames, options=fast),
        write_clip(folder / "vp8.webm", frames, codec="libvpx", options=fast),
        write_clip(folder / "a.avi", frames, options={"g": "5"}),
        write_clip(folder / "mjpeg.avi", frames[:5], codec="mjpeg", pix_fmt="yuvj420p"),
    ]
    kinds = ("png", "jpg", "webp", "bmp", "tif", "gif")
    return files + [write_image(folder / f"a.{kind}", frames[0]) for kind in kinds]


def test_damaged_files_end_in_frames_or_a_reason(
    seeds: list[Path], tmp_path: Path
) -> None:
    """Never in another exception, a hang or a crash inside FFmpeg, which would cost one
    child and name its case.
    """
    paths, ends = [], Counter[str]()
    for case in range(140):
        source = seeds[case % len(seeds)]
        paths.append(tmp_path / f"{case}-{source.name}")
        paths[-1].write_bytes(damaged_bytes(source.read_bytes(), random.Random(case)))
    # the slowest of thousands takes less than a second
    with Workers(2, limit=20.0) as workers:
        answers = list(
            workers.map(
                ("examine", {"path": str(path), "until": 9.0}) for path in paths
            )
        )
        for path, answer in zip(paths, answers, strict=True):
            assert not isinstance(answer, DecoderCrash), f"{path.name}: {answer}"
            if "info" not in answer:
                reason, detail = answer["problem"]
                assert reason in REASONS
                assert detail
                ends[reason] += 1
        infos = [answer["info"] for answer in answers if "info" in answer]
        how = {"times": [0.0, 0.0], "height": 32, "width": 48}
        for info, frames in zip(
            infos,
            workers.map(("decode", {"info": info} | how) for info in infos),
            strict=True,
        ):
            assert not isinstance(frames, DecoderCrash), f"{info['path']}: {frames}"
            ends["frames" if not isinstance(frames, Exception) else frames.reason] += 1
    assert sum(ends.values()) == 140
    assert ends["frames"] > 10
    assert len(ends) >= 4  # several reasons
