"""What runs in a process with the card: a tiny model, toy clips, real steps, and what
the card has seen of them.
"""

import gc
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.simcuda import card
from tests.support.run_parts import build_trainer, open_run
from tests.support.tiny_networks import deepen
from videotune.job.overrides import Overrides
from videotune.models.registry import find
from videotune.rng import generator_for
from videotune.toy.dataset import encode_clip
from videotune.toy.shapes import COMBINATIONS, caption, draw_clip
from videotune.trainer import loop
from videotune.trainer.step_record import StepRecord

STEPS = 6
QUIET = (
    "sample_after=0",
    "validate_every=0",
    "sample_metrics.budget=0",
    "save_every=0",
)
"""A run in which nothing happens but steps."""
PLAIN = (f"steps={STEPS}", "resolution=32x32", "caption_dropout=0")


@dataclass
class Seen:
    """What the card has seen: errors, and for each step the host's waits, and the
    memory that is held after it.

    ``experts``: what each step has trained, ``losses``: its [loss, norm of the
    gradient]; ``raised``: what ended the run.
    """

    errors: list[str] = field(default_factory=list)
    waits: list[dict[str, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    experts: list[str | None] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    raised: str = ""


@contextmanager
def seen_by_card() -> Iterator[Seen]:
    """Of every run of the training loop within: its errors and steps."""
    gc.collect()  # what is left of the last run
    gc.freeze()  # libraries that it has imported are not looked through again
    seen, own = Seen(), loop.train_step

    def counted(*arguments: Any) -> StepRecord:
        card.ops.waits()  # those of previews, checkpoints and of the loading of experts
        record = own(*arguments)
        seen.waits.append(dict(Counter(card.ops.waits())))
        seen.held.append(card.ops.held())
        seen.experts.append(record.expert)
        return record

    with card.watched() as found, patch.object(loop, "train_step", counted):
        yield seen
        gc.collect()
    seen.errors += found.errors


@dataclass
class Lab:
    """A folder for models, clips, caches and runs."""

    folder: Path

    @property
    def clips(self) -> Path:
        """Four clips of 32x32 pixels, long enough for every family."""
        made = self.folder / "clips"
        for index, look in enumerate(() if made.exists() else COMBINATIONS[::20]):
            for name in ("videos", "captions"):
                (made / name).mkdir(parents=True, exist_ok=True)
            clip = draw_clip(
                generator_for(0, "simcuda", index), *look, frames=25, side=32
            )
            encode_clip(made / "videos" / f"{index}.mp4", clip, 16.0)
            (made / "captions" / f"{index}.txt").write_text(caption(*look))
        return made

    def words(
        self,
        family: str,
        *sets: str,
        variant: str | None = None,
        blocks: int = 0,
        wider: Mapping[str, int] = {},
    ) -> Overrides:
        """What a command is called with for a family's tiny checkpoint, with so many
        blocks in place of its own.

        ``wider``: other numbers of its transformers' configs, for those of more than
            its own blocks.
        """
        cls = find(family)
        variant = variant or cls.variants[0]
        tiny = base = self.folder / f"{family}-{variant}"
        if not tiny.exists():
            cls.tiny(tiny, variant=variant)
        if blocks:
            base = tiny.with_name(
                "-".join([tiny.name, *map(str, [blocks, *wider.values()])])
            )
            if not base.exists():
                deepen(tiny, base, blocks, **wider)
        own = (f"base_model_name={base}", f"cache_dir={self.folder / 'cache'}")
        own += (f"video_config.frames={1 if family == 'hidream' else 9}",)
        return Overrides(data=str(self.clips), sets=(*own, *PLAIN, *sets))

    def steps(
        self,
        name: str,
        words: Overrides,
        planted: AbstractContextManager[Any] | None = None,
    ) -> dict[str, Any]:
        """What the card sees of a run's steps and nothing else, with a fault planted if
        there is one.
        """
        run = self.folder / "runs" / name
        words = Overrides(data=words.data, sets=(*words.sets, *QUIET))
        with seen_by_card() as seen, planted or nullcontext():
            trainer = build_trainer(open_run(words, run).job, run, False)
            try:
                late: StepRecord | None = None
                for record in loop.train_steps(trainer):
                    seen.losses += read(late)
                    late = record
                seen.losses += read(late)
            except RuntimeError as error:
                seen.raised = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            trainer.journal.close()
        return asdict(seen)


def read(record: StepRecord | None) -> list[list[float]]:
    """The loss and the gradient's norm of a step that is over."""
    lines = [record.read()] if record else []
    return [[line["loss"], line["grad_norm"]] for line in lines]


def faults(seen: Mapping[str, Any], waits: int = 0) -> list[str]:
    """What is wrong with a run, in words.

    ``waits``: so many a step are known, from the second step on.
    """
    found, experts = [*seen["errors"], *filter(None, [seen["raised"]])], seen["experts"]
    found += [
        f"the host waits {made}"
        for made in seen["waits"][1:]
        if sum(made.values()) > waits
    ][:1]
    if not all(
        math.isfinite(number) for numbers in seen["losses"] for number in numbers
    ):
        found.append("a loss or a gradient is NaN")
    begun = max(
        (experts.index(one) for one in set(experts)), default=0
    )  # the last expert has made its moments
    held = seen["held"][begun:]
    if held and max(held) != min(held):
        found.append(f"memory grows: {held}")
    return found
