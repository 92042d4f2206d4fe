"""What a run writes is what docs/schemas promises to those who read it, no key more and
none less.
"""

import ast
import inspect
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.command_line import check, options_of, plan, train
from tests.support.command_line import run as shell
from tests.support.run_results import of_kind
from videotune.cli.interop import ORDER, import_config
from videotune.config.resolve import Resolved
from videotune.config.suggestions import others
from videotune.data.file_checks import REASONS
from videotune.errors import DONE, INTERRUPTED, SKIPPED
from videotune.files import read_json
from videotune.job.overrides import Overrides
from videotune.latent_cache.view_bands import BANDS
from videotune.runs.journal import read_journal
from videotune.toy.dataset import write_dataset
from videotune.trainer.resume import Resume

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
NAMES = sorted(
    path.name.removesuffix(".schema.json") for path in SCHEMAS.glob("*.json")
)
BAND = {"min": 37, "mean": 37.21, "max": 38, "band": "moderate"}
SHARES = {"before": 0.0, "after": 0.917, "n": 12}
DEMO = {
    "clips_used": 43,
    "steps": 400,
    "views": BAND,
    "validation": {"before": 0.24, "after": 0.2},
    "concept": SHARES,
    "control": SHARES,
    "same_frames": {"max_difference": 1},
    "lora": "demo/run/export/run-step-400.safetensors",
    "base": "asset:toy",
    "seconds": 123.4,
}
"""The keys that videotune/commands/demo.py writes."""


def schema(name: str) -> dict[str, Any]:
    return read_json(SCHEMAS / f"{name}.schema.json")


def faults(name: str, value: Any) -> list[str]:
    """What the schema says against a value; for a journal line by the schema of its own
    kind, so that it says where.
    """
    whole = schema(name)
    if name == "journal" and str(value.get("kind")) in whole["$defs"]:
        whole = {**whole, "oneOf": [{"$ref": f"#/$defs/{value['kind']}"}]}
    found: Iterator[Any] = Draft202012Validator(whole).iter_errors(value)
    return [
        f"{error.json_path}: {error.message}"
        for outer in found
        for error in (outer.context or [outer])
    ]


