"""Filling a cache from clips on an object store, with and without read-ahead, beside the
same clips in a folder.

    python benchmarks/object_store.py [--clips 48] [--rounds 5] [--json FILE] [--tiny]

The store is moto in a process of its own on this machine; it answers each request so many
milliseconds later. A filling lists the clips, reads each for the first time (hash, media
info, scan) and encodes its windows with the toy base, by default with two workers, into an
empty cache. With read-ahead objects are fetched before the turn of their clip; without,
each worker fetches its clip and then decodes it. Ratio = seconds from the store / seconds
from the folder, in the same round; 1 would be a store that costs nothing.

A second part fills nothing: it lists a folder of many small objects whose mirror is there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import bootstrap

from videotune.config.resolve import parse
from videotune.data.dataset import scan
from videotune.data.fetch_ahead import FetchAhead
from videotune.data.locations import open_location
from videotune.data.workers import Workers, close_default_workers
from videotune.latent_cache.cache_items import CacheItems, missing_items
from videotune.latent_cache.encode import encode_missing
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.store import LatentCache
from videotune.memory.accelerator import local_device
from videotune.models.base import DiffusersModel
from videotune.models.base_model import of_base, place
from videotune.models.registry import find
from videotune.toy.dataset import encode_clip

BUCKET = "bucket"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def serve() -> None:
    """Serve objects until stdin ends; each line there is a new latency in seconds."""
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):
        disable_nagle_algorithm = True
        protocol_version = "HTTP/1.1"

        def log_request(self, *_: Any) -> None:
            """Keep quiet."""

    application = DomainDispatcherApplication(create_backend_app)
    latency = [0.0]

    def late(environment: Any, start_response: Any) -> Iterable[bytes]:
        time.sleep(latency[0])
        answer: Iterable[bytes] = application(environment, start_response)
        return answer

    server = make_server("127.0.0.1", 0, late, True, request_handler=Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for line in sys.stdin:
        latency[0] = float(line)
        print("set", flush=True)


class Server:
    """The store, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        assert process.stdout
        self.url = process.stdout.readline().strip()

    def set_latency(self, seconds: float) -> None:
        """Answer each request so much later from now on."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()


@contextmanager
def serving() -> Iterator[Server]:
    """Run the store for a block."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        server = Server(process)
        os.environ["AWS_ENDPOINT_URL"] = server.url
        yield server
    finally:
        process.kill()
        process.wait()


