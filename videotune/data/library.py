"""Datasets -> Library: which clips are used, which are held out, which are skipped and why, and the windows to train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from videotune.types import Clip, ClipShape, VideoRules, Window

from .account import ClipAccount, clip_account, dataset_notes, skipped_account
from .drafts import (
    Dataset,
    Draft,
    LibrarySettings,
    Skip,
    Source,
    check,
    examine,
    look_at,
    notes_on_settings,
    open_dataset,
)
from .facts import ClipProblem, Facts
from .holdout import hold_out
from .index import Progress
from .sources import NamedClip, group, near_duplicates
from .untrusted import refuse_links

if TYPE_CHECKING:
    from .workers import Workers

__all__ = ["Library", "LibrarySettings", "Source", "buckets", "scan"]


@dataclass(frozen=True)
class Library:
    """The clips of a run and the windows laid over them.

    ``clips`` are those used and those held out; ``windows`` those of training clips, ``held_out_windows`` the others', each
    in path order; ``skipped`` (path, reason, detail); ``accounts`` one a file found; ``notes`` what is to be said about
    the whole; ``facts`` by clip id; ``roots`` the folders in which the datasets lie.
    """

    clips: tuple[Clip, ...]
    windows: tuple[Window, ...]
    held_out_windows: tuple[Window, ...]
    skipped: tuple[tuple[str, str, str], ...]
    accounts: tuple[ClipAccount, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Facts]
    roots: tuple[Path, ...] = ()

    @cached_property
    def regularization(self) -> frozenset[str]:
        """The ids of the clips that are shown to keep the model as it is."""
        return frozenset(clip.id for clip in self.clips if clip.kind == "regularization")


def scan(
    sources: Sequence[Source],
    rules: VideoRules,
    settings: LibrarySettings,
    index_path: Path | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> Library:
    """Read datasets into a Library; files are opened only where the index does not know them.

    VideotuneError for a dataset without clips, for captions that are not there unless ``missing_caption`` allows it, and
    for settings that the model cannot take.
    """
    check(sources, settings)
    notes = notes_on_settings(settings.windows, settings.shrink, rules)
    cache = index_path.parent if index_path is not None else None
    if cache is not None:
        refuse_links(cache)
    datasets = [open_dataset(source, rules, settings, cache, progress) for source in sources]
    notes += [note for dataset in datasets for note in (*_where_from(dataset), *dataset.layout.notes)]
    found, index_notes = look_at(datasets, settings, index_path, progress, workers)
    outcomes = examine(found, rules, settings)
    drafts = [outcome for outcome in outcomes if isinstance(outcome, Draft)]
    called = _dataset_names(datasets)
    named = [_named(draft, called[draft.found.dataset.layout.root]) for draft in drafts]
    names, source_notes = group(named)
    kinds = [draft.found.dataset.source.kind for draft in drafts]
    validated = any(source.kind == "validation" for source in sources)
    held, split_notes = hold_out(names, kinds, settings.validation_fraction, settings.seed, validated)
    notes += [
        *index_notes,
        *source_notes,
        *split_notes,
        *dataset_notes(drafts, settings.windows, rules),
    ]
    return _assemble(outcomes, names, held, _twins(named), notes, settings, datasets)


def _where_from(dataset: Dataset) -> list[str]:
    """A dataset of the Hub with its commit, so that the same one can be had again; nothing of what lies here."""
    origin = dataset.layout.origin
    return [f"{dataset.source.path} is {origin}"] if origin.startswith("hf://") else []


def _dataset_names(datasets: Sequence[Dataset]) -> dict[Path, str]:
    """A name for each dataset's folder: its own, with its parents' where two have the same."""
    names = {dataset.layout.root: dataset.layout.name for dataset in datasets}
    for depth in range(1, max((len(root.absolute().parts) for root in names), default=1)):
        twice = {name for name in names.values() if list(names.values()).count(name) > 1}
        if not twice:
            break
        for dataset in datasets:
            root, own = dataset.layout.root, dataset.layout.name
            if names[root] in twice:
                above = dataset.source.path.rstrip("/").split("/")[-1 - depth : -1]
                names[root] = "/".join([*above, own])
    return names


def _named(draft: Draft, dataset: str) -> NamedClip:
    look = draft.found.look
    assert not isinstance(look, ClipProblem)
    layout = draft.found.dataset.layout
    return NamedClip(draft.found.file.path, layout.root, draft.facts.seconds, look, dataset)


def _twins(named: Sequence[NamedClip]) -> dict[str, str]:
    """For a clip that shows nearly the same as another: that other's path in its dataset."""
    twins: dict[str, str] = {}
    for i, j in near_duplicates(named):
        for one, other in ((named[j], named[i]), (named[i], named[j])):
            twins.setdefault(str(one.path), str(other.path.relative_to(other.root)))
    return twins


