"""Base models of the Hub, against a local server that gives its few answers, and from
its cache without a network.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from tests.support import command_line
from tests.support.command_line import Patch
from tests.support.damaged_files import limited
from tests.support.dripping_server import dripping
from tests.support.hub_downloads import COMMIT, hub_of
from tests.support.hub_settings import hub_settings
from videotune import http_limits
from videotune.cli.main import main
from videotune.data import hub_files
from videotune.errors import VideotuneError
from videotune.models import hub
from videotune.models.base_model import place

TOKEN = "hf_this_is_secret"
UNUSED = {
    "README.md": b"a card",
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"a variant",
    "transformer/diffusion_pytorch_model.bin": b"a pickle",
    "wan-of-another-program.safetensors": b"x" * 1000,
    "convert.py": b"code",
}


@pytest.fixture
def server(tiny_bases: Callable[[str], Path]) -> Iterator[Any]:
    base = tiny_bases("wan")
    found = (path for path in base.rglob("*") if path.is_file())
    files = {
        path.relative_to(base).as_posix(): path.read_bytes() for path in found
    } | UNUSED
    with hub_of(
        {"good": files, "gated": files, "authors": UNUSED, "LTX-2.3": UNUSED}
    ) as server:
        server.files = files
        yield server


Placed = Callable[..., tuple[str, list[str]]]


def settings_of(server: Any, folder: Path) -> dict[str, str]:
    """The environment of a process whose Hub is the local server."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


@pytest.fixture
def placed(server: Any, tmp_path: Path, capfd: command_line.Printed) -> Placed:
    """Places a model whose Hub is the local server; (folder or error, what was said).

    With ``file`` the transformer, and then without the Hub again.
    """

    def run(
        name: str,
        what: str = "weights",
        *,
        free: int | None = None,
        file: Path | None = None,
        **env: str,
    ) -> tuple[str, list[str]]:
        said: list[str] = []
        settings = settings_of(server, tmp_path) | env
        with hub_settings(tmp_path / "hub", settings) as patch:
            patch.setattr(hub, "_WORTH_A_WORD", 1)
            patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
            if free is not None:
                usage = SimpleNamespace(total=10**9, used=10**9, free=free)
                patch.setattr(hub.shutil, "disk_usage", lambda path: usage)
            try:
                if file is None:
                    weights = what == "weights"
                    found = hub.fetch(
                        name, weights=weights, replaced_parts=(), echo=said.append
                    )
                else:
                    files = {"transformer": file}
                    found = place(name, files=files, echo=said.append).folder
                    patch.setenv("HF_HUB_OFFLINE", "1")
                    said.append(str(place(name, files=files).folder))
                answer = str(found)
            except VideotuneError as error:
                answer = f"error: {error}"
        assert TOKEN not in "".join([answer, *said, *capfd.readouterr()])
        return answer, said

    return run


def there(folder: str) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def fetched(server: Any) -> set[str]:
    return {
        path.split(f"{COMMIT}/")[1]
        for kind, path, _, _ in server.asked
        if kind == "GET" and "/resolve/" in path
    }


def test_what_is_needed_is_fetched_and_told_before(server: Any, placed: Placed) -> None:
    folder, said = placed("user/good", "configs", HF_TOKEN=TOKEN)
    assert said == []
    assert there(folder) == {
        name for name in server.files if name.endswith((".json", ".txt", ".model"))
    }
    assert any(authorization == f"Bearer {TOKEN}" for *_, authorization in server.asked)
    folder, (said_first, *more) = placed("user/good")
    needed = {name for name in server.files if name not in UNUSED}
    assert there(folder) == needed
    assert more == []
    size = sum(len(server.files[name]) for name in needed)
    come = sum(
        len(server.files[name]) for name in needed if name.endswith(".safetensors")
    )
    assert said_first.startswith(
        f"user/good: {len(needed)} files, {size / 1000:.1f} kB, "
    )
    assert f"{come / 1000:.1f} kB are fetched into " in said_first
    assert said_first.endswith("licence: apache-2.0")
    server.asked.clear()
    assert placed("user/good") == (folder, [])
    assert fetched(server) == set()


def test_everything_is_of_the_commit_that_was_looked_at(
    server: Any, placed: Placed
) -> None:
    """A repository may move on while it is fetched: after the first look nobody asks
    for its newest state.
    """
    folder, _ = placed("user/good")
    asked = [path for _, path, _, _ in server.asked]
    looked = next(i for i, path in enumerate(asked) if COMMIT in path)
    assert len(asked) > looked + 5
    assert [path for path in asked[looked:] if COMMIT not in path] == []
    assert Path(folder).name == COMMIT
    assert placed("user/good", HF_HUB_OFFLINE="1")[0] == folder


def test_a_full_disk_is_told_before(server: Any, placed: Placed) -> None:
    said, _ = placed("user/good", free=1000)
    assert said.startswith("error: base_model_name: user/good needs ")
    assert "has 1.0 kB free. Free some, or set HF_HOME" in said
    assert not any(name.endswith(".safetensors") for name in fetched(server))


