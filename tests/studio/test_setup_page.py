"""The page Setup: settings, presets, the card, another trainer's config, and the start
of a run.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from videotune.studio import plan_server, projects, queue_page
from videotune.studio.app import make_app

HX = {"HX-Request": "true"}


class Studio:
    """A client of a studio with one project, whose plans and workers are not started."""

    def __init__(self, root: Path, client: Any) -> None:
        self.root, self.client = root, client
        self.project = projects.create(root, "Cats", preset="toy")

    def post(self, act: str, code: int = 204, **words: str) -> Any:
        """Post to the page; returns the values or the events of the answer, or its text
        where it is refused.
        """
        answer = self.client.post(f"/p/cats/setup/{act}", data=words, headers=HX)
        assert answer.status_code == code, answer.text
        assert max(map(len, answer.headers.values())) < 10_000
        if code == 422:
            return answer.text
        if code in (200, 409):
            return answer.json()
        return json.loads(answer.headers.get("HX-Trigger", "{}"))

    def set(self, code: int = 200, **words: str) -> Any:
        """Set a key; returns what the page gets back."""
        return self.post("set", code, **words)

    def draft(self) -> dict[str, Any]:
        """The settings on the disk."""
        return projects.draft(self.project)

    def facts(self) -> dict[str, Any]:
        """What belongs to the project and not to the config."""
        return dict(projects.find_project(self.root, "cats").facts)

    def page(self) -> str:
        """The whole page."""
        answer = self.client.get("/p/cats/setup")
        assert answer.status_code == 200
        return str(answer.text)


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Studio]:
    from starlette.testclient import TestClient

    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    monkeypatch.setattr(
        plan_server,
        "request_answer",
        lambda out, question: {
            **plan_server.read_answer(out),
            "current": False,
            "measuring": False,
            "computing": True,
        },
    )
    with TestClient(
        make_app(tmp_path, "127.0.0.1", None), base_url="http://127.0.0.1"
    ) as client:
        yield Studio(tmp_path, client)


def test_a_setting_is_saved_or_refused_in_words(studio: Studio) -> None:
    assert studio.set(key="learning_rate", value="1e-4", was="")["now"] == "0.0001"
    assert studio.draft() == {"learning_rate": 1e-4}
    for key, value in (
        ("resolution", "big"),
        ("resolution", "{}"),
        ("resolution", "[{}]"),
        ("resolution", '{"a": [1]}'),
        ("samples", "[" * 20_000),
        ("samples", "9" * 5000),
        ("samples", '["\\ud800"]'),
        ("steps", "99999999999999"),
        ("nothing", "1"),
        ("cache_dir", "/tmp"),
    ):
        assert studio.set(422, key=key, value=value, was="")
    assert studio.draft() == {"learning_rate": 1e-4}
    studio.set(key="learning_rate", value="", was="0.0001")
    assert studio.draft() == {}


def test_a_long_value_is_no_header(studio: Studio) -> None:
    prompt = "ä cat " * 12_000
    saved = studio.set(key="samples", value=prompt, was="")
    assert saved["now"] == prompt.strip()
    conflict = studio.set(409, key="samples", value="x" * 70_000, was="y" * 70_000)
    assert conflict["now"] == prompt.strip()


def test_what_another_tab_has_changed_is_shown_and_not_written_over(
    studio: Studio,
) -> None:
    studio.set(key="steps", value="70", was="")
    found = studio.set(409, key="steps", value="80", was="60")
    assert found == {"key": "steps", "now": "70", "yours": "80"}
    assert studio.draft() == {"steps": 70}
    studio.set(key="steps", value="80", was="70")
    assert studio.draft() == {"steps": 80}


def test_fields_that_are_left_within_a_moment_are_all_kept(studio: Studio) -> None:
    keys = {
        "steps": "40",
        "batch_size": "2",
        "save_every": "10",
        "sample_after": "20",
        "lora.rank": "4",
        "seed": "7",
    }
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda one: studio.set(key=one[0], value=one[1]), keys.items()))
    assert {key: str(value) for key, value in projects_flat(studio).items()} == keys


def projects_flat(studio: Studio) -> dict[str, Any]:
    from videotune.config.nested_keys import flatten

    return flatten(studio.draft())


def test_preset_card_and_consent_belong_to_the_project(studio: Studio) -> None:
    studio.post("fact", 200, key="preset", value="wan 2.2 LoRA 8GB")
    studio.post("fact", 200, key="vram", value="23,5")
    studio.post("fact", 200, key="allow_skips", value="true")
    assert {
        "preset": "wan 2.2 LoRA 8GB",
        "vram": 23.5,
        "allow_skips": True,
    }.items() <= studio.facts().items()
    studio.post("fact", 200, key="card", value="RTX 4090")
    assert "vram" not in studio.facts(), "the name says the memory"
    for key, value in (("vram", "lots"), ("preset", "toi"), ("title", "x")):
        studio.post("fact", 422, key=key, value=value)


def test_own_presets_are_saved_used_and_moved_to_the_bin(studio: Studio) -> None:
    studio.set(key="steps", value="33", was="")
    studio.post("preset/save", name="My best / 1")
    studio.post("preset/save", 422, name="My best / 1")
    (saved,) = (studio.root / "presets").glob("*.json")
    assert saved.stem in studio.page()
    studio.post("reset")
    assert studio.draft() == {}
    studio.post("fact", 200, key="preset", value="wan 2.2 LoRA 8GB")
    studio.post("preset/use", name=saved.stem)
    assert studio.draft() == {"steps": 33}
    assert studio.facts()["preset"] == "toy"
    for slip in ("apply", "delete", "Use"):
        studio.post(f"preset/{slip}", 422, name=saved.stem)
        assert saved.exists()
    studio.post("preset/remove", name=saved.stem)
    assert not saved.exists()
    assert list((studio.root / "bin").glob("*/item.json"))
    for name in ("../cats/config", "..", ".hidden", ""):
        assert studio.client.post(
            "/p/cats/setup/preset/use", data={"name": name}, headers=HX
        ).status_code in (400, 422)


def test_what_clips_without_a_caption_do_is_decided_by_the_project_alone(
    studio: Studio,
) -> None:
    """Not by a preset, a reset, or another trainer's config that says nothing of it."""
    studio.set(key="steps", value="33", was="")
    studio.post("preset/save", name="fast")
    studio.set(key="missing_caption", value="skip", was="")

    studio.post("preset/use", name="fast")
    assert studio.draft() == {"steps": 33, "missing_caption": "skip"}
    studio.post("reset")
    assert studio.draft() == {"missing_caption": "skip"}

    studio.set(key="steps", value="44", was="")
    studio.post("preset/save", name="slow")
    studio.set(key="missing_caption", value="empty", was="skip")
    studio.post("preset/use", name="slow")
    assert studio.draft() == {"steps": 44, "missing_caption": "empty"}

    answer_file = studio.project.folder / ".studio" / "imported.json"
    (answer_file.parent / "theirs").mkdir(parents=True)
    for config, decided in (
        ({"steps": 9}, "empty"),
        ({"missing_caption": "skip"}, "skip"),
    ):
        base = {"base_model_name": "Wan-AI/Wan2.2-TI2V-5B-Diffusers"}
        answer_file.write_text(json.dumps({"config": base | config}))
        studio.post("apply")
        assert studio.draft()["missing_caption"] == decided


