"""Captions by a real local server and by a tiny vision-language model; retries,
refusals, kills and Ctrl-C.
"""

import base64
import gzip
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from PIL import Image

from tests.docs.test_schemas import faults
from tests.support.clips import noise, write_clip, write_image
from tests.support.command_line import Bases, Patch, Printed, run
from tests.support.damaged_files import limited
from tests.support.dripping_server import dripping
from tests.support.http_server import Handler, serving
from tests.support.hub_downloads import hub_of
from tests.support.hub_settings import hub_settings
from tests.support.waiting import wait_until
from videotune.captioning import backends
from videotune.captioning.caption_cleanup import CaptionError, clean, prompt_for
from videotune.captioning.overwrite import STATE_FILE, OverwriteState
from videotune.cli.main import main
from videotune.commands.caption import CaptionOptions, CaptionResult, caption
from videotune.commands.check import check
from videotune.errors import DONE, FAILED, SKIPPED, VideotuneError

KEY = "sk-secret-1234"


class Captioner(Handler):
    """Speaks /v1/chat/completions: ``answers`` (status, text of the body) are given in
    turn, then a caption of its own.
    """

    def do_POST(self) -> None:
        outer = self.server
        outer.headers.append(self.headers)
        outer.requests.append(json.loads(self.body()))
        number = len(outer.requests)
        if number >= outer.hang_from:
            outer.end.wait(60)
        status, text = (
            outer.answers.pop(0)
            if outer.answers
            else (200, completion(f"caption {number}"))
        )
        self.answer(status, text.encode(), {"Content-Type": "application/json"})


def completion(text: str | None) -> str:
    message = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
    }
    return json.dumps(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [message],
        }
    )


