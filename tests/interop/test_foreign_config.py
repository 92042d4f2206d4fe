"""Configs of other trainers are read whole: every leaf, the files that they refer to,
and command lines.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.command_line import Patch
from tests.support.damaged_files import limited
from videotune.errors import VideotuneError
from videotune.interop.command_files import parse_options
from videotune.interop.foreign_config import read_foreign_config

CONFIGS = Path(__file__).parent / "configs"
HELD: dict[str, tuple[list[str], dict[str, Any]]] = {
    "musubi": (
        ["musubi/dataset.toml", "musubi/train.sh"],
        {
            "network_dim": 24,
            "learning_rate": 3e-4,
            "fp8_base": True,
            "vae": "weights/vae file.safetensors",
            "optimizer_args": ["weight_decay=0.05", "betas=0.9,0.95"],
            "launcher.mixed_precision": "bf16",
            "script": "wan_train_network.py",
            "dataset_config.datasets.0.target_frames": [1, 17, 30],
        },
    ),
    "kohya": (
        ["kohya/dataset.toml"],
        {"dataset_config.datasets.0.subsets.1.is_reg": True},
    ),
    "diffusion-pipe": (
        ["diffusion-pipe/main.toml"],
        {
            "adapter.rank": 20,
            "dataset": "data.toml",
            "dataset.directory.0.path": "clips",
            "dataset.resolutions": [[640, 360]],
        },
    ),
    "ai-toolkit": (
        ["ai-toolkit/job.yaml"],
        {"config.process.0.train.lr": 2e-4, "config.process.0.datasets.0.fps": 16},
    ),
    "onetrainer": (
        ["onetrainer/config.json"],
        {"concept_file_name.1.path": "held", "optimizer.beta1": 0.9},
    ),
    "simpletuner": (
        ["simpletuner/config.json"],
        {
            "lora_rank": 10,
            "data_backend_config.0.video.num_frames": 45,
            "data_backend_config.1.default": True,
        },
    ),
    "finetrainers": (
        ["finetrainers/examples/run/train.sh"],
        {
            "dp_degree": 2,
            "rank": 14,
            "target_modules": "transformer_blocks.*(to_q|to_k|to_v|to_out.0)",
            "dataset_config.datasets.0.video_resolution_buckets": [
                [25, 320, 576],
                [49, 320, 576],
            ],
        },
    ),
    "videomodelstudio": (
        ["videomodelstudio/session.json"],
        {"params.lora_rank": "48", "status.step": 0},
    ),
    "ltx-trainer": (
        ["ltx-trainer/video.yaml"],
        {"validation.video_dims": [384, 256, 25], "checkpoints.keep_last_n": -1},
    ),
}
"""A trainer -> its files and some of the leaves that they hold."""


@pytest.mark.parametrize("trainer", HELD)
def test_every_leaf_of_a_config_and_of_what_it_refers_to(trainer: str) -> None:
    names, held = HELD[trainer]
    paths = [CONFIGS / name for name in names]
    theirs = read_foreign_config(paths)
    assert theirs.trainer == trainer
    assert {key: theirs.values.get(key) for key in held} == held
    assert all(type(theirs.values[key]) is type(value) for key, value in held.items())
    assert read_foreign_config(paths[::-1]).values == theirs.values
    assert not theirs.missing
    assert set(paths) <= set(theirs.files)


def test_a_referred_file_given_too_is_not_read_twice() -> None:
    main, data = (
        CONFIGS / "diffusion-pipe" / "main.toml",
        CONFIGS / "diffusion-pipe" / "data.toml",
    )
    assert (
        read_foreign_config([data, main]).values == read_foreign_config([main]).values
    )
    assert read_foreign_config([data]).values == {
        key: value
        for key, value in read_foreign_config([main]).values.items()
        if key.startswith("dataset.")
    }


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    text = (CONFIGS / "diffusion-pipe" / "main.toml").read_text()
    (tmp_path / "main.toml").write_text(text.replace("data.toml", "x" * 300))
    theirs = read_foreign_config([tmp_path / "main.toml"])
    assert theirs.missing == (("dataset", "x" * 300),)
    assert theirs.values["adapter.rank"] == 20


def test_paths_and_variables_of_windows() -> None:
    theirs = read_foreign_config([CONFIGS / "musubi" / "train.bat"])
    assert theirs.values["dit"] == r"C:\models\hunyuan video\dit.safetensors"
    assert theirs.values["learning_rate"] == 3e-4
    assert theirs.values["dataset_config.datasets.1.frame_stride"] == 8


def test_no_line_of_a_script_is_run_and_variables_are_of_the_file_alone(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("SECRET", "told")
    touch = f"touch {tmp_path}/made"
    script = (
        f'{touch}\nA=$({touch})\npython x_train.py --dit "$SECRET" --seed `{touch}`\n'
    )
    found = parse_options(script, Path("x.sh"))
    assert found["dit"] == "$SECRET"
    assert not (tmp_path / "made").exists()


BAD = {
    "truncated.json": b'{"model_type": "HUNYUAN_VIDEO", ',
    "truncated.toml": b"[model\ntype = 'wan'",
    "truncated.sh": b'accelerate launch train.py --network_module "networks.lora',
    "bomb.yaml": b"a: &a [x, x]\nb: &b [*a, *a]\nconfig: {process: [*b]}\n",
    "tag.yaml": b"config: !!python/object/apply:os.system ['true']\n",
    "twice.json": b'{"model_type": 1, "model_type": 2, "training_method": 3}',
    "deep.json": b'{"config": {"process": '
    + b'[{"a":' * 3000
    + b"1"
    + b"}]" * 3000
    + b"}}",
    "ours.json": b'{"learning_rate": 1e-4, "lora": {"rank": 8}}',
    "list.json": b"[1, 2, 3]",
    "empty.sh": b"",
    "weights.pt": pickle.dumps({"network_module": "networks.lora"}, protocol=2),
    "picture.png": b"\x89PNG\r\n\x1a\n\0\0",
    "huge.sh": b"--network_module x " * 60_000,
    "many.json": json.dumps(
        {"model_type": 1, "training_method": 2, **{f"k{i}": i for i in range(2_001)}}
    ).encode(),
    "grows.sh": b"A=aaaaaaaaaa\n"
    + b"A=$A$A$A$A\n" * 30
    + b"python train.py --network_module $A\n",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_config_is_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(BAD[name])
    with pytest.raises(VideotuneError):
        read_foreign_config([tmp_path / name])


def test_files_of_two_runs_are_refused() -> None:
    for names in (
        ["kohya/dataset.toml", "ai-toolkit/job.yaml"],
        ["musubi/dataset.toml", "musubi/dataset.toml/../../kohya/dataset.toml"],
    ):
        with pytest.raises(VideotuneError):
            read_foreign_config([CONFIGS / name for name in names])
    with pytest.raises(VideotuneError):
        read_foreign_config([CONFIGS])


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet=st.sampled_from("ab=-$\"'{}()[]@\\^`\n %;|#<>. 1é"), max_size=80)
)
def test_any_text_is_options_or_one_sentence(text: str) -> None:
    try:
        found = parse_options(text, Path("x.sh"))
    except VideotuneError:
        return
    assert all(isinstance(key, str) for key in found)


SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "set in quotes": (
        'set "M=C:\\AI\\models"\npython train.py --dit "%M%\\wan.safetensors"\n',
        {"dit": r"C:\AI\models\wan.safetensors"},
    ),
    "set with blanks": (
        'set D=D:\\data sets\nset E=%D%\\new\npython train.py --data "%d%\\t" --e "%E%"\n',
        {"data": r"D:\data sets\t", "e": r"D:\data sets\new"},
    ),
    "set of a folder without a drive": (
        'set M=models\\wan\npython train.py --dit "%M%\\t.safetensors"\n',
        {"dit": r"models\wan\t.safetensors"},
    ),
    "set of options": (
        'set A=--p "a b" --q C:\\n\npython train.py %A% ^\n  --z \\\\server\\x\n',
        {"p": "a b", "q": r"C:\n", "z": r"\\server\x"},
    ),
    "two sets in a line": (
        "set A=1&& set B=2\npython train.py --a %A% --b %B%\n",
        {"a": 1, "b": 2},
    ),
    "powershell": (
        "$m = \"C:\\AI\"\n$env:X = 'D:\\data sets'\n"
        "python train.py --dit \"$M\\wan\" --x $env:X --y 'C:\\a b' `\n --z 1\n",
        {"dit": r"C:\AI\wan", "x": r"D:\data sets", "y": r"C:\a b", "z": 1},
    ),
    "shell": (
        'M="models\\wan"\nA="--p \\"a b\\" --q 3"\n'
        'python train.py --dit "$M" $A --e "\\$M \\" q" --f a\\ b\n',
        {"dit": r"models\wan", "p": "a b", "q": 3, "e": '$M " q', "f": "a b"},
    ),
    "a command that prepares": (
        "python wan_cache_latents.py --vae v --batch_size 16\n"
        "python wan_train_network.py --dit d\npython y.py --batch_size 3\n",
        {"dit": "d"},
    ),
    "two launchers of one training": (
        "if x; then\n accelerate launch --n 2 train.py --a 1\nelse\n"
        " torchrun --m 3 train.py --a 1\nfi\n",
        {"launcher.n": 2, "launcher.m": 3, "a": 1},
    ),
}
"""Scripts with the options that they start a training with."""

SUFFIXES = {"powershell": ".ps1", "shell": ".sh", "a command that prepares": ".sh"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_variables_stand_for_and_which_command_trains(name: str) -> None:
    text, expected = SCRIPTS[name]
    path = Path("x").with_suffix(SUFFIXES.get(name, ".bat"))
    found = parse_options(text, path)
    found.pop("script")
    assert found == expected


def test_a_script_of_two_trainings_is_refused() -> None:
    text = "".join(f"python wan_train_network.py --dit {x}.safetensors\n" for x in "ab")
    with pytest.raises(VideotuneError):
        parse_options(text, Path("x.sh"))


BOMBS = {
    "dots.toml": "network_module = 'x'\n" + ".".join("a" * 30_000) + " = 1\n",
    "table.toml": "[" + ".".join("a" * 100_000) + "]\n",
    "arrays.sh": "A=(x x x x x x x x x x)\n"
    + "".join(
        f"{chr(66 + i)}=(" + f'"${{{chr(65 + i)}[@]}}" ' * 10 + ")\n" for i in range(20)
    )
    + "python wan_train_network.py\n",
    "words.sh": 'A="' + "x " * 20_000 + '"\npython train.py ' + "$A " * 100_000,
    "blanks.sh": 'A="' + " " * 40_000 + '"\npython train.py ' + "$A " * 300_000,
    "quoted.bat": "set A=" + "x" * 40_000 + '\npython train.py "' + "%A%" * 200_000 + '"',
    "doubled.bat": "set A=x\n" + "set A=%A%%A%\n" * 3000 + "python train.py %A%\n",
    "tables.toml": "".join(f"[a{i}.b.c.d.e.f.g]\nx=1\n" for i in range(36_000)),
    "values.yaml": "config:\n" + "".join(f"  a{i}: 1\n" for i in range(90_000)),
    "nested.yaml": "[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_does_not_occupy_the_reader(name: str, tmp_path: Path) -> None:
    """Within 5 seconds; the files take minutes where a bound is looked at too late."""
    (tmp_path / name).write_text(BOMBS[name])
    with pytest.raises(VideotuneError), limited(5):
        read_foreign_config([tmp_path / name])


def test_files_that_a_config_refers_to_have_a_bound_together(tmp_path: Path) -> None:
    names = [f"{i}.json" for i in range(9)]
    for name in names:
        (tmp_path / name).write_text(json.dumps({"x": 1}) + " " * 900_000)
    (tmp_path / "config.json").write_text(
        json.dumps({"--data_backend_config": names, "--model_family": "wan"})
    )
    with pytest.raises(VideotuneError):
        read_foreign_config([tmp_path / "config.json"])


@pytest.mark.parametrize(
    "text",
    [
        'network_module = "x"\ndit = "C:\\temp\\wan.safetensors"\n',
        'network_module = "x"\noutput_dir = "out\\new"\n',
        'network_module = "x"\nvae = "D:\\fine\\vae.safetensors"\n',
        'network_module = "x"\nt5 = "models\\t5.pth"\n',
    ],
)
def test_a_backslash_that_was_an_escape_is_said(text: str, tmp_path: Path) -> None:
    """A tab, a line break or a form feed in a path."""
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(VideotuneError):
        read_foreign_config([tmp_path / "x.toml"])
    (tmp_path / "x.toml").write_text(text.replace('"', "'"))
    assert read_foreign_config([tmp_path / "x.toml"]).trainer == "musubi"


def test_a_path_with_blanks_of_a_pasted_command_is_found(tmp_path: Path) -> None:
    """Logs print arguments without quotes."""
    (tmp_path / "my files").mkdir()
    (tmp_path / "my files" / "ds.toml").write_text("[general]\nbatch_size = 3\n")
    (tmp_path / "log.txt").write_text(
        "python wan_train_network.py --network_module networks.lora_wan"
        f" --dataset_config {tmp_path}/my files/ds.toml --seed 1\n"
    )
    theirs = read_foreign_config([tmp_path / "log.txt"])
    assert theirs.values["dataset_config.general.batch_size"] == 3
    assert theirs.missing == ()


TRAINING = "accelerate launch wan_train_network.py --task t2v-1.3B --network_module networks.lora_wan "
APPENDED = {
    "array.sh": 'A=(--network_dim 8)\nA+=(--learning_rate 3e-5)\n' + TRAINING + '"${A[@]}"\n',
    "text.sh": 'A="--network_dim 8"\nA+=" --learning_rate 3e-5"\n' + TRAINING + "$A\n",
    "new.sh": "A+=(--network_dim 8 --learning_rate 3e-5)\n" + TRAINING + '"${A[@]}"\n',
    "command.sh": TRAINING + "--network_dim 8 --output_name run_$(date +%Y) --learning_rate 3e-5\n",
    "nested.sh": TRAINING + "--network_dim 8 --output_name a$(basename $(pwd))b --learning_rate 3e-5\n",
    "sum.sh": TRAINING + "--network_dim 8 --max_train_steps $((100 * 7)) --learning_rate 3e-5\n",
    "text.ps1": '$dim = "8"\n$rate = "3e"\n$rate += "-5"\n' + TRAINING + "--network_dim $dim --learning_rate $rate\n",
}  # fmt: skip
"""Scripts that all train with rank 8 at the rate 3e-5."""


@pytest.mark.parametrize("name", APPENDED)
def test_no_option_of_a_script_is_lost(name: str) -> None:
    options = parse_options(APPENDED[name], Path(name))
    assert (options["network_dim"], options["learning_rate"]) == (8, 3e-5)


UNREAD = {
    "splat.ps1": '$p = @("--network_dim","8")\n' + TRAINING + "@p\n",
    "array.ps1": '$p = @("--network_dim","8")\n' + TRAINING + "$p\n",
    "list.ps1": '$e = [System.Collections.ArrayList]::new()\n[void]$e.Add("--network_dim=8")\n'
    + TRAINING + "--cache_latents $e\n",
    "appended.ps1": '$p = @("--network_dim")\n$p += "8"\n' + TRAINING + "@p\n",
    "environment.sh": TRAINING + "$EXTRA --network_dim 8\n",
    "array.sh": TRAINING + '"${EXTRA[@]}" --network_dim 8\n',
}  # fmt: skip
"""Scripts whose training takes arguments from a variable that is not known here."""


@pytest.mark.parametrize("name", UNREAD)
def test_arguments_that_are_not_known_are_refused(name: str) -> None:
    with pytest.raises(VideotuneError):
        parse_options(UNREAD[name], Path(name))


def test_a_variable_of_the_environment_may_be_a_value() -> None:
    options = parse_options(
        TRAINING + "--output_dir $OUT --network_dim 8\n", Path("a.sh")
    )
    assert (options["output_dir"], options["network_dim"]) == ("$OUT", 8)