def test_a_config_of_another_trainer_is_applied_only_when_it_is_asked_for(
    studio: Studio,
) -> None:
    theirs = studio.project.folder / ".studio" / "theirs"
    answer = studio.client.post(
        "/p/cats/setup/import?name=../../x.toml", content=b"a = 1", headers=HX
    )
    assert answer.status_code == 204
    assert [path.name for path in theirs.iterdir()] == ["x.toml"]
    known = {
        "steps": 9,
        "base_model_name": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        "datasets": [{"path": "/etc"}],
    }
    (theirs.parent / "imported.json").write_text(
        json.dumps({"config": known | {"output_model_destination": "/tmp/x"}})
    )
    assert studio.draft() == {}
    studio.post("apply")
    assert studio.draft() == {
        "steps": 9,
        "base_model_name": known["base_model_name"],
    }, "clips and places stay ours"
    assert studio.facts()["preset"].startswith("wan 2.2")
    assert not theirs.exists()


def test_a_run_begins_by_a_button(studio: Studio) -> None:
    assert "clips" in studio.post("start", 422, run="")
    (studio.project.folder / "clips" / "a.mp4").write_bytes(b"")
    answer = studio.client.post(
        "/p/cats/setup/start", data={"title": "erste"}, headers=HX
    )
    assert answer.headers["HX-Redirect"] == "/p/cats/train?run=erste"
    entry = queue_page.training_entry(studio.root, studio.project, "erste")
    assert entry is not None
    assert entry.state == "waiting"


