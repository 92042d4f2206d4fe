"""Describe how the data of a run has changed since it started."""

from pathlib import Path

from videotune.job.job import Job
from videotune.runs.schemas import read_record

COMPANION_KEYS = ("mask", "start_image")
"""Keys of a clip's account that name files which belong to it."""


def describe_change(account: Path, job: Job) -> str:
    """Describe what has changed in the data since a check.json was written."""
    old_clips = {}
    for clip_account in read_record(account, "check")["clips"]:
        if clip_account["used"] or clip_account["held_out"]:
            old_clips[clip_account["id"]] = clip_account
    clips = {
        clip.id: clip for clip in sorted(job.library.clips, key=lambda clip: clip.path)
    }

    accounts = {account["id"]: account for account in job.library.accounts}

    added = [clip.path for clip in clips.values() if clip.id not in old_clips]
    removed = sorted(
        old["path"] for clip_id, old in old_clips.items() if clip_id not in clips
    )
    old_paths = {old["path"] for old in old_clips.values()}
    changes: dict[str, list[str]] = {
        "added": [path for path in added if path not in old_paths],
        "removed": [path for path in removed if path not in added],
        "with other bytes under the same name": [
            path for path in added if path in old_paths
        ],
        "renamed": [],
        "with another caption": [],
        "with another mask or start image": [],
        "trained on before, now kept aside: the validation loss is no longer blind to them": [],
        "no longer kept aside": [],
    }
    for clip in clips.values():
        if clip.id not in old_clips:
            continue
        old = old_clips[clip.id]
        if Path(clip.path).name != Path(old["path"]).name:
            changes["renamed"].append(clip.path)
        if list(clip.captions) != old.get("captions"):
            changes["with another caption"].append(clip.path)
        if any(old.get(key) != accounts[clip.id][key] for key in COMPANION_KEYS):
            changes["with another mask or start image"].append(clip.path)
        if clip.held_out and old["used"]:
            key = "trained on before, now kept aside: the validation loss is no longer blind to them"
            changes[key].append(clip.path)
        if not clip.held_out and old["held_out"]:
            changes["no longer kept aside"].append(clip.path)

    parts = []
    for change, paths in changes.items():
        if paths:
            names = ", ".join(Path(path).name for path in paths[:3])
            if len(paths) > 3:
                names += ", …"
            count = "1 clip" if len(paths) == 1 else f"{len(paths)} clips"
            parts.append(f"{count} {change} ({names})")
    return "; ".join(parts) or "clips, their windows or how they are shown differ"
