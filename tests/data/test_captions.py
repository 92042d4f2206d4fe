"""Captions read or refused with a code, metadata files, the trigger word, hints."""

import csv
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.clips import noise, write_image
from tests.support.datasets import scanned
from videotune.bounds import CAPTION_BYTES
from videotune.data.captions import (
    fill_trigger,
    lint_caption,
    lint_captions,
    read_caption,
    split_variants,
    with_trigger,
)
from videotune.data.file_checks import ClipProblem
from videotune.data.library import Library
from videotune.data.metadata_files import MetadataRow, read_metadata
from videotune.errors import VideotuneError


def test_lines_are_variants(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeff  a cat \r\n\n  eine Kätze, 猫\n \n".encode())
    assert read_caption(file) == ("a cat", "eine Kätze, 猫")


@pytest.mark.skipif(os.name == "nt", reason="needs pipes with names")
def test_captions_that_are_none(tmp_path: Path) -> None:
    for name, content, reason, words in [
        ("a", None, "missing_caption", "No such file"),
        ("b", b" \n\t\n", "empty_caption", "has no text"),
        ("c", b"\xff\xfea\x00", "undecodable_caption", "UTF-16"),
        (
            "d",
            "ein Bär".encode("latin-1"),
            "undecodable_caption",
            "byte 5.*Windows-1252.*; save it as UTF-8",
        ),
        ("e", "a cat".encode("utf-16"), "undecodable_caption", "looks like UTF-16"),
        (
            "f",
            "a cat".encode("utf-16-le"),
            "undecodable_caption",
            "contains a NUL .*UTF-16",
        ),
        ("h", "a cat".encode("utf-32"), "undecodable_caption", "UTF-32"),
        ("i", b"a cat\0", "undecodable_caption", "NUL .byte 5.; .*no text"),
        (
            "j",
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
            "undecodable_caption",
            "byte 0.*no text",
        ),
        ("k", "猫がいる".encode("shift-jis"), "undecodable_caption", "Shift-JIS"),
        (
            "l",
            b"a" * (CAPTION_BYTES + 1),
            "undecodable_caption",
            "has at most 1,048,576",
        ),
        # and is not waited for
        ("pipe", None, "missing_caption", "is not a regular file"),
    ]:
        if name == "pipe":
            os.mkfifo(tmp_path / name)
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ClipProblem, match=words) as caught:
            read_caption(tmp_path / name)
        assert caught.value.reason == reason


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_a_metadata_file_that_is_a_pipe_is_not_waited_for(
    name: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(VideotuneError, match="named pipe"):
        read_metadata(tmp_path / name)


@pytest.mark.parametrize(
    ("caption", "trigger", "with_it"),
    [
        ("a cat on a roof", "zorble", "zorble, a cat on a roof"),
        ("A Zorble on a roof", "zorble", "A Zorble on a roof"),
        ("zorbles everywhere", "zorble", "zorble, zorbles everywhere"),
        ("a <zorble> sits", "<zorble>", "a <zorble> sits"),
        ("", "zorble", "zorble"),
        ("a cat", None, "a cat"),
    ],
)
def test_the_trigger_word_comes_once(
    caption: str, trigger: str | None, with_it: str
) -> None:
    assert with_trigger(caption, trigger) == with_it


PLACEHOLDERS = (
    "caption",
    "TODO",
    " <Insert caption here> ",
    "a video.",
    "None",
    "n/a",
    "Lorem  ipsum",
)


@pytest.mark.parametrize(
    ("caption", "name", "hint"),
    [
        (
            "A person walking through a forest with sunlight filtering through trees",
            "a",
            "",
        ),
        (
            "First he sits, then he stands",
            "a",
            'the caption tells a sequence ("first", "then")',
        ),
        ("the firstborn thenar", "a", ""),
        ("word " * 600, "a", "600 words"),
        *((text, "a", "looks like a placeholder") for text in PLACEHOLDERS),
        ("my clip 03", "My_Clip-03", "only the file's name"),
        ("a cat plays", "My_Clip-03", ""),
        ("my clip 03", None, ""),
        ("the video shows a cat", "video", ""),
        ("a\u200b cat\ufffd", "a", "U+200B, U+FFFD"),
        ("a\u0007 cat", "a", "U+0007"),
        # a private character, one without a meaning, half of a pair, and separators
        ("a\ue000 cat", "a", "U+E000"),
        ("a\u0378 cat", "a", "U+0378"),
        ("a\ud800 cat", "a", "U+D800"),
        ("a\u2028 cat", "a", "U+2028"),
        ("a\u2029 cat", "a", "U+2029"),
        # joiners belong to Persian and to emoji
        ("ein Bär, 猫, می‌خواهم, 👩‍👩‍👧", "a", ""),
    ],
)
def test_hints(caption: str, name: str | None, hint: str) -> None:
    found = lint_caption(caption, name)
    assert bool(found) == bool(hint)
    assert hint in " ".join(found)


def test_one_caption_for_most_clips_is_told() -> None:
    same = {f"{i}.mp4": ("a  dog",) for i in range(5)} | {
        f"x{i}.mp4": (f"cat {i}",) for i in range(3)
    }
    assert lint_captions(same) == [
        '5 of 8 clips have the same caption ("a dog"); describe what each one shows'
    ]
    assert (
        lint_captions({**same, "y.mp4": ("bird",), "z.mp4": ("cow",)}) == []
    )  # half is not more than half
    assert (
        lint_captions({name: texts for name, texts in same.items() if name != "x0.mp4"})
        == []
    )  # seven are too few
    assert (
        lint_captions(
            {f"{i}.mp4": ("a dog", "a dog") if i < 4 else (f"{i}",) for i in range(8)}
        )
        == []
    )
    assert (
        "8 of 8 clips have an empty caption"
        in lint_captions({f"{i}.mp4": ("",) for i in range(8)})[0]
    )


def variants_of(row: MetadataRow) -> tuple[str, ...]:
    return split_variants("\n".join(row.texts))


def rows(path: Path, content: str | bytes) -> list[tuple[str, tuple[str, ...], int]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    listed, _ = read_metadata(path)
    return [
        (row.file_name, variants_of(row), int(row.position.rpartition(":")[2]))
        for row in listed
    ]


def test_csv_as_people_write_it(tmp_path: Path) -> None:
    file = tmp_path / "metadata.csv"
    plain = [
        ("a.mp4", ("a cat, a dog",), 2),
        ("sub/b.mp4", ("one", "two"), 3),
        ("c.mp4", (), 6),
    ]
    comma = 'file_name,text\na.mp4,"a cat, a dog"\nsub/b.mp4,"one\n\ntwo"\nc.mp4,\n'
    assert rows(file, comma) == plain
    assert rows(file, comma.replace("\n", "\r\n")) == plain
    assert rows(file, "\ufeff" + comma) == plain
    assert (
        rows(
            file, 'file_name;text\na.mp4;a cat, a dog\nsub/b.mp4;"one\n\ntwo"\nc.mp4;\n'
        )
        == plain
    )
    assert (
        rows(
            file,
            'file_name\ttext\na.mp4\ta cat, a dog\nsub/b.mp4\t"one\n\ntwo"\nc.mp4\t\n',
        )
        == plain
    )
    assert rows(file, 'fps, file_name, text,\n\n24, a.mp4, "a ""big"" cat",,\n') == [
        ("a.mp4", ('a "big" cat',), 3)
    ]


def test_jsonl_as_people_write_it(tmp_path: Path) -> None:
    file = tmp_path / "metadata.jsonl"
    whole = '\ufeff{"file_name": "a.mp4", "text": "a cat"}\r\n\n{"text": ["x", "y\\nz"], "file_name": "b.mp4"}'
    assert rows(file, whole) == [
        ("a.mp4", ("a cat",), 1),
        ("b.mp4", ("x", "y", "z"), 3),
    ]
    empty = '{"file_name": "a.mp4", "text": null}\n{"file_name": "b.mp4"}'
    assert rows(file, empty) == [("a.mp4", (), 1), ("b.mp4", (), 2)]


def test_the_text_column(tmp_path: Path) -> None:
    file = tmp_path / "metadata.csv"
    for name in ("text", "caption", "prompt"):
        assert rows(file, f"file_name,{name}\na.mp4,hi\n") == [("a.mp4", ("hi",), 2)]
    file.write_text("caption,file_name,text\nno,a.mp4,yes\n")
    listed, notes = read_metadata(file)
    assert listed[0].texts == ("yes",)
    assert notes[0].endswith(
        "captions are taken from the column text, not from caption"
    )


def test_texts_of_metadata_keep_their_line_breaks(tmp_path: Path) -> None:
    file = tmp_path / "metadata.csv"
    file.write_text(
        'file_name,text\na.mp4,"one\ntwo"\nb.mp4," "\nc.mp4,"one\n"\nd.mp4,one\n',
        newline="",
    )
    listed, notes = read_metadata(file)
    assert [row.texts for row in listed] == [("one\ntwo",), (), ("one\n",), ("one",)]
    assert notes == []
    file = tmp_path / "metadata.jsonl"
    file.write_text('{"file_name": "a.mp4", "text": ["one", "two\\nthree"]}\n')
    assert read_metadata(file)[0][0].texts == ("one", "two\nthree")


@pytest.mark.parametrize(
    "separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"]
)
def test_only_line_ends_of_editors_end_a_caption(separator: str) -> None:
    """Others are within one, and a hint names those that are not seen."""
    text = f"a cat{separator}on a roof"
    assert split_variants(text) == (text,)
    assert any("invisible" in hint for hint in lint_caption(text))
    assert split_variants("a\nb\r\nc\rd") == ("a", "b", "c", "d")


def captioned(folder: Path, **texts: str) -> Path:
    """A folder of images with these captions."""
    for seed, (name, text) in enumerate(texts.items()):
        write_image(folder / f"{name}.png", noise(1, seed=seed)[0])
        (folder / f"{name}.txt").write_bytes(text.encode())
    return folder


def line_notes(library: Library) -> list[str]:
    return [note for note in library.notes if "several lines" in note]


@pytest.mark.parametrize(
    ("texts", "several", "prose"),
    [
        ({"a": "one\ntwo", "b": "one"}, "1 caption has", False),
        ({"a": "She walks.\n\nThe camera follows.", "b": "x\r\ny"}, "2 captions", True),
        ({"a": "x\r\rShe", "b": "x"}, "1 caption has", True),
        ({"a": "\n\none\n\n", "b": "two \n"}, "", False),
    ],
)
def test_several_lines_are_reported_and_may_be_one_caption(
    tmp_path: Path, texts: dict[str, str], several: str, prose: bool
) -> None:
    folder = captioned(tmp_path / "d", **texts)
    library = scanned(folder)
    notes = line_notes(library)
    assert bool(notes) is bool(several)
    if several:
        assert several in notes[0]
        assert ("paragraphs" in notes[0]) is prose

    joined = scanned(folder, caption_lines="join")
    assert line_notes(joined) == []
    assert [clip.captions for clip in joined.clips] == [
        (" ".join(text.split()),) for text in texts.values()
    ]


def test_lines_of_metadata_follow_the_same_rule(tmp_path: Path) -> None:
    write_image(tmp_path / "d" / "a.png", noise(1)[0])
    (tmp_path / "d" / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "text": ["one\\ntwo", "three"]}\n'
    )
    library = scanned(tmp_path / "d")
    assert library.clips[0].captions == ("one", "two", "three")
    assert len(line_notes(library)) == 1
    joined = scanned(tmp_path / "d", caption_lines="join")
    assert joined.clips[0].captions == ("one two", "three")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "metadata.csv",
            "file_name,caption,prompt\na,b,c\n",
            "columns caption and prompt, but no column text",
        ),
        (
            "metadata.csv",
            "file_name,fps\na.mp4,24\n",
            "no column text; its columns are file_name, fps",
        ),
        (
            "metadata.csv",
            "video,prompt\na.mp4,x\n",
            "no column file_name; its columns are video, prompt",
        ),
        (
            "metadata.csv",
            "file_name,text\na.mp4,a cat, a dog\n",
            r"metadata\.csv:2 has 3 columns, the header has 2",
        ),
        (
            "metadata.csv",
            "file_name,text\na.mp4,x\nb.mp4\n",
            r"metadata\.csv:3 has 1 columns",
        ),
        (
            "metadata.csv",
            'file_name,text\na.mp4,"x\ny"\nb.mp4,"never closed\nc.mp4,x\n',
            r"metadata\.csv:4 is not valid CSV",
        ),
        (
            "metadata.csv",
            'file_name,text\na.mp4,"a "big" cat"\n',
            r"metadata\.csv:2 is not valid CSV",
        ),
        (
            "metadata.csv",
            "file_name,text\n,a cat\n",
            r"metadata\.csv:2 has no file_name",
        ),
        (
            "metadata.csv",
            "file_name,text,text\na,b,c\n",
            r"metadata\.csv:1: the column 'text' appears twice",
        ),
        ("metadata.csv", "", "lists no clips"),
        ("metadata.csv", "file_name,text\n", "lists no clips"),
        (
            "metadata.csv",
            "file_name,text\na.mp4,Bär\n".encode("latin-1"),
            "is not UTF-8 text .*save it as UTF-8",
        ),
        (
            "metadata.csv",
            "file_name,text\na.mp4,x\n".encode("utf-16"),
            "looks like UTF-16",
        ),
        (
            "metadata.csv",
            "file_name,text\na.mp4," + "x" * 200_000,
            r"metadata\.csv:2 is not valid CSV: field larger",
        ),
        (
            "metadata.jsonl",
            '{"file_name": "a.mp4", "text": "x"}\n{"file_name":',
            r"metadata\.jsonl:2 is not valid JSON",
        ),
        ("metadata.jsonl", '["a.mp4", "x"]', r"metadata\.jsonl:1 is not an object"),
        (
            "metadata.jsonl",
            '{"file_name": "a", "text": ["x", 3]}',
            r"jsonl:1: text must be a text .*not \[\"x\", 3\]",
        ),
        (
            "metadata.jsonl",
            '{"file_name": 7, "text": "x"}',
            r"metadata\.jsonl:1 has no file_name",
        ),
        (
            "metadata.jsonl",
            '{"file_name": "a.mp4", "text": "\\ud83d"}',
            r"metadata\.jsonl:1 has a broken character",
        ),
        ("metadata.jsonl", "[" * 100_000, r"metadata\.jsonl:1 is not valid JSON"),
    ],
)
def test_bad_metadata_names_the_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    with pytest.raises(VideotuneError, match=words):
        rows(tmp_path / name, content)