def test_what_a_config_says_is_text_on_the_page(studio: Studio) -> None:
    evil = "<img src=x onerror=alert(1)>"
    studio.set(key="samples", value=json.dumps([evil, '"}{{ 7*7 }}']), was="")
    studio.post("fact", 422, key="card", value=evil)
    studio.post("preset/save", name=evil)
    assert evil not in studio.page()
    (studio.project.folder / ".studio").mkdir(exist_ok=True)
    answer = {"code": 1, "words": evil, "key": "x", "part": "full", "plan": {}}
    (studio.project.folder / ".studio" / "plan.json").write_text(json.dumps(answer))
    assert evil not in studio.page()


def test_every_preset_has_a_card_and_every_fact_a_preset(studio: Studio) -> None:
    from videotune.files import read_json
    from videotune.presets.shipped import preset_names, read_preset
    from videotune.studio import setup_page

    text = studio.page()
    assert all(f"Use {name}" in text or name == "toy" for name in preset_names())
    known = read_json(Path(setup_page.__file__).with_name("presets.json"))
    assert known.keys() == {
        read_preset(name)["base_model_name"] for name in preset_names()
    }


def test_what_a_model_takes_is_what_its_checkpoint_takes() -> None:
    from videotune.job.overrides import Overrides, resolve_config
    from videotune.presets.shipped import preset_names
    from videotune.studio import model_choices

    seen = set()
    for name in preset_names():
        base = model_choices.presets()[name]["base"]
        if base in seen:
            continue
        seen.add(base)
        _, spec, _ = resolve_config(Overrides(preset=name), planning=True)
        known = model_choices.conditions_of(base)
        assert set(known or ()) == set(spec.conditions), f"presets.json: {base}"
        assert model_choices.makes_sound(base) == (spec.sound is not None), base
    assert model_choices.makes_sound("somebody/else") is None
    assert model_choices.conditions_of("somebody/else") is None


@pytest.mark.parametrize(
    ("preset", "takes"),
    [
        ("toy", {"first_frame", "last_frame", "prefix", "suffix", "mask", "reference"}),
        ("ltx 2B LoRA 24GB", {"first_frame"}),
        ("hunyuan 13B LoRA 24GB", set()),
    ],
)
def test_only_files_and_conditions_that_the_model_takes_are_offered(
    preset: str, takes: set[str], studio: Studio
) -> None:
    projects.update(studio.project, preset=preset)
    projects.save_draft(studio.project, {"samples": ["a cat"]})
    text = studio.page()
    files = re.findall(r'data-browse="prompt-(\w+)-1"', text)
    prompt_files = projects.texts()["prompt_files"]
    assert {prompt_files[key][0] for key in files} == takes
    boxes = re.findall(r'data-condition="(\w+)"', text)
    assert set(boxes) == takes - {"first_frame"}


@pytest.mark.parametrize(
    ("generate", "offered"),
    [
        (None, {"image", "last_frame", "prefix", "reference"}),
        (["video", "sound"], {"image", "last_frame", "prefix", "reference"}),
        ("video", {"image", "last_frame", "prefix", "reference", "sound"}),
        (["sound"], {"video"}),
    ],
)
def test_a_prompt_is_offered_the_sound_or_the_video_that_the_run_is_given(
    generate: Any, offered: set[str], studio: Studio
) -> None:
    projects.update(studio.project, preset="ltx 2.3 LoRA 24GB")
    keys = {"samples": [{"prompt": "a cat", "video": "clips/a.mp4"}]}
    if generate:
        keys["generate"] = generate
    projects.save_draft(studio.project, keys)
    text = studio.page()
    assert set(re.findall(r'data-browse="prompt-(\w+)-1"', text)) == offered
    line = re.search(r'data-line="video">([^<]*)<span[^>]*>clips/a.mp4<', text)
    assert line
    texts = projects.texts()
    by_itself = texts["prompt_files_of_sound"]["video"][2]
    words = by_itself if generate == ["sound"] else texts["prompt_files"]["video"][2]
    assert line[1].strip() == words


def test_the_steps_of_two_experts_have_a_reason_and_hints_name_titles(
    tmp_path: Path, client: Any
) -> None:
    projects.create(tmp_path, "Two", preset="wan 2.2 A14B LoRA 24GB")
    page = client.get("/p/two/setup").text
    reason = page.partition('id="ref-steps"')[2].partition("</p>")[0]
    why = reason.partition("Why 2000: ")[2]
    assert "20 views of each" in why.partition("both experts")[0]
    assert "window" not in why

    hint = page.partition('id="h-sample_after_epochs"')[2].partition("</span>")[0]
    assert "“Sample after”" in hint
    assert "sample_after" not in hint