def make_clips(folder: Path, count: int, side: int, frames: int) -> None:
    """Write different clips of moving noise, with captions."""
    folder.mkdir()
    for number in range(count):
        rng = np.random.default_rng(number)
        small = rng.integers(0, 255, (side // 8, side // 8, 3), dtype=np.uint8)
        picture = small.repeat(8, 0).repeat(8, 1)
        moving = np.stack([np.roll(picture, 2 * i, axis=1) for i in range(frames)])
        encode_clip(folder / f"{number:03}.mp4", moving, 16)
        (folder / f"{number:03}.txt").write_text(f"clip {number}", encoding="utf-8")


def open_toy() -> DiffusersModel:
    """Open the toy base."""
    base = place("asset:toy").folder
    spec = of_base(base).read_spec(base)
    return find(spec.name)(base, local_device(), torch.float32)


def upload(folder: Path, prefix: str) -> str:
    """Upload a folder; return its address."""
    import boto3

    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    client.create_bucket(Bucket=BUCKET)
    for path in sorted(folder.iterdir()):
        client.put_object(
            Bucket=BUCKET, Key=f"{prefix}/{path.name}", Body=path.read_bytes()
        )
    return f"s3://{BUCKET}/{prefix}"


def fill(family: DiffusersModel, path: str, workers: int) -> float:
    """Read the clips and fill an empty cache; return the seconds."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["XDG_CACHE_HOME"] = home
        close_default_workers()
        settings = {
            "datasets": [{"path": path}],
            "resolution": 64,
            "validation_fraction": 0.0,
            "video_config": {"frames": 9},
        }
        config = parse(settings)

        begun = time.perf_counter()
        library = scan(config, family.spec.rules, Path(home) / "cache" / "index.sqlite")
        store = LatentCache(Path(home) / "cache")
        samples = tuple((window, 0) for window in library.windows)
        keys = CacheKeys.of(family, 0)
        todo = missing_items(store, keys, CacheItems((), samples))
        with Workers(workers) as pool:
            encode_missing(family, store, todo, library.media, 0, pool, lambda *_: None)
        return time.perf_counter() - begun


@contextmanager
def without_read_ahead() -> Iterator[None]:
    """Let each worker fetch its own clips for a block."""
    request = FetchAhead.request
    FetchAhead.request = lambda self, path: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FetchAhead.request = request  # type: ignore[method-assign]


def compare(
    family: DiffusersModel, server: Server, folder: Path, address: str, options: Any
) -> list[dict[str, Any]]:
    """Measure each latency; the three ways alternate in each round."""
    rows = []
    fill(family, str(folder), options.workers)  # the first one warms
    for milliseconds in options.latencies:
        server.set_latency(milliseconds / 1000)
        ratios: dict[str, list[float]] = {"read-ahead": [], "without": [], "saved": []}
        for _ in range(options.rounds):
            local = fill(family, str(folder), options.workers)
            ahead = fill(family, address, options.workers)
            with without_read_ahead():
                in_turn = fill(family, address, options.workers)
            ratios["read-ahead"].append(ahead / local)
            ratios["without"].append(in_turn / local)
            ratios["saved"].append(in_turn / ahead)

        row: dict[str, Any] = {"latency_ms": milliseconds}
        for way, values in ratios.items():
            low, high = bootstrap(values)
            row[way] = {"median": statistics.median(values), "low": low, "high": high}
        rows.append(row)
        print(
            f"{milliseconds:4} ms a request: x{row['read-ahead']['median']:.2f} of the folder's time with "
            f"read-ahead, x{row['without']['median']:.2f} without; without / with {row['saved']['median']:.2f} "
            f"({row['saved']['low']:.2f} to {row['saved']['high']:.2f})",
            flush=True,
        )
    server.set_latency(0.0)
    return rows


def measure_listing(count: int) -> dict[str, float]:
    """Return the seconds of the first and the second listing of many small objects."""
    import boto3

    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    for number in range(count):
        client.put_object(Bucket=BUCKET, Key=f"many/{number:06}.mp4", Body=b"x")
    seconds = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["XDG_CACHE_HOME"] = home
        for _ in range(2):
            begun = time.perf_counter()
            open_location(f"s3://{BUCKET}/many", Path(home) / "cache")
            seconds.append(time.perf_counter() - begun)
    print(
        f"{count} objects: {seconds[0]:.2f} s to list and mirror, {seconds[1]:.2f} s once more"
    )
    return {"objects": count, "first": seconds[0], "second": seconds[1]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=48)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--objects", type=int, default=5000)
    parser.add_argument("--latencies", type=int, nargs="+", default=[0, 50, 200])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.tiny:
        options.clips = 3
        options.side = 64
        options.rounds = 1
        options.objects = 20
        options.latencies = [20]

    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as name, serving() as server:
        folder = Path(name) / "clips"
        make_clips(folder, options.clips, options.side, options.frames)
        address = upload(folder, "clips")
        sizes = [path.stat().st_size for path in folder.glob("*.mp4")]
        print(f"{len(sizes)} clips of {statistics.mean(sizes) / 1e3:.0f} kB")
        rows = compare(open_toy(), server, folder, address, options)
        result = {
            "clips": len(sizes),
            "clip_bytes": statistics.mean(sizes),
            "workers": options.workers,
            "rounds": options.rounds,
            "filling": rows,
            "listing": measure_listing(options.objects),
        }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
