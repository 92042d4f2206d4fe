"""The flat form in which a checkpoint keeps an optimizer's state, and the way back."""

import json
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from videotune.config.optimizers import Optimizer
from videotune.trainer.optimizer_state import (
    MOST_NESTED,
    load_optimizer_state,
    names_with_state,
    optimizer_state,
)
from videotune.trainer.optimizers import AnyOptimizer, make_optimizer, parts_of

SGD = Optimizer.model_construct(name="torch.optim:SGD", args={})


def same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)


def with_state(
    state: dict[str, Any], device: str = "cpu"
) -> tuple[AnyOptimizer, nn.Parameter]:
    """An optimizer that is named by its class, and its only parameter with a state."""
    weight = nn.Parameter(torch.ones(2, device=device))
    optimizer = make_optimizer({"all": [weight]}, SGD)
    parts_of(optimizer)[0].state[weight] = state
    return optimizer, weight


def of_weight(optimizer: AnyOptimizer, weight: nn.Parameter) -> dict[str, Tensor]:
    """What is kept of the parameter itself, by key."""
    flat = optimizer_state(optimizer, {"net.w": weight})
    prefix = "net.w."
    assert all(name.startswith(prefix) for name in flat)
    own = {name.removeprefix(prefix): value for name, value in flat.items()}
    return {key: value for key, value in own.items() if not key.startswith("@")}


def test_each_type_has_its_mark_and_its_exact_form() -> None:
    """Checkpoints of earlier versions depend on it."""
    mean, history = torch.rand(2), [torch.rand(2), torch.rand(3)]
    nested = [None, True, 3, "text", 0.1, (history[0],), {"a": history[1]}]
    state = {
        "mean": mean,
        "step": 3,
        "rate": 0.1,
        "is_first": True,
        "queue": deque([1, history[1]], maxlen=4),
        "share%": [mean],
        "nested": nested,
        "word": "é",
        "nothing": None,
    }
    optimizer, weight = with_state(state)
    kept = of_weight(optimizer, weight)
    texts = {}
    for key in ("queue%", "nested%", "word%", "nothing%", "share%%"):
        description = kept.pop(key)
        assert description.dtype == torch.uint8
        texts[key] = json.loads(bytes(description.tolist()))
    assert texts["queue%"] == ["deque", [1, ["tensor", 0]], 4]
    assert texts["share%%"] == ["list", [["tensor", 0]]]
    content = [None, True, 3, "text", ["float", (0.1).hex()]]
    content += [["tuple", [["tensor", 0]]], ["dict", [["a", ["tensor", 1]]]]]
    assert texts["nested%"] == ["list", content]
    assert (texts["word%"], texts["nothing%"]) == ("é", None)

    expected = {
        "mean": mean,
        "step#": torch.tensor(3, dtype=torch.int64),
        "rate~": torch.tensor(0.1, dtype=torch.float64),
        "is_first?": torch.tensor(True),
        "nested%0": history[0],
        "nested%1": history[1],
        "queue%0": history[1],
        "share%%0": mean,
    }
    assert kept.keys() == expected.keys()
    for key, value in expected.items():
        assert same(kept[key], value), key

    again, other = with_state({})
    load_optimizer_state(
        again, {"net.w": other}, optimizer_state(optimizer, {"net.w": weight})
    )
    loaded = parts_of(again)[0].state[other]
    assert loaded.keys() == state.keys()
    for key in ("mean", "step", "rate", "is_first", "word", "nothing"):
        assert same(loaded[key], state[key]), key
    assert (loaded["queue"][0], loaded["queue"].maxlen) == (1, 4)
    assert same(loaded["queue"][1], history[1])
    assert same(loaded["share%"][0], mean)
    assert loaded["nested"][:5] == nested[:5]
    assert same(loaded["nested"][5][0], history[0])
    assert same(loaded["nested"][6]["a"], history[1])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "state net.w.helper is a object"),
        ([object()], "state net.w.helper holds a object"),
        ({"a": {1}}, "state net.w.helper holds a set"),
        ({frozenset(): 1}, "state net.w.helper holds a frozenset"),
        (torch.eye(2).to_sparse(), "state net.w.helper is sparse"),
    ],
)
def test_what_no_tensor_can_hold_is_named(value: Any, reason: str) -> None:
    optimizer, weight = with_state({"helper": value})
    with pytest.raises(ValueError, match=reason):
        optimizer_state(optimizer, {"net.w": weight})