def _assemble(
    outcomes: Sequence[Draft | Skip],
    names: Sequence[str],
    held_out: Sequence[bool],
    twins: Mapping[str, str],
    notes: Sequence[str],
    settings: LibrarySettings,
    datasets: Sequence[Dataset],
) -> Library:
    """The library of these outcomes; ``names`` and ``held_out`` are those of the drafts, in order."""
    clips: list[Clip] = []
    windows: dict[bool, list[Window]] = {False: [], True: []}
    accounts: list[ClipAccount] = []
    drafts = iter(zip(names, held_out, strict=True))
    for outcome in outcomes:
        if isinstance(outcome, Skip):
            accounts.append(skipped_account(outcome.path, outcome.reason, outcome.detail, outcome.facts))
            continue
        name, held = next(drafts)
        clip = _clip(outcome, name, held)
        laid = list(_windows(outcome, clip, settings))
        clips.append(clip)
        windows[held] += laid
        accounts.append(clip_account(outcome, clip, laid, settings.resize, twins.get(clip.path)))
    return Library(
        clips=tuple(clips),
        windows=tuple(windows[False]),
        held_out_windows=tuple(windows[True]),
        skipped=tuple((o.path, o.reason, o.detail) for o in outcomes if isinstance(o, Skip)),
        accounts=tuple(accounts),
        notes=tuple(notes),
        facts={outcome.id: outcome.facts for outcome in outcomes if isinstance(outcome, Draft)},
        roots=tuple(dataset.layout.root for dataset in datasets),
    )


def _clip(draft: Draft, name: str, held_out: bool) -> Clip:
    source = draft.found.dataset.source
    return Clip(
        id=draft.id,
        path=draft.path,
        source=name,
        captions=draft.captions,
        held_out=held_out,
        kind=source.kind,
        repeats=source.repeats * draft.repeats[1],
        loss_weight=source.loss_weight,
        target=source.target if source.kind == "regularization" else "clip",
        still=draft.facts.still,
    )


def _windows(draft: Draft, clip: Clip, settings: LibrarySettings) -> Iterator[Window]:
    """The clip's windows; nothing is drawn at random for those held out."""
    resize = "center" if clip.held_out and settings.resize == "random" else settings.resize
    laid_clip = draft.plainly if clip.held_out else draft.laid
    for laid in laid_clip.windows:
        shape = ClipShape(laid.frames, *draft.size, laid_clip.fps)
        yield Window(clip.id, laid.start, laid.end, shape, laid.sampling, laid.swaps, resize)


def buckets(library: Library) -> dict[ClipShape, list[Window]]:
    """The training windows by shape, the dearest shape (frames · height · width) first, in path order.

    A window of a dataset with repeats stands in its bucket so many times: all windows, then those with a second copy, ….
    """
    repeats = {clip.id: clip.repeats for clip in library.clips}
    shapes = {window.shape for window in library.windows}
    ordered = sorted(shapes, key=lambda shape: (-shape.frames * shape.height * shape.width, shape))
    entries: dict[ClipShape, list[Window]] = {shape: [] for shape in ordered}
    for copy in range(max(repeats.values(), default=1)):
        for window in library.windows:
            if copy < repeats[window.clip_id]:
                entries[window.shape].append(window)
    return entries