@pytest.fixture
def server() -> Iterator[Any]:
    with serving(
        Captioner, answers=[], requests=[], headers=[], hang_from=10**6, end=Event()
    ) as made:
        yield made
        made.end.set()


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Three clips without captions, one of them below a folder, and an image."""
    for i, name in enumerate(("a", "b", "deep/c")):
        write_clip(
            tmp_path / "clips" / "videos" / f"{name}.mp4", noise(20, 32, 48, seed=i), 16
        )
    write_image(tmp_path / "clips" / "images" / "d.png", noise(1, 32, 48, seed=9)[0])
    return tmp_path / "clips"


def asked(clips: Path, server: Any, **options: Any) -> CaptionResult:
    return caption(
        options=CaptionOptions("m", f"{server.url}/v1", **{"workers": 1, **options}),
        data=str(clips),
    )


def texts(clips: Path) -> dict[str, str]:
    return {
        str(path.relative_to(clips)): path.read_text()
        for path in sorted(clips.rglob("captions/**/*.txt"))
        # A file that is being written has a hidden name until it is whole.
        if not path.name.startswith(".")
    }


def test_frames_key_and_retries(clips: Path, server: Any, monkeypatch: Patch) -> None:
    """The library asks again after 429 and 500; the server gets JPEG frames, the key,
    the model and the prompt.
    """
    monkeypatch.setenv("MY_KEY", KEY)
    server.answers = [
        (429, "{}"),
        (500, "{}"),
        (200, completion('**Caption:** "Ohwx runs."')),
    ]
    result = asked(
        clips,
        server,
        key_env="MY_KEY",
        trigger="ohwx",
        frames=3,
        purpose="motion",
        max_words=40,
    )
    assert result.exit_code == DONE
    assert len(server.requests) == 6
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    content = [request["messages"][0]["content"] for request in server.requests]
    assert sorted(len(parts) - 1 for parts in content[2:]) == [1, 3, 3, 3]
    assert content[-1][-1]["text"] == prompt_for("motion", None, 3, 40)
    head, _, data = content[-1][0]["image_url"]["url"].partition(",")
    picture = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (head, picture.format, picture.size) == (
        "data:image/jpeg;base64",
        "JPEG",
        (48, 32),
    )
    assert list(texts(clips)) == [
        "captions/a.txt",
        "captions/b.txt",
        "captions/d.txt",
        "captions/deep/c.txt",
    ]
    assert sorted(texts(clips).values())[0] == "Ohwx runs.\n"
    assert all(text.lower().count("ohwx") == 1 for text in texts(clips).values())


BROKEN = [
    "no json",
    "{}",
    "[]",
    '{"choices": []}',
    '{"choices": [{"message": {"content": 7}}]}',
    completion(None),
]


@pytest.mark.parametrize(
    "body",
    [
        *BROKEN,
        completion("I'm sorry, I can't help with that."),
        completion("<think>so"),
    ],
)
def test_an_answer_that_is_no_caption_fails_its_clip_alone(
    body: str, clips: Path, server: Any
) -> None:
    server.answers = [(200, body)]
    result = asked(clips, server)
    assert (len(result.failed), len(result.written), result.exit_code) == (
        1,
        3,
        SKIPPED,
    )
    assert len(texts(clips)) == 3
    again = asked(clips, server)
    assert (len(again.kept), len(again.written), again.exit_code) == (3, 1, DONE)


def test_a_request_without_an_answer_fails(
    clips: Path, server: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(backends, "RETRIES", 0)
    server.hang_from = 2
    result = asked(clips, server, timeout=0.3)
    assert (len(result.failed), len(result.written)) == (3, 1)
    assert "Timeout" in result.failed[0]["why"]


def test_a_wrong_key_ends_the_command_and_is_not_told(
    clips: Path, server: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.answers = [
        (401, json.dumps({"error": {"message": f"the key {KEY} is wrong"}}))
    ] * 4
    with pytest.raises(VideotuneError) as caught:  # no other clip would fare better
        asked(clips, server)
    assert KEY not in str(caught.value)


def test_what_a_person_wrote_stays(clips: Path, server: Any) -> None:
    (clips / "captions").mkdir()
    own = clips / "captions" / "a.txt"
    own.write_text("a red fox\nit runs\n")
    (clips / "captions" / "b.txt").write_text("\n")
    result = asked(clips, server)
    assert (own.read_text(), len(result.kept), len(result.written)) == (
        "a red fox\nit runs\n",
        1,
        3,
    )
    result = asked(clips, server, overwrite=True)
    assert (len(result.written), result.kept) == (4, [])
    assert "a red fox\nit runs\n" in [
        path.read_text() for path in clips.glob("captions/a.txt.*.bak")
    ]
    assert not (clips / STATE_FILE).exists()
    assert len(asked(clips, server).kept) == 4


def test_captions_go_where_the_dataset_says_they_are_read(
    clips: Path, server: Any
) -> None:
    """Folders of frames are clips, and captions have the ending that training reads."""
    for number, frame in enumerate(noise(6, 32, 48, seed=7)):
        write_image(clips / "shot" / f"{number:03}.png", frame)
    keys = {"caption_extension": ".tags", "frame_folder_fps": 16}
    config = {"datasets": [{"path": str(clips), **keys}]}
    options = CaptionOptions("m", f"{server.url}/v1", workers=1, frames=3)
    result = caption(config, preset="toy", options=options, data=str(clips))
    assert (result.exit_code, len(result.written)) == (DONE, 5)
    assert sorted(path.relative_to(clips).as_posix() for path in clips.rglob("*.tags")) == [
        "captions/a.tags",
        "captions/b.tags",
        "captions/d.tags",
        "captions/deep/c.tags",
        "shot.tags",
    ]  # fmt: skip
    assert len(server.requests[-1]["messages"][0]["content"]) == 4, "three frames"
    account = check(config, preset="toy").account
    assert {tuple(clip["captions"]) for clip in account["clips"]} == {
        (row["caption"],) for row in result.written
    }

    sets = tuple(f"datasets.{key}={value}" for key, value in keys.items())
    again = caption(options=options, data=str(clips), sets=sets)
    assert (len(again.kept), again.written) == (5, [])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_continues(
    number: int, overwrite: bool, clips: Path, server: Any
) -> None:
    """The process is stopped while the third request waits for its answer; what was
    written is not asked for again.
    """
    if overwrite:
        for name in ("a", "b", "d", "deep/c"):
            (clips / "captions" / name).parent.mkdir(parents=True, exist_ok=True)
            (clips / "captions" / f"{name}.txt").write_text(f"by hand {name}")
    server.hang_from = 3
    words = f"-m videotune caption {clips} --model m --endpoint {server.url}/v1 --workers 1".split()
    child = subprocess.Popen(
        [sys.executable, *words, *["--overwrite"] * overwrite], stderr=subprocess.PIPE
    )

    def written() -> dict[str, str]:
        return {
            name: text
            for name, text in texts(clips).items()
            if text.startswith("caption")
        }

    # a request may go out while the answer to the one before is being written
    wait_until(
        lambda: (
            (len(server.requests) >= server.hang_from and len(written()) == 2)
            or child.poll() is not None
        )
    )
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    before = written()
    assert len(before) == 2, said.decode()
    server.end.set()
    result = asked(clips, server, overwrite=overwrite)
    assert (len(result.written), len(result.kept)) == (2, 2)
    assert before.items() <= texts(clips).items()
    backups = sorted(path.read_text() for path in clips.rglob("*.bak"))
    assert (
        backups == ["by hand a", "by hand b", "by hand d", "by hand deep/c"] * overwrite
    )


def test_a_recorded_caption_is_finished_only_if_its_file_has_it(tmp_path: Path) -> None:
    """Whatever the clock says, and wherever the process was killed."""
    state = OverwriteState(tmp_path, {"model": "m"})
    state.begin()
    for name, text in (("a", "one"), ("b", "two"), ("é", "three")):
        state.record(tmp_path / f"{name}.txt", (text,))
    path = tmp_path / STATE_FILE
    path.write_bytes(path.read_bytes()[:-4])  # a kill tore the last line

    again = OverwriteState(tmp_path, {"model": "m"})
    again.begin()
    assert again.is_finished(tmp_path / "a.txt", ("one",))
    assert not again.is_finished(tmp_path / "b.txt", ("by hand",))
    assert not again.is_finished(tmp_path / "é.txt", ("three",))
    again.record(tmp_path / "é.txt", ("three",))
    third = OverwriteState(tmp_path, {"model": "m"})
    assert third.is_finished(tmp_path / "é.txt", ("three",))

    other = OverwriteState(tmp_path, {"model": "n"})
    assert not other.is_finished(tmp_path / "a.txt", ("one",))
    other.begin()
    other.end()
    assert not path.exists()


def test_datasets_without_caption_files_of_their_own_are_refused(
    clips: Path, server: Any, tmp_path: Path
) -> None:
    with pytest.raises(VideotuneError):
        asked(tmp_path / "clips.zip", server)
    (clips / "metadata.csv").write_text("file_name,text\nvideos/a.mp4,a fox\n")
    with pytest.raises(VideotuneError):
        asked(clips, server)
    (clips / "metadata.csv").unlink()
    (tmp_path / "elsewhere").mkdir()
    (clips / "captions").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VideotuneError):
        asked(clips, server)
    assert server.requests == []


def test_json_dry_run_and_hints(
    clips: Path, server: Any, capsys: Printed, tiny_bases: Bases
) -> None:
    words = {
        "model": "m",
        "endpoint": f"{server.url}/v1",
        "workers": 1,
        "as_json": True,
    }
    assert run("caption", clips, **words, dry_run=True) == DONE
    dry = json.loads(capsys.readouterr().out)
    assert faults("caption", dry) == []
    assert (len(dry["planned"]), dry["written"], server.requests) == (4, [], [])
    server.answers = [
        (200, completion(text))
        for text in ("First a fox.", "fox " * 600, "a fox", "a fox")
    ]
    assert (
        run("caption", clips, **words, base=tiny_bases("wan"), max_words=2000) == DONE
    )
    value = json.loads(capsys.readouterr().out)
    assert faults("caption", value) == []
    hints = " ".join(row["hint"] for row in value["hints"])
    assert all(
        part in hints
        for part in ('"first"', "tokens; the model reads", "the same as", "600 words")
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("<think>first\nso</think>\n\nA fox\nruns.", "A fox runs."),
        ("thoughts</think>A fox.", "A fox."),
        ("**Video caption:** A **red** fox.", "A red fox."),
        ("Here is a caption for the clip: A fox.", "A fox."),
        ("# “A fox.”", "A fox."),
        ("A large dog runs.", "A large dog runs."),
        ("\x1b[31mA\x07 \u202efox\0 \ud800runs.", "A fox runs."),
        ("One two. Three four five six.", "One two."),
        ("one two three four five six", "one two three four"),
    ],
)
def test_clean(answer: str, text: str) -> None:
    assert clean(answer, 4 if "wo" in answer else 50) == text


@pytest.mark.parametrize(
    "answer",
    ["", " ** ", "As an AI model, I see", "I’m sorry, but", "I cannot view", "<think>"],
)
def test_refusals(answer: str) -> None:
    with pytest.raises(CaptionError):
        clean(answer, 50)


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaVA with random weights, saved as its authors' checkpoints are."""
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "</s>", "<image>", *(f"word{i}" for i in range(60))]
    plain = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="</s>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    vision = hf.CLIPVisionConfig(**size, image_size=16, patch_size=8, projection_dim=16)
    text = hf.LlamaConfig(**size, vocab_size=len(words), num_key_value_heads=2)
    config = hf.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=2,
        vision_feature_layer=-1,
    )
    part = "{{ '<image> ' if part['type'] == 'image' else part['text'] }}"
    template = "{% for part in messages[0]['content'] %}" + part + "{% endfor %} word1"
    pictures = hf.CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    processor = hf.LlavaProcessor(
        pictures, tokenizer, 8, "default", template, num_additional_image_tokens=1
    )
    folder = tmp_path_factory.mktemp("vlm")
    hf.set_seed(0)
    hf.LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_a_local_model(tiny_vlm: Path, clips: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(backends, "ANSWER_TOKENS", 6)
    result = caption(options=CaptionOptions(str(tiny_vlm), frames=2), data=str(clips))
    assert (result.exit_code, len(result.written), result.failed) == (DONE, 4, [])
    assert all(text.startswith(("word", "<")) for text in texts(clips).values())


def test_a_relative_folder(clips: Path, server: Any, monkeypatch: Patch) -> None:
    monkeypatch.chdir(clips.parent)
    assert len(asked(Path(clips.name), server).written) == 4
    assert (clips / "captions" / "deep" / "c.txt").is_file()


def test_a_folder_that_is_no_model(tmp_path: Path, clips: Path) -> None:
    with pytest.raises(VideotuneError):
        caption(options=CaptionOptions(str(tmp_path)), data=str(clips))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("user/model", "the Hub cannot be reached: check the network"),
        ("user/none", "is not on the Hub, or is private"),
    ],
)
def test_a_model_that_cannot_be_fetched_is_one_sentence_within_seconds(
    name: str, sentence: str, clips: Path, tmp_path: Path, capfd: Printed
) -> None:
    """Without a network transformers would ask for file after file, again and again."""
    begun = time.monotonic()
    with hub_of({"other": {}}) as hub:
        is_reached = name == "user/none"
        endpoint = hub.url if is_reached else "http://127.0.0.1:9"
        settings = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
        with hub_settings(tmp_path / "hub", settings) as patch:
            words = ["videotune", "caption", str(clips), "--model", name]
            patch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as end:
                main()
        asked = [path for _, path, *_ in hub.asked if name in path]
        assert len(asked) == is_reached, "one attempt"
    assert time.monotonic() - begun < 60
    printed = capfd.readouterr().err
    lines = [line for line in printed.splitlines() if not line.startswith("note")]
    assert end.value.code == FAILED
    assert lines[0] == "reading the clips …"
    assert lines[-1].startswith(f"videotune: --model: {name}")
    assert sentence in lines[-1]
    assert "Retry" not in printed


