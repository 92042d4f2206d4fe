"""The form is the schema: every key, its bounds, its default; what is typed is what a config file would say."""

from pathlib import Path

import pytest

from videotune.config.schema import leaves
from videotune.errors import VideotuneError
from videotune.studio import actions, form, projects


def test_every_key_of_the_config_has_a_field() -> None:
    own = {key for key in leaves() if not key.startswith("datasets.")}
    assert {field.key for field in form.fields()} == own - set(form.ELSEWHERE)
    assert set(projects.texts()["basic"]) <= own
    assert all(field.help and field.values and field.default for field in form.fields())


@pytest.mark.parametrize(
    ("key", "typed", "means"),
    [
        ("steps", "40", 40), ("learning_rate", "1e-4", 1e-4), ("shuffle", "false", False), ("resolution", "480", 480),
        ("resolution", "64x64", "64x64"), ("samples", "a cat", ["a cat"]), ("samples", "a cat\na dog", ["a cat", "a dog"]),
        ("samples", "3", 3), ("lora.targets", '["a", "b"]', ["a", "b"]), ("training_method", "LORA", "LORA"),
    ],
)  # fmt: skip
def test_what_is_typed_is_what_a_config_file_would_say(key: str, typed: str, means: object) -> None:
    kept = form.put({}, key, typed, "toy")
    assert form.flatten(kept) == {key: means}
    assert form.put(kept, key, "", "toy") == {}, "emptied, the preset holds again"
    field = next(one for one in form.fields() if one.key == key)
    assert form.typed(field, form.shown(means)) == means


@pytest.mark.parametrize(
    ("key", "typed", "words"),
    [
        ("steps", "0", "greater than or equal to 1"), ("steps", "many", "not a whole number"),
        ("learning_rate", "-1", "greater than 0"), ("resize", "bend", "is not one of"), ("nothing", "1", "not a setting"),
        ("cache_dir", "/tmp", "not a setting"), ("shuffle", "perhaps", "true or false"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(key: str, typed: str, words: str) -> None:
    with pytest.raises(VideotuneError, match=words):
        form.put({}, key, typed, "toy")


def test_settings_are_on_the_disk_as_soon_as_they_are_said(tmp_path: Path) -> None:
    one = projects.create(tmp_path, "one")
    actions.perform(actions.set_key, tmp_path, {"project": "one", "key": "lora.rank", "value": "4"})
    actions.perform(actions.fact, tmp_path, {"project": "one", "key": "vram", "value": "24"})
    actions.perform(actions.fact, tmp_path, {"project": "one", "key": "allow_skips", "value": "true"})
    again = projects.named(tmp_path, "one")
    assert projects.draft(again) == {"lora": {"rank": 4}}
    assert again.facts["vram"] == 24
    assert projects.skips(again) == ["--allow-skips", "all"]
    assert projects.skips(one) == []
    with pytest.raises(VideotuneError, match="did you mean"):
        actions.perform(actions.fact, tmp_path, {"project": "one", "key": "preset", "value": "toi"})


def test_fields_that_are_left_within_a_moment_are_all_kept(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    one = projects.create(tmp_path, "one")
    keys = {"steps": "40", "batch_size": "2", "save_every": "10", "sample_after": "20", "lora.rank": "4", "seed": "7"}
    with ThreadPoolExecutor(6) as pool:
        asked = [{"project": "one", "key": key, "value": value} for key, value in keys.items()]
        list(pool.map(lambda words: actions.perform(actions.set_key, tmp_path, words), asked))
    assert {key: str(value) for key, value in form.flatten(projects.draft(one)).items()} == keys
