"""step -> the batch, its noise levels and its noise, from the cache: a pure function, and a stream that reads it ahead."""

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from threading import Barrier, Lock

import torch
from torch import Tensor

from videotune.config.schema import Config
from videotune.data.buckets import padded_box
from videotune.diffusion.loss import Objective
from videotune.diffusion.timesteps import TimestepSampler, shift_of_tokens
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.sampler import ExpertSchedule, Schedule, bucket_of, sample_indices
from videotune.latent_cache.store import LatentCache
from videotune.memory.host_weights import pinned
from videotune.rng import generator_for
from videotune.types import (
    DETERMINISTIC_VARIANT,
    Batch,
    Clip,
    Conditioning,
    LatentDistribution,
    ModelSpec,
    Window,
)

BLOCK = 64
"""Steps whose windows, captions and noise levels are drawn together."""


@dataclass(frozen=True)
class StepBatch:
    """A process's samples of a step, and of all the step's samples, in order, the windows, captions and noise levels t (B,).

    Of several processes each has the samples from number ``first`` on, with their noise (b,C,F,H,W); one that has none has
    no ``batch``, or where all of them must run the network together a ``spare`` one, of another's sample, which counts
    nothing. ``prior``: the numbers of the step's samples whose target is the base model's own prediction.
    """

    step: int
    window_ids: tuple[str, ...]
    captions: tuple[str, ...]
    t: Tensor
    first: int
    batch: Batch | None
    noise: Tensor
    prior: tuple[int, ...] = ()
    spare: bool = False

    def pinned(self) -> "StepBatch":
        """The same in pinned memory, which a CUDA device reads while the host goes on."""
        return replace(
            self,
            t=_pin(self.t),
            noise=_pin(self.noise),
            batch=self.batch and self.batch.map(_pin),
        )


def _pin(x: Tensor) -> Tensor:
    return x if x.device.type != "cpu" else pinned(x.shape, x.dtype).copy_(x)


@dataclass(frozen=True)
class StepDraws:
    """What is drawn for a step but noise: each sample's window, variant and caption, whether it is conditioned on its first
    frame, and t (B,).
    """

    samples: tuple[tuple[Window, int], ...]
    captions: tuple[str, ...]
    first_frame: tuple[bool, ...]
    t: Tensor


