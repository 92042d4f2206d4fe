"""From clips with captions to a file for ComfyUI: what it takes beside the training.

python benchmarks/first_day.py [--tiny] [--studio | --terminal] trains the toy base model
on twelve clips, once by the commands and once by the studio's pages (over HTTP, without
a browser), and prints where the seconds go. The bound is that all but the steps takes
45 s on two idle cores. Wall time on a machine that others use says little: a loop of
plain Python says how quick the core is today.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

BOUND_SECONDS = 45
PATIENCE_SECONDS = 900

CLIPS = 12
STEPS = 300
TINY_CLIPS = 5
TINY_STEPS = 4

SETTLE_SECONDS = 0.2
"""Time between two looks at what the studio does."""


class Clock:
    """Seconds by part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def measure(self, part: str, act: Callable[[], Any]) -> Any:
        """Do something and count its seconds to a part."""
        begun = time.perf_counter()
        result = act()
        self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - begun
        return result

    def show(self, title: str, step_seconds: float, inside: dict[str, float]) -> None:
        """Print the seconds of each part, of the run's own phases, and of all together."""
        total = sum(self.parts.values())
        print(f"\n{title}")
        for part, seconds in self.parts.items():
            print(f"  {part:<34}{seconds:7.1f} s")
        for part, seconds in inside.items():
            if part != "training":
                print(f"    of the run: {part:<22}{seconds:7.1f} s")
        print(f"  {'steps':<34}{step_seconds:7.1f} s")
        other_seconds = total - step_seconds
        print(
            f"  {'beside the steps':<34}{other_seconds:7.1f} s  (bound {BOUND_SECONDS} s)"
        )


def make_clips(folder: Path, count: int) -> None:
    """Write clips of the toy's own world, with captions beside them."""
    from videotune.toy.dataset import write_dataset

    videos = write_dataset(folder / "made", concept_clips=count, reminder_clips=0)
    flat = folder / "clips"
    flat.mkdir()
    for path in videos:
        caption = folder / "made" / "captions" / f"{path.stem}.txt"
        shutil.copy(path, flat / path.name)
        shutil.copy(caption, flat / caption.name)


