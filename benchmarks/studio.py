"""The studio's speed: its start, the first paint of each page, the answer to clicks,
and what an open page costs.

python benchmarks/studio.py [SECONDS] [--tiny] prints a line a figure, beside its bound
where it has one; SECONDS (30) is how long a page Train is looked at. A project of 500
clips is open during a run. It needs Chromium on the PATH. Wall time on a machine that
others use says little: a loop of plain Python says how quick the core is today.
"""

import json
import os
import re
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

CLIPS = 500
MANY = 5000
STEPS = 2000
PAINT = 500
ANSWER = 300
PLAN = 2000
"""Milliseconds until the first paint of a page, until a click is answered, and until
the plan follows a setting; 95 % of them keep within the bound.
"""

PAINTED = """() => new Promise((done) => new PerformanceObserver((list) => {
  for (const one of list.getEntries()) if (one.name === 'first-contentful-paint') done(one.startTime);
}).observe({ type: 'paint', buffered: true }))"""

ROUNDS = 12
"""Times that each click is tried."""


def main() -> None:
    """Make the projects, start the server, and print the figures."""
    global CLIPS, MANY, STEPS, ROUNDS
    named = [word for word in sys.argv[1:] if word != "--tiny"]
    seconds = float(named[0]) if named else 30.0
    if "--tiny" in sys.argv:
        CLIPS = 60
        MANY = 120
        STEPS = 100
        ROUNDS = 2
        seconds = 1.0
    begun = time.process_time()
    sum(i * i for i in range(10_000_000))
    print(
        f"this core: 10 million turns of a Python loop {time.process_time() - begun:.2f} s; load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_clips(root, "clips", CLIPS)
        write_clips(root, "many", MANY)
        write_run(root / "clips")
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
    (folder / "project.json").write_text(
        json.dumps({"title": name, "created": 1.0, "preset": "toy"})
    )
    return folder


def write_clips(root: Path, name: str, count: int) -> None:
    """A project of ``count`` checked clips; those after the first 500 are hard links to
    them.
    """
    folder = project(root, name)
    rows = []
    for number in range(count):
        path = folder / "clips" / f"clip-{number:05d}.mp4"
        words = f"thing number {number} moves {('left', 'right', 'up', 'down')[number % 4]} over a wide green field"
        if number < CLIPS:
            a_video(path, number)
        else:
            os.link(path.with_name(f"clip-{number % CLIPS:05d}.mp4"), path)
        path.with_suffix(".txt").write_text(words)
        bad = number % 50 == 0
        rows.append({
            "path": str(path), "id": None, "used": not bad, "notes": [], "spans": [], "held_out": False, "warnings": [],
            "captions": [words],
            "reason": "too_short" if bad else None, "detail": "3 frames, 17 are needed" if bad else None,
            "source_seconds": 2.0, "width": 640, "height": 360, "shape": "17x64x64", "windows": 1, "views": 4,
        })  # fmt: skip
    used = sum(row["used"] is True for row in rows)
    account = {
        "found": count,
        "used": used,
        "held_out": 0,
        "skipped": count - used,
        "clips": rows,
    }
    job = folder / "jobs" / "000001-check"
    job.mkdir()
    (job / "out").write_text(
        json.dumps({**account, "buckets": [], "notes": [], "blockers": []})
    )
    (job / "rc.json").write_text(json.dumps({"code": 0, "ended": time.time() + 10}))
    facts = {
        "kind": "check",
        "about": "",
        "words": [],
        "cwd": "",
        "started": time.time() + 5,
    }
    (job / "job.json").write_text(json.dumps(facts))


def a_video(path: Path, seed: int) -> None:
    """Two seconds of a square that moves over noise drawn from the seed."""
    import av
    import numpy as np

    draws = np.random.default_rng(seed)
    ground = draws.integers(0, 160, (180, 320, 3), np.uint8)
    colour = draws.integers(160, 256, 3)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=24)
        stream.width = 320
        stream.height = 180
        stream.pix_fmt = "yuv420p"
        for number in range(48):
            picture = ground.copy()
            picture[60:120, 4 * number : 4 * number + 60] = colour
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())


def write_run(folder: Path) -> None:
    """A run of 2,000 steps and forty validations, which this process continues."""
    run = folder / "runs" / "run-1"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"steps": 2 * STEPS, "settings": {}}))
    start_of = {
        "kind": "start",
        "time": time.time(),
        "steps": 2 * STEPS,
        "device": "cpu",
        "windows": 48,
        "notes": [],
    }
    lines: list[dict[str, Any]] = [start_of]
    for step in range(STEPS + 1):
        lines.append(a_step(step))
        if step % 50 == 0:
            lines.append(a_reading(step))
    (run / "journal.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    beat(run, "training")


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
    facts = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": 1.0,
        "step": STEPS,
        "state": state,
    }
    aside = run / "beat"
    aside.write_text(json.dumps({**facts, "since": time.time(), "time": time.time()}))
    aside.replace(run / "heartbeat.json")


