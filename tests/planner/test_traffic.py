"""What the processes of a run send each other, against the counted numbers of a tiny
network.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher import QUIET, overrides_of
from tests.support.made_steps import specs_in_place
from videotune.adapters.lora import add_lora
from videotune.config.sections import Lora
from videotune.job.job import Job, open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.memory.checkpointing import OFF, ON
from videotune.planner import process_choice, traffic
from videotune.planner.cluster import Cluster
from videotune.planner.fit import Fit, fit, process_share, step_seconds
from videotune.planner.gpus import USUAL, find_card
from videotune.planner.memory import Choice, Need, need
from videotune.planner.process_choice import Target, shared_job
from videotune.planner.processes import copied_bytes, message_seconds_of, processes_of
from videotune.planner.read_step import step_spec
from videotune.planner.step_spec import StepSpec, sharded
from videotune.planner.traffic import (
    Rounds,
    Traffic,
    exchanged_bytes_per_token,
    rounds_of,
)

Bases = Callable[..., Path]

GROUPS = 3
FULL = ("training_method=FINE_TUNE",)
SHARDED = ("sharding=FULL",)
TWICE = ("gradient_accumulation_steps=2", "batch_size=3")
SAMPLES = 2 * 3
PASSES = 2 * 2
"""Of at most two samples each."""


@pytest.fixture(scope="module")
def words(
    small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Overrides:
    """A run with one bucket."""
    cache = tmp_path_factory.mktemp("traffic") / "cache"
    sets = (*QUIET, *TWICE, "lora.rank=4", "video_config.frames=9")
    return overrides_of(small_clips, tiny_bases("wan"), cache, *sets)


@pytest.fixture
def sizes(tiny_family: Callable[..., Any]) -> dict[str, int]:
    """How many numbers train, by method, and bytes that the card holds of the network:
    of frozen weights whole pieces.
    """
    family = tiny_family("wan")
    net = family.denoiser()
    whole = sum(parameter.numel() for parameter in net.parameters())
    in_few_rows = sum(
        parameter.numel() for parameter in net.parameters() if len(parameter) < GROUPS
    )
    assert in_few_rows > 0
    pieces = sum(-(-value.nbytes // 512) * 512 for value in net.parameters())
    buffers = sum(-(-value.nbytes // 512) * 512 for value in net.buffers())
    adapter = add_lora(net, family.spec, Lora(rank=4), seed=0)
    return {
        "FINE_TUNE": whole,
        "FINE_TUNE in few rows": in_few_rows,
        "FINE_TUNE held": 4 * (whole - in_few_rows) + buffers,
        "LORA": sum(parameter.numel() for parameter in adapter.values()),
        "LORA in few rows": 0,
        "LORA held": pieces + buffers,
    }


def opened(
    words: Overrides, *sets: str, dtype: str = "FLOAT_32"
) -> tuple[Job, StepSpec, Need]:
    """A job of three groups, its step, and what two samples a pass need."""
    overrides = Overrides(data=words.data, sets=(*words.sets, *sets))
    job = open_job(*resolve_config(overrides, planning=True), processes=GROUPS)
    spec = step_spec(job, dtype)
    return job, spec, need(spec, Choice(2, OFF, 0))


@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
def test_gradients_are_summed_in_messages_and_sharded_blocks_gathered(
    method: str, words: Overrides, sizes: dict[str, int], monkeypatch: Any
) -> None:
    """A ring of three takes two rounds for a gather, and four for a sum. Tensors of fewer
    than three rows are not sharded.
    """
    monkeypatch.setattr(traffic, "BUFFER_NUMBERS", 1000)
    numbers = sizes[method]
    messages = (numbers + 999) // 1000
    sets = (f"training_method={method}",)
    job, spec, training = opened(words, *sets)
    assert rounds_of(job, spec, training) == Rounds(4 * messages, 0)
    sent = traffic.traffic(job, spec, training, "FLOAT_32")
    assert sent == Traffic(gradients=pytest.approx(4 * numbers * 4 / 3))

    job, spec, training = opened(words, *sets, *SHARDED)
    trains_all = method == "FINE_TUNE"
    units = len(spec.blocks) + 1
    collectives = 3 if trains_all else 2
    unsharded = sizes[f"{method} in few rows"] if trains_all else numbers
    messages = (unsharded + 999) // 1000
    rounds = Rounds(4 * messages, PASSES * units * collectives * 2)
    assert rounds_of(job, spec, training) == rounds

    sent = traffic.traffic(job, spec, training, "FLOAT_32")
    assert sent.gradients == pytest.approx(4 * unsharded * 4 / 3)
    gradients = 4 * (numbers - unsharded) if trains_all else 0
    gathered_twice = 2 * sizes[f"{method} held"]
    assert sent.weights == pytest.approx(PASSES * (gathered_twice + gradients) * 2 / 3)


@pytest.mark.parametrize(
    ("choice", "recomputed"),
    [(Choice(2, OFF, 0), 0), (Choice(2, OFF, 1), 1), (Choice(2, ON, 0), 2)],
)
def test_attention_is_exchanged_in_every_pass_of_a_block(
    choice: Choice, recomputed: int, words: Overrides
) -> None:
    """Forward, backward, and again where a block is streamed or recomputed."""
    job, spec, _ = opened(words, "context_parallel=2")
    assert len(spec.blocks) == 2
    sent = traffic.traffic(job, spec, need(spec, choice), "FLOAT_32")
    tokens = SAMPLES * job.spec.video_tokens(job.shapes[0])
    tensor = exchanged_bytes_per_token(job, "FLOAT_32") * tokens
    assert sent.attention == pytest.approx((4 + recomputed) * 4 * tensor / 4)
    # each of two processes sends its half of the output
    latents = job.spec.latent_channels * prod(job.spec.rules.latent_size(job.shapes[0]))
    assert sent.prediction == pytest.approx(4 * SAMPLES * latents / 2)


@pytest.mark.parametrize(("sets", "is_full"), [(FULL, True), ((), False)])
def test_a_process_holds_its_shard_of_what_is_sharded(
    sets: tuple[str, ...], is_full: bool, words: Overrides
) -> None:
    job, spec, _ = opened(words, *sets, *SHARDED)
    assert process_share(job, spec, "FLOAT_32") == sharded(spec, GROUPS, is_full)
    job, spec, _ = opened(words, *sets)
    assert process_share(job, spec, "FLOAT_32") == spec


@pytest.mark.parametrize(
    ("gpus", "sets", "parts"),
    [
        (4, (), [1, 2]),
        (3, (), [1]),
        (4, ("context_parallel=1",), None),
        (4, ("sample.cache_threshold=0.1",), [1]),
        (1, (), None),
    ],
)
def test_a_sample_is_shared_by_numbers_of_cards_that_divide_a_machine(
    gpus: int,
    sets: tuple[str, ...],
    parts: list[int] | None,
    words: Overrides,
    monkeypatch: Any,
) -> None:
    """Of a model with two heads of attention. None: nothing is chosen."""
    jobs: list[Job] = []

    def first_of(candidates: list[Job], target: Target) -> Job:
        jobs.extend(candidates)
        return candidates[0]

    monkeypatch.setattr(process_choice, "_best", first_of)
    overrides = Overrides(data=words.data, sets=(*words.sets, *sets, "batch_size=8"))
    resolved, spec, base = resolve_config(overrides)
    target = Target(Cluster(1, gpus), vram=24 << 30, card=None, spare=0)
    job = shared_job(resolved, spec, base, target)
    assert (job.processes, job.config.context_parallel) == (gpus, 1)
    if parts is None:
        assert not jobs
    else:
        assert [job.config.context_parallel for job in jobs] == parts
        assert [job.processes for job in jobs] == [gpus // count for count in parts]


@pytest.mark.parametrize(
    ("needed", "seconds", "index"),
    [
        ([3, 2, 1], [2.0, 1.7, 1.6], 0),
        ([3, 2, 1], [2.1, 1.7, 1.6], 1),
        ([9, 2, 1], [1.0, 1.7, 1.6], 1),
        ([9, 8, 7], [1.0, 1.7, 1.6], 2),
        ([8, 9, 8], [1.0, 1.7, 1.6], 0),
    ],
)
def test_the_fewest_cards_share_a_sample_with_which_it_fits_and_is_not_slow(
    needed: list[int], seconds: list[float], index: int, monkeypatch: Any
) -> None:
    """Of three candidates, on a card with room for 5."""
    jobs: list[Any] = [0, 1, 2]

    class Result(Fit):
        def __init__(self, size: int) -> None:
            vars(self).update(fits=size <= 5, size=size)

        @property
        def needed(self) -> int:
            return int(vars(self)["size"])

    monkeypatch.setattr(
        process_choice, "_fit_of", lambda job, target: Result(needed[job])
    )
    monkeypatch.setattr(
        process_choice, "_seconds_a_sample", lambda job, result, target: seconds[job]
    )
    target: Any = None
    assert process_choice._best(jobs, target) == index


def test_a_card_without_a_rate_is_compared_as_a_usual_one(words: Overrides) -> None:
    resolved, spec, base = resolve_config(words)
    job = open_job(resolved, spec, base, processes=2)
    for card in (None, USUAL):
        target = Target(Cluster(2, 1), vram=24 << 30, card=card, spare=1 << 30)
        result = process_choice._fit_of(job, target)
        alone = fit(job, "BFLOAT_16", 24 << 30, card, spare=1 << 30)
        assert result == replace(alone, cluster=target.cluster)
        spec = step_spec(job, "BFLOAT_16")
        a_step = step_seconds(
            job, spec, result.training, USUAL, "BFLOAT_16", target.cluster
        )
        a_sample = process_choice._seconds_a_sample(job, result, target)
        assert a_sample == a_step / job.effective_batch > 0


def test_cards_without_bfloat16_are_compared_in_float16(
    words: Overrides, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = specs_in_place(monkeypatch)
    specs.dtype = "FLOAT_16"
    monkeypatch.setattr(process_choice, "step_spec", specs.reader("plain"))
    job = open_job(*resolve_config(words), processes=2)
    target = Target(Cluster(1, 2), vram=24 << 30, card=find_card("t4"), spare=0)
    result = process_choice._fit_of(job, target)
    assert process_choice._seconds_a_sample(job, result, target) > 0
    assert specs.read == ["plain", "plain"]


def test_processes_in_a_plan_have_what_they_send_and_keep(words: Overrides) -> None:
    """Three processes that each save their rows, on three machines or on one."""
    job, spec, training = opened(words, *FULL, *SHARDED)
    sent = traffic.traffic(job, spec, training, "FLOAT_32")
    card = find_card("h100")

    def facts(cluster: Cluster | None, card: Any = card) -> dict[str, Any]:
        result = processes_of(
            job,
            spec,
            training,
            "FLOAT_32",
            card=card,
            cluster=cluster,
            host_bytes=1000,
            checkpoint_bytes=300,
        )
        assert result is not None
        return result

    assert copied_bytes(job, 301) == 100
    seconds = message_seconds_of(job, spec, training, "FLOAT_32", card, Cluster(1, 3))
    assert seconds.waiting > 0
    expected = {
        "count": 3,
        "context_parallel": 1,
        "groups": 3,
        "sharding": "FULL",
        "sent_bytes": {
            "attention": 0,
            "prediction": 0,
            "gradients": round(sent.gradients),
            "weights": round(sent.weights),
        },
        "link_bytes_a_second": 450 * 10**9,
        "seconds_waiting": round(seconds.waiting, 4),
        "seconds_beside": round(seconds.beside, 4),
        "host_bytes_a_machine": 3 * 1000 + 3 * 100,
        "machines": None,
    }
    assert facts(None) == facts(Cluster(1, 3)) == expected
    unknown = dict.fromkeys(
        ("link_bytes_a_second", "seconds_waiting", "seconds_beside")
    )
    assert facts(None, card=None) == expected | unknown
    several = facts(Cluster(3, 1))
    assert several["host_bytes_a_machine"] == 1000 + 100
    assert several["machines"]["count"] == 3


def test_of_an_adapter_the_main_process_copies_all(words: Overrides) -> None:
    job, spec, training = opened(words, *SHARDED)
    assert copied_bytes(job, 301) == 301
    facts = processes_of(
        job,
        spec,
        training,
        "FLOAT_32",
        card=None,
        cluster=Cluster(1, 3),
        host_bytes=1000,
        checkpoint_bytes=301,
    )
    assert facts is not None
    assert facts["host_bytes_a_machine"] == 3 * 1000 + 301
    assert copied_bytes(opened(words, *FULL)[0], 301) == 301


def test_a_process_by_itself_sends_nothing(words: Overrides) -> None:
    job, spec, training = opened(words)
    alone = replace(job, processes=1)
    assert traffic.traffic(alone, spec, training, "FLOAT_32") == Traffic()
    assert rounds_of(alone, spec, training) == Rounds()
    pair = replace(job, processes=2)
    assert rounds_of(pair, spec, training).gradients == 2
    assert traffic.traffic(pair, spec, training, "FLOAT_32").gradients > 0
    keys: dict[str, Any] = dict.fromkeys(("card", "cluster"))
    keys |= {"host_bytes": 1, "checkpoint_bytes": 1}
    assert processes_of(alone, spec, training, "FLOAT_32", **keys) is None
