"""Simulate a run of many processes: who trains which samples in which step, what the
steps read from the cache, and how long they wait for checkpoints.

The schedule is that of the trainer: ``sample_indices`` draws the windows of a step, and
``samples_to_run`` gives each group of processes its part. No process is started, and
nothing is read from the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from videotune.job.job import Job
from videotune.latent_cache.sampler import sample_indices
from videotune.latent_cache.step_batch import samples_to_run
from videotune.planner.cache_size import condition_bytes
from videotune.planner.cluster import Cluster
from videotune.planner.processes import saves_together
from videotune.validation.callbacks import cache_items_of

STEPS = 1000
"""Steps that are simulated at most."""

PROCESS_WRITES = 0.9e9
"""Bytes a second that a process hashes and writes (docs/reliability.md)."""

STORAGE_WRITES = 2e9
"""Bytes a second that the disk of the run folder is assumed to take of all processes."""


@dataclass(frozen=True)
class SimulatedStep:
    """The samples of a step, and who trains them."""

    step: int
    bucket: int
    window_ids: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    """Samples, begin and end, that each group of processes runs the network on."""
    padding_samples: int
    """Groups without a sample of their own: they run another group's, which counts once."""

    def of_rank(self, rank: int, context_parallel: int) -> tuple[str, ...]:
        """Return the windows that a process runs the network on."""
        begin, end = self.ranges[rank // context_parallel]
        return self.window_ids[begin:end]

    def to_json(self, job: Job) -> dict[str, Any]:
        """Return a line of the file of ``plan --schedule``."""
        return {
            "step": self.step,
            "shape": str(job.shapes[self.bucket]),
            "window_ids": list(self.window_ids),
            "samples_of_groups": [list(part) for part in self.ranges],
            "context_parallel": job.config.context_parallel,
        }


def simulated_steps(job: Job, groups: int, last: int) -> Iterator[SimulatedStep]:
    """Yield the steps 1 to ``last`` of a run.

    Args:
        job: the run.
        groups: of processes that share the samples of a step.
        last: the last step.
    """
    pads = job.config.sharding == "FULL" and groups > 1
    parts_by_count: dict[int, list[tuple[int, int, bool]]] = {}
    ids_by_bucket: dict[int, list[str]] = {}
    for step in range(1, last + 1):
        bucket, indices = sample_indices(job.schedule, step)
        count = len(indices)
        if count not in parts_by_count:
            parts_by_count[count] = [
                samples_to_run((group, groups), count, pad_empty_share=pads)
                for group in range(groups)
            ]
        parts = parts_by_count[count]
        if bucket not in ids_by_bucket:
            ids_by_bucket[bucket] = [window.id for window in job.buckets[bucket]]
        ids = ids_by_bucket[bucket]
        yield SimulatedStep(
            step=step,
            bucket=bucket,
            window_ids=tuple(ids[position] for position, _ in indices),
            ranges=tuple((begin, end) for begin, end, _ in parts),
            padding_samples=sum(is_padding for _, _, is_padding in parts),
        )


def simulate(
    job: Job,
    cluster: Cluster,
    seconds_by_bucket: Sequence[float] | None,
    checkpoint_bytes: int,
    staging_rate: float | None,
    storage: float | None = None,
) -> dict[str, Any]:
    """Return the simulation as ``plan --simulate`` prints it.

    Args:
        job: the run.
        cluster: its machines.
        seconds_by_bucket: of a step of each bucket. None: no card with a rate is known.
        checkpoint_bytes: tensors of a checkpoint.
        staging_rate: bytes a second from a card to its host. None: no card is known.
        storage: bytes a second that the disk of the run folder takes. None: assumed.
    """
    groups = cluster.processes // job.config.context_parallel
    last = min(job.steps, STEPS)
    work = _Work(job, groups, seconds_by_bucket)
    reads = CacheReads(job, cluster)
    for step in simulated_steps(job, groups, last):
        work.add(step)
        reads.add(step, None if seconds_by_bucket is None else work.seconds[-1])

    saves = None
    if seconds_by_bucket is not None and staging_rate is not None:
        step_seconds = fmean(work.seconds)
        saves = saves_of(
            job, cluster, checkpoint_bytes, step_seconds, staging_rate, storage
        )
    return {
        "steps": last,
        "of": job.steps,
        "ranks": cluster.processes,
        "machines": cluster.machines,
        "work": work.to_json(),
        "cache": reads.to_json(),
        "checkpoints": saves,
    }


class _Work:
    """Sums the work of the simulated steps."""

    def __init__(
        self, job: Job, groups: int, seconds_by_bucket: Sequence[float] | None
    ) -> None:
        self._job = job
        self._groups = groups
        self._seconds_by_bucket = seconds_by_bucket
        self._steps_by_bucket: dict[int, list[SimulatedStep]] = {}
        self._most_over_mean = 1.0
        self._idle = 0
        self._padding_samples = 0
        self.seconds: list[float] = []
        """Of each step; empty without a card."""

    def add(self, step: SimulatedStep) -> None:
        """Count a step."""
        self._steps_by_bucket.setdefault(step.bucket, []).append(step)
        counts = [end - begin for begin, end in step.ranges]
        mean = len(step.window_ids) / self._groups
        self._most_over_mean = max(self._most_over_mean, max(counts) / mean)
        self._idle += counts.count(0)
        self._padding_samples += step.padding_samples
        if self._seconds_by_bucket is not None:
            self.seconds.append(self._seconds_by_bucket[step.bucket])

    def to_json(self) -> dict[str, Any]:
        """Return how unequal the ranks' and the steps' work is."""
        job = self._job
        count = sum(map(len, self._steps_by_bucket.values()))
        rows = []
        for bucket, steps in sorted(self._steps_by_bucket.items()):
            tokens = job.spec.tokens(job.shapes[bucket])
            samples = max(end - begin for begin, end in steps[0].ranges)
            seconds = self._seconds_by_bucket and self._seconds_by_bucket[bucket]
            row = {
                "shape": str(job.shapes[bucket]),
                "steps": len(steps),
                "samples": len(steps[0].window_ids),
                "samples_a_group": samples,
                "tokens_a_rank": samples * tokens // job.config.context_parallel,
                "seconds_a_step": seconds and round(seconds, 4),
            }
            rows.append(row)

        slowest = None
        if self.seconds:
            slowest = round(max(self.seconds) / fmean(self.seconds), 3)
        without_sample = (self._idle + self._padding_samples) / (count * self._groups)
        return {
            "buckets": rows,
            "most_over_mean_of_ranks": round(self._most_over_mean, 3),
            "share_without_sample": round(without_sample, 4),
            "slowest_over_mean_step": slowest,
        }


class CacheReads:
    """Sums what the machines read from the cache in the simulated steps.

    A process reads its group's samples. What several processes of a machine read in a
    step comes once from the storage. No step is assumed to find in the memory of its
    machine what an earlier one has read.
    """

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self._job = job
        self._cluster = cluster
        self._sizes = bytes_by_window(job)
        self._most_of_machines: list[int] = []
        self._from_storage: list[int] = []
        self._read: list[int] = []
        self._seconds: list[float] = []

    def add(self, step: SimulatedStep, seconds: float | None) -> None:
        """Count what a step reads.

        Args:
            step: the step.
            seconds: that it takes. None: they are not known.
        """
        parts = self._job.config.context_parallel
        read = 0
        windows_by_machine: dict[int, set[str]] = {}
        for group, (begin, end) in enumerate(step.ranges):
            windows = step.window_ids[begin:end]
            read += parts * self._bytes_of(windows)
            ranks = (group * parts, group * parts + parts - 1)
            first, last = map(self._cluster.machine_of, ranks)
            for machine in range(first, last + 1):
                windows_by_machine.setdefault(machine, set()).update(windows)

        from_storage = list(map(self._bytes_of, windows_by_machine.values()))
        self._read.append(read)
        self._most_of_machines.append(max(from_storage))
        self._from_storage.append(sum(from_storage))
        if seconds is not None:
            self._seconds.append(seconds)

    def _bytes_of(self, window_ids: Iterable[str]) -> int:
        return sum(self._sizes[window_id] for window_id in window_ids)

    def to_json(self) -> dict[str, Any]:
        """Return bytes a step, and what the storage must give in a second."""
        rate = None
        if self._seconds:
            rates = [
                count / seconds
                for count, seconds in zip(
                    self._from_storage, self._seconds, strict=True
                )
            ]
            mean = sum(self._from_storage) / sum(self._seconds)
            rate = {"mean": round(mean), "most": round(max(rates))}
        return {
            "read_bytes_a_step": _mean_and_most(self._read),
            "storage_bytes_a_step": _mean_and_most(self._from_storage),
            "storage_bytes_a_step_and_machine": _mean_and_most(self._most_of_machines),
            "storage_bytes_a_second": rate,
        }


def _mean_and_most(values: Sequence[int]) -> dict[str, int]:
    return {"mean": round(fmean(values)), "most": max(values)}


def bytes_by_window(job: Job) -> dict[str, int]:
    """Return the bytes that a sample of each window reads from the cache, at most: its
    latents, its caption, and every condition that it may have.
    """
    spec = job.spec
    text = 0
    if not job.config.text_in_step:
        text = 4 * (spec.text_tokens * spec.text_width + spec.text_numbers)

    conditions: dict[str, dict[str, int]] = {}
    for sample in cache_items_of(job).conditions:
        by_type = conditions.setdefault(sample.window.id, {})
        size = condition_bytes(sample, spec)
        by_type[sample.type] = max(size, by_type.get(sample.type, 0))

    sizes = {}
    for bucket in job.buckets:
        for window in bucket:
            latents = 4 * spec.cached_numbers(window.shape)
            of_conditions = sum(conditions.get(window.id, {}).values())
            sizes[window.id] = latents + text + of_conditions
    return sizes


@dataclass(frozen=True)
class SaveTimes:
    """Seconds of a checkpoint."""

    staging: float
    """Copying what a process saves into host memory."""
    writing: float
    """Hashing and writing it."""


def saves_of(
    job: Job,
    cluster: Cluster,
    checkpoint_bytes: int,
    step_seconds: float,
    staging_rate: float,
    storage: float | None,
) -> dict[str, Any]:
    """Return the bytes of the checkpoints, and for how long the steps wait for them.

    Args:
        job: the run.
        cluster: its machines.
        checkpoint_bytes: tensors of a checkpoint.
        step_seconds: of a step without checkpoints, on average.
        staging_rate: bytes a second from a card to its host.
        storage: bytes a second that the disk of the run folder takes. None: assumed.
    """
    writers = cluster.processes if saves_together(job) else 1
    bytes_a_writer = checkpoint_bytes / writers
    storage_writes = storage or STORAGE_WRITES
    times = SaveTimes(
        staging=bytes_a_writer / staging_rate,
        writing=max(bytes_a_writer / PROCESS_WRITES, checkpoint_bytes / storage_writes),
    )

    steps = steps_that_save(job)
    training = job.steps * step_seconds
    waits = {
        "blocking": len(steps) * times.writing,
        "asynchronous": asynchronous_wait(steps, step_seconds, times),
    }
    return {
        "count": len(steps),
        "bytes": checkpoint_bytes,
        "writers": writers,
        "bytes_a_writer": round(bytes_a_writer),
        "storage_bytes_a_second": round(storage_writes),
        "storage_is_assumed": storage is None,
        "staging_seconds": round(times.staging, 4),
        "writing_seconds": round(times.writing, 4),
        "waiting_seconds": {name: round(wait, 3) for name, wait in waits.items()},
        "waiting_shares": {
            name: round(wait / (training + wait), 6) for name, wait in waits.items()
        },
    }


def steps_that_save(job: Job) -> list[int]:
    """Return the steps after which a run saves: by ``save_every`` and
    ``backup_every``, and the last one.
    """
    config = job.config
    steps = {job.steps}
    for every in (config.save_every, config.backup_every):
        if every:
            steps.update(range(every, job.steps + 1, every))
    return sorted(steps)


def asynchronous_wait(
    steps: Sequence[int], step_seconds: float, times: SaveTimes
) -> float:
    """Return for how many seconds steps wait while threads write checkpoints: for the
    copies, for a write that is not done when the next one begins, and for the last one.

    Args:
        steps: after which a checkpoint is saved.
        step_seconds: of a step.
        times: of a checkpoint.
    """
    waited = 0.0
    still_writing = 0.0
    done = 0
    for step in steps:
        training = (step - done) * step_seconds
        waited += max(0.0, still_writing - training) + times.staging
        still_writing = times.writing
        done = step
    return waited + still_writing
