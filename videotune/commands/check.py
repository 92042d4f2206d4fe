"""``check``: what would become of every clip, before anything is loaded."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from videotune.console import echo
from videotune.data.dataset import to_json
from videotune.errors import DONE, FAILED, SKIPPED
from videotune.job.job import Job, crop_blocker, open_job, with_views
from videotune.job.overrides import (
    ConfigSource,
    resolve_config,
    to_overrides,
    user_keys,
)
from videotune.models.registry import find
from videotune.reporter.contact_sheet import contact_sheet as write_contact_sheet

DEFAULT_PRESET = "toy"


@dataclass(frozen=True)
class CheckResult:
    """``account``: what ``check --json`` prints, with a row for each clip.

    ``assumed``: no model was named, so the toy's rules hold.
    """

    account: dict[str, Any]
    job: Job
    assumed: bool

    @property
    def exit_code(self) -> int:
        """0: every clip is used or held out; 2: some are skipped; 1: a training would end before it begins."""
        if crop_blocker(self.job) is not None or not self.account["skipped"]:
            return SKIPPED if crop_blocker(self.job) is not None else DONE
        return FAILED if self.account["blockers"] else SKIPPED


def check(
    config: ConfigSource = None,
    *,
    allow_skips: str | None = None,
    contact_sheet: Path | None = None,
    **overrides: Any,
) -> CheckResult:
    """Account for every clip: used, held out or skipped, with the reason; no model is loaded.

    ``contact_sheet``: a folder for pictures of each clip as it is trained, and a page. Without a model the toy's rules hold.
    """
    words = to_overrides(config, overrides, allow_skips)
    named = user_keys(words)
    assumed = not (
        words.preset or words.config or named.get("family") or named.get("base_model_name")
    )
    words = replace(words, preset=DEFAULT_PRESET) if assumed else words
    job = open_job(*resolve_config(words, planning=True), to_look=True)
    account = with_views(job, with_cut_captions(job, to_json(job.library)), job.steps) | {
        "blockers": blockers(job)
    }
    if contact_sheet is not None:
        for path, why in write_contact_sheet(job, account, contact_sheet).items():
            echo(f"no picture of {path}: {why}")
    return CheckResult(account, job, assumed)


def blockers(job: Job) -> list[str]:
    """What would end a training before it begins, whatever is allowed to be skipped."""
    uncaptioned = sum(reason.endswith("_caption") for _, reason, _ in job.library.skipped)
    if not uncaptioned or job.config.missing_caption != "error":
        return []
    clips = "1 clip has" if uncaptioned == 1 else f"{uncaptioned} clips have"
    ways = 'write it or let `videotune caption`, or set missing_caption to "skip", "empty" or "text"'
    return [f"{clips} no usable caption, which ends a training before it begins: {ways}"]


def token_counts(job: Job, captions: Iterable[str]) -> dict[str, int] | None:
    """The tokens of each caption; None where no base model is named, or it comes without a fast tokenizer."""
    texts = sorted(set(captions))
    lengths = find(job.spec.name).token_lengths(job.base.folder, texts) if job.base else None
    return None if lengths is None else dict(zip(texts, lengths, strict=True))


def with_cut_captions(job: Job, account: dict[str, Any]) -> dict[str, Any]:
    """The account with a warning for each clip that has a caption longer than the model reads.

    Where no base model is named, or it comes without a fast tokenizer, nothing is counted, and that is said.
    """
    by_caption = token_counts(
        job, [caption for clip in job.library.clips for caption in clip.captions]
    )
    if by_caption is None:
        why = (
            "the base model has no tokenizer.json here"
            if job.base
            else "no base model is named"
        )
        return account | {
            "notes": [*account["notes"], f"captions were not counted in tokens: {why}"]
        }
    most = job.spec.text_tokens
    longest = {
        clip.path: max(by_caption[caption] for caption in clip.captions)
        for clip in job.library.clips
    }
    rows = []
    for row in account["clips"]:
        tokens = longest.get(row["path"], 0)
        cut = (
            [f"a caption has {tokens} tokens; the model reads {most}, the rest is cut"]
            if tokens > most
            else []
        )
        rows.append(row | {"warnings": [*row["warnings"], *cut]})
    return account | {"clips": rows}
