"""What every command needs first: the words of the command line, settled into a config, a base, a library and a schedule.

Nothing here imports torch, so that ``check`` and ``plan`` of a dataset start at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.cache.schedule import Schedule, views
from videotune.config.load import merge, parse_sets, read_config, read_preset
from videotune.config.resolve import Resolved, resolve, total_steps
from videotune.config.schema import Config
from videotune.data.library import Library, LibrarySettings, Source, buckets, scan
from videotune.data.windows import WindowSettings
from videotune.errors import DoesNotFit, VideotuneError
from videotune.families.find import place, spec_for
from videotune.files import digest
from videotune.monitor.exposure import Exposure, exposure
from videotune.types import BasePlace, ClipShape, FamilySpec, Window


@dataclass(frozen=True)
class Words:
    """What a command was told: --preset, --config, --family, --data, and each --set."""

    preset: str | None = None
    config: Path | None = None
    family: str | None = None
    data: str | None = None
    sets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """A settled run, before any model is loaded. ``buckets`` are the schedule's, the dearest first."""

    resolved: Resolved
    spec: FamilySpec
    base: BasePlace | None
    library: Library
    shapes: tuple[ClipShape, ...]
    buckets: tuple[tuple[Window, ...], ...]
    schedule: Schedule
    steps: int
    cache: Path
    notes: tuple[str, ...]

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.resolved.config

    def exposure(self, steps: int) -> Exposure:
        """Views of every window and clip after so many steps."""
        return exposure(views(self.schedule, steps), self.buckets)

    def data_digest(self) -> str:
        """Names what is trained on: windows, captions and the held-out clips."""
        clips = sorted((clip.id, list(clip.captions), clip.held_out) for clip in self.library.clips)
        windows = [window.id for window in (*self.library.windows, *self.library.held_out_windows)]
        return digest({"clips": clips, "windows": windows})


def layers(words: Words) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the person's own keys, the preset's)."""
    user = read_config(words.config) if words.config else {}
    if words.family:
        user = merge(user, {"family": words.family})
    if words.data:
        user = merge(user, {"datasets": [{"path": words.data}]})
    preset = read_preset(words.preset) if words.preset else {}
    return anchored(merge(user, parse_sets(words.sets))), anchored(preset)


def anchored(layer: dict[str, Any]) -> dict[str, Any]:
    """The same keys with local paths made absolute, so that a run can be resumed from any folder."""
    out = dict(layer)
    if isinstance(out.get("datasets"), list):
        out["datasets"] = [
            {**row, "path": absolute(row["path"])}
            if isinstance(row, dict) and isinstance(row.get("path"), str)
            else row
            for row in out["datasets"]
        ]
    for name in ("base_model_name", "cache_dir", "output_model_destination"):
        value = out.get(name)
        if isinstance(value, str) and (name != "base_model_name" or Path(value).expanduser().is_dir()):
            out[name] = absolute(value)
    return out


def absolute(path: str) -> str:
    """A path as it is from anywhere."""
    return str(Path(path).expanduser().absolute())


def settle(words: Words) -> tuple[Resolved, FamilySpec, BasePlace | None]:
    """Config layers and the base model they name.

    Raises VideotuneError where neither a family nor a base model is given.
    """
    user, preset = layers(words)
    named = merge(preset, user)
    base = place(named["base_model_name"], weights=False) if named.get("base_model_name") else None
    family = named.get("family")
    if base is None and family is None:
        raise VideotuneError(
            "which model? Give --preset NAME (see `videotune presets list`), --config FILE, or --set base_model_name=…"
        )
    spec = spec_for(family, base)
    return resolve(user, preset, spec), spec, base


def open_job(
    resolved: Resolved,
    spec: FamilySpec,
    base: BasePlace | None,
    progress: Callable[[int, int, str], None] | None = None,
    *,
    to_look: bool = False,
) -> Job:
    """Scan the data and lay out the schedule.

    Raises VideotuneError where no dataset is given, captions are missing or nothing can be used; but not ``to_look``:
    then a clip without a caption is one that is skipped, and there may be no window.
    """
    config = resolved.config
    if not config.datasets:
        raise VideotuneError("datasets: which clips? Give --data DIR, or datasets in the config.")
    cache = Path(config.cache_dir or Path(config.datasets[0].path) / ".videotune-cache").expanduser()
    video = config.video_config
    settings = LibrarySettings(
        windows=WindowSettings(
            max_frames=video.max_frames,
            frames=video.frames,
            strict_frames=video.strict_frames,
            min_frames=video.min_frames,
            target_fps=video.target_fps,
            max_duration=video.max_duration,
            windows=video.windows,
        ),
        resolution=config.resolution if config.resolution is not None else spec.default_resolution,
        missing_caption="skip" if to_look and config.missing_caption == "error" else config.missing_caption,
        validation_fraction=config.validation_fraction,
        seed=config.seed,
    )
    sources = [Source(dataset.path, dataset.trigger) for dataset in config.datasets]
    try:
        library = scan(sources, spec.rules, settings, cache / "index.json", progress)
    except OSError as error:
        raise VideotuneError(f"the cache {cache} cannot be written: {error}. Set cache_dir elsewhere.") from error
    if not library.windows and not to_look:
        reasons = "\n".join(f"  {path}: {reason}: {detail}" for path, reason, detail in library.skipped[:10])
        raise DoesNotFit(f"no clip can be trained on:\n{reasons}")
    shaped = buckets(library)
    sizes = tuple(len(bucket) for bucket in shaped.values())
    batch = config.batch_size * config.gradient_accumulation_steps
    steps, arithmetic = total_steps(config, sum(sizes))
    return Job(
        resolved=resolved,
        spec=spec,
        base=base,
        library=library,
        shapes=tuple(shaped),
        buckets=tuple(tuple(bucket) for bucket in shaped.values()),
        schedule=Schedule(config.seed, sizes or (1,), batch, config.shuffle),
        steps=steps,
        cache=cache,
        notes=(*library.notes, *((arithmetic,) if arithmetic else ())),
    )


def refuse_skips(job: Job, allow: str | None) -> None:
    """Stop where clips are skipped and the person has not allowed so many by name ("all", or a number).

    Raises DoesNotFit that lists them.
    """
    skipped = job.library.skipped
    if allow not in (None, "all") and not allow.isdigit():
        raise VideotuneError(f"--allow-skips takes a number or all, not {allow!r}")
    if not skipped or allow == "all":
        return
    if allow is not None and len(skipped) <= int(allow):
        return
    lines = "\n".join(f"  {path}: {reason}: {detail}" for path, reason, detail in skipped[:10])
    more = f"\n  … and {len(skipped) - 10} more" if len(skipped) > 10 else ""
    raise DoesNotFit(
        f"{len(skipped)} of the clips would be skipped:\n{lines}{more}\n"
        f"Mend or remove them, or allow it: --allow-skips {len(skipped)}"
    )


def with_views(job: Job, account: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The clip account with the views of each training clip by the end."""
    seen = job.exposure(steps).clips if job.buckets else {}
    by_path = {clip.path: seen.get(clip.id, 0) for clip in job.library.clips if not clip.held_out}
    clips = [clip | {"views": by_path.get(clip["path"])} for clip in account["clips"]]
    return {**account, "clips": clips}
