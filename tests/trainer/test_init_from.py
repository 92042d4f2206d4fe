"""A run that begins with the weights of another one has its ΔW, of every kind and rank."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from tests.support.trainers import Lab, overrides_of, run_steps, trainer_of
from videotune.adapters.adapter_types import PARTS, ZERO
from videotune.config.resolve import parse
from videotune.config.schema import Config
from videotune.config.sections import Lora
from videotune.errors import VideotuneError
from videotune.job.overrides import resolve_config
from videotune.memory.sharding import Shard, Shards
from videotune.runs.checkpoint import pick
from videotune.trainer.ema import EmaWeights
from videotune.trainer.export import export_run
from videotune.trainer.init_from import (
    _load_expert,
    check_kind,
    check_source,
    init_from,
    is_adapter,
    put_adapter,
    put_rows,
    read_adapter,
    refuse_shapes,
)
from videotune.trainer.low_precision import MasterWeights
from videotune.trainer.optimizers import OptimizerList
from videotune.trainer.saving import save
from videotune.trainer.step_context import TrainableState
from videotune.trainer.text_encoders import text_size
from videotune.trainer.trainer import Trainer

SOURCE = Path("source")


def lora_of(rank: int, *, inputs: int = 5, outputs: int = 4) -> dict[str, Tensor]:
    return {"lora_A": torch.randn(rank, inputs), "lora_B": torch.randn(outputs, rank)}


def trained_of(modules: dict[str, dict[str, Tensor]]) -> dict[str, nn.Parameter]:
    parameters = {}
    for path, tensors in modules.items():
        for part, value in tensors.items():
            parameters[f"{path}.{part}.weight"] = nn.Parameter(value)
    return parameters


def settings_of(variant: str = "LORA", **lora: Any) -> Lora:
    settings: Lora = parse({"lora": {"variant": variant, **lora}}).lora
    return settings


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_factors_of_a_lower_rank_have_the_same_product(rank: int) -> None:
    """A keeps its draw in the further rows, whose B is zero."""
    torch.manual_seed(1)
    source = lora_of(rank)
    parameters = trained_of({"a": lora_of(3), "b": lora_of(3)})
    before = {name: value.detach().clone() for name, value in parameters.items()}
    settings = settings_of(rank=3, alpha=6)
    taken = put_adapter(SOURCE, ({"a": source}, {"a": 0.5}), parameters, settings)

    product = parameters["a.lora_B.weight"] @ parameters["a.lora_A.weight"]
    expected = 0.5 * source["lora_B"] @ source["lora_A"]
    torch.testing.assert_close(settings.scale * product, expected)
    further_rows = parameters["a.lora_A.weight"][rank:]
    assert torch.equal(further_rows, before["a.lora_A.weight"][rank:])
    assert not parameters["a.lora_B.weight"][:, rank:].any()
    assert torch.equal(parameters["b.lora_B.weight"], before["b.lora_B.weight"])
    assert taken == "1 modules; 1 others start at zero"
    both = ({"a": source, "b": source}, {"a": 0.5, "b": 1.0})
    assert put_adapter(SOURCE, both, parameters, settings) == "2 modules"


def test_a_module_with_a_rank_of_its_own_has_its_own_scale() -> None:
    rules = [{"pattern": "b", "rank": 4, "alpha": 1.0}]
    settings = settings_of(rank=2, alpha=2, modules=rules)
    parameters = trained_of({"a": lora_of(2), "b": lora_of(4)})
    source = {"a": lora_of(2), "b": lora_of(4)}
    scales = {"a": 3.0, "b": 0.5}
    put_adapter(SOURCE, (source, scales), parameters, settings)
    for path, scale in (("a", 1.0), ("b", 0.25)):
        expected = source[path]["lora_B"] * (scales[path] / scale)
        torch.testing.assert_close(parameters[f"{path}.lora_B.weight"].data, expected)

    too_high = ({"a": lora_of(3)}, {"a": 1.0})
    with pytest.raises(
        VideotuneError, match=r"source has rank 3 in a\. Set lora\.rank"
    ):
        put_adapter(SOURCE, too_high, parameters, settings)


@pytest.mark.parametrize("variant", sorted(PARTS))
def test_of_each_kind_one_factor_has_the_scale(variant: str) -> None:
    """But a rotation, which has none."""
    parts = [part for part in PARTS[variant] if part not in ("lokr_w1_a", "lokr_w1_b")]
    source = {part: torch.randn(2, 2) for part in parts}
    parameters = trained_of({"a": {part: torch.zeros(2, 2) for part in parts}})
    settings = settings_of(variant, rank=2, alpha=1)
    put_adapter(SOURCE, ({"a": source}, {"a": 2.0}), parameters, settings)
    scaled = set()
    for part, value in source.items():
        ratio = parameters[f"a.{part}.weight"].data / value
        torch.testing.assert_close(ratio, ratio[0, 0].expand(2, 2))
        if float(ratio[0, 0]) != 1:
            assert float(ratio[0, 0]) == pytest.approx(2.0 / 0.5)
            scaled.add(part)
    assert scaled == set(parts) & set(ZERO) - {"oft_R"}


def test_what_does_not_fit_is_refused_by_name() -> None:
    settings = settings_of(rank=2, alpha=2)
    parameters = trained_of({"a": lora_of(2)})
    untrained = ({"b": lora_of(2), "c": lora_of(2)}, {"b": 1.0, "c": 1.0})
    with pytest.raises(
        VideotuneError, match=r"^init_from: source changes 2 modules .* as b\."
    ):
        put_adapter(SOURCE, untrained, parameters, settings)
    loha = {part: torch.ones(2, 2) for part in PARTS["LOHA"]}
    with pytest.raises(
        VideotuneError, match=r"^init_from: source is LOHA, and lora\.variant is LORA$"
    ):
        check_kind(SOURCE, {"a": loha}, settings)
    check_kind(SOURCE, {"a": lora_of(2)}, settings)
    with pytest.raises(VideotuneError, match=r"^init_from: source has rank 3 in a\."):
        check_kind(SOURCE, {"a": lora_of(3)}, settings)
    for adapter, text in (
        (({"a": loha}, {"a": 1.0}), "source is LOHA"),
        (
            ({"a": lora_of(2, inputs=6)}, {"a": 1.0}),
            "source was made for another base: a",
        ),
    ):
        with pytest.raises(VideotuneError, match=f"^init_from: {text}"):
            put_adapter(SOURCE, adapter, parameters, settings)
    # A module without factors A and B does not end the search for one with a high rank.
    modules = {"a": {"lora_B": torch.ones(2, 3)}, "b": lora_of(3)}
    with pytest.raises(VideotuneError, match="has rank 3 in b"):
        check_kind(SOURCE, modules, settings)


@pytest.mark.parametrize("sizes", [{"inputs": 6}, {"outputs": 5}])
def test_a_module_of_another_size_is_of_another_base(sizes: dict[str, int]) -> None:
    refuse_shapes(SOURCE, "a", lora_of(1), lora_of(2))
    with pytest.raises(
        VideotuneError, match=r"^init_from: source .* another base: a differs"
    ):
        refuse_shapes(SOURCE, "a", lora_of(1, **sizes), lora_of(2))
    settings = settings_of(rank=2)
    adapter = ({"a": lora_of(1, **sizes)}, {"a": 1.0})
    with pytest.raises(VideotuneError, match="source was made for another base"):
        put_adapter(SOURCE, adapter, trained_of({"a": lora_of(2)}), settings)


def test_other_kinds_need_the_same_shapes() -> None:
    tensors = {"hada_w1_a": torch.ones(4, 2), "hada_w1_b": torch.ones(2, 3)}
    refuse_shapes(SOURCE, "a", tensors, tensors)
    here = tensors | {"hada_w1_b": torch.ones(1, 3)}
    text = r"^init_from: source has hada_w1_a \(4, 2\), hada_w1_b \(2, 3\) in a, .* hada_w1_b \(1, 3\)"
    with pytest.raises(VideotuneError, match=text):
        refuse_shapes(SOURCE, "a", tensors, here)


def test_an_adapter_is_a_file_or_a_folder_with_one(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.touch()
    assert is_adapter(file)
    assert is_adapter(tmp_path)
    (tmp_path / "COMPLETE").touch()
    assert not is_adapter(tmp_path)
    (tmp_path / "empty").mkdir()
    assert not is_adapter(tmp_path / "empty")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, small_clips: Path) -> Lab:
    tmp = tmp_path_factory.mktemp("init-from")
    return Lab(Path("asset:toy"), small_clips, tmp / "cache", tmp)


KNOBS = {"steps": 1, "learning_rate": 0.01, "lora.targets": "attention"}


@pytest.fixture(scope="module")
def first(lab: Lab) -> Iterator[Trainer]:
    """A run of one step, saved, with a scale of 2."""
    trainer = trainer_of(lab, KNOBS | {"lora.alpha": 4})
    run_steps(trainer)
    save(trainer, 1, thread=False)
    yield trainer
    trainer.journal.close()


def test_a_checkpoint_is_read_with_its_scale(first: Trainer, tmp_path: Path) -> None:
    checkpoint = pick(first.run, 1).folder
    modules, scales = read_adapter(checkpoint, first.family, "")
    assert set(scales.values()) == {2.0}
    assert set(scales) == set(modules)
    for path, tensors in modules.items():
        for part, value in tensors.items():
            assert torch.equal(value, first.parameters[f"{path}.{part}.weight"])
    with pytest.raises(VideotuneError, match=r"^init_from: "):
        read_adapter(tmp_path / "missing", first.family, "")
    tmp_path.joinpath("COMPLETE").touch()
    with pytest.raises(VideotuneError, match="is not a complete checkpoint"):
        read_adapter(tmp_path, first.family, "")


def test_a_run_begins_with_the_update_and_the_average_of_it(
    first: Trainer, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(lab, KNOBS | {"ema.decay": 0.9, "lora.alpha": 1})
    trainer.journal.close()
    checkpoint = pick(first.run, 1).folder
    init_from(checkpoint, trainer.family, trainer.pool, trainer.job.config)
    for name, value in first.parameters.items():
        factor = 4 if ".lora_B." in name else 1
        expected = factor * value.detach()
        torch.testing.assert_close(trainer.parameters[name].data, expected)
        torch.testing.assert_close(trainer.averages[name], expected)
    modules = len(first.parameters) // 2
    line = "".join(capsys.readouterr()).splitlines()[-1]
    assert f"{checkpoint} ({modules} modules); new optimizer state" in line


def test_what_the_network_and_the_average_hold_begins_with_the_weights(
    first: Trainer, lab: Lab
) -> None:
    """Where the optimizer updates float32 masters, and the network has them rounded."""
    halves = {
        name: nn.Parameter(torch.zeros_like(value, dtype=torch.float16))
        for name, value in first.parameters.items()
    }
    masters = MasterWeights(halves)
    ema = EmaWeights(masters.parameters, 0.5)
    state = TrainableState(
        masters.parameters, OptimizerList([]), {}, masters=masters, ema=ema
    )
    pool: Any = SimpleNamespace(trainables={"transformer": state})
    checkpoint = pick(first.run, 1).folder
    init_from(checkpoint, first.family, pool, first.job.config)
    for name, value in first.parameters.items():
        assert torch.equal(masters.parameters[name], value)
        assert torch.equal(halves[name], value.half())
        assert torch.equal(ema.values[name], value)


def test_each_module_of_a_checkpoint_has_its_own_scale(lab: Lab) -> None:
    rules = [{"pattern": ".*attn1.*", "alpha": 8}]
    trainer = trainer_of(lab, KNOBS | {"lora.alpha": 4, "lora.modules": rules})
    save(trainer, 1, thread=False)
    trainer.journal.close()
    _, scales = read_adapter(pick(trainer.run, 1).folder, trainer.family, "")
    assert set(scales.values()) == {2.0, 4.0}
    for path, scale in scales.items():
        assert scale == (4.0 if ".attn1." in path else 2.0), path


def test_each_expert_begins_with_its_own_weights(
    tmp_path: Path,
    small_clips: Path,
    tiny_bases: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of one checkpoint of both."""
    base = tiny_bases("wan", "t2v-a14b")
    lab = Lab(base, small_clips, tmp_path / "cache", tmp_path)
    knobs = KNOBS | {"steps": 6}
    earlier = trainer_of(lab, knobs)
    for number, state in enumerate(earlier.pool.trainables.values()):
        for parameter in state.parameters.values():
            parameter.data.fill_(1 + number)
    save(earlier, 1, thread=False)
    earlier.journal.close()

    later = trainer_of(lab, knobs)
    later.journal.close()
    folder = pick(earlier.run, 1).folder
    init_from(folder, later.family, later.pool, later.job.config)
    counts = []
    for number, state in enumerate(later.pool.trainables.values()):
        counts.append(f"{len(state.parameters) // 2} modules")
        for name, parameter in state.parameters.items():
            assert torch.equal(parameter, torch.full_like(parameter, 1 + number)), name
    line = "".join(capsys.readouterr()).splitlines()[-1]
    taken = "; ".join(counts)
    assert line.endswith(f"{folder} ({taken}); new optimizer state, step 0")