@pytest.mark.parametrize(
    ("name", "token", "words"),
    [
        ("user/none", "", ["not on the Hub, or is private", "Check the id at http", "set HF_TOKEN to it"]),
        ("Wan-AI/Wan2.1-T2V-1.3B", "", ["did you mean Wan-AI/Wan2.1-T2V-1.3B-Diffusers?"]),
        ("user/gated", "", ["is gated. Agree to its terms at http", "/user/gated", "/settings/tokens, and set HF_TOKEN"]),
        ("user/rejected", TOKEN, ["the Hub rejects HF_TOKEN", "/settings/tokens, or unset it"]),
        ("user/authors", "", ["no model_index.json; it holds transformer/", "Look for user/authors-Diffusers"]),
        ("user/LTX-2.3", "", ["no model_index.json", "Look for diffusers/LTX-2.3-Diffusers"]),
        ("user/--bad--", "", ["neither a local folder nor an id of the Hub. Write user/name"]),
    ],
)  # fmt: skip
def test_the_hubs_refusals_say_what_to_do(
    placed: Placed, name: str, token: str, words: list[str]
) -> None:
    said, _ = placed(name, **({"HF_TOKEN": token} if token else {}))
    assert said.startswith(f"error: base_model_name: {name}")
    for word in words:
        assert word in said


def test_a_part_that_is_there_as_a_pickle_alone(server: Any, placed: Placed) -> None:
    del server.files["transformer/diffusion_pytorch_model.safetensors"]
    del server.files["transformer/diffusion_pytorch_model.fp16.safetensors"]
    said, _ = placed("user/good")
    assert (
        "its transformer/ has no weights in safetensors; diffusion_pytorch_model.bin can run code"
        in said
    )


def test_without_a_network_the_cache_serves_and_says_what_is_missing(
    server: Any, placed: Placed, tmp_path: Path
) -> None:
    folder, _ = placed("user/good", "configs")
    for env in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert placed("user/good", "configs", **env)[0] == folder
        said, _ = placed("user/good", **env)
        assert "of user/good, 3 files are not in" in said
        assert "text_encoder/model.safetensors" in said
    assert "--offline or HF_HUB_OFFLINE" in placed("user/good", HF_HUB_OFFLINE="1")[0]
    assert "user/other is not in" in placed("user/other", HF_HUB_OFFLINE="1")[0]
    placed("user/good")
    assert placed("user/good", HF_HUB_OFFLINE="1") == (folder, [])
    unreached, said_of = placed("user/good", HF_ENDPOINT="http://127.0.0.1:9")
    assert unreached == folder
    assert said_of == [
        f"note: the Hub is not reached; user/good is taken from {folder}"
    ]