def command(*arguments: str) -> dict[str, Any]:
    """Run a command and return what it prints with --json."""
    done = subprocess.run(
        [sys.executable, "-m", "videotune", *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 2):
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def steps_of(run: Path) -> float:
    """Return the seconds that a run's steps took."""
    lines = (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return sum(
        sum(record["seconds"].values())
        for record in records
        if record["kind"] == "step"
    )


def seconds_of(run: Path) -> dict[str, float]:
    """Return the seconds by state that a run counted of itself."""
    heartbeat = json.loads((run / "heartbeat.json").read_text(encoding="utf-8"))
    return dict(heartbeat.get("seconds", {}))


def by_terminal(work: Path, steps: int) -> None:
    """Check, plan and train by the commands."""
    clips = str(work / "clips")
    run = work / "run"
    clock = Clock()
    clock.measure("check", lambda: command("check", clips, "--preset", "toy"))
    clock.measure("plan", lambda: command("plan", clips, "--preset", "toy"))
    arguments = ["--preset", "toy", "--set", f"steps={steps}", "--out", str(run)]
    clock.measure("train", lambda: command("train", clips, *arguments))
    exports = json.loads((run / "exports.json").read_text(encoding="utf-8"))
    assert "comfyui" in {export["format"] for export in exports}
    clock.show("at the terminal", steps_of(run), seconds_of(run))


class Studio:
    """A studio, asked as its own pages ask it."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        arguments = ["studio", "--root", str(root), "--port", str(port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "videotune", *arguments], stdout=subprocess.DEVNULL
        )
        wait_for(self.answers)

    def answers(self) -> bool:
        """Return whether the server answers."""
        try:
            self.get("/static/studio.js")
        except OSError:
            return False
        return True

    def get(self, path: str) -> bytes:
        """Return a page or a file."""
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            content: bytes = answer.read()
        return content

    def post(self, path: str, body: dict[str, Any] | bytes) -> None:
        """Post a form, or the content of a file."""
        content = body if isinstance(body, bytes) else urlencode(body).encode()
        request = urllib.request.Request(self.address + path, content)
        request.add_header("HX-Request", "true")
        try:
            urllib.request.urlopen(request, timeout=60).read()
        except urllib.error.HTTPError as error:
            answer = error.headers.get("HX-Trigger") or error.read()[:500]
            raise SystemExit(f"{path}: {error.code} {answer!r}") from error

    def end(self) -> None:
        """End the server."""
        self.process.terminate()
        self.process.wait(60)


def wait_for(is_so: Callable[[], Any]) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit("the studio did not do it in time")
        time.sleep(SETTLE_SECONDS)


def by_studio(work: Path, steps: int, count: int) -> None:
    """Upload, look at the plan, train and download by the studio's pages."""
    root = work / "root"
    run = root / "mine" / "runs" / "run-1"
    clock = Clock()
    studio = clock.measure("start of the server", lambda: Studio(root))
    try:
        form = {"title": "Mine", "preset": "toy"}
        clock.measure("new project", lambda: studio.post("/create", form))
        clock.measure("upload and check", lambda: upload(studio, work, count))
        values = {"key": "steps", "value": str(steps)}
        studio.post("/p/mine/setup/set", values)
        clock.measure("plan", lambda: wait_for(lambda: has_plan(studio, root)))
        clock.measure("train", lambda: train(studio, run))
        clock.measure("download", lambda: download(studio, run))
    finally:
        studio.end()
    clock.show("in the studio", steps_of(run), seconds_of(run))


def upload(studio: Studio, work: Path, count: int) -> None:
    """Send all files, and wait until all clips are checked."""
    paths = [path for path in sorted((work / "clips").iterdir()) if path.is_file()]
    for path in paths:
        name = quote(path.name)
        studio.post(f"/p/mine/data/upload?name={name}", path.read_bytes())
    used = f"{count} used".encode()
    wait_for(lambda: used in studio.get("/p/mine/data"))


def has_plan(studio: Studio, root: Path) -> bool:
    """Return whether the page Setup shows a whole plan."""
    studio.get("/p/mine/setup")
    try:
        answer = json.loads((root / "mine" / ".studio" / "plan.json").read_text())
    except (OSError, ValueError):
        return False
    return answer.get("part") == "full" and bool(answer.get("plan"))


def train(studio: Studio, run: Path) -> None:
    """Start the run and wait until its process has ended."""
    studio.post("/p/mine/start", {})
    wait_for((run / "exports.json").is_file)
    wait_for(
        lambda: json.loads((run / "heartbeat.json").read_text())["state"] == "ended"
    )


def download(studio: Studio, run: Path) -> None:
    """Fetch the file for ComfyUI as the page Results offers it."""
    page = studio.get("/p/mine/results?run=run-1").decode()
    address = page.split('id="take-comfyui" href="', 1)[1].split('"', 1)[0]
    exports = json.loads((run / "exports.json").read_text(encoding="utf-8"))
    path = next(item["path"] for item in exports if item["format"] == "comfyui")
    assert studio.get(address) == (run / path).read_bytes()


def main() -> None:
    """Print the figures of one way or of both."""
    is_tiny = "--tiny" in sys.argv
    count = TINY_CLIPS if is_tiny else CLIPS
    steps = TINY_STEPS if is_tiny else STEPS

    begun = time.process_time()
    sum(i * i for i in range(10_000_000))
    seconds = time.process_time() - begun
    load = os.getloadavg()[0]
    print(
        f"this core: 10 million turns of a Python loop {seconds:.2f} s; load {load:.1f}"
    )

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        make_clips(work, count)
        if "--studio" not in sys.argv:
            by_terminal(work, steps)
        if "--terminal" not in sys.argv:
            by_studio(work, steps, count)


if __name__ == "__main__":
    main()
