"""A new project asks for a card and a model, and nothing is chosen that nobody chose."""

import re
from pathlib import Path
from typing import Any

import pytest

from videotune.config.base_models import download_size
from videotune.data.remarks import Remark
from videotune.files import read_json
from videotune.models.model_files import CONFIGS
from videotune.studio import (
    clip_row,
    gpu,
    model_choices,
    project_names,
    projects,
    queue_page,
)
from videotune.studio.first_model import first_model
from videotune.studio.model_choices import ChosenCard

MP4 = b"\0\0\0\x20ftypisom" + b"\0" * 64
GIB = 2**30
MANIFESTS = Path(__file__).parents[1] / "manifests"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "list_gpus", list)


def create(client: Any, code: int = 204, **words: str) -> Any:
    answer = client.post("/create", data={"title": "Cats", **words})
    assert answer.status_code == code, answer.text
    return answer


def facts(root: Path, name: str = "cats") -> dict[str, Any]:
    found = dict(projects.find_project(root, name).facts)
    return {key: found[key] for key in ("preset", "card", "vram") if key in found}


def test_nothing_is_chosen_for_a_new_project(tmp_path: Path, client: Any) -> None:
    create(client)
    assert facts(tmp_path) == {}
    project = projects.find_project(tmp_path, "cats")
    (project.folder / "clips/a.mp4").write_bytes(MP4)
    page = client.get("/p/cats/setup").text
    assert "No model is chosen yet" in page
    assert 'data-why="Choose a model first."' in page
    answer = client.post("/p/cats/setup/start", data={"title": ""})
    assert (answer.status_code, "no model" in answer.text) == (422, True)
    assert queue_page.project_entries(tmp_path, project) == []
    for name in ("data", "train", "results"):
        assert client.get(f"/p/cats/{name}").status_code == 200


def test_the_card_of_the_project_before_is_offered_first(
    tmp_path: Path, client: Any
) -> None:
    chosen = re.compile(r'<option value="([^"]*)" selected>([^<]*)')
    assert chosen.search(client.get("/").text) is None
    for card, value, name in (
        ({"card": "RTX 3060 12GB"}, "RTX 3060 12GB", "RTX 3060 12GB"),
        ({"card": "other", "vram": "10.5"}, "10.5 GB", "a card of 10.5 GB"),
        ({"card": "none"}, "10.5 GB", "a card of 10.5 GB"),
    ):
        create(client, **card)
        page = client.get("/").text
        assert chosen.findall(page)[0] == (value, f"{name} (as in the project before)")
        assert f"Models that fit {name} come first." in page
        assert client.get("/models", params={"card": value}).status_code == 200
    create(client, card="10.5 GB")
    assert facts(tmp_path, "cats-4") == {"vram": 10.5}


def test_card_and_model_are_kept_or_refused_at_once(
    tmp_path: Path, client: Any
) -> None:
    create(client, card="RTX 4090", preset="wan 2.1 1.3B LoRA 16GB")
    assert facts(tmp_path) == {
        "card": "RTX 4090",
        "preset": "wan 2.1 1.3B LoRA 16GB",
    }
    create(client, card="other", vram="10,5")
    assert facts(tmp_path, "cats-2") == {"vram": 10.5}
    for wrong in (
        {"card": "GTX 9999"},
        {"card": "other", "vram": ""},
        {"vram": "much"},
        {"vram": "0"},
        {"preset": "nothing"},
    ):
        create(client, 422, **wrong)
    assert len(projects.list_projects(tmp_path)) == 2


def test_a_project_that_has_a_preset_keeps_it(tmp_path: Path) -> None:
    project = projects.create(tmp_path, "Old", preset="toy")
    assert projects.command_arguments.__doc__
    (project.folder / "clips/a.mp4").write_bytes(MP4)
    assert projects.find_project(tmp_path, "old").preset == "toy"
    assert projects.command_arguments(project)[:2] == ["--preset", "toy"]


def test_models_are_ordered_by_their_fit(client: Any) -> None:
    text = client.get("/models", params={"card": "RTX 4080"}).text
    families = re.findall(r"<h3>([^<]+)</h3>", text)
    assert families[-1] == "Toy"
    first = first_model(ChosenCard("x", 16.0)).preset
    fitting = [
        family
        for family in model_choices.families_for(ChosenCard("x", 16.0), "", first)
        if any(size.fits(ChosenCard("x", 16.0)) for size in family.sizes)
    ]
    assert families[: len(fitting) - 1] == [family.name for family in fitting[:-1]]
    assert "checked" in text.split("Choose the model later")[0][-200:]

    text = client.get("/models", params={"card": "GTX 9999"}).text
    assert "unknown card" in text
    assert "fits" not in text.replace("which of them fit", "")
    chosen = "ltx 2B LoRA 12GB"
    text = client.get("/models", params={"vram": "12", "preset": chosen}).text
    assert re.search(f'value="{chosen}" checked', text), "a choice outlives the card"


@pytest.mark.parametrize(
    ("memory", "needs", "fits"),
    [
        (24.0, 24, True),
        (22.5, 24, True),  # a driver's view of a card of 24 GB
        (11.0, 12, False),
        (16.0, 24, False),
        (0.0, 24, None),
    ],
)
def test_a_size_is_made_for_the_cards_of_its_class(
    memory: float, needs: int, fits: bool | None
) -> None:
    size = model_choices.ModelSize("x", "5B, LoRA", "x", "", "", "", needs)
    assert size.is_made_for(ChosenCard("a card", memory)) is fits


