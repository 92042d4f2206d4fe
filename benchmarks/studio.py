"""The studio's speed: its start and first page, a table of 5,000 clips, and what looking at a run costs the server.

python benchmarks/studio.py [SECONDS] [--tiny] prints a line a figure; SECONDS (60) is how long each run is looked at. It
needs Chromium on the PATH. Wall time on a machine that others use says little: CPU seconds stand beside it, and a loop of
plain Python says how quick the core is today.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

CLIPS = 5000
STEPS = 2000

FRAMES = """async () => {
  const view = document.querySelector('.clips'), times = []; let last = performance.now();
  const long = [], told = (list) => long.push(...list.getEntries());
  new PerformanceObserver(told).observe({ entryTypes: ['longtask'] });
  for (let i = 0; i < 180; i++) {
    view.scrollTop += 2300;
    await new Promise(requestAnimationFrame); const now = performance.now(); times.push(now - last); last = now;
  }
  times.sort((a, b) => a - b);
  const rows = document.querySelectorAll('.clip').length;
  return { median: times[90], p95: times[171], worst: times[179], long: long.length, rows };
}"""
"""Scroll by 25 rows in each of 180 frames, from the top to nearly the bottom: milliseconds between frames."""

FILTER = """async (words) => {
  const box = document.querySelector('[data-clips] input'), begin = performance.now();
  box.value = words; box.dispatchEvent(new Event('input', { bubbles: true })); const work = performance.now() - begin;
  await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame);
  return { work, painted: performance.now() - begin, said: document.querySelector('.filters .count').textContent };
}"""


def main() -> None:
    """Make the projects, start the server, and print the figures."""
    global CLIPS, STEPS
    named = [word for word in sys.argv[1:] if word != "--tiny"]
    seconds = float(named[0]) if named else 60.0
    if "--tiny" in sys.argv:
        CLIPS, STEPS, seconds = 300, 100, 1.0
    begun = time.process_time()
    sum(i * i for i in range(10_000_000))
    print(
        f"this core: 10 million turns of a Python loop {time.process_time() - begun:.2f} s; load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_many(root)
        write_run(root, "ended", "ended")
        write_run(root, "going", "training")
        server, address = start(root)
        try:
            look(address, server, root, seconds)
        finally:
            server.terminate()
            server.wait(30)


def project(root: Path, name: str) -> Path:
    """An empty project."""
    folder = root / name
    for part in ("clips", "runs", "jobs"):
        (folder / part).mkdir(parents=True)
    (folder / "project.json").write_text(json.dumps({"title": name, "created": 1.0, "preset": "toy"}))
    return folder


def write_many(root: Path) -> None:
    """A project of 5,000 clips that were checked."""
    folder, rows = project(root, "many"), []
    for number in range(CLIPS):
        path = folder / "clips" / f"clip-{number:05d}.mp4"
        words = f"thing number {number} moves {('left', 'right', 'up', 'down')[number % 4]} over a wide green field"
        path.write_bytes(b"\0\0\0\x18ftypmp42")
        path.with_suffix(".txt").write_text(words)
        bad = number % 50 == 0
        rows.append({
            "path": str(path), "id": None, "used": not bad, "held_out": False, "warnings": [], "captions": [words],
            "reason": "too_short" if bad else None, "detail": "3 frames, 17 are needed" if bad else None,
            "source_seconds": 2.0, "width": 640, "height": 360, "shape": "17x64x64", "windows": 1, "views": 4,
        })  # fmt: skip
    used = sum(row["used"] for row in rows)
    account = {"found": CLIPS, "used": used, "held_out": 0, "skipped": CLIPS - used, "clips": rows}
    job = folder / "jobs" / "000001-check"
    job.mkdir()
    (job / "out").write_text(json.dumps({**account, "buckets": [], "notes": [], "blockers": []}))
    (job / "rc.json").write_text(json.dumps({"code": 0, "ended": time.time() + 10}))
    facts = {"kind": "check", "about": "", "words": [], "cwd": "", "started": time.time() + 5}
    (job / "job.json").write_text(json.dumps(facts))


def write_run(root: Path, name: str, state: str) -> None:
    """A project with a run of 2,000 steps and forty validations; the run has ended, or this process continues it."""
    run = project(root, name) / "runs" / "run-1"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"steps": 2 * STEPS, "settings": {}}))
    start_of = {"kind": "start", "time": time.time(), "steps": 2 * STEPS, "device": "cpu", "windows": 48, "notes": []}
    lines: list[dict[str, Any]] = [start_of]
    for step in range(STEPS + 1):
        lines.append(a_step(step))
        if step % 50 == 0:
            lines.append(a_reading(step))
    if state == "ended":
        lines.append({"kind": "end", "time": time.time(), "step": STEPS, "why": "stopped", "seconds": {}})
    (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    beat(run, state)


def a_step(step: int) -> dict[str, Any]:
    """A step's record, as a run writes it."""
    by_t: list[float | None] = [None] * 9
    by_t[step % 9] = error = 0.1 + (step * 7919 % 100) / 1000
    return {
        "kind": "step", "step": step, "loss": error, "mse": error, "by_t": by_t, "lr": {"transformer": 1e-3},
        "grad_norm": 0.3, "window_ids": [f"{step % 48:012x}@0.000+17x64x64"], "captions": [0],
        "seconds": {"data": 0.005, "forward": 0.05, "backward": 0.05, "optimizer": 0.004},
    }  # fmt: skip


