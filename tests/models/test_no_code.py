"""No code that lies in a base model, an image encoder or an adapter ever runs, whatever
stands on standard input.
"""

import ast
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import edit_json

ROOT = Path(__file__).parents[2] / "videotune"
READ_ALL = """
import sys
import torch
from pathlib import Path
from videotune.errors import VideotuneError
from videotune.models.registry import find
from videotune.models.base_model import place, spec_for
from videotune.validation.embeddings import open_encoder

def family(folder):
    base = place(folder)
    spec = spec_for(None, base)
    return find(spec.name)(base.folder, torch.device("cpu"), torch.float32)

tries = {
    "base": [
        lambda folder: family(folder).encode_text(["a red circle"]),
        lambda folder: family(folder).text_skeletons(),
        lambda folder: family(folder).encode_video(torch.zeros(3, 5, 32, 32)),
        lambda folder: family(folder).pipeline({"transformer": family(folder).denoiser("transformer")}),
    ],
    "encoder": [open_encoder],
}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    for each in tries[folder.name.partition(" ")[0]]:
        try:
            each(str(folder))
        except VideotuneError as error:
            print("refused:", error)
"""


AUTO = {
    "AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoImageProcessor": "evil.Evil", "AutoProcessor": "evil.Evil",
    "AutoFeatureExtractor": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoModelForCausalLM": "evil.Evil",
    "CLIPTextModelWithProjection": "evil.Evil", "UMT5EncoderModel": "evil.Evil",
}  # fmt: skip


def plant(folder: Path, fired: Path) -> None:
    """Code that leaves a file, wherever a library would look for it."""
    code = f"open({str(fired)!r}, 'w').write('ran')\nclass Evil:\n    pass\n"
    for place in [folder, *(path for path in folder.iterdir() if path.is_dir())]:
        for name in (
            "evil.py",
            "pipeline.py",
            "tok.py",
            "__init__.py",
            "modeling_evil.py",
        ):
            (place / name).write_text(code)
        (place / "custom_generate").mkdir()
        (place / "custom_generate" / "generate.py").write_text(
            f"{code}def generate(*_, **__):\n    pass\n"
        )


def own_class(name: str) -> dict[str, Any]:
    return {"tokenizer_class": "Evil", "image_processor_type": "Evil", "processor_class": "Evil", "auto_map": AUTO} | {
        "model_type": "evil", "architectures": ["Evil"]
    } | ({"_class_name": "Evil"} if name == "model_index.json" else {})  # fmt: skip


HUNG = {"auto_map": AUTO}
PLANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a text encoder of its own": ("model_index.json", {"text_encoder": ["evil", "Evil"]}),
    "a transformer of its own": ("model_index.json", {"transformer": ["pipeline", "X"]}),
    "a scheduler of its own": ("model_index.json", {"scheduler": ["evil", "EvilScheduler"]}),
    "a pipeline of its own": ("model_index.json", {"_class_name": ["pipeline", "Evil"], "custom_pipeline": "pipeline"}),
    "scheduler": ("scheduler/scheduler_config.json", HUNG | {"_class_name": "Evil", "custom_pipeline": "pipeline"}),
    "transformer": ("transformer/config.json", HUNG),
    "vae": ("vae/config.json", HUNG),
    "text encoder": ("text_encoder/config.json", HUNG),
    "text encoder of its own type": ("text_encoder/config.json", own_class("")),
    "kernels of the Hub": ("text_encoder/config.json", {"attn_implementation": "user/kernels"}),
    "kernels of the Hub, within": ("text_encoder/config.json", {"_attn_implementation": "user/kernels:f"}),
    "generation": ("text_encoder/generation_config.json", HUNG | {"custom_generate": "."}),
    "tokenizer": ("tokenizer/tokenizer_config.json", HUNG),
    "tokenizer of its own class": ("tokenizer/tokenizer_config.json", own_class("")),
    "tokenizer by a config": ("tokenizer/config.json", own_class("")),
    "tokenizer by a processor": ("tokenizer/processor_config.json", own_class("")),
    "image encoder": ("image_encoder/config.json", HUNG),
    "image encoder of its own type": ("image_encoder/config.json", own_class("")),
    "image processor": ("image_processor/preprocessor_config.json", own_class("")),
    "image processor by a processor": ("image_processor/processor_config.json", own_class("")),
    "an adapter beside the weights": ("text_encoder/adapter_config.json", {
        "peft_type": "LORA", "base_model_name_or_path": ".", "task_type": None,
        "auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}}),
}  # fmt: skip


def test_code_beside_weights_does_not_run(
    tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """In one process that reads all of them, with as many "y" on its standard input as
    anybody could ask for.
    """
    original = tiny_bases("wan", "i2v")
    for how, (name, values) in PLANTS.items():
        base = Path(shutil.copytree(original, tmp_path / "read" / f"base {how}"))
        edit_json(base / name, **values)
        plant(base, tmp_path / f"fired: {how}")
    for name in (
        "config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "adapter_config.json",
    ):
        for how, said in {"map": HUNG, "own": own_class("")}.items():
            folder = tmp_path / "read" / f"encoder {name} {how}"
            shutil.copytree(original / "image_encoder", folder)
            shutil.copy(
                original / "image_processor" / "preprocessor_config.json", folder
            )
            edit_json(folder / name, **said)
            plant(folder, tmp_path / f"fired: encoder {name} {how}")
    words = [sys.executable, "-c", READ_ALL, str(tmp_path / "read")]
    done = subprocess.run(
        words, input="y\n" * 1000, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(tmp_path.glob("fired*")) == []
    assert "Do you wish" not in done.stdout + done.stderr, "nobody is asked"
    assert "trust_remote_code" not in done.stdout, "nobody is told to allow it"


def calls(tree: ast.AST) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_call_says_that_no_code_is_run(path: Path) -> None:
    """Nothing reads a repository but by ``pretrained`` or with the word itself, and
    nobody says the word's opposite.
    """
    tree = ast.parse(path.read_text())
    for call in calls(tree):
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr == "from_pretrained":
            told = [
                word.value for word in call.keywords if word.arg == "trust_remote_code"
            ]
            fine = [
                isinstance(value, ast.Constant) and value.value is False
                for value in told
            ]
            assert fine == [True], ast.unparse(call)
        owner = call.func.value
        assert not (
            isinstance(owner, ast.Name)
            and owner.id.startswith("Auto")
            and call.func.attr == "from_config"
        )
    words = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
    ]
    assert all(
        isinstance(word.value, ast.Constant) and word.value.value is False
        for word in words
    )