def test_one_file_is_not_for_two_experts(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.touch()
    pool: Any = SimpleNamespace(trainables={"high": None, "low": None})
    family: Any = None
    with pytest.raises(
        VideotuneError, match=f"^init_from: {file} is one file, and two"
    ):
        init_from(file, family, pool, parse({}))


def test_every_weight_needs_a_checkpoint_s_folder(
    lab: Lab, first: Trainer, tmp_path: Path
) -> None:
    knobs = {"training_method": "FINE_TUNE", "transformer.layers": ["blocks.0"]}
    trainer = trainer_of(lab, knobs | {"steps": 1, "ema.decay": 0.5})
    saved = {name: p.detach().clone() + 1 for name, p in trainer.parameters.items()}
    for name, parameter in trainer.parameters.items():
        parameter.data.copy_(saved[name])
    save(trainer, 1, thread=False)
    trainer.journal.close()
    folder = pick(trainer.run, 1).folder

    again = trainer_of(lab, knobs | {"steps": 1, "ema.decay": 0.5})
    again.journal.close()
    init_from(folder, again.family, again.pool, again.job.config)
    for name, value in saved.items():
        assert torch.equal(again.parameters[name], value)
        assert torch.equal(again.averages[name], value)
    file = tmp_path / "a.safetensors"
    file.touch()
    with pytest.raises(VideotuneError, match=f"^init_from: {file} is a file, and FINE"):
        init_from(file, again.family, again.pool, again.job.config)
    with pytest.raises(VideotuneError, match=f"^init_from: {folder} holds no LoRA"):
        read_adapter(folder, again.family, "")

    # Of sharded weights a process takes its own rows, and of some it has none.
    name, without_rows, *_ = (key for key, value in saved.items() if len(value) > 3)
    value = saved[name]
    local = {
        key: nn.Parameter(torch.zeros_like(value))
        for key, value in saved.items()
        if key != without_rows
    }
    local[name] = nn.Parameter(torch.zeros_like(value[1:3]))
    shards = Shards()
    shards.layout = {
        name: Shard(tuple(value.shape), first=1, count=2),
        without_rows: Shard(tuple(saved[without_rows].shape), first=0, count=0),
    }
    state = TrainableState(local, OptimizerList([]), {}, shards=shards)
    taken = _load_expert(folder, again.family, "transformer", state, again.job.config)
    assert taken == f"all {len(saved)} tensors"
    assert torch.equal(local[name], value[1:3])
    for key in local.keys() - {name}:
        assert torch.equal(local[key], saved[key])
    del local[name]
    with pytest.raises(VideotuneError, match=f"^init_from: {folder} does not fit"):
        _load_expert(folder, again.family, "transformer", state, again.job.config)


def test_a_source_is_checked_before_any_work(
    lab: Lab, first: Trainer, tmp_path: Path
) -> None:
    config = resolve_config(overrides_of(lab, KNOBS))[0].config
    with pytest.raises(VideotuneError, match="no such file or folder"):
        check_source(tmp_path / "missing", first.family, config)
    file = tmp_path / "a.safetensors"
    file.touch()

    def check(chosen: Config) -> None:
        check_source(file, first.family, chosen)

    with pytest.raises(VideotuneError):
        check(config)
    check(config.model_copy(update={"training_method": "FINE_TUNE"}))
    with pytest.raises(VideotuneError):
        check(config.model_copy(update={"training_method": "EMBEDDING"}))
    checkpoint = pick(first.run, 1).folder
    check_source(checkpoint, first.family, config)
    check_source(
        checkpoint,
        first.family,
        config.model_copy(update={"training_method": "EMBEDDING"}),
    )
    run, family, resolved = first.run, first.family, first.job.resolved
    (good,) = export_run(
        run, family, first.result, 1, resolved, ["diffusers"], tmp_path
    )
    check_source(good.path, family, config)
    other = resolve_config(overrides_of(lab, KNOBS | {"lora.variant": "LOHA"}))[
        0
    ].config
    with pytest.raises(VideotuneError, match=f"^init_from: {good.path} is LORA, and"):
        check_source(good.path, family, other)
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    with pytest.raises(VideotuneError, match=r"^init_from: "):
        check_source(tmp_path / "pipe", first.family, config)


def embedding_of(lab: Lab, token: str, vectors: int) -> Trainer:
    """A run that trains a new token's rows."""
    knobs = {
        "steps": 1,
        "training_method": "EMBEDDING",
        "embedding.token": token,
        "embedding.vectors": vectors,
    }
    return trainer_of(lab, knobs)


def test_rows_begin_as_those_of_a_file_or_a_checkpoint(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new run's token may be another word; number and width must be the same."""
    earlier = embedding_of(lab, "<first>", 2)
    for parameter in earlier.parameters.values():
        parameter.data.normal_()
    save(earlier, 1, thread=False)
    earlier.journal.close()
    run, family, resolved = earlier.run, earlier.family, earlier.job.resolved
    (exported,) = export_run(
        run, family, earlier.result, 1, resolved, ["diffusers"], tmp_path
    )
    with safe_open(exported.path, "pt") as file:
        facts = json.loads(file.metadata()["videotune"])
    assert facts["vectors"] == 2
    assert facts["use"] == exported.use

    for source in (pick(run, 1).folder, exported.path):
        again = embedding_of(lab, "<second>", 2)
        init_from(source, again.family, again.pool, again.job.config)
        for name, parameter in earlier.parameters.items():
            assert torch.equal(again.parameters[name], parameter)
        assert f"{source} (2 rows)" in "".join(capsys.readouterr())

        longer = embedding_of(lab, "<second>", 3)
        with pytest.raises(
            VideotuneError,
            match=rf"^init_from: {source} has 2 rows of (\d+) numbers, and 3 of \1 .* to 2$",
        ):
            init_from(source, longer.family, longer.pool, longer.job.config)
        again.journal.close()
        longer.journal.close()
        (name,) = longer.parameters
        renamed = {"embedding.other": longer.parameters[name]}
        with pytest.raises(
            VideotuneError, match=rf"^init_from: {source} does not have .*: embedding"
        ):
            put_rows(source, longer.family, renamed)


@pytest.mark.parametrize("method", ["EMBEDDING", "FINE_TUNE"])
def test_what_would_train_of_text_encoders_is_counted_without_loading_them(
    method: str, lab: Lab
) -> None:
    if method == "EMBEDDING":
        trainer = embedding_of(lab, "<new>", 3)
    else:
        text = {
            "text_encoder.train": True,
            "text_encoder.layers": [r"encoder\.block\.0"],
        }
        knobs = {"training_method": method, "transformer.train": False, "steps": 1}
        trainer = trainer_of(lab, knobs | text)
    trainer.journal.close()
    modules, numbers = text_size(trainer.family, trainer.job.config)
    assert numbers == sum(p.numel() for p in trainer.parameters.values()) > 0
    paths = {name.rpartition(".")[0] for name in trainer.parameters}
    assert modules == len(paths) > 0