@pytest.mark.parametrize("where", ["headers", "body"])
def test_a_server_that_never_finishes_its_answer_fails_the_clip(
    where: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Each read is in time; the answer is not."""
    monkeypatch.setattr(backends, "RETRIES", 0)
    write_clip(tmp_path / "clips" / "a.mp4", noise(20, 32, 48, seed=1), 16)
    with dripping(where) as address, limited(20):
        result = caption(
            options=CaptionOptions("m", address, workers=1, timeout=1.0),
            data=str(tmp_path / "clips"),
        )
    assert (len(result.failed), result.written) == (1, [])
    assert "--timeout" in result.failed[0]["why"]


DEEP = '{"choices": ' + "[" * 100_000


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, DEEP), (400, DEEP), (200, " " * 5_000_000), (400, "x" * 5_000_000)],
)
def test_an_answer_that_is_deep_or_huge_fails_its_clip_alone(
    status: int, body: str, clips: Path, server: Any
) -> None:
    server.answers = [(status, body)]
    result = asked(clips, server)
    assert (len(result.failed), len(result.written)) == (1, 3)


def test_a_compressed_answer_is_refused(
    clips: Path, server: Any, monkeypatch: Patch
) -> None:
    """100 kB become 100 MB."""
    body = gzip.compress(b" " * 100_000_000)

    def answer(handler: Any) -> None:
        handler.body()
        handler.answer(200, body, {"Content-Encoding": "gzip"})

    monkeypatch.setattr(Captioner, "do_POST", answer)
    result = asked(clips, server)
    assert len(result.failed) == 4


def test_a_redirect_leads_nowhere(clips: Path, server: Any, monkeypatch: Patch) -> None:
    """The other server may be one that only this machine reaches."""
    reached = []

    class Inside(Handler):
        def do_POST(self) -> None:
            reached.append(self.body())
            self.answer(200, b"{}")

    with serving(Inside) as inside:

        def answer(handler: Any) -> None:
            handler.body()
            handler.answer(307, b"", {"Location": f"{inside.url}/v1/chat"})

        monkeypatch.setattr(backends, "RETRIES", 0)
        monkeypatch.setattr(Captioner, "do_POST", answer)
        assert len(asked(clips, server).failed) == 4
    assert reached == []


def test_redirects_without_end_fail(
    clips: Path, server: Any, monkeypatch: Patch
) -> None:
    def answer(handler: Any) -> None:
        handler.body()
        handler.answer(307, b"", {"Location": "/v1/again"})

    monkeypatch.setattr(backends, "RETRIES", 0)
    monkeypatch.setattr(Captioner, "do_POST", answer)
    assert len(asked(clips, server).failed) == 4