def a_reading(step: int) -> dict[str, Any]:
    """A validation with twelve clips a part."""
    part = {
        "mean": 0.1, "by_quantile": [0.1] * 9, "windows": 12, "normalised": 1 - step / 9000,
        "clips": {f"{n:012x}": 0.9 + n / 100 for n in range(12)},
    }  # fmt: skip
    return {
        "kind": "validation", "time": time.time(), "step": step, "validation": "abc", "held_out": part, "train": part,
        "seconds": 1,
    }  # fmt: skip


def beat(run: Path, state: str) -> None:
    """The run's heartbeat, by this process."""
    facts = {"pid": os.getpid(), "host": socket.gethostname(), "started": 1.0, "step": STEPS, "state": state}
    aside = run / "beat"
    aside.write_text(json.dumps({**facts, "since": time.time(), "time": time.time()}))
    aside.replace(run / "heartbeat.json")


def start(root: Path) -> tuple[psutil.Process, str]:
    """The server; prints how long it took until it answered, beside its CPU seconds."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    address, begun = f"http://127.0.0.1:{port}", time.perf_counter()
    words = [sys.executable, "-m", "videotune", "studio", "--root", str(root), "--port", str(port)]
    process = psutil.Popen(words, stdout=subprocess.DEVNULL)
    while True:
        try:
            urllib.request.urlopen(f"{address}/static/studio.js", timeout=5).read()
            break
        except OSError:
            time.sleep(0.05)
    print(f"start: answers after {time.perf_counter() - begun:.1f} s, {spent(process):.1f} s of CPU")
    return process, address


def spent(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def browsers() -> float:
    """CPU seconds of the browser's processes so far."""
    children = psutil.Process().children(recursive=True)
    return sum(spent(one) for one in children if one.name().startswith("chrom"))


def look(address: str, server: psutil.Process, root: Path, seconds: float) -> None:
    """Open the pages in a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(240_000)
        for which in ("first", "second"):
            first_page(page, address, which)
        table(page, address, server)
        for name, what in (("ended", "an ended run"), ("going", "a run of two steps a second")):
            watch(page, f"{address}/?project={name}&tab=train&run=run-1", server, root / name, seconds, what)
        browser.close()


def first_page(page: Any, address: str, which: str) -> None:
    """From the address to the first paint, and to the list of projects."""
    begun, cpu = time.perf_counter(), browsers()
    page.goto(address)
    page.locator(".card").first.wait_for()
    whole, cpu = time.perf_counter() - begun, browsers() - cpu
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    print(f"{which} page: first paint after {paint / 1000:.2f} s, projects after {whole:.2f} s, {cpu:.2f} s of CPU")


def table(page: Any, address: str, server: psutil.Process) -> None:
    """The table of clips: shown, filtered, scrolled."""
    where = f"{address}/studio/clips?project=many"
    urllib.request.urlopen(where).read()
    begun, cpu = time.perf_counter(), spent(server)
    size = len(urllib.request.urlopen(where).read())
    wall, cpu = time.perf_counter() - begun, spent(server) - cpu
    print(f"table of {CLIPS}: {size / 1e6:.2f} MB, made in {wall:.2f} s ({cpu:.2f} s of CPU)")
    begun = time.perf_counter()
    page.goto(f"{address}/?project=many&tab=data")
    page.locator(".clip").first.wait_for()
    print(f"  page with its first rows after {time.perf_counter() - begun:.2f} s")
    for words in ("thing", "number 4321", ""):
        found = page.evaluate(FILTER, words)
        said = found["said"] or "all"
        print(f"  filter {words!r}: {found['work']:.1f} ms of work, painted after {found['painted']:.0f} ms ({said})")
    cpu = browsers()
    frames = page.evaluate(FRAMES)
    cpu = (browsers() - cpu) / 180
    print(
        f"  scroll by 25 rows a frame: {frames['median']:.0f} ms a frame, 95 % within {frames['p95']:.0f} ms, worst "
        f"{frames['worst']:.0f} ms; {frames['long']} tasks above 50 ms; {frames['rows']} rows exist; "
        f"{cpu * 1000:.0f} ms of CPU a frame, in all of the browser"
    )


def watch(page: Any, address: str, server: psutil.Process, folder: Path, seconds: float, what: str) -> None:
    """The page Train open for so long: the server's CPU time."""
    page.goto(address)
    page.locator(".state .badge").first.wait_for()
    page.locator("#loss, section").first.wait_for()
    over = threading.Event()
    writer = threading.Thread(target=grow, args=(folder / "runs" / "run-1", over))
    if what != "an ended run":
        writer.start()
    begun, cpu = time.perf_counter(), spent(server)
    page.wait_for_timeout(1000 * seconds)
    share = (spent(server) - cpu) / (time.perf_counter() - begun)
    over.set()
    print(f"{what} of {STEPS} steps looked at for {seconds:.0f} s: {share:.2%} of a core")


def grow(run: Path, over: threading.Event) -> None:
    """Two steps a second, and a heartbeat with each."""
    step = STEPS
    while not over.wait(0.5):
        step += 1
        with (run / "journal.jsonl").open("a") as file:
            file.write(json.dumps(a_step(step)) + "\n")
        beat(run, "training")


if __name__ == "__main__":
    main()