def test_hours_are_of_all_presets_and_begin_with_those_that_may_fit() -> None:
    card = ChosenCard("RTX 4080", 16.0)
    chosen = "wan 2.1 14B LoRA 48GB"
    names = model_choices.sizes_to_time(card, chosen)
    assert names[0] == chosen
    assert sorted([*names, "toy"]) == sorted(model_choices.presets())
    needs = [model_choices.presets()[name]["gb"] for name in names[1:]]
    fitting = [need for need in needs if need <= 16]
    assert fitting
    assert needs == fitting + sorted(need for need in needs if need > 16)


def test_the_size_of_a_download_is_that_of_its_networks_and_more() -> None:
    """Published files have 2 or 4 bytes a number; a text encoder has at most 8.1e9."""
    folder_by_model = read_json(CONFIGS / "index.json")
    known = {facts["base"] for facts in model_choices.presets().values()}
    found = {name: download_size(name) for name in known}
    sizes = {
        name: size.gigabytes
        for name, size in found.items()
        if size is not None and size.is_published
    }
    assert len(sizes) >= 8
    for name, size in sizes.items():
        manifest = read_json(MANIFESTS / f"{folder_by_model[name]}.json")
        experts = len(manifest["family"]["spec"]["experts"])
        networks = experts * manifest["transformer"]["parameters"]
        numbers = networks + manifest["vae"]["parameters"]
        assert 2 * numbers < size * 1e9 < 4 * (numbers + 8.1e9)


def test_the_card_of_this_computer_is_taken_until_another_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = gpu.Gpu(0, "NVIDIA GeForce RTX 3090", 0, 24 * GIB, None, None, None)
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card])
    assert model_choices.chosen_card({}).gigabytes == 24
    assert model_choices.chosen_card({"vram": 8.0}).gigabytes == 8
    assert model_choices.chosen_card({"card": "RTX 4080"}).name == "RTX 4080"
    assert "unknown card" in model_choices.chosen_card({"card": "GTX 9999"}).error


@pytest.mark.parametrize("field", ["card", "vram"])
def test_a_card_is_typed_as_on_the_command_line(
    client: Any, tmp_path: Path, field: str
) -> None:
    """Its name or its memory, in whichever of the two fields."""
    project = projects.create(tmp_path, "Cats")

    def type_card(text: str) -> Any:
        return client.post("/p/cats/setup/fact", data={"key": field, "value": text})

    def facts() -> tuple[Any, Any]:
        current = projects.find_project(tmp_path, project.name).facts
        return current.get("card"), current.get("vram")

    for text in ("16", "16 GB", "16GB", "16 gb", "a 16 GB card"):
        assert type_card("8").status_code == 200
        assert type_card(text).status_code == 200
        assert facts() == (None, 16.0), text
    for text in ("4090", "an RTX 4090", "rtx 4090 24 gb"):
        assert type_card(text).status_code == 200
        assert facts() == ("RTX 4090", None), text
    for text in ("0", "much", "GTX 9999", "-3", "A100", "x" * 5000):
        answer = type_card(text)
        assert answer.status_code == 422, text
        assert "such as 16 GB" in answer.text
        assert "--" not in answer.text
    assert facts() == ("RTX 4090", None)

    form = {"title": "Dogs", "card": "other", "vram": "24 gb"}
    assert client.post("/create", data=form).status_code == 204
    assert projects.find_project(tmp_path, "dogs").facts["vram"] == 24.0


def test_a_config_of_another_trainer_becomes_a_project(
    tmp_path: Path, client: Any
) -> None:
    answer = client.post("/import?name=mine.yaml", content=b"job: extension")
    assert answer.headers["HX-Redirect"] == "/p/mine/setup"
    project = projects.find_project(tmp_path, "mine")
    (config,) = (project.folder / ".studio/theirs").iterdir()
    assert config.read_bytes() == b"job: extension"
    answer = client.post("/import?name=mine.zip", content=b"no zip")
    assert answer.status_code == 422
    assert str(tmp_path) not in answer.text, "no path of the server"


def test_two_projects_never_have_one_name(tmp_path: Path) -> None:
    made = [projects.create(tmp_path, "x" * 78) for _ in range(3)]
    assert len({project.title for project in made}) == 3
    assert max(len(project.title) for project in made) <= project_names.MAX_TITLE_LENGTH


def test_without_a_model_clips_are_checked_but_nothing_is_said_of_its_sizes(
    tmp_path: Path,
) -> None:
    project = projects.create(tmp_path, "Cats")
    (project.folder / "clips/a.mp4").write_bytes(MP4)
    assert "toy" in projects.command_arguments(project)
    slow = Remark("repeated_frames", "66% of the frames repeat the one before")
    black = Remark("black", "100% of it is black or one flat colour")
    row = {
        "warned": [slow, black],
        "shape": "17x64x64", "windows": 3, "spans": [[0, 1]], "notes": ["upscaled"],
    }  # fmt: skip
    shown = clip_row.without_model(row)
    assert shown["warned"] == [black]
    assert (shown["shape"], shown["windows"], shown["notes"]) == (None, None, [])
