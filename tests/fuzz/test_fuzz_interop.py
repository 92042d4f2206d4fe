"""Files and answers of other programs, drawn at random: each is read or refused in a
sentence, and none hangs.

More of them: ``VIDEOTUNE_FUZZ=4000 pytest tests/fuzz/test_fuzz_interop.py`` draws ten
times as many.
"""

import gzip
import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.interop.test_translate import EXAMPLES
from tests.support.command_line import Patch, train
from tests.support.damaged_files import COUNT, ODD, limited, try_each
from tests.support.http_server import Handler, serving
from videotune.captioning import backends
from videotune.captioning.caption_cleanup import CaptionError, clean
from videotune.commands.publish import card, publish
from videotune.console import print_json
from videotune.errors import DONE, VideotuneError
from videotune.exporter.base_detection import candidate_bases
from videotune.exporter.lora_inspect import inspect, summary_lines
from videotune.exporter.lora_target import Target
from videotune.exporter.lora_tools import convert
from videotune.files import read_json
from videotune.interop.autopsy import build_autopsy
from videotune.interop.foreign_config import read_foreign_config
from videotune.interop.trainer_rules import build_trainer_rules
from videotune.interop.translate import translate
from videotune.job.overrides import Overrides
from videotune.models.registry import find
from videotune.models.skeletons import explained

pytestmark = pytest.mark.filterwarnings("ignore")

NO_CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]  # fmt: skip


def drawn(share: float) -> Any:
    """Settings for a share of ``COUNT`` examples, the same ones unless more are wanted.

    Those that fail are not made smaller, which would take minutes.
    """
    return settings(
        max_examples=max(1, int(COUNT * share)),
        derandomize=COUNT <= 400,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=NO_CHECKS,
    )


