"""``card`` and ``publish``, against a local server that speaks the Hub's upload
protocol.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from tests.support import reports
from tests.support.command_line import Patch
from tests.support.command_line import run as shell
from tests.support.damaged_files import limited
from tests.support.dripping_server import dripping
from tests.support.hub_uploads import TOKEN, upload_hub
from tests.support.run_processes import Work
from tests.support.waiting import wait_until
from videotune import http_limits
from videotune.bounds import EXPORT_ENTRIES
from videotune.commands.publish import card, publish
from videotune.errors import DONE, VideotuneError
from videotune.files import hash_file, hash_path, read_json, write_json
from videotune.runs import export_files

SHOWN = (
    "steps=2",
    "sample_after=2",
    "sample.steps=1",
    'samples=["a cat"]',
    "video_config.frames=5",
)
FORMATS = 'output_model_format=["diffusers","comfyui"]'


@pytest.fixture
def hub(monkeypatch: Patch) -> Iterator[Any]:
    with upload_hub(monkeypatch) as server:
        yield server


@pytest.fixture
def run(work: Work) -> Path:
    """A finished run of two formats with previews."""
    return work.copy(*SHOWN, FORMATS)


def puts(hub: Any) -> int:
    """How many large files were sent."""
    return sum(method == "PUT" for method, *_ in hub.asked)


def edit(run: Path, base: str, **settings: Any) -> None:
    """Another base model and other settings in a run's config.json."""
    config = read_json(run / "config.json")
    config["base"]["name"] = base
    write_json(
        run / "config.json", config | {"settings": config["settings"] | settings}
    )


def test_the_card_says_what_was_trained_and_how_it_is_used(
    run: Path, tmp_path: Path
) -> None:
    datasets = read_json(run / "config.json")["settings"]["datasets"]
    edit(run, "someone/a-base", datasets=[datasets[0] | {"trigger": "<mytoken>"}])
    assert shell("card", run, out=tmp_path / "README.md") == DONE
    made = ModelCard.load(tmp_path / "README.md")
    data = made.data
    assert (data.library_name, data.pipeline_tag, data.license) == (
        "diffusers",
        "text-to-video",
        "apache-2.0",
    )
    assert (data.base_model, data.base_model_relation) == ("someone/a-base", "adapter")
    assert ({"videotune", "lora"} < set(data.tags), data.instance_prompt) == (
        True,
        "<mytoken>",
    )
    (sample,) = data.to_dict()["widget"]
    assert (sample["text"], (run / sample["output"]["url"]).is_file()) == (
        "a cat",
        True,
    )
    for text in (
        "6 clips",
        "load_lora_weights('run-step-2.safetensors')",
        "LoraLoaderModelOnly",
        "| lora.rank | 2 |",
    ):
        assert text in made.text, text


def test_the_card_has_the_exports_figures_and_the_bases_own_licence(
    run: Path, tmp_path: Path
) -> None:
    """The best step may be another than that of the files."""
    verdict = {
        "verdict": "LEARNING",
        "reason": "it falls",
        "best_step": 1,
        "best": 0.75,
        "turned": False,
    }
    losses = {0: 1.0, 1: 0.75, 2: 0.8125}
    with (run / "journal.jsonl").open("a") as journal:
        for step, loss in losses.items():
            reading = reports.reading(step, loss, loss) | {"time": 1.0}
            reading["held_out"]["normalised"] = loss
            journal.write(json.dumps(reading) + "\n")
        record = {"kind": "verdict", "time": 1.0, "step": 2} | verdict
        journal.write(json.dumps(record) + "\n")
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: Their Own Licence\n---\n"
    )
    edit(run, str(tmp_path), training_method="FINE_TUNE")
    assert ModelCard(card(run)["card"]).data.license == "apache-2.0"  # no base model
    (tmp_path / "model_index.json").write_text("{}")
    made = ModelCard(card(run)["card"])
    assert (made.data.license, made.data.license_name) == ("other", "their-own-licence")
    assert [one.metric_value for one in made.data.eval_results] == [0.8125]
    assert "of this export: 0.8125 at step 2" in made.text
    assert "0.75 at step 1" in made.text
    assert "LEARNING: it falls" in made.text
    assert "base_model" not in made.data.to_dict()


