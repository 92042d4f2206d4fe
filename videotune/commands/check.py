"""``check``: account for every clip before anything is loaded."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from videotune.console import echo
from videotune.data.clip_table import map_rows
from videotune.data.dataset import to_json
from videotune.data.folder_listing import expected_captions_folder
from videotune.data.packed_rows import return_free_memory
from videotune.data.remarks import Remark, codes_of
from videotune.errors import DONE, FAILED, SKIPPED
from videotune.job.job import Job, open_job, with_views
from videotune.job.overrides import (
    ConfigSource,
    resolve_config,
    to_overrides,
    user_keys,
)
from videotune.job.skips import crop_blocker
from videotune.models.registry import find
from videotune.reporter.contact_sheet import contact_sheet as write_contact_sheet

DEFAULT_PRESET = "toy"

UNCOUNTED = "captions were not counted in tokens"
"""How the note begins that nothing was counted."""

COUNTED_TOGETHER = 5000
"""Clips whose captions are counted in tokens at once."""


@dataclass(frozen=True)
class CheckResult:
    """What would become of every clip."""

    account: dict[str, Any]
    """What ``check --json`` prints, with a row for each clip."""
    job: Job
    assumed: bool
    """Whether no model was named, so that the toy's rules were used."""

    @property
    def exit_code(self) -> int:
        """0: every clip is used or held out; 2: some are skipped, or the crop is too
        large; 1: some are skipped, and a training would end before it begins.
        """
        if crop_blocker(self.job) is not None:
            return SKIPPED
        if not self.account["skipped"]:
            return DONE
        return FAILED if self.account["blockers"] else SKIPPED


def check(
    config: ConfigSource = None,
    *,
    allow_skips: str | None = None,
    contact_sheet: Path | None = None,
    **overrides: Any,
) -> CheckResult:
    """Account for every clip: used, held out or skipped, with the reason.

    No model is loaded.

    Args:
        config: the config. Without a model the toy's rules are used.
        allow_skips: how many clips may be skipped: a number, or "all".
        contact_sheet: a folder for a page with pictures of each clip as it is trained.
        overrides: fields of ``Overrides``.
    """
    all_overrides = to_overrides(config, overrides, allow_skips)
    keys = user_keys(all_overrides)
    names_model = keys.get("family") or keys.get("base_model_name")
    assumed = not (all_overrides.preset or all_overrides.config or names_model)
    if assumed:
        all_overrides = replace(all_overrides, preset=DEFAULT_PRESET)

    job = open_job(*resolve_config(all_overrides, planning=True), to_look=True)
    return_free_memory()
    account = with_unused_sound(job, with_cut_captions(job, to_json(job.library)))
    account = with_views(job, account, job.steps)
    account["blockers"] = blockers(job)
    if contact_sheet is not None:
        for path, reason in write_contact_sheet(job, account, contact_sheet).items():
            echo(f"no picture of {path}: {reason}")
    return CheckResult(account, job, assumed)


def blockers(job: Job) -> list[str]:
    """Return what would end a training before it begins, however many clips may be
    skipped.
    """
    uncaptioned = sum(
        reason.endswith("_caption") for _, reason, _ in job.library.skipped
    )
    if not uncaptioned or job.config.missing_caption != "error":
        return []
    clips = "1 clip has" if uncaptioned == 1 else f"{uncaptioned} clips have"
    return [f"{clips} no usable caption, which ends a training before it begins"]


def uncaptioned_example(job: Job) -> Path | None:
    """Return the text file that a clip without a caption lacks, or None if each clip has
    one.
    """
    for path, reason, _ in job.library.skipped:
        if reason.endswith("_caption"):
            root = next(
                (root for root in job.library.roots if Path(path).is_relative_to(root)),
                Path(path).parent,
            )
            folder = expected_captions_folder(root, Path(path).parent)
            return folder / Path(path).with_suffix(".txt").name
    return None


def with_unused_sound(job: Job, account: dict[str, Any]) -> dict[str, Any]:
    """Return the account with a note on clips whose sound the run leaves out, if the
    model could learn it.
    """
    if job.config.reads_sound or job.spec.sound is None:
        return account
    clips = 0
    for clip in account["clips"]:
        sound = clip["sound"]
        is_usable = sound is not None and sound["problem"] is None
        clips += is_usable and clip["reason"] is None
    if not clips:
        return account

    have = "clip has" if clips == 1 else "clips have"
    note = Remark(
        "unused_sound",
        f"{clips} {have} sound, which this run does not use: "
        """--set 'generate=["video", "sound"]' trains with it""",
    )
    notes = [*account["notes"], note]
    return account | {"notes": notes, "note_codes": codes_of(notes)}


def token_counts(job: Job, captions: Iterable[str]) -> dict[str, int] | None:
    """Return the tokens of each caption, or None without a base model that has a fast
    tokenizer.
    """
    if job.base is None:
        return None
    texts = sorted(set(captions))
    lengths = find(job.spec.name).token_lengths(job.base.folder, texts)
    return None if lengths is None else dict(zip(texts, lengths, strict=True))


def captions_too_long(job: Job) -> dict[str, int] | None:
    """Return the tokens of the longest caption of each clip that has one longer than the
    model reads, by the clip's path. None if they cannot be counted.
    """
    if job.base is None:
        return None

    too_long = {}
    clips = job.library.clips
    for first in range(0, max(1, len(clips)), COUNTED_TOGETHER):
        part = clips[first : first + COUNTED_TOGETHER]
        captions: list[str] = []
        for clip in part:
            captions += clip.captions
        tokens_of = token_counts(job, captions)
        if tokens_of is None:
            return None

        for clip in part:
            tokens = max(tokens_of[caption] for caption in clip.captions)
            if tokens > job.spec.text_tokens:
                too_long[clip.path] = tokens
    return too_long


def with_cut_captions(job: Job, account: dict[str, Any]) -> dict[str, Any]:
    """Return the account with a warning for each clip that has a caption longer than
    the model reads.

    Without a base model that has a fast tokenizer, a note says that nothing was
    counted.
    """
    too_long = captions_too_long(job)
    if too_long is None:
        reason = "no base model is named"
        if job.base:
            reason = "the base model's tokenizer is not on this machine yet"
        notes = [*account["notes"], f"{UNCOUNTED}: {reason}"]
        return account | {"notes": notes, "note_codes": codes_of(notes)}

    def with_warning(row: dict[str, Any]) -> dict[str, Any]:
        tokens = too_long.get(row["path"], 0)
        if not tokens:
            return row
        text = (
            f"a caption has {tokens} tokens; the model reads {job.spec.text_tokens}, "
            "the rest is cut"
        )
        warnings = [*row["warnings"], Remark("caption", text)]
        return row | {"warnings": warnings, "warning_codes": codes_of(warnings)}

    return account | {"clips": map_rows(account["clips"], with_warning)}