def test_a_file_of_ones_own_spares_the_download_of_the_transformer(
    server: Any, placed: Placed, tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    own = tmp_path / "own.safetensors"
    shutil.copyfile(
        tiny_bases("wan") / "transformer" / "diffusion_pytorch_model.safetensors", own
    )
    folder, (*_, offline) = placed("user/good", file=own)
    assert offline == folder
    assert (
        Path(folder) / "transformer" / "diffusion_pytorch_model.safetensors"
    ).resolve() == own.resolve()
    assert not any(name.startswith("transformer/diffusion") for name in fetched(server))


def test_what_has_come_is_kept_and_a_broken_connection_taken_up_where_it_broke(
    server: Any, placed: Placed
) -> None:
    """An answer that is wrong in the midst ends the run; the next one asks only for
    what is not there.
    """
    cut, broken = (
        "text_encoder/model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    )
    server.cut.add(cut)
    server.broken.add(broken)
    assert placed("user/good")[0].startswith("error: base_model_name: ")
    ranges = [
        asked
        for kind, path, asked, _ in server.asked
        if kind == "GET" and path.endswith(cut)
    ]
    assert ranges == [None, f"bytes={len(server.files[cut]) // 2 // 4096 * 4096}-"]
    before = fetched(server) - {broken}
    assert len(before) > 5
    server.broken.clear()
    server.asked.clear()
    folder, _ = placed("user/good")
    assert all(
        (Path(folder) / name).read_bytes() == server.files[name]
        for name in (cut, broken)
    )
    assert not fetched(server) & before


def test_each_file_is_held_once_against_the_hubs_own_hash(
    placed: Placed, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder, read, digest = Path(placed("user/good")[0]), [], hashlib.file_digest
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        hashlib,
        "file_digest",
        lambda file, kind: (read.append(file.name), digest(file, kind))[1],
    )
    place(str(folder))
    assert len(read) == 3, "the weights of transformer, text encoder and VAE"
    place(str(folder))
    assert len(read) == 3, "they are remembered"
    blob = (folder / "vae" / "diffusion_pytorch_model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    for _ in range(2):  # what is wrong is not remembered as right
        with pytest.raises(
            VideotuneError, match=r"vae/diffusion_pytorch_model.safetensors is damaged"
        ) as caught:
            place(str(folder))
        assert str(blob) in str(caught.value)
    assert len(read) == 5, "the one that changed"


def test_offline_is_an_option_of_the_commands(
    small_clips: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # put back after the test
    with pytest.raises(VideotuneError, match="nobody/nothing is not in"):
        command_line.run(
            "plan", offline=True, data=small_clips, set="base_model_name=nobody/nothing"
        )
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("where", ["headers", "body", "silent"])
def test_a_hub_that_never_finishes_its_answer_is_not_reached(
    where: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(http_limits, "HUB_SECONDS", 0.5)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with dripping(where) as address, limited(40):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(VideotuneError, match="user/model"):
            place("user/model")
        with pytest.raises(VideotuneError, match=r"user/clips.*check the network"):
            hub_files.snapshot("user/clips", None, suffixes=(".mp4",), names=())


# ---- videotune download


@dataclass(frozen=True)
class Downloaded:
    """How ``videotune download`` ended, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def download(
    server: Any, tmp_path: Path, capsys: command_line.Printed
) -> Callable[..., Downloaded]:
    """Runs ``videotune download`` as the installed script does, with the local server
    as its Hub.
    """

    def run(*words: str, **env: str) -> Downloaded:
        settings = settings_of(server, tmp_path) | env
        capsys.readouterr()
        with hub_settings(tmp_path / "hub", settings) as patch:
            patch.setattr(sys, "argv", ["videotune", "download", *words])
            with pytest.raises(SystemExit) as end:
                main()
        return Downloaded(int(end.value.code or 0), *capsys.readouterr())

    return run


def test_download_fetches_a_model_and_continues_where_it_broke(
    server: Any, download: Any, tmp_path: Path
) -> None:
    """What came before the connection broke is not sent again."""
    large = "transformer/diffusion_pytorch_model.safetensors"
    server.broken.add(large)
    first = download("user/good")
    assert first.code == 1
    assert "could not be downloaded" in first.err or "refuses" in first.err

    server.broken.clear()
    server.asked.clear()
    done = download("user/good", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["model"] == "user/good"
    folder = Path(result["folder"])
    assert (folder / large).read_bytes() == server.files[large]
    assert there(str(folder)) == set(server.files) - set(UNUSED)
    assert result["bytes"] == sum(
        len(server.files[name]) for name in there(str(folder))
    )
    fetched = {path for command, path, *_ in server.asked if command == "GET"}
    assert any(path.endswith(large) for path in fetched)
    assert not any("text_encoder/model.safetensors" in path for path in fetched)

    again = download("user/good")
    assert again.out.startswith(str(folder)), "it is complete"


def test_a_dry_run_prints_the_size_and_fetches_no_weights(
    server: Any, download: Any
) -> None:
    done = download("user/good", "--dry-run", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    needed = sum(
        len(content) for name, content in server.files.items() if name not in UNUSED
    )
    assert result["bytes"] == needed
    assert 0 < result["missing_bytes"] <= needed
    assert result["licence"] == "apache-2.0"
    paths = [path for command, path, *_ in server.asked if command == "GET"]
    assert not any(path.endswith(".safetensors") for path in paths)


def test_a_config_file_names_the_base_model_to_fetch(
    server: Any, download: Any, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("base_model_name: user/good\n")
    done = download(str(config), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["model"] == "user/good"

    config.write_text(
        "base_model_name: transformer.safetensors\nbase_parts: user/good\n"
    )
    done = download(str(config), "--dry-run", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["model"] == "user/good"


@pytest.mark.parametrize(
    "env", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_a_dry_run_without_the_hub_prints_the_size_that_a_plan_knows(
    download: Any, env: dict[str, str]
) -> None:
    done = download("ltx 2B LoRA", "--dry-run", **env)
    assert done.code == 0, done.err
    assert "about 28 GB to download" in done.out
    assert "licence: " in done.out
    assert "was not reached" in done.out

    result = json.loads(download("ltx 2B LoRA", "--dry-run", "--json", **env).out)
    assert result["download"] == {"gigabytes": 28.0, "is_published": True}
    assert result["is_here"] is False


@pytest.mark.parametrize(
    ("words", "env", "sentence"),
    [
        (
            ["user/good"],
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "the Hub is not reached",
        ),
        (
            ["user/good", "--dry-run"],
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "the Hub is not reached",
        ),
        (["wan 2.2 LoRA"], {"HF_HUB_OFFLINE": "1"}, "may not be asked"),
        (["user/good", "--dry-run"], {"HF_HUB_OFFLINE": "1"}, "may not be asked"),
        (["none.yaml"], {}, "none.yaml"),
        (["user/none"], {}, "is not on the Hub"),
        (["user/gated"], {}, "is gated"),
        (["toy"], {}, "comes with videotune"),
        (["no such preset"], {}, "there is no preset"),
        (["."], {}, "is here already"),
    ],
)
def test_a_download_that_cannot_be_is_one_sentence_within_seconds(
    download: Any, words: list[str], env: dict[str, str], sentence: str
) -> None:
    begun = time.monotonic()
    done = download(*words, **env)
    assert time.monotonic() - begun < 20, "no minutes of retries"
    assert done.code == 1
    first, message = done.err.splitlines()[:2]
    assert first == "asking the Hub …"
    assert message.startswith("videotune: ")
    assert sentence in message