def test_the_keys_of_a_dict_may_hold_tensors() -> None:
    length = torch.tensor(2)
    optimizer, weight = with_state({"sizes": {(1, length): "a"}})
    flat = optimizer_state(optimizer, {"w": weight})
    load_optimizer_state(optimizer, {"w": weight}, flat)
    ((key, value),) = parts_of(optimizer)[0].state[weight]["sizes"].items()
    assert (key[0], key[1] is length, value) == (1, True, "a")


def test_a_description_that_names_a_missing_tensor_is_damaged() -> None:
    optimizer, weight = with_state({"queue": [torch.ones(2)]})
    flat = optimizer_state(optimizer, {"w": weight})
    del flat["w.queue%0"]
    with pytest.raises(ValueError, match=r"^a nested value of .* is damaged"):
        load_optimizer_state(optimizer, {"w": weight}, flat)


def test_a_number_of_the_host_is_marked_where_its_parameter_is_elsewhere() -> None:
    """Other tensors and types are not, and none is if the parameter is there too."""
    step, row = torch.tensor(3.0), torch.ones(2)
    state = {"step": step, "row": row, "count": 3, "moved": step.to("meta")}
    for device, mark in (("meta", "&"), ("cpu", "")):
        kept = of_weight(*with_state(state, device))
        assert kept.keys() == {f"step{mark}", "row", "count#", "moved"}


def test_values_of_groups_are_kept_under_their_first_parameter() -> None:
    """What the run sets, and what no update changes, is not."""
    weights = {name: nn.Parameter(torch.ones(2)) for name in ("a1", "a2", "b1")}
    groups = {"a": [weights["a1"], weights["a2"]], "b": [weights["b1"]]}
    optimizer = make_optimizer(groups, SGD)
    first, second = optimizer.param_groups
    for group in (first, second):
        for key in set(group) - {"params", "name", "lr"}:
            group[key] = None
    first |= {"seen": 3, "sum": 0.5}
    second["list"] = [1]
    shared: list[Any] = [part.state for part in parts_of(optimizer)]
    shared[1]["count"] = 7
    flat = optimizer_state(optimizer, weights)
    assert list(flat) == ["a1.@seen#", "a1.@sum~", "b1.@list%", "b1.@@count#"]

    again = {name: nn.Parameter(torch.ones(2)) for name in weights}
    other = make_optimizer({"a": [again["a1"], again["a2"]], "b": [again["b1"]]}, SGD)
    load_optimizer_state(other, again, flat, set(weights))
    first, second = other.param_groups
    assert (first["seen"], first["sum"], second["list"]) == (3, 0.5, [1])
    assert "list" not in first
    assert [dict(part.state) for part in parts_of(other)] == [{}, {"count": 7}]
    # Those of an optimizer whose parameters are not asked for are not.
    of_second = optimizer_state(optimizer, {"w": weights["b1"]})
    assert list(of_second) == ["w.@list%", "w.@@count#"]


def test_of_videotune_s_own_optimizers_updated_values_of_groups_are_kept() -> None:
    """Once there was an update."""
    weights = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    groups = {"a": [weights["a"]], "b": [weights["b"]]}
    optimizer = make_optimizer(groups, Optimizer())
    first, second = optimizer.param_groups
    first |= {"k": 2, "d": 0.5, "other": 1.0}
    second |= {"k": 0, "d": 0.25}
    assert list(optimizer_state(optimizer, weights)) == ["a.@d~", "a.@k#"]
    assert list(optimizer_state(optimizer, {"b": weights["b"]})) == []
    second["k"] = 1
    assert list(optimizer_state(optimizer, {"b": weights["b"]})) == ["b.@d~", "b.@k#"]