def refusal(read: Callable[[], object]) -> str:
    """Run a reader, and return the sentence with which it refuses, or ""."""
    with limited(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            read()
        except (VideotuneError, OSError, CaptionError) as error:
            return str(error) or type(error).__name__
    return ""


def read_or_refuse(read: Callable[[], object]) -> None:
    """Run a reader; a refusal is a sentence of some length, anything else fails."""
    assert len(refusal(read)) < 5000


scalars = st.one_of(
    st.sampled_from([value for value in ODD if not isinstance(value, dict | list)]),
    st.integers(-3, 3),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "low_noise.safetensors",
            "wan",
            "t2v-A14B",
            "C:\temp",
            "[trigger] --w 3",
            "a=b",
            "1e-4",
            "0.875",
            875,
        ]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def foreign_keys(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Some keys of a trainer's published example, with any values."""
    example = draw(st.sampled_from(EXAMPLES))
    keys: list[str] = []
    for file_keys in example["keys"].values():
        keys += [key.replace("N", draw(st.sampled_from("01"))) for key in file_keys if key]  # fmt: skip
    chosen = draw(st.lists(st.sampled_from(keys), min_size=1, max_size=30, unique=True))
    return example["trainer"], {key: draw(values) for key in chosen}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Objects for dotted keys; a key below a value that is no object is dropped."""
    value: dict[str, Any] = {}
    for key, leaf in flat.items():
        inner: Any = value
        *sections, last = key.split(".")
        for section in sections:
            inner = inner.setdefault(section, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[last] = leaf
    return value


def toml_text(flat: dict[str, Any]) -> str:
    return "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in flat.items()
    ).replace("null", '""')


def command_text(flat: dict[str, Any]) -> str:
    options = [f"--{key.rpartition('.')[2]}={json.dumps(value)}" for key, value in flat.items()]  # fmt: skip
    return "accelerate launch wan_train_network.py " + " ".join(options) + "\n"


FORMS: dict[str, Callable[[dict[str, Any]], str]] = {
    ".json": lambda flat: json.dumps(nested(flat)),
    ".yaml": lambda flat: yaml.safe_dump(json.loads(json.dumps(nested(flat)))),
    ".toml": toml_text,
    ".sh": command_text,
}


def import_and_show(path: Path) -> None:
    found = translate(read_foreign_config([path]))
    print_json({"config": found.config, "rows": [vars(row) for row in found.rows]})


@pytest.mark.parametrize("form", FORMS)
@drawn(0.4)
@given(drawn_keys=foreign_keys())
def test_configs_of_other_trainers(
    form: str, drawn_keys: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    _, flat = drawn_keys
    path = tmp_path / f"config{form}"
    path.write_text(FORMS[form](flat), errors="surrogatepass")
    read_or_refuse(lambda: import_and_show(path))


WORDS = [
    '"', "'", "\\", "^\n", "`\n", "\n", " ", "=", "(", ")", "&&", "|", "%A%", "$A", "${A[@]}", "!A!", "set A=",
    'set "B=', "A=", "$a =", "$env:A=", "rem x\n", "# x\n", "python train.py", "accelerate launch ", "--dit ",
    "--network_module=", "C:\\t", "x", "é", "\x00",
]  # fmt: skip


@pytest.mark.parametrize("suffix", [".sh", ".bat", ".ps1"])
@drawn(0.5)
@given(words=st.lists(st.sampled_from(WORDS), max_size=60))
def test_scripts(suffix: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / f"run{suffix}"
    path.write_text("".join(words))
    read_or_refuse(lambda: import_and_show(path))


CLIP = {
    "path": "a.mp4", "source_frames": 40, "source_fps": 24.0, "source_seconds": 1.7, "width": 640, "height": 360, "used": True,
    "reason": None, "windows": 1, "shape": "33x480x832", "speed": 1.0,
}  # fmt: skip
ACCOUNT = {"clips": [CLIP], "used": 1, "held_out": 0, "skipped": 0, "buckets": []}
OURS = {"steps_per_epoch": 1.0, "noise": [0.1, 0.3, 0.5, 0.7, 0.9], "scale": 1.0}


@drawn(0.4)
@given(drawn_keys=foreign_keys())
def test_autopsies(drawn_keys: tuple[str, dict[str, Any]]) -> None:
    trainer, flat = drawn_keys
    spec = find("wan").spec

    def read() -> None:
        with explained("the config has values that the trainer would not accept"):
            rules = build_trainer_rules(trainer, flat, spec)
            print_json(build_autopsy(trainer, rules, spec, ACCOUNT, OURS, []))

    read_or_refuse(read)


MODULES = ["transformer.blocks.0.attn1.to_q", "diffusion_model.blocks.0.self_attn.q", "lora_unet_blocks_0_ffn_0", "x", "",
           "base_model.model.blocks.0.attn1.to_k", "lycoris_blocks_0_attn1_to_v", "text_encoder.x"]  # fmt: skip
PARTS = ["lora_A.weight", "lora_B.weight", "lora_down.weight", "lora_up.weight", "alpha", "diff_b", "diff", "lora_B.bias",
         "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "oft_R.weight",
         "dora_scale", "lora_magnitude_vector"]  # fmt: skip
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "U8": 1, "F8_E4M3": 1, "BOOL": 1}  # fmt: skip
SIDES = st.sampled_from([0, 1, 2, 3, 4, 8, 24, 48, 100, 3000, 2**31])
SETTINGS = ["r", "lora_alpha", "alpha", "alpha_pattern", "use_rslora", "digest", "family", "base"]  # fmt: skip
HEADER_KEYS = ["lora_adapter_metadata", "lora_config", "adapter_config", "videotune", "ss_x"]  # fmt: skip
HEADER_VALUES = st.one_of(
    values.map(json.dumps),
    st.text(max_size=9),
    st.dictionaries(st.sampled_from(SETTINGS), values, max_size=4).map(json.dumps),
)
HEADERS = st.dictionaries(st.sampled_from(HEADER_KEYS), HEADER_VALUES, max_size=2)


@st.composite
def safetensors_bytes(draw: st.DrawFn) -> bytes:
    """A file of safetensors whose header may not be true."""
    header: dict[str, Any] = {}
    end = 0
    module = draw(st.sampled_from(MODULES))
    for part in draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=6, unique=True)):  # fmt: skip
        dtype = draw(st.sampled_from(["F32", "F32", "F32", *BYTES]))
        shape = draw(st.lists(SIDES, max_size=2))
        count = BYTES[dtype]
        for side in shape:
            count *= side
        size = count if draw(st.integers(0, 9)) else draw(st.sampled_from([0, 1, 2**63]))  # fmt: skip
        header[f"{module}.{part}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}  # fmt: skip
        end += size
    header["__metadata__"] = draw(HEADERS)
    text = json.dumps(header).encode(errors="surrogatepass")
    data = b"\x3c" * min(end, 1 << 20) if draw(st.booleans()) else bytes(min(end, 1 << 20))  # fmt: skip
    return len(text).to_bytes(8, "little") + text + data


@drawn(0.75)
@given(content=safetensors_bytes())
def test_adapter_files(
    content: bytes, tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("wan")
    assert list(candidate_bases())  # built once, outside of the time for a file
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)

    def show() -> None:
        facts = inspect(path)
        print_json(facts)
        summary_lines(facts)

    read_or_refuse(show)
    target = Target(tmp_path / "y.safetensors", "kohya", str(family.folder), overwrite=True)  # fmt: skip
    read_or_refuse(lambda: convert(path, target))


@pytest.fixture(scope="module")
def run(
    small_clips: Path,
    tiny_bases: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A finished run with an export and previews."""
    home = tmp_path_factory.mktemp("fuzz")
    sets = (
        f"base_model_name={tiny_bases('wan')}", f"cache_dir={home / 'cache'}", "resolution=32x32", "lora.rank=2", "steps=2",
        "sample_after=2", "sample.steps=1", 'samples=["a cat"]', "sample_metrics.budget=0", "validation_fraction=0.4",
        "video_config.frames=5", "dataloader_threads=0",
    )  # fmt: skip
    assert train(Overrides(data=str(small_clips), sets=sets), home / "run") == DONE
    return home / "run"


ENTRY = st.dictionaries(
    st.sampled_from(["format", "path", "hash", "use", "verified", "x"]),
    st.one_of(values, st.sampled_from(["export", "../..", "/", "journal.jsonl", ".", "a\nb", "\0"]),
              st.fixed_dictionaries({"reader": values})),
)  # fmt: skip


@drawn(0.5)
@given(
    changes=st.lists(ENTRY, max_size=3),
    odd=st.one_of(st.none(), values),
    is_whole=st.booleans(),
)
def test_lists_of_exports(
    changes: list[dict[str, Any]], odd: Any, is_whole: bool, run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    if not copy.exists():
        shutil.copytree(run, copy)
    entry, *_ = read_json(run / "exports.json")
    entries: Any = [entry | change for change in changes] if is_whole else changes
    content = json.dumps(odd if odd is not None else entries)
    (copy / "exports.json").write_text(content)
    outside = (tmp_path / "victim.safetensors").absolute()
    outside.write_bytes(b"precious")

    read_or_refuse(lambda: card(copy))
    published: list[str] = []
    read_or_refuse(lambda: published.extend(row["path"] for row in publish(copy, dry_run=True)["files"]))  # fmt: skip
    allowed = {Path(entry["path"]).name}
    assert {name for name in published if not name.startswith("samples/")} <= allowed


def test_other_files_of_a_run_that_is_published(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    files = [copy / f"{name}.json" for name in ("config", "plan", "check", "exports")]

    def read() -> None:
        card(copy)
        publish(copy, dry_run=True)

    read()
    assert try_each(files, read, COUNT // 4)["refused"] > 0


class AnyAnswer(Handler):
    """Gives ``status``, ``headers`` and ``content`` of its server."""

    def do_POST(self) -> None:
        self.body()
        self.answer(self.server.status, self.server.content, self.server.headers)


@pytest.fixture(scope="module")
def any_answer() -> Iterator[Any]:
    """The server; ``ask`` is a captioner that asks it once."""
    with (
        serving(AnyAnswer, status=200, headers={}, content=b"", ask=None) as server,
        Patch.context() as patch,
    ):
        patch.setattr(backends, "RETRIES", 0)
        server.ask = backends.server(f"{server.url}/v1", "m", "NO_KEY", 5.0)
        yield server


MESSAGE = st.one_of(values, st.fixed_dictionaries({"content": values}))
COMPLETION = st.one_of(
    values,
    st.fixed_dictionaries({"choices": st.one_of(values, st.lists(st.fixed_dictionaries({"message": MESSAGE}), max_size=2))}),
)  # fmt: skip
CONTENT = st.one_of(
    COMPLETION.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
    st.sampled_from([b"", b"[" * 100_000, b'{"choices":' * 5000, b" " * 5_000_000, b"NaN", b"\xff\xfe",
                     gzip.compress(bytes(10**7))]),
)  # fmt: skip
HTTP_HEADERS = st.dictionaries(
    st.sampled_from(["Content-Type", "Content-Encoding", "Location", "Retry-After"]),
    st.sampled_from(["gzip", "identity", "application/json", "text/event-stream", "/v1", "-1", "br", ""]),
    max_size=2,
)  # fmt: skip


@drawn(0.5)
@given(
    content=CONTENT,
    headers=HTTP_HEADERS,
    status=st.sampled_from(
        [200, 200, 200, 201, 204, 301, 307, 400, 401, 404, 418, 429, 500, 599]
    ),
)
def test_answers_of_a_caption_server(
    content: bytes, headers: dict[str, str], status: int, any_answer: Any
) -> None:
    any_answer.content = content
    any_answer.headers = headers
    any_answer.status = status
    read_or_refuse(lambda: clean(any_answer.ask([], "say what is seen"), 50))