def test_a_card_says_nothing_of_this_machine(
    work: Work, clips: Path, tmp_path: Path
) -> None:
    """Folders and clips of telling names, in the run's every setting that takes a path."""
    secret = clips.rename(tmp_path / "clips-of-bob")
    for path in [*secret.glob("*/*")]:
        path.rename(path.with_name(f"carol-{path.name}"))
    out = f"output_model_destination={tmp_path / 'exports-of-dave'}"
    run = work.train(*SHOWN, out, f"cache_dir={tmp_path}/cache", data=secret)
    with pytest.raises(VideotuneError, match="outside the run"):
        publish(run, dry_run=True)
    done = publish(run, dry_run=True, folders=[tmp_path / "exports-of-dave"])
    text = done["card"] + "".join(one["path"] for one in done["files"])
    assert [
        word
        for word in ("bob", "carol", "dave", "/tmp", str(tmp_path), ".mp4/")
        if word in text
    ] == []


def test_a_dry_run_names_the_repository_and_the_command_that_sends(
    run: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell("publish", run, dry_run=True, repo="me/first") == DONE
    printed = capsys.readouterr()
    first_lines = " ".join(printed.out.splitlines()[:2])
    assert "nothing is sent" in first_lines
    assert "the private repository me/first:" in first_lines
    command = " ".join(printed.err.partition("next: ")[2].split())
    assert command == f"videotune publish {run} --repo me/first"

    assert shell("publish", run, dry_run=True, public=True) == DONE
    printed = capsys.readouterr()
    words = " ".join(printed.out.split())
    assert f"the public repository {run.name} of the token's account" in words
    assert printed.err.strip().endswith("--public")
    assert hub.asked == []


def test_the_card_of_a_toy_says_that_comfyui_does_not_have_it(run: Path) -> None:
    sentence = "work only with the toy model, which ComfyUI does not have"
    assert sentence not in card(run)["card"]
    config = read_json(run / "config.json")
    config["settings"]["base_model_name"] = "asset:toy"
    (run / "config.json").write_text(json.dumps(config))
    assert sentence in card(run)["card"]


def test_what_is_published_is_what_was_exported_and_is_sent_once(
    run: Path, hub: Any
) -> None:
    assert shell("publish", run, dry_run=True, repo="user/run") == DONE
    assert hub.asked == []
    assert publish(run)["url"] == f"{hub.url}/user/run"
    assert hub.private is True
    expected = {
        Path(line["path"]).name: run / line["path"]
        for line in read_json(run / "exports.json")
    }
    expected |= {
        f"samples/{path.name}": path for path in (run / "samples").glob("step-000002*")
    }
    contents = {name: path.read_bytes() for name, path in expected.items()}
    assert hub.files == contents | {"README.md": card(run)["card"].encode()}
    assert {token for *_, token in hub.asked} == {f"Bearer {TOKEN}", ""}
    assert puts(hub) == len(expected)
    assert publish(run, "user/run")["repo"] == "user/run"
    assert puts(hub) == len(expected)
    hub.private = False
    with pytest.raises(VideotuneError, match="--public"):
        publish(run, "user/run")
    publish(run, "user/run", public=True)


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("create", 401, "HF_TOKEN"),
        ("create", 500, "could not be uploaded"),
        ("commit", 403, "write to this repository"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(
    where: str, code: int, said: str, run: Path, hub: Any
) -> None:
    hub.status = {where: code}
    with pytest.raises(VideotuneError, match=said) as error:
        publish(run, "user/run")
    assert TOKEN not in str(error.value)
    assert hub.files == {}


def test_without_a_token_a_network_or_exports_it_is_a_sentence(
    run: Path, hub: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(VideotuneError, match="HF_HUB_OFFLINE"):
        publish(run, "user/run")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(run / "nothing"))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(VideotuneError, match="set HF_TOKEN"):
        publish(run, "user/run")
    file = run / read_json(run / "exports.json")[0]["path"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(VideotuneError, match="videotune export"):
        publish(run, dry_run=True)
    (run / "exports.json").unlink()
    with pytest.raises(VideotuneError, match="videotune export"):
        card(run)
    assert hub.asked == []


def test_an_upload_that_broke_or_was_killed_goes_on(
    run: Path, hub: Any, work: Work
) -> None:
    """A connection that drops is tried again; of a process that was killed the files
    that had come are not sent again.
    """
    hub.cut, hub.hold = 1, 3
    command = [
        sys.executable,
        "-m",
        "videotune",
        "publish",
        str(run),
        "--repo",
        "user/run",
    ]
    env = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
        "PATH": "/usr/bin:/bin",
    }

    process = subprocess.Popen(command, env=os.environ | env, stderr=subprocess.PIPE)
    wait_until(lambda: len(hub.stored) > 1 or process.poll() is not None)
    assert process.poll() is None, (process.communicate(), hub.asked[-5:])
    process.kill()
    process.wait()
    assert hub.files == {}
    had, before, hub.hold = puts(hub), set(hub.stored), 0
    assert publish(run, "user/run")["url"]
    assert puts(hub) - had == len(set(hub.stored) - before)
    assert len(hub.files) == len(hub.stored) + 1


def forge(run: Path, **changes: Any) -> None:
    """An entry of exports.json with other values, whose hash fits."""
    entry = read_json(run / "exports.json")[0] | changes
    if (run / entry["path"]).exists():
        entry["hash"] = hash_path(run / entry["path"])
    write_json(run / "exports.json", [entry])


def elsewhere(run: Path, tmp_path: Path) -> None:
    forge(run, path=str(tmp_path / "thesis.safetensors"))


def above(run: Path, tmp_path: Path) -> None:
    forge(run, path=os.path.relpath(tmp_path / "thesis.safetensors", run))


def a_link(run: Path, tmp_path: Path) -> None:
    (run / "x.safetensors").symlink_to(tmp_path / "thesis.safetensors")
    forge(run, path="x.safetensors")


def no_file_name(run: Path, tmp_path: Path) -> None:
    entry = read_json(run / "exports.json")[0] | {"path": "export/a\0b"}
    write_json(run / "exports.json", [entry])


def half_a_letter(run: Path, tmp_path: Path) -> None:
    entry = read_json(run / "exports.json")[0] | {"path": "export/\ud800"}
    (run / "exports.json").write_text(json.dumps([entry]))


def a_hard_link(run: Path, tmp_path: Path) -> None:
    os.link(tmp_path / "thesis.safetensors", run / "x.safetensors")
    forge(run, path="x.safetensors")


def a_linked_folder(run: Path, tmp_path: Path) -> None:
    (run / "x").symlink_to(tmp_path / "private")
    forge(run, path="x")


def a_link_in_a_folder(run: Path, tmp_path: Path) -> None:
    (run / "x").mkdir()
    (run / "x" / "videotune.json").write_text("{}")
    (run / "x" / "model.safetensors").symlink_to(tmp_path / "thesis.safetensors")
    forge(run, path="x")


def another_file_of_the_run(run: Path, tmp_path: Path) -> None:
    forge(run, path="check.json")


def another_folder_of_the_run(run: Path, tmp_path: Path) -> None:
    forge(run, path="samples")


def a_pipe(run: Path, tmp_path: Path) -> None:
    os.mkfifo(run / "x.safetensors")
    write_json(
        run / "exports.json",
        [read_json(run / "exports.json")[0] | {"path": "x.safetensors"}],
    )


def a_linked_list(run: Path, tmp_path: Path) -> None:
    (run / "exports.json").rename(tmp_path / "list.json")
    (run / "exports.json").symlink_to(tmp_path / "list.json")


def a_linked_config(run: Path, tmp_path: Path) -> None:
    (run / "config.json").rename(tmp_path / "config.json")
    (run / "config.json").symlink_to(tmp_path / "config.json")


def a_linked_preview(run: Path, tmp_path: Path) -> None:
    preview = next((run / "samples").glob("step-000002*"))
    preview.rename(tmp_path / preview.name)
    preview.symlink_to(tmp_path / preview.name)


FORGERIES = (
    elsewhere, above, a_link, a_hard_link, a_linked_folder, a_link_in_a_folder, another_file_of_the_run,
    another_folder_of_the_run, a_pipe, no_file_name, half_a_letter, a_linked_list, a_linked_config, a_linked_preview,
)  # fmt: skip


@pytest.mark.parametrize("how", FORGERIES, ids=lambda how: how.__name__)
def test_a_run_publishes_nothing_that_it_never_exported(
    how: Any, run: Path, hub: Any, tmp_path: Path
) -> None:
    """A run folder from someone else names files of this machine."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "videotune.json").write_text("{}")
    export = run / read_json(run / "exports.json")[0]["path"]
    shutil.copy(export, tmp_path / "thesis.safetensors")
    how(run, tmp_path)
    with pytest.raises(VideotuneError), limited(10):
        publish(run, "user/run")
    assert hub.files == {}


@pytest.mark.parametrize("spelling", ["export/{}", "export/../export/{}", "a folder"])
def test_a_file_is_hashed_once_however_often_it_is_listed(
    spelling: str, run: Path, monkeypatch: Patch
) -> None:
    entry = read_json(run / "exports.json")[0]
    export = run / entry["path"]
    entry["path"] = spelling.format(export.name)
    if spelling == "a folder":
        inner = run / "a folder" / "inner"
        inner.mkdir(parents=True)
        shutil.copy(export, inner)
        for folder in (inner.parent, inner):
            (folder / "videotune.json").write_text("{}")
        entry |= {"path": "a folder", "hash": hash_path(run / "a folder")}
        within = entry | {"path": "a folder/inner", "hash": hash_path(inner)}
        entries = [entry, within] * 10
    else:
        entries = [entry] * 20
    write_json(run / "exports.json", entries)

    hashed: list[Path] = []
    monkeypatch.setattr(
        export_files,
        "hash_file",
        lambda path: [hashed.append(path), hash_file(path)][1],
    )
    publish(run, dry_run=True)
    assert len(hashed) == len(set(hashed)) >= 1


def test_too_many_exports_are_a_sentence(run: Path) -> None:
    """Thirty thousand took two minutes."""
    entries = read_json(run / "exports.json")
    write_json(run / "exports.json", entries[:1] * (EXPORT_ENTRIES + 1))
    with pytest.raises(VideotuneError, match=r"exports\.json"), limited(10):
        publish(run, dry_run=True)
    write_json(run / "exports.json", entries[:1] * EXPORT_ENTRIES)
    with limited(15):
        publish(run, dry_run=True)


@pytest.mark.parametrize("key", ["verified", "format", "path", "hash", "use"])
def test_an_entry_without_a_key_is_a_sentence(key: str, run: Path) -> None:
    entries = read_json(run / "exports.json")
    entries[0].pop(key)
    write_json(run / "exports.json", entries)
    if key in ("verified", "use"):  # of older versions
        assert card(run)["card"]
        return
    with pytest.raises(VideotuneError):
        card(run)


@pytest.mark.parametrize("method", ["QLORA", "\ud800", None, [1], {}])
def test_a_card_of_an_unknown_method_is_refused_in_words(
    method: Any, run: Path
) -> None:
    config = read_json(run / "config.json")
    config["settings"]["training_method"] = method
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(VideotuneError):
        card(run)


def test_the_card_quotes_no_readme_of_another_folder(run: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: my bank password is 1234\n---\n"
    )
    edit(run, str(tmp_path))
    assert "1234" not in card(run)["card"]
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: 'a: {b}\\n[c](http://x)'\n---\n"
    )
    assert "http" not in card(run)["card"].split("## In diffusers")[0].split("\n# ")[1]


@pytest.mark.parametrize("where", ["headers", "body", "silent"])
def test_a_hub_that_never_finishes_its_answer_is_a_sentence(
    where: str, run: Path, hub: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(http_limits, "HUB_SECONDS", 0.5)
    with dripping(where) as address:
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(VideotuneError), limited(20):
            publish(run, "user/run")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("plan", "views"),
        ("plan", "buckets"),
        ("plan", "effective_batch"),
        ("config", "steps"),
        ("config", "base"),
        ("check", "clips"),
        ("plan", None),
        ("config", None),
    ],
)
def test_a_record_without_a_key_or_a_missing_one_is_a_sentence(
    name: str, key: str | None, run: Path
) -> None:
    path = run / f"{name}.json"
    value = read_json(path)
    if key is None:
        path.unlink()
    else:
        value.pop(key)
        write_json(path, value)
    with pytest.raises(VideotuneError, match=name):
        card(run)