@pytest.fixture(scope="module")
def words(
    small_clips: Path,
    tiny_bases: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """Words of a short run on the tiny base."""
    cache = tmp_path_factory.mktemp("cache")
    fixed = (
        f"base_model_name={tiny_bases('wan')}",
        f"cache_dir={cache}",
        "resolution=32x32",
        "sample.steps=1",
    )

    def make(*sets: str, data: Path = small_clips) -> Overrides:
        return Overrides(data=str(data), sets=(*fixed, *sets))

    return make


@pytest.fixture(scope="module")
def run(words: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything on, stopped after its first step and taken up again; 24
    clips, so that some are held out.
    """
    folder = tmp_path_factory.mktemp("runs")
    write_dataset(folder / "clips", concept_clips=12, reminder_clips=12)
    (folder / "run").mkdir()
    (folder / "run" / "control.json").write_text('{"stop": true}')
    probed = (
        "sample_metrics.budget=100000",
        "sample_metrics.steps=1",
        "sample_metrics.samples=4",
        "forgetting.budget=100000",
        "forgetting.steps=1",
    )
    often = (
        *probed,
        "save_every=2",
        "sample_after=2",
        "validate_every=1",
        "video_config.frames=5",
        "lora.dropout=0.1",
    )
    own = ("steps=3", "batch_size=2", 'output_model_format=["diffusers", "comfyui"]')
    said = words(*own, *often, data=folder / "clips")
    assert train(said, folder / "run") == INTERRUPTED
    assert train(Overrides(), folder / "run", resume=Resume()) == DONE
    return folder / "run"


@pytest.fixture(scope="module")
def blown_up(words: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without held-out clips, whose first step throws the weights so far off that
    nothing after it is finite.
    """
    folder = tmp_path_factory.mktemp("blown") / "run"
    assert (
        train(
            words("steps=3", "learning_rate=1e37", "sample_after=0", "warmup_steps=0"),
            folder,
        )
        == DONE
    )
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_schemas_and_closed(name: str) -> None:
    whole = schema(name)
    Draft202012Validator.check_schema(whole)
    assert whole["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    closed = [
        kind
        for kind in whole.get("$defs", {}).values()
        if "kind" in kind.get("properties", {})
    ]
    for part in closed or [whole.get("items", whole)]:
        assert part["additionalProperties"] is False


def test_every_line_of_the_journal(run: Path, blown_up: Path) -> None:
    for line in [*read_journal(run), *read_journal(blown_up)]:
        assert faults("journal", line) == [], line
        assert Draft202012Validator(schema("journal")).is_valid(line)


def test_the_journals_kinds_are_those_that_are_written(
    run: Path, blown_up: Path
) -> None:
    """By the code, by what the two runs wrote, and by the schema."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in (ROOT / "videotune").rglob("*.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    said = {
        ast.literal_eval(node.args[0])
        for node in calls
        if node.func.attr == "event" and node.args
    }
    known = {part["$ref"].rsplit("/", 1)[-1] for part in schema("journal")["oneOf"]}
    assert known == said | {"step"}
    assert known == {
        line["kind"] for line in [*read_journal(run), *read_journal(blown_up)]
    }


def test_what_the_two_runs_show(run: Path, blown_up: Path) -> None:
    """They reach the corners of the schema: no held-out clips, a skipped step, null for
    what is not finite.
    """
    for kind, steps in (
        ("validation", [0, 1, 2, 3]),
        ("step", [1, 2, 3]),
        ("sample_metrics", [0, 2, 3]),
    ):
        assert [line["step"] for line in of_kind(run, kind)] == steps
    assert all(line["held_out"] is not None for line in of_kind(run, "validation"))
    assert {line["step"] for line in of_kind(run, "sample")} == {0, 2, 3}
    assert all(
        line["diversity"]["value"] is not None
        for line in of_kind(run, "sample_metrics")
    )
    assert of_kind(blown_up, "sample_metrics")[0]["not_measured"].startswith("budget")
    skipped = [line for line in read_journal(blown_up) if line.get("skipped")]
    assert skipped
    assert all(line["loss"] is None or line["grad_norm"] is None for line in skipped)
    assert all(line["held_out"] is None for line in of_kind(blown_up, "validation"))


@pytest.mark.parametrize("name", ["plan", "check", "exports", "config", "heartbeat"])
def test_files_of_a_run(name: str, run: Path, blown_up: Path) -> None:
    for folder in (run, blown_up):
        assert faults(name, read_json(folder / f"{name}.json")) == []


def test_formats_that_were_exported_stand_in_the_list(run: Path) -> None:
    assert [line["format"] for line in read_json(run / "exports.json")] == [
        "diffusers",
        "comfyui",
    ]


def test_the_sums_of_an_account(run: Path) -> None:
    account = read_json(run / "check.json")
    assert (
        account["found"]
        == account["used"] + account["held_out"] + account["skipped"]
        == len(account["clips"])
    )
    assert account["held_out"] == 2


def test_plan_and_check_print_the_same_kind_of_json(
    words: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, command in (("plan", plan), ("check", check)):
        assert command(words(), as_json=True) == DONE
        assert faults(name, json.loads(capsys.readouterr().out)) == []


def test_plan_without_a_base_model(
    small_clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        plan(
            Overrides(family="wan", data=str(small_clips), sets=("resolution=32x32",)),
            as_json=True,
        )
        == DONE
    )
    facts = json.loads(capsys.readouterr().out)
    assert faults("plan", facts) == []
    assert facts["adapter"] is None
    assert set(facts["disk"]) == {
        "latent_entries",
        "latent_bytes",
        "condition_entries",
        "condition_bytes",
        "text_bytes_at_most",
        "free_bytes",
        "short_bytes",
    }


def test_check_of_a_file_that_is_skipped(
    words: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path, concept_clips=2, reminder_clips=0)
    (tmp_path / "videos" / "broken.mp4").write_bytes(b"not a video")
    assert check(words(data=tmp_path), as_json=True) == SKIPPED
    account = json.loads(capsys.readouterr().out)
    assert faults("check", account) == []
    assert [clip["reason"] for clip in account["clips"]] == ["not_a_video", None, None]


def test_what_import_prints(capsys: pytest.CaptureFixture[str]) -> None:
    import_config(
        [ROOT / "tests" / "interop" / "configs" / "musubi" / "train.sh"], as_json=True
    )
    value = json.loads(capsys.readouterr().out)
    assert faults("import", value) == []
    assert {row["verdict"] for row in value["rows"]} == {
        "same",
        "translated",
        "none",
        "differs",
        "unknown",
        "missing",
    }
    words = schema("import")["properties"]
    assert words["rows"]["items"]["properties"]["verdict"]["enum"] == sorted(ORDER)
    assert set(words["trainer"]["enum"]) == {
        kind["trainer"] for kind in others()["files"]
    }


def test_lora_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in sorted((run / "export").glob("*.safetensors")):
        assert shell("lora", "inspect", file, as_json=True) == DONE
        found = json.loads(capsys.readouterr().out)
        assert faults("lora", found) == []
        for key in found:
            assert faults(
                "lora", {name: value for name, value in found.items() if name != key}
            ), key


def test_what_other_commands_print(
    run: Path, words: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines, tables, and keys of their own."""
    for command in (
        ("wait", run),
        ("card", run),
        ("report", run),
        ("export", run),
        ("presets", "list"),
    ):
        assert shell(*command, as_json=True) == DONE
        assert faults("output", json.loads(capsys.readouterr().out)) == [], command
    assert (
        shell(
            "queue",
            "add",
            **options_of(words("steps=1")),
            out=tmp_path / "one",
            queue=tmp_path,
            as_json=True,
        )
        == DONE
    )
    for command in ("run", "ls"):
        capsys.readouterr()
        assert shell("queue", command, queue=tmp_path, as_json=True) == DONE
        found = json.loads(capsys.readouterr().out)
        assert (
            faults(
                "output",
                found
                if command == "run"
                else {"exit_code": 0, "lines": [], "tables": {}, "entries": found},
            )
            == []
        )
    assert shell("publish", run, dry_run=True, as_json=True) == DONE
    assert faults("output", json.loads(capsys.readouterr().out)) == []


def test_the_demos_result() -> None:
    assert faults("demo", DEMO) == []
    tree = ast.parse(
        (ROOT / "videotune" / "commands" / "demo.py").read_text(encoding="utf-8")
    )
    measure = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "measure"
    )
    last = next(node.value for node in measure.body if isinstance(node, ast.Return))
    assert isinstance(last, ast.Dict)
    assert {ast.literal_eval(key) for key in last.keys if key} | {"seconds"} == set(
        DEMO
    )


def test_words_of_the_schemas_are_the_codes() -> None:
    reasons = schema("check")["properties"]["clips"]["items"]["properties"]["reason"][
        "enum"
    ]
    assert reasons == [*REASONS, None]
    bands = schema("plan")["properties"]["views"]["properties"]["per_window"][
        "properties"
    ]["band"]["enum"]
    assert bands == [*(name for _, name in BANDS), "risky"]
    origins = schema("config")["properties"]["origins"]["additionalProperties"]["enum"]
    assert all(f'"{origin}"' in inspect.getsource(Resolved) for origin in origins)


def examples(run: Path, blown_up: Path) -> list[tuple[str, Any]]:
    """One valid value of each schema and of each kind of line."""
    lines = {
        line["kind"]: line for line in [*read_journal(blown_up), *read_journal(run)]
    }
    found = [("journal", line) for line in lines.values()] + [("demo", DEMO)]
    found += [
        (name, read_json(run / f"{name}.json")) for name in ("plan", "check", "config")
    ]
    return [*found, ("exports", read_json(run / "exports.json"))]


def test_a_key_more_or_a_key_less_is_refused(run: Path, blown_up: Path) -> None:
    for name, value in examples(run, blown_up):
        assert faults(name, value) == []
        place = value[0] if name == "exports" else value
        for key in list(place):
            wrong = deepcopy(value)
            del (wrong[0] if name == "exports" else wrong)[key]
            assert faults(name, wrong), f"{name} without {key}"
        wrong = deepcopy(value)
        (wrong[0] if name == "exports" else wrong)["surprise"] = 1
        assert faults(name, wrong), f"{name} with a key that nobody promised"


def test_values_of_another_kind_are_refused(run: Path, blown_up: Path) -> None:
    """Each value in turn becomes an object that no schema allows in its place."""
    for name, value in examples(run, blown_up):
        for key in value[0] if name == "exports" else value:
            wrong = deepcopy(value)
            (wrong[0] if name == "exports" else wrong)[key] = {"surprise": [None]}
            assert faults(name, wrong), f"{name}.{key} may be anything"


def test_a_step_that_counted_must_have_numbers(run: Path) -> None:
    line = of_kind(run, "step")[0]
    assert faults("journal", line | {"loss": None})
    assert faults("journal", line | {"loss": None, "skipped": True}) == []