def start(root: Path) -> tuple[psutil.Process, str]:
    """The server; prints how long it took until it answered, beside its CPU seconds."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    begun = time.perf_counter()
    words = [
        sys.executable,
        "-m",
        "videotune",
        "studio",
        "--root",
        str(root),
        "--port",
        str(port),
    ]
    process = psutil.Popen(words, stdout=subprocess.DEVNULL)
    while True:
        try:
            urllib.request.urlopen(f"{address}/static/studio.js", timeout=5).read()
            break
        except OSError:
            time.sleep(0.05)
    print(
        f"start: answers after {time.perf_counter() - begun:.1f} s, {spent(process):.1f} s of CPU"
    )
    return process, address


def spent(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def look(address: str, server: psutil.Process, root: Path, seconds: float) -> None:
    """Open the pages in a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(240_000)
        over = threading.Event()
        writer = threading.Thread(
            target=grow, args=(root / "clips" / "runs" / "run-1", over)
        )
        writer.start()
        try:
            plans(
                page, address
            )  # its first one has read all clips, which would go on beside the clicks
            paints(page, address)
            clicks(page, address)
            cost(
                page,
                f"{address}/p/clips/train?run=run-1",
                server,
                seconds,
                "page Train of a run of two steps a second",
            )
            cost(
                page,
                f"{address}/p/clips/data",
                server,
                seconds,
                f"page Data of {CLIPS} clips",
            )
        finally:
            over.set()
            writer.join()
        begun = time.perf_counter()
        page.goto(f"{address}/p/many/data")
        page.locator(".tile").first.wait_for()
        print(
            f"page Data of {MANY} clips: first tiles after {time.perf_counter() - begun:.2f} s"
        )
        browser.close()


def paints(page: Any, address: str) -> None:
    """The first paint of each page, the first of which begins with an empty cache."""
    for path in (
        "/",
        "/p/clips/data",
        "/p/clips/setup",
        "/p/clips/train?run=run-1",
        "/p/clips/results?run=run-1",
        "/queue",
    ):
        times = []
        for _ in range(max(1, ROUNDS // 3)):
            page.goto(address + path)
            times.append(page.evaluate(PAINTED))
        report(f"first paint of {path.partition('?')[0]}", times, PAINT)


CLICKS = (
    ("/p/clips/data", ".clip-open", "dialog[open]"),
    ("/p/clips/data", "nav.pages a[href$='/train']", "body[data-page=train] #r-run"),
    (
        "/p/clips/train?run=run-1",
        "nav.pages a[href$='/data']",
        "body[data-page=data] .tile",
    ),
    (
        "/p/clips/train?run=run-1",
        "nav.pages a[href$='/setup']",
        "body[data-page=setup] .field",
    ),
    (
        "/p/clips/setup",
        "nav.pages a[href$='/results']",
        "body[data-page=results] main > *",
    ),
    ("/", "[data-open=new]", "dialog[open]"),
)
"""An address, what is clicked there, and what is to be seen then."""


def clicks(page: Any, address: str) -> None:
    """From a click to what it shows, painted."""
    every = []
    for path, button, shown in CLICKS:
        times = []
        for _ in range(ROUNDS):
            page.goto(address + path)
            page.locator(button).first.wait_for()
            page.wait_for_timeout(300)
            begun = time.perf_counter()
            page.locator(button).first.click()
            page.locator(shown).first.wait_for()
            times.append(1000 * (time.perf_counter() - begun))
        report(f"click on {button} of {path.partition('?')[0]}", times, ANSWER)
        every += times
    report("any click", every, ANSWER)


def plans(page: Any, address: str) -> None:
    """From a setting to its plan: the first one of the studio, and those after it."""
    page.goto(f"{address}/p/clips/setup")
    times = []
    for number in range(ROUNDS + 1):
        field = page.locator("#f-steps")
        shown = page.locator("#r-plan .stat b")
        field.fill(str(700 + number))
        begun = time.perf_counter()
        field.press("Tab")
        shown.filter(has_text=re.compile(f"^{700 + number}$")).first.wait_for()
        times.append(1000 * (time.perf_counter() - begun))
    print(
        f"the first plan of {CLIPS} clips: {times[0]:.0f} ms after its setting was typed"
    )
    report(f"a plan of {CLIPS} clips after a setting was typed", times[1:], PLAN)


def report(what: str, times: list[float], bound: float) -> None:
    """The median and the 95th percentile of some milliseconds, beside their bound."""
    ordered = sorted(times)
    late = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    word = "" if late <= bound else "  BEYOND"
    print(
        f"{what}: median {ordered[len(ordered) // 2]:.0f} ms, 95 % within {late:.0f} ms; bound {bound} ms{word}"
    )


def cost(
    page: Any, address: str, server: psutil.Process, seconds: float, what: str
) -> None:
    """A page open for so long: the server's CPU time."""
    page.goto(address)
    page.wait_for_timeout(2000)
    begun = time.perf_counter()
    cpu = spent(server)
    page.wait_for_timeout(1000 * seconds)
    share = (spent(server) - cpu) / (time.perf_counter() - begun)
    print(f"{what} open for {seconds:.0f} s: {share:.2%} of a core")


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