@dataclass(frozen=True)
class BatchSource:
    """Where batches come from. ``buckets`` are the schedule's, dearest first; ``condition`` is the family's.

    A window of a clip with ``repeats`` r stands r times in its bucket. ``sizes``: each clip's (width, height) in pixels.
    Without variants in the store (``video_config.variants`` 0) ``encode`` makes the latents of each sample, one at a time.

    A sample conditioned on its clip's first frame has it in the way that ``spec.image_conditioning`` names: "replace", the frame is fed
    clean and counts nothing; "concat", the extras that were encoded with the clip are what they are, else all zeros.

    Where text is encoded in the step none is in the store: a batch has its captions, and an empty ``conditioning.text`` until then.
    ``pin``: the batches of steps are in pinned memory.
    """

    config: Config
    spec: ModelSpec
    store: LatentCache
    keys: CacheKeys
    condition: Callable[[Sequence[Mapping[str, Tensor]]], Conditioning]
    clips: Mapping[str, Clip]
    sizes: Mapping[str, tuple[int, int]]
    buckets: tuple[tuple[Window, ...], ...]
    schedule: Schedule
    objective: Objective
    encode: Callable[[Window, int], LatentDistribution] | None = None
    expert_schedule: ExpertSchedule | None = None
    pin: bool = False
    _one_at_a_time: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)
    _blocks: dict[int, list[StepDraws]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def timesteps_of(self, step: int) -> TimestepSampler:
        """The noise levels that a step draws from: its bucket's shift, and of several experts its expert's alone."""
        levels = self.objective.timesteps
        rule = self.spec.shift_by_tokens
        if self.config.timestep_shift == "resolution" and rule is not None:
            shape = self.buckets[bucket_of(self.schedule, step)][0].shape
            levels = replace(levels, shift=shift_of_tokens(self.spec.tokens(shape), rule))
        if self.expert_schedule is not None:
            name = self.expert_schedule.at(step)
            expert = next(one for one in self.spec.experts if one.name == name)
            levels = levels.within(expert.t_lo, expert.t_hi)
        return levels

    def text(self, caption: str) -> dict[str, Tensor]:
        """A caption's cached states."""
        return self.store.get("text", self.names.get(caption) or self.keys.text(caption))

    def sample(self, window: Window, variant: int, *name: str | int) -> LatentDistribution:
        """A window's latents as a mean without a variance: drawn for ``name`` where the family keeps one; and the extras."""
        moments = self._moments(window, variant)
        if moments.logvar is None:
            return moments
        noise = generator_for(self.keys.seed, "posterior", *name).standard_normal(
            moments.mean.shape, "float32"
        )
        drawn = moments.mean + torch.exp(0.5 * moments.logvar) * torch.from_numpy(noise)
        return replace(moments, mean=drawn, logvar=None)

    def plain(self, window: Window) -> LatentDistribution:
        """A window without any draw of frames, place or image noise: what validation and previews read."""
        return self.sample(window, DETERMINISTIC_VARIANT, window.id)

    @property
    def conditions_on_first_frame(self) -> bool:
        """Whether most samples of the run are conditioned on first frames: so are then validation and previews."""
        return (
            self.spec.image_conditioning != "none"
            and (self.config.first_frame_probability or 0.0) >= 0.5
        )

    @property
    def variants(self) -> int:
        """The variants in the store of a window that varies."""
        return self.config.video_config.variants

    def varies(self, window: Window) -> bool:
        """Whether the variants of a window differ."""
        return window.varies or self.keys.image_noise

    def variant(self, bucket: int, place: int, epoch: int) -> int:
        """The variant of its window that a bucket's entry gives in the bucket's epoch ``epoch``."""
        window = self.buckets[bucket][place]
        if not self.varies(window):
            return 0
        repeats = self.clips[window.clip_id].repeats
        number = epoch * repeats + (self._copies[bucket][place] if repeats > 1 else 0)
        return number % self.variants if self.variants else number

    @cached_property
    def names(self) -> dict[tuple[Window, int] | str, str]:
        """The names of the entries that steps read, by window and variant, and by caption: made before the first step."""
        found: dict[tuple[Window, int] | str, str] = {
            (window, variant): self.keys.latents(self.keys.sample(window, variant))
            for bucket in self.buckets
            for window in dict.fromkeys(bucket)
            for variant in (range(self.variants) if self.varies(window) else (0,))
        }
        texts = () if self.text_in_step else self.clips.values()
        captions = {"", *(caption for clip in texts for caption in clip.captions)}
        return found | {caption: self.keys.text(caption) for caption in captions}

    @cached_property
    def text_in_step(self) -> bool:
        """Whether captions are encoded in the step, and none is cached."""
        return self.config.text_in_step

    @cached_property
    def _copies(self) -> tuple[Sequence[int], ...]:
        """For each entry of each bucket, how many entries of the same window stand before it."""
        numbers = []
        for bucket in self.buckets:
            before: dict[Window, Iterator[int]] = defaultdict(count)
            numbers.append(array("L", (next(before[window]) for window in bucket)))
        return tuple(numbers)

    def _moments(self, window: Window, variant: int) -> LatentDistribution:
        if self.variants == 0 and variant != DETERMINISTIC_VARIANT and self.varies(window):
            assert self.encode is not None, (
                "without variants in the store, somebody must encode"
            )
            with self._one_at_a_time:
                return self.encode(window, variant)
        key = self.names.get((window, variant)) or self.keys.latents(
            self.keys.sample(window, variant)
        )
        own = dict(self.store.get("latents", key))
        return LatentDistribution(own.pop("mean"), own.pop("logvar", None), own)

    def step_draws(self, step: int) -> StepDraws:
        """What is drawn for a step; a block of steps is drawn together, and the latest blocks are kept."""
        number, place = divmod(step - 1, BLOCK)
        block = self._blocks.get(number)
        if block is None:
            steps = range(number * BLOCK + 1, (number + 1) * BLOCK + 1)
            block = self._blocks[number] = [draws_of(self, each) for each in steps]
            for old in list(self._blocks)[:-3]:
                self._blocks.pop(old, None)
        return block[place]


def draws_of(source: BatchSource, step: int) -> StepDraws:
    """The draws of step ``step`` (from 1). Each belongs to (seed, purpose, step, index of the sample)."""
    seed = source.keys.seed
    bucket, places = sample_indices(source.schedule, step)
    samples = tuple(
        (source.buckets[bucket][place], source.variant(bucket, place, epoch))
        for place, epoch in places
    )
    captions = tuple(_caption(source, window, step, i) for i, (window, _) in enumerate(samples))
    t = source.timesteps_of(step).draw(
        uniforms(seed, step, len(samples), source.config.timestep_stratified)
    )
    share = source.config.first_frame_probability or 0.0
    first_frame = tuple(
        generator_for(seed, "first frame", step, i).random() < share
        for i in range(len(samples))
    )
    return StepDraws(samples, captions, first_frame, t)


def assemble(
    source: BatchSource,
    windows: Sequence[Window],
    captions: Sequence[str],
    clips: Sequence[LatentDistribution],
    first_frame: Sequence[bool],
) -> Batch:
    """Windows of one bucket with their captions and encoded clips -> a Batch on the CPU, nothing dropped.

    ``first_frame``: which samples are conditioned on their first frame.
    """
    x0 = torch.stack([moments.mean for moments in clips])
    given = torch.zeros(len(windows), 1, x0.shape[2], 1, 1, dtype=torch.bool)
    if (
        source.spec.image_conditioning == "replace" and x0.shape[2] > 1
    ):  # of a still nothing would be left to learn
        given[:, :, 0, 0, 0] = torch.tensor(first_frame)[:, None]
    own = [source.clips[window.clip_id] for window in windows]
    told = zip(clips, first_frame, strict=True)
    extras = [
        {name: value * shown for name, value in moments.extras.items()}
        for moments, shown in told
    ]
    return Batch.of(
        x0,
        _condition(source, captions, extras),
        conditioning_mask=given,
        loss_mask=_picture_weight(source, windows, x0) * ~given,
        loss_weight=torch.tensor([clip.loss_weight for clip in own], dtype=torch.float32),
        captions=tuple(captions),
        window_ids=tuple(window.id for window in windows),
        fps=torch.tensor([window.shape.fps for window in windows]),
        prior_preservation=tuple(clip.prior_preservation for clip in own),
        has_conditioning=bool(given.any()),
    )


def _condition(
    source: BatchSource, captions: Sequence[str], extras: Sequence[dict[str, Tensor]]
) -> Conditioning:
    """What samples are conditioned on: cached text and their clips' extras; extras alone where text is encoded in step."""
    if source.text_in_step:
        names = extras[0] if extras else ()
        return Conditioning(
            torch.empty(len(extras), 0, 0),
            None,
            {n: torch.stack([e[n] for e in extras]) for n in names},
        )
    return source.condition(
        [source.text(caption) | more for caption, more in zip(captions, extras, strict=True)]
    )


def _picture_weight(source: BatchSource, windows: Sequence[Window], x0: Tensor) -> Tensor:
    """1 where a latent cell shows some of the picture, 0 where it is black border alone.

    (B,1,F,1,1), or (B,1,F,H,W) where some window is padded.
    """
    frames, rows, columns = x0.shape[2:]
    if all(window.resize != "pad" for window in windows):
        return torch.ones(len(windows), 1, frames, 1, 1)
    masks = torch.ones(len(windows), 1, frames, rows, columns)
    for mask, window in zip(masks, windows, strict=True):
        if window.resize == "pad":
            shape = window.shape
            top, left, high, wide = padded_box(
                *source.sizes[window.clip_id], (shape.height, shape.width)
            )
            mask[:, :, ~_touched(top, high, rows, shape.height // rows)] = 0
            mask[..., ~_touched(left, wide, columns, shape.width // columns)] = 0
    return masks


def _touched(begin: int, length: int, cells: int, pixels: int) -> Tensor:
    """Which of a line of cells, each so many pixels long, hold some of the pixels from ``begin`` on: (cells,) bool."""
    first = torch.arange(cells) * pixels
    return (first < begin + length) & (first + pixels > begin)


def share_of(part: tuple[int, int], samples: int) -> tuple[int, int]:
    """The samples, from and to, that the i-th of n processes takes of a step: nearly equal parts, in order."""
    i, n = part
    return i * samples // n, (i + 1) * samples // n


def prepare(
    source: BatchSource, step: int, part: tuple[int, int] = (0, 1), spares: bool = False
) -> StepBatch:
    """What step ``step`` (from 1) trains on.

    ``part`` (i, n) as in ``share_of``; ``spares``: where it is empty, another's sample is there, to run along with.
    """
    seed = source.keys.seed
    drawn = source.step_draws(step)
    windows = [window for window, _ in drawn.samples]
    captions = drawn.captions
    prior = tuple(
        i for i, window in enumerate(windows) if source.clips[window.clip_id].prior_preservation
    )
    lo, hi = share_of(part, len(windows))
    spare = spares and lo == hi
    if spare:
        lo = min(lo, len(windows) - 1)
        hi = lo + 1
    batch = None
    noise = torch.empty(0)
    if lo < hi:
        encoded = [source.sample(*drawn.samples[i], step, i) for i in range(lo, hi)]
        batch = assemble(
            source, windows[lo:hi], captions[lo:hi], encoded, drawn.first_frame[lo:hi]
        )
        shape = tuple(batch.x0.shape[1:])
        drawn_noise = [
            generator_for(seed, "noise", step, i).standard_normal(shape, "float32")
            for i in range(lo, hi)
        ]
        batch = _with_dropped_frames(source, batch, step, lo)
        noise = torch.stack([*map(torch.from_numpy, drawn_noise)])
    made = StepBatch(
        step, tuple(w.id for w in windows), captions, drawn.t, lo, batch, noise, prior, spare
    )
    return made.pinned() if source.pin else made


def uniforms(seed: int, step: int, count: int, stratified: bool) -> Tensor:
    """The uniform numbers (count,) float64 that a step's noise levels come from, one for each sample, each exactly uniform.

    ``stratified``: sample i takes part π(i) of [0, 1) cut into ``count`` equal ones, π a permutation drawn for the step, so
    that the step as a whole covers the distribution evenly.
    """
    u = torch.tensor(
        [generator_for(seed, "t", step, i).random() for i in range(count)], dtype=torch.float64
    )
    if not stratified:
        return u
    order = torch.from_numpy(generator_for(seed, "t order", step).permutation(count))
    return ((order + u) / count).clamp(max=1 - 2**-53)


def _with_dropped_frames(source: BatchSource, batch: Batch, step: int, first: int) -> Batch:
    """Some latent frames are fed as noise and count nothing: whole groups of a token's frames, never the first group."""
    share = source.config.video_config.frame_dropout_probability
    frames = batch.x0.shape[2]
    each = source.spec.patch[0]
    if share == 0:
        return batch
    group = (torch.arange(frames) + -frames % each) // each  # padding stands in front
    dropped = torch.zeros_like(batch.conditioning_mask)
    for i in range(len(batch)):
        u = generator_for(source.keys.seed, "frame dropout", step, first + i).random(
            frames
        )  # one for each group is enough
        dropped[i, 0, :, 0, 0] = (torch.from_numpy(u)[group] < share) & (group > 0)
    dropped &= ~batch.conditioning_mask
    return replace(batch, dropped_frames_mask=dropped, loss_mask=batch.loss_mask * ~dropped)


def _caption(source: BatchSource, window: Window, step: int, index: int) -> str:
    clip = source.clips[window.clip_id]
    random = generator_for(source.keys.seed, "caption", step, index)
    if random.random() < source.config.caption_dropout:
        return ""
    weights = clip.caption_weights[: len(clip.captions)]
    if not sum(weights):
        return clip.captions[int(random.integers(len(clip.captions)))]
    return clip.captions[
        int(random.choice(len(weights), p=[weight / sum(weights) for weight in weights]))
    ]


def quiet_pool(threads: int) -> ThreadPoolExecutor:
    """Threads whose torch operations stay in the one thread.

    Each thread that calls torch otherwise gets OpenMP workers of its own, which spin beside those of the training: on two
    cores a step then takes twice as long. The number of threads is a setting of each thread, but setting it also sets the
    default of those to come, so all are started first and the caller's number is put back after.
    """
    number = torch.get_num_threads()
    started = Barrier(threads + 1)

    def become_one() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # torch asks for the default at a thread's first call: now, while that is 1
        started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="batches", initializer=become_one)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(number)
    return pool


def stream(
    source: BatchSource,
    first: int,
    last: int,
    threads: int,
    part: tuple[int, int] = (0, 1),
    spares: bool = False,
) -> Iterator[StepBatch]:
    """Steps first … last, read ahead by ``threads`` threads (0: in the caller's own time). Order never depends on them.

    ``part`` and ``spares`` as in ``prepare``. At most 2 · ``threads`` + 1 steps are there at a time.
    """
    steps = iter(range(first, last + 1))
    if threads == 0:
        yield from (prepare(source, step, part, spares) for step in steps)
        return
    pool = quiet_pool(threads)
    ahead: deque[Future[StepBatch]] = deque()
    try:
        for step in steps:
            ahead.append(pool.submit(prepare, source, step, part, spares))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
