import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support.effect_marks import EffectMarks

if TYPE_CHECKING:
    from tests.support.object_stores import Store

settings.register_profile(
    "no clock", deadline=None
)  # on a machine that others use a moment may take a second
settings.load_profile("no clock")


# a session begun in the background of a shell ignores a Ctrl-C, and so would all that
# it starts
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if (
    hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
):  # nor would they hear that their terminal closes, under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Tiny bases are of models whose terms are asked for; test_licences.py takes it away.
os.environ["VIDEOTUNE_ACCEPT_LICENCE"] = "1"

SLOW = (
    "fuzz/",
    "benchmarks/",
    "docs/",
    "simcuda/",
    "elastic/",
    "studio/test_browser.py",
    "toy/test_toy_making.py",
)
"""What `make test-slow` runs: fuzz, rehearsals of benchmarks, pages and schemas, a
stand-in card, a browser, the making of the toy base.
"""


MANY_MODULES = 20
"""A test that imports this many modules adds more objects than a run makes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bit-for-bit",
        action="store_true",
        help="golden losses must be equal, not close",
    )


ROOT = Path(__file__).parents[1]
ENTRIES = pytest.StashKey[set[str]]()
"""What is in the repository's root before the tests."""


def root_entries() -> set[str]:
    """Names in the repository's root, without caches of tools."""
    return {
        path.name for path in ROOT.iterdir() if not path.name.startswith((".", "__"))
    }


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(EffectMarks(), "effect_marks")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[ENTRIES] = root_entries()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if the tests left something in the repository's root."""
    if hasattr(session.config, "workerinput"):
        return  # a worker of pytest-xdist; the controller compares

    before = session.config.stash[ENTRIES]
    left = sorted(root_entries() - before)
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        writer = session.config.get_terminal_writer()
        writer.line(
            f"\ntests left in the repository's root: {', '.join(left)}", red=True
        )


def freeze_objects() -> None:
    """Exclude what is alive by now from garbage collection: a run collects garbage, which
    among millions of objects of libraries and of other tests takes longer than what it
    trains.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _freeze_objects_of_other_files() -> None:
    freeze_objects()


@pytest.fixture(autouse=True)
def _freeze_new_libraries() -> Iterator[None]:
    """Some libraries are imported by the first test that needs them."""
    modules_before = len(sys.modules)
    yield
    if len(sys.modules) - modules_before > MANY_MODULES:
        freeze_objects()


@pytest.fixture(scope="session")
def tiny_bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Family name, and which of its kinds (default: its first) -> the folder of a tiny
    random checkpoint, written once.
    """
    from videotune.models.registry import find

    made: dict[tuple[str, str], Path] = {}

    def get(name: str, variant: str | None = None) -> Path:
        variant = variant or find(name).variants[0]
        if (name, variant) not in made:
            folder = tmp_path_factory.mktemp("tiny") / f"{name}-{variant}"
            made[name, variant] = find(name).tiny(folder, variant=variant)
        return made[name, variant]

    return get


@pytest.fixture
def tiny_family(tiny_bases: Callable[..., Path]) -> Callable[..., Any]:
    """Family name and variant -> the family opened over its tiny checkpoint, on the CPU
    in float32.
    """
    import torch

    from videotune.models.registry import find

    def get(
        name: str, dtype: torch.dtype = torch.float32, variant: str | None = None
    ) -> Any:
        return find(name)(tiny_bases(name, variant), torch.device("cpu"), dtype)

    return get


@pytest.fixture(scope="session")
def _object_server() -> Iterator["Store"]:
    from tests.support.object_stores import serving_objects

    with serving_objects() as store:
        yield store


@pytest.fixture
def objects(
    _object_server: "Store", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator["Store"]:
    """An object store, and a user's cache of this test's own."""
    from tests.support.object_stores import CREDENTIALS
    from videotune.data.workers import close_default_workers

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", _object_server.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name in ("VIDEOTUNE_OBJECT_CACHE_GB", "VIDEOTUNE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    # Child processes keep the environment that they were started in.
    close_default_workers()
    _object_server.forget()
    yield _object_server
    _object_server.latency = 0.0
    _object_server.refuse = None
    os.environ.pop("VIDEOTUNE_OBJECT_CACHE_GB", None)
    close_default_workers()


@pytest.fixture(scope="session")
def small_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clips of 32x32 pixels in the guide's layout: five of 17 frames and one of 9."""
    from videotune.rng import generator_for
    from videotune.toy.dataset import encode_clip
    from videotune.toy.shapes import COMBINATIONS, caption, draw_clip

    folder = tmp_path_factory.mktemp("clips")
    (folder / "captions").mkdir()
    (folder / "videos").mkdir()
    for index, look in enumerate(COMBINATIONS[::12]):
        frames = 9 if index == 5 else 17
        clip = draw_clip(
            generator_for(0, "small", index), *look, frames=frames, side=32
        )
        encode_clip(folder / "videos" / f"{'-'.join(look)}.mp4", clip, 16.0)
        (folder / "captions" / f"{'-'.join(look)}.txt").write_text(caption(*look))
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tests run two at a time on two cores, and exact comparisons want one way of
    summing.
    """
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark what is slow.

    Tests that need a CUDA device are deselected, and counted as such, where there is
    none.
    """
    for item in items:
        if item.path.relative_to(Path(__file__).parent).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    needing = [item for item in items if item.get_closest_marker("cuda")]
    if needing:
        import torch

        if not torch.cuda.is_available():
            config.hook.pytest_deselected(items=needing)
            items[:] = [item for item in items if item not in needing]