WORDS = st.text(
    st.characters(
        exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters="\ufeff"
    ),
    max_size=20,
)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    texts=st.lists(st.lists(WORDS, max_size=3), min_size=1, max_size=5),
    delimiter=st.sampled_from(",;\t"),
)
def test_what_a_csv_or_json_writer_wrote_is_read(
    tmp_path: Path, texts: list[list[str]], delimiter: str
) -> None:
    wanted = [
        tuple(text.strip() for text in variants if text.strip()) for variants in texts
    ]
    file = tmp_path / "metadata.csv"
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerow(["file_name", "text"])
        writer.writerows(
            [f"{i}.mp4", "\n".join(variants)] for i, variants in enumerate(texts)
        )
    assert [variants_of(row) for row in read_metadata(file)[0]] == wanted
    lines = [
        json.dumps({"file_name": str(i), "text": each}, ensure_ascii=False)
        for i, each in enumerate(texts)
    ]
    file = file.with_suffix(".jsonl")
    file.write_text("\n".join(lines), encoding="utf-8")
    assert [variants_of(row) for row in read_metadata(file)[0]] == wanted


@pytest.mark.parametrize(
    ("caption", "with_it"),
    [
        ("a photo of [trigger]", "a photo of ohwx"),
        ("[name] and [trigger]", "ohwx and ohwx"),
        ("a photo", "ohwx, a photo"),
    ],
)
def test_placeholders_of_the_trigger_word(caption: str, with_it: str) -> None:
    assert with_trigger(caption, "ohwx") == with_it
    assert with_trigger(caption, None) == caption
    assert bool(lint_caption(caption)) == ("[" in caption)
    assert lint_caption(fill_trigger(caption, "ohwx")) == []
