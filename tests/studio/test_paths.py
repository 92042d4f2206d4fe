"""What somebody who came in with the password may name, wherever the path comes from."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.job.absolute_paths import absolute_paths
from videotune.sampling.given_files import FILE_KEYS
from videotune.studio import paths, projects, queue_page
from videotune.studio.paths import PathRule


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> projects.Project:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    project = projects.create(tmp_path, "Cats", preset="toy")
    (project.folder / "clips" / "a.mp4").write_bytes(b"")
    (project.folder / "out").symlink_to("/etc")
    (project.folder / "loop").symlink_to("loop")
    return project


OUTSIDE = [
    "/etc/passwd",
    "../../etc/passwd",
    "clips/../../../etc/passwd",
    "~/x",
    "~root/x",
    "~nobody-at-all/x",
    "/",
    "a\0b",
    "a\n/../../../etc/passwd",
    "/etc/passwd\n",
    "s3://bucket/clips",
    "S3://bucket/clips",
    " s3a://bucket/clips",
]


@pytest.mark.parametrize("text", OUTSIDE)
def test_paths_outside_are_for_users_on_the_server(tmp_path: Path, text: str) -> None:
    assert not PathRule(tmp_path, is_restricted=True).allows(text)
    assert PathRule(tmp_path, is_restricted=False).allows(text)


def test_a_link_leads_where_it_leads(tmp_path: Path, cats: projects.Project) -> None:
    rule = PathRule(tmp_path, is_restricted=True)
    for name in ("out", "out/passwd", "loop"):
        assert not rule.allows(str(cats.folder / name))
        assert not rule.allows(name), "a training reads it from the project's folder"
    assert rule.allows(str(cats.folder / "clips"))
    assert rule.allows("clips/a.mp4")
    assert rule.allows("loops/a.mp4")


@pytest.mark.parametrize(
    "text",
    [
        "a cat",
        "asset:toy",
        "Wan-AI/Wan2.1",
        "1/2 .. 3",
        "x" * 5000,
        "",
        "a\n/b",
        r"\.q",
    ],
)
def test_what_is_no_path_outside_may_be_said(tmp_path: Path, text: str) -> None:
    assert PathRule(tmp_path, is_restricted=True).allows(text)


def test_a_file_beside_the_server_is_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is computed in the folder in which the studio was started."""
    (tmp_path / "keys.txt").write_text("secret")
    (root := tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not PathRule(root, is_restricted=True).allows("keys.txt")
    assert PathRule(root, is_restricted=True).allows("others.txt")


KEYS = {
    "samples": "/etc/passwd",
    "prior_preservation": "/etc",
    "init_from": "../../../x.safetensors",
    "base_model_name": "/models/wan",
    "base_parts": "/models/wan",
    "transformer.file": '["/models/x.safetensors", null]',
    "sample_metrics.encoder": "/models/clip",
    "optimizer.name": "prodigyopt:Prodigy",
    "base_loras": '["/models/x.safetensors"]',
    "sample.loras": '[{"file": "/models/x.safetensors", "strength": 0.5}]',
}


@pytest.mark.parametrize("key", KEYS)
def test_no_key_of_the_form_names_a_file_elsewhere(
    cats: projects.Project, visitor: Any, client: Any, key: str
) -> None:
    form = {"key": key, "value": KEYS[key]}
    assert visitor.post("/p/cats/setup/set", data=form).status_code == 422
    assert projects.draft(cats) == {}
    assert client.post("/p/cats/setup/set", data=form).status_code == 200


def test_no_prompt_names_an_image_elsewhere(
    tmp_path: Path, cats: projects.Project, visitor: Any
) -> None:
    secret = "/home/me/secret.png"
    value = json.dumps([{"prompt": "a cat", "image": secret}])
    answer = visitor.post("/p/cats/setup/set", data={"key": "samples", "value": value})
    assert answer.status_code == 422
    assert projects.draft(cats) == {}

    prompts = cats.folder / "prompts.txt"
    prompts.write_text(f"a cat --i {secret}\n")
    for keys in ({"samples": str(prompts)}, {"settings": {"samples": str(prompts)}}):
        with pytest.raises(VideotuneError):
            PathRule(tmp_path, is_restricted=True).check_config(keys)
        PathRule(tmp_path, is_restricted=False).check_config(keys)
    PathRule(tmp_path, is_restricted=True).check_config({"samples": ["a file.txt"]})


@pytest.mark.parametrize("key", FILE_KEYS)
@pytest.mark.parametrize("path", ["/etc/hostname", "../../secret.mp4", "~/x.wav", "out/x.wav"])  # fmt: skip
def test_no_file_of_a_prompt_is_elsewhere(
    tmp_path: Path,
    cats: projects.Project,
    visitor: Any,
    client: Any,
    key: str,
    path: str,
) -> None:
    """By the field of prompts, a preset, an imported config, a run and a tried prompt."""
    keys = {"samples": ["a dog", {"prompt": "a cat", key: path}]}
    form = {"key": "samples", "value": json.dumps(keys["samples"])}
    assert visitor.post("/p/cats/setup/set", data=form).status_code == 422

    write_json(tmp_path / "presets" / "p.json", {"preset": "toy", "keys": keys})
    use = "/p/cats/setup/preset/use"
    assert visitor.post(use, data={"name": "p"}).status_code == 422
    imported = {"config": keys, "rows": [], "trainer": "x"}
    write_json(cats.folder / ".studio" / "imported.json", imported)
    assert visitor.post("/p/cats/setup/apply").status_code == 422
    assert projects.draft(cats) == {}

    config = {"settings": {**keys, "steps": 3}, "origins": {}, "steps": 3}
    write_json(cats.folder / "runs" / "r" / "config.json", config)
    run = {"run": "r", "prompt": "x"}
    assert visitor.post("/p/cats/run/draw", data=run).status_code == 422
    write_json(cats.folder / "runs" / "r" / "config.json", {"settings": {}})
    answer = visitor.post("/p/cats/run/draw", data={**run, key: path})
    is_below_project = path.startswith("~")  # there it is a name like others
    assert answer.status_code == (204 if is_below_project else 422)

    assert client.post("/p/cats/setup/set", data=form).status_code == 200


@pytest.mark.parametrize("key", FILE_KEYS)
def test_a_file_of_a_prompt_is_a_path_and_no_address(
    key: str, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What libav would take for a protocol is a name below the folder of the run."""
    monkeypatch.chdir(cats.folder)
    for text in ("file:/etc/hostname", "http://127.0.0.1/x", "concat:/etc/hostname"):
        samples = [{"prompt": "x", key: text}]
        config = absolute_paths({"samples": samples})
        assert config["samples"][0][key] == os.path.abspath(cats.folder / text)


def test_every_file_of_a_prompt_can_be_chosen_in_the_studio() -> None:
    assert set(projects.texts()["prompt_files"]) == set(FILE_KEYS)


def test_no_sweep_names_a_file_elsewhere(
    cats: projects.Project, visitor: Any, client: Any
) -> None:
    prompt = json.dumps([{"prompt": "a cat", "sound": "/etc/hostname"}])
    form = {"key": ["samples"], "values": [f"a cat,{prompt}"]}
    assert visitor.post("/p/cats/sweep", data=form).status_code == 422
    form = {"key": ["samples"], "values": ["a cat,/etc/passwd"]}
    assert visitor.post("/p/cats/sweep", data=form).status_code == 422
    assert client.post("/p/cats/sweep", data=form).status_code == 204


def test_no_sweep_imports_code(
    cats: projects.Project, visitor: Any, client: Any
) -> None:
    """A listed class is free to all."""
    for values, answer in (("ADAMW,prodigyopt:Prodigy", 422), ("ADAMW,Lamb", 204)):
        form = {"key": ["optimizer.name"], "values": [values]}
        assert visitor.post("/p/cats/sweep", data=form).status_code == answer


@pytest.mark.parametrize(
    "path", ["/etc", "~/clips", "../../etc", "{out}", "s3://bucket/clips"]
)
def test_no_dataset_is_elsewhere(
    cats: projects.Project, visitor: Any, path: str
) -> None:
    path = path.format(out=cats.folder / "out")
    answer = visitor.post("/p/cats/data/source", data={"path": path})
    assert answer.status_code == 422
    inside = {"path": str(cats.folder / "clips")}
    assert visitor.post("/p/cats/data/source", data=inside).status_code == 204


def test_no_preset_brings_a_path(
    tmp_path: Path, cats: projects.Project, visitor: Any
) -> None:
    preset = {"preset": "toy", "keys": {"samples": "/etc/passwd"}}
    write_json(tmp_path / "presets" / "p.json", preset)
    answer = visitor.post("/p/cats/setup/preset/use", data={"name": "p"})
    assert answer.status_code == 422
    assert projects.draft(cats) == {}


@pytest.mark.parametrize("act", ["resume", "draw", "export", "write", "use"])
def test_no_run_with_a_path_elsewhere_is_used(
    cats: projects.Project, visitor: Any, client: Any, act: str
) -> None:
    config: dict[str, Any] = {
        "settings": {"output_model_destination": "/elsewhere", "steps": 3},
        "origins": {"output_model_destination": "user", "steps": "user"},
        "steps": 3,
    }
    write_json(cats.folder / "runs" / "r" / "config.json", config)
    form = {"run": "r", "prompt": "x", "format": "comfyui", "kind": "report"}
    assert visitor.post(f"/p/cats/run/{act}", data=form).status_code == 422
    config["settings"]["output_model_destination"] = None
    write_json(cats.folder / "runs" / "r" / "config.json", config)
    assert visitor.post(f"/p/cats/run/{act}", data=form).status_code == 204


def test_no_tried_prompt_is_given_a_file_elsewhere(
    cats: projects.Project, visitor: Any, client: Any
) -> None:
    write_json(cats.folder / "runs" / "r" / "config.json", {"settings": {}})
    for path in ("/etc/hostname", "../../secret.mp4"):
        form = {"run": "r", "prompt": "x", "video": path}
        assert visitor.post("/p/cats/run/draw", data=form).status_code == 422
        assert client.post("/p/cats/run/draw", data=form).status_code == 204


def test_an_imported_config_refers_to_no_file_elsewhere(tmp_path: Path) -> None:
    """Only what lies below the studio's folder is read, also through a link."""
    from videotune.commands.import_config import import_config

    secret = tmp_path / "keys.json"
    secret.write_text(json.dumps({"datasets": [{"num_repeats": 971_313}]}))
    folder = tmp_path / "root" / "theirs"
    folder.mkdir(parents=True)
    (folder / "link.json").symlink_to(secret)
    for name in ("../../keys.json", str(secret), "link.json"):
        config = folder / "m.toml"
        config.write_text(
            'task = "t2v-1.3B"\ndit = "x"\nnetwork_module = "networks.lora_wan"\n'
            f'dataset_config = "{name}"\n'
        )
        read = [
            "971313" in repr(import_config([config], within=within).rows)
            for within in (None, tmp_path / "root")
        ]
        assert read == [True, False]


SERVERS = {
    "http://localhost:8000/v1": False,
    "http://127.0.0.1/v1": False,
    "http://[::1]:8000/v1": False,
    "http://10.1.2.3/v1": False,
    "http://169.254.169.254/latest": False,
    "http://0.0.0.0/": False,
    "http://2130706433/": False,
    "http://[64:ff9b::7f00:1]/v1": False,
    "http://[2002:7f00:1::]/v1": False,
    "http://[::127.0.0.1]/v1": False,
    "http://[::ffff:10.0.0.1]/v1": False,
    "http://[fec0::1]/v1": False,
    "http://[ff02::1]/v1": False,
    "http://8.8.8.8/v1": True,
    "http://[2001:4860:4860::8888]/v1": True,
    "http://[64:ff9b::808:808]/v1": True,
}


@pytest.mark.parametrize("address", SERVERS)
def test_no_server_inside_the_network_writes_captions(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = PathRule(tmp_path, is_restricted=True)
    if SERVERS[address]:
        rule.check_server(address)
    else:
        with pytest.raises(ValueError, match="own network"):
            rule.check_server(address)
    PathRule(tmp_path, is_restricted=False).check_server(address)
    monkeypatch.setenv(paths.CAPTION_SERVERS_VARIABLE, f"http://x/v1, {address}")
    rule.check_server(address)


@pytest.mark.parametrize(
    "address", ["x", "file:///etc", "http://", "http://[", "http://a b/"]
)
def test_what_is_no_server_is_refused(
    cats: projects.Project, client: Any, visitor: Any, address: str
) -> None:
    form = {"model": "m", "endpoint": address}
    for who in (client, visitor):
        answer = who.post("/p/cats/data/auto-caption", data=form)
        assert answer.status_code == 422


@pytest.mark.parametrize("keys", [
    {"notify": ["json://10.0.0.1/x"]},
    {"notify": "ntfy://topic"},
    {"notify": ["MY_PHONE"]},
    {"settings": {"notify": ["ntfy://(hidden)"]}, "asked": {}},
])  # fmt: skip
def test_a_visitor_names_no_address_for_messages(tmp_path: Path, keys: Any) -> None:
    with pytest.raises(VideotuneError, match="only a user on the server itself"):
        PathRule(tmp_path, is_restricted=True).check_config(keys)


@pytest.mark.parametrize("key", ["push_to", "push_checkpoints_to"])
def test_a_visitor_uploads_nothing_with_the_servers_account(
    tmp_path: Path, key: str
) -> None:
    rule = PathRule(tmp_path, is_restricted=True)
    for keys in ({key: "owner/model"}, {"settings": {key: "owner/model"}}):
        with pytest.raises(VideotuneError, match="the server's account"):
            rule.check_config(keys)
        PathRule(tmp_path, is_restricted=False).check_config(keys)
    rule.check_config({key: None})


def test_no_setting_that_visitors_see_has_a_secret(tmp_path: Path) -> None:
    rule = PathRule(tmp_path, is_restricted=False)
    rule.check_config({"notify": ["MY_PHONE"]})
    rule.check_config({"settings": {"notify": ["ntfy://(hidden)"]}})
    with pytest.raises(VideotuneError, match="environment variable") as refusal:
        rule.check_config({"notify": ["ntfy://secret-topic"]})
    assert "secret-topic" not in str(refusal.value)


def test_a_user_on_the_server_may_name_an_object_store(
    tmp_path: Path, cats: projects.Project, client: Any
) -> None:
    form = {"path": "s3://bucket/clips/"}
    assert client.post("/p/cats/data/source", data=form).status_code == 204
    facts = projects.find_project(tmp_path, "cats").facts
    assert facts["sources"] == [{"path": "s3://bucket/clips"}]
    bad = {"path": "s3://bucket/../clips"}
    assert client.post("/p/cats/data/source", data=bad).status_code == 422
