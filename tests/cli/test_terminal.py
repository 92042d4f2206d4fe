"""What the command line prints at 80 columns, and what it says where it stops."""

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.cells import cell_len

from tests.support.command_line import Patch, Printed, run
from videotune import console
from videotune.cli.cache import encoder_lines
from videotune.cli.init import ChosenCard, parse_card
from videotune.commands import doctor
from videotune.data.file_checks import REASONS
from videotune.errors import DONE, VideotuneError
from videotune.exporter.formats import refuse_format
from videotune.latent_cache.entry import KINDS
from videotune.latent_cache.view_bands import BANDS, band_limits, views_text
from videotune.models.base_model import place, spec_for
from videotune.planner.gpus import cards
from videotune.presets.shipped import preset_names
from videotune.text import (
    counted,
    counted_are,
    duration,
    memory_size,
    reason_words,
    state_words,
)

LONG = "launcher.num_cpu_threads_per_process_of_the_whole_machine"


def lines_of(printed: Printed) -> list[str]:
    return printed.readouterr().out.splitlines()


def test_a_table_wraps_between_words_and_breaks_no_name(
    capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = "a remark of some length, which takes several lines of its column"
    rows = [[LONG[:40], text, 12], ["b", "短い説明 " * 12, 3]]
    console.print_table("things", ["name", "remark", "count"], rows, right=(2,))
    lines = lines_of(capsys)
    assert max(map(cell_len, lines)) <= 80
    assert LONG[:40] in "\n".join(lines)
    assert len(lines) > 8, "the remarks wrap"


def test_the_title_of_a_table_breaks_no_path(
    capsys: Printed, monkeypatch: Patch
) -> None:
    """Also where the table is narrower than the terminal, and the path wider."""
    monkeypatch.setenv("COLUMNS", "80")
    for path in ("/a/folder/of/mine", "/a/folder/" + "x" * 90):
        console.print_table(f"cache in {path}", ["a", "b"], [["1", "2"]])
        assert lines_of(capsys)[0] == f"cache in {path}"


def test_a_table_whose_names_do_not_fit_becomes_a_list(
    capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [[LONG, f"{LONG} = 1", None], ["b", "two\nlines", "x"]]
    console.print_table("things", ["theirs", "ours", ""], rows)
    lines = lines_of(capsys)
    assert lines == [
        "things",
        LONG,
        f"  ours: {LONG} = 1",
        "b",
        "  ours: two, lines; x",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["presets", "list"],
        ["presets", "keys"],
        ["config", "explain", "lora.rank"],
        ["config", "explain", "timestep_shift"],
        ["queue", "ls"],
    ],
    ids=" ".join,
)
def test_a_command_s_lines_fit_80_columns(
    words: list[str], capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*words) == DONE
    assert max(map(cell_len, lines_of(capsys)), default=0) <= 80


def test_names_of_presets_are_not_broken(capsys: Printed, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run("presets", "list")
    printed = capsys.readouterr().out
    assert all(f"│ {name} " in printed for name in preset_names())


def test_a_table_of_a_pipe_is_as_wide_as_it_needs_to_be(
    capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = [[LONG, f"{LONG} = 1"]]
    console.print_table("things", ["theirs", "ours"], rows)
    assert any(f"│ {LONG} │ {LONG} = 1 │" in line for line in lines_of(capsys))


def test_a_sentence_is_wrapped_for_a_terminal_only(
    capsys: Printed, monkeypatch: Patch
) -> None:
    sentence = "word " * 40 + "/a/path/that-is-not-broken/" + "x" * 90
    monkeypatch.setenv("COLUMNS", "80")
    console.tell(sentence)
    *lines, path = lines_of(capsys)
    assert all(len(line) <= 80 for line in lines)
    assert path.endswith("x" * 90)
    assert path.startswith("  /a/path/that-is-not-broken/")
    monkeypatch.delenv("COLUMNS")
    console.tell(sentence)
    assert lines_of(capsys) == [sentence.strip()]


@pytest.mark.parametrize(
    ("beginning", "is_one_line"),
    [
        ("next: videotune train", True),
        ("next: caption them, then videotune check", True),
        ("  torchrun --nproc-per-node 2", True),
        ("videotune reads", False),
        ("note: videotune writes", False),
    ],
)
def test_a_command_stays_one_line_that_can_be_copied(
    beginning: str, is_one_line: bool, capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    console.tell(beginning + " clips" * 20)
    assert (len(lines_of(capsys)) == 1) is is_one_line


def test_the_last_line_of_a_bar_leaves_no_time(
    capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    with console.bar("training") as progress:
        progress.update(1, 2, ["loss 0.5"], 15.0)
        progress.update(2, 2, ["loss 0.4"], 15.0)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "training: 1/2  loss 0.5  15 s left"
    assert last == "training: 2/2  loss 0.4"


def test_a_bar_that_is_asked_again_at_its_end_prints_it_once(
    capsys: Printed, monkeypatch: Patch
) -> None:
    """As `wait` does while the last files are written."""
    clock = iter(range(0, 90, 3))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(console, "QUIET_SECONDS", 1000.0)
    with console.bar("waiting") as progress:
        for _ in range(5):
            progress.update(2, 2)
        progress.update(1, 3)
        progress.update(3, 3)
    assert capsys.readouterr().err.splitlines() == ["waiting: 2/2"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (16 << 30, "16.0 GiB"), (768 << 20, "768 MiB"), (1000, "1000 B")],
)
def test_memory_is_shown_as_nvidia_smi_does(count: int, text: str) -> None:
    assert memory_size(count) == text


def test_init_without_a_terminal_names_the_options(
    tmp_path: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(VideotuneError, match=r"--purpose … --model … --card … --data"):
        run("init", tmp_path / "work")
    with pytest.raises(VideotuneError, match=r"options: --card … --trigger …$"):
        run("init", tmp_path / "work", purpose="style", model="ltx 2b", data="clips")
    with pytest.raises(VideotuneError, match=r"options: --trigger …$"):
        run("init", tmp_path / "work", purpose="style", model="toy", data="clips")
    with pytest.raises(VideotuneError, match="no model"):
        run("init", tmp_path / "work", model="wam 3")
    answers = {"purpose": "style", "model": "toy", "data": "clips", "trigger": ""}
    assert run("init", tmp_path / "work", **answers) == DONE
    assert (tmp_path / "work" / "config.yaml").is_file()


def test_init_asks_nothing_where_its_questions_would_not_be_seen(
    tmp_path: Any, monkeypatch: Patch
) -> None:
    """With --json all that is printed is one object at the end."""
    monkeypatch.setattr("sys.stdin", io.StringIO("24\nstyle\n\nclips\n\n"))
    with pytest.raises(VideotuneError, match=r"--purpose … --model … --card … --data"):
        run("init", tmp_path / "work", json=True)
    assert not (tmp_path / "work").exists()


def test_each_preset_has_a_line_of_its_own_at_80_columns(
    monkeypatch: Patch, capsys: Printed
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run("presets", "list")
    rows = [line for line in capsys.readouterr().out.splitlines() if line[:1] == "│"]
    continued = [row for row in rows if row.split("│")[1].strip() == ""]
    assert len(rows) - len(continued) == len(preset_names())
    assert len(continued) < len(preset_names()) / 3, "only long names of models go on"


@pytest.mark.parametrize(
    ("card", "option"), [("an rtx 4090", "RTX 4090"), ("24", "24 GB")]
)
def test_init_names_the_card_as_it_was_recognised(
    card: str, option: str, tmp_path: Any, capsys: Printed
) -> None:
    answers = {"purpose": "style", "model": "wan 2.2 LoRA", "data": "clips"}
    run("init", tmp_path / "work", **answers, card=card, trigger="")
    printed = " ".join(capsys.readouterr().err.split())
    assert f'config.yaml --card "{option}"' in printed
    config = (tmp_path / "work" / "config.yaml").read_text()
    head = config.partition("\n\n")[0].replace("\n# ", " ")
    assert ("the card RTX 4090 (24 GB)" in head) == (card == "an rtx 4090")


def test_a_card_for_a_new_config_is_a_memory_or_a_name() -> None:
    for text, gigabytes, name in (
        ("0", 0, ""),
        ("16", 16, ""),
        ("16 GB", 16, ""),
        ("an rtx 4090", 24, "RTX 4090"),
        ("4090", 24, "RTX 4090"),
    ):
        assert parse_card(text) == ChosenCard(gigabytes, name)
    for card in cards():
        chosen = ChosenCard(card.vram >> 30, card.name)
        assert parse_card(chosen.option) == chosen, "as the next command takes it"
    for text in ("-1", "rtx 3060", "many"):
        with pytest.raises(VideotuneError, match="--card"):
            parse_card(text)


def test_an_export_for_kohya_is_a_conversion(tiny_family: Any) -> None:
    family = tiny_family("wan")
    with pytest.raises(
        VideotuneError, match=r"`videotune lora convert FILE --to kohya`"
    ):
        refuse_format(family, "LORA", "kohya")
    with pytest.raises(VideotuneError) as refusal:
        refuse_format(family, "LORA", "made-up")
    assert "convert" not in str(refusal.value)


@pytest.mark.parametrize(
    ("gigabytes", "begin", "preset"),
    [
        (12, "This card of 12 GB trains ", "12GB"),
        (80, "This card of 80 GB trains ", "80GB"),
        (4, "This card of 4 GB is smaller", ""),
    ],
)
def test_doctor_ends_with_what_the_card_trains(
    gigabytes: int, begin: str, preset: str, monkeypatch: Patch
) -> None:
    """The driver holds some of the memory back."""
    total = int((gigabytes - 0.3) * 2**30)
    monkeypatch.setattr(doctor, "local_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (0, total))
    sentence = doctor.can_train()
    assert sentence.startswith(begin)
    assert preset in sentence


def test_doctor_ends_with_what_a_machine_without_a_card_trains(
    capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run("doctor") == DONE
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert "This machine has no card" in " ".join(lines[-3:])
    assert max(map(len, lines)) <= 80
    assert printed.err == "looking at packages and devices …\n"


def test_a_count_of_one_is_singular() -> None:
    assert [counted(n, "clip") for n in (0, 1, 2)] == ["0 clips", "1 clip", "2 clips"]
    assert counted(1, "entry", "entries") == "1 entry"
    assert counted(1200, "entry", "entries") == "1,200 entries"
    are = [counted_are(n, "entry", plural="entries") for n in (1, 3)]
    assert are == ["1 entry is", "3 entries are"]


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_of_a_skipped_clip_is_said_in_words(reason: str) -> None:
    words = reason_words(reason)
    assert words != reason
    assert "_" not in words
    clip = {"used": False, "held_out": False, "reason": reason}
    assert state_words(clip) == f"skipped: {words}"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.613, "0.613 s"),
        (15.4, "15.4 s"),
        (90, "90 s"),
        (107, "2 min"),
        (59 * 60, "59 min"),
        (100 * 60, "1 h 40 min"),
        (26 * 3600, "26 h 00 min"),
    ],
)
def test_a_duration_is_in_one_unit_until_there_are_hours(
    seconds: float, words: str
) -> None:
    assert duration(seconds) == words


def test_the_band_of_views_is_said_with_its_limits() -> None:
    limits = {name: band_limits(name) for _, name in BANDS} | {"risky": band_limits("")}
    assert limits == {
        "conservative": "below 10",
        "moderate": "10 to below 50",
        "high": "50 to below 100",
        "risky": "100 or more",
    }
    per_window = {"min": 9, "max": 10, "band": "moderate"}
    assert views_text(per_window) == "each window seen 9 to 10 times (moderate)"
    text = views_text(per_window, with_limits=True)
    assert text == "each window seen 9 to 10 times (moderate: 10 to below 50)"


def test_the_toy_has_its_own_name() -> None:
    base = place("asset:toy")
    assert spec_for(None, base).title == "the toy base model"
    assert spec_for(None, replace(base, name=str(base.folder))).title == "Wan 2.1 T2V"


def test_each_kind_of_cache_entries_has_a_label() -> None:
    rows = [
        {"kind": kind, "encoder": None, "clip": "a.mp4", "bytes": 1, "made": None}
        for kind in KINDS
    ]
    labels = [line.split(":")[0] for line in encoder_lines(rows)]
    assert len(set(labels)) == len(KINDS)
    assert sum("text encoder" in label for label in labels) == 1