def test_parameters_with_a_state_are_found_by_their_names() -> None:
    flat = ["net.w.exp_avg", "net.w.step#", "v.@d~", "v.@@count%", "u.queue%0"]
    assert names_with_state(flat) == {"net.w", "u"}
    assert names_with_state([]) == set()


def test_tensors_of_nested_values_come_to_the_device_of_their_parameter() -> None:
    optimizer, weight = with_state({"queue": [torch.ones(2)], "mean": torch.ones(2)})
    flat = optimizer_state(optimizer, {"w": weight})
    other, on_device = with_state({}, "meta")
    load_optimizer_state(other, {"w": on_device}, flat)
    state = parts_of(other)[0].state[on_device]
    assert state["queue"][0].is_meta
    assert state["mean"].is_meta


def test_a_state_that_was_none_is_not_taken_for_a_lost_one() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer({"all": [weight]}, SGD)
    names = {"net.w": weight}
    with pytest.raises(ValueError, match=r"^no optimizer state for net\.w$"):
        load_optimizer_state(optimizer, names, {})
    load_optimizer_state(optimizer, names, {}, {"net.w"})
    assert weight not in parts_of(optimizer)[0].state
    flat = {"net.w.mean": torch.ones(2)}
    with pytest.raises(ValueError, match=r"for net\.w, which had none"):
        load_optimizer_state(optimizer, names, flat, {"net.w"})
    with pytest.raises(ValueError, match=r"of no parameter: net\.mean"):
        load_optimizer_state(optimizer, names, {"net.mean": torch.ones(2)})


def test_a_description_that_is_too_long_or_too_deep_is_damaged() -> None:
    optimizer, weight = with_state({})
    longest = json.dumps("x" * (MOST_NESTED - 2)).encode()
    description = torch.frombuffer(bytearray(longest), dtype=torch.uint8)
    load_optimizer_state(optimizer, {"w": weight}, {"w.word%": description})
    assert parts_of(optimizer)[0].state[weight]["word"] == "x" * (MOST_NESTED - 2)
    longer = torch.cat([description, description[:1]])
    with pytest.raises(ValueError, match="word is described at great length"):
        load_optimizer_state(optimizer, {"w": weight}, {"w.word%": longer})

    deep = torch.tensor(list(b"[" * 100_000), dtype=torch.uint8)
    for bad in (deep, torch.tensor([1.5])):
        with pytest.raises(ValueError, match="state word is damaged"):
            load_optimizer_state(optimizer, {"w": weight}, {"w.word%": bad})


class Paging(torch.optim.SGD):
    """Allocates its moments itself, as bitsandbytes' paged optimizers do."""

    is_paged = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.buffers: list[Tensor] = []

    def get_state_buffer(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        self.buffers.append(torch.empty_like(parameter, dtype=dtype))
        return self.buffers[-1]


@pytest.mark.parametrize("is_paged", [True, False])
def test_what_a_paging_optimizer_pages_is_loaded_into_its_own_memory(
    is_paged: bool,
) -> None:
    """But two means in one tensor are not; the others of the state are."""
    names = {name: nn.Parameter(torch.ones(3)) for name in ("w", "v")}
    optimizer = Paging(list(names.values()))
    optimizer.is_paged = is_paged
    moment = torch.tensor([1, 2, 3], dtype=torch.uint8)
    pair = torch.rand(2, 3)
    flat = {"w.state1": moment, "w.state2": pair, "w.absmax1": torch.ones(3)}
    flat |= {"v.state1": pair, "v.state2": moment}
    load_optimizer_state(optimizer, names, flat)
    held = {
        f"{name}.{key}": value
        for name, parameter in names.items()
        for key, value in optimizer.state[parameter].items()
    }
    assert held.keys() == flat.keys()
    assert all(same(held[key], value) for key, value in flat.items())
    places = {value.data_ptr() for value in optimizer.buffers}
    paged = {key for key, value in held.items() if value.data_ptr() in places}
    assert paged == ({"w.state1", "v.state2"} if is_paged else set())

    plain, weight = with_state({})  # a class that knows nothing of pages
    load_optimizer_state(plain, {"w": weight}, {"w.state1": moment[:2]})
