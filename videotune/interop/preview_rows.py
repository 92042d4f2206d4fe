"""Previews of a translated config: only what the model can sample."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from videotune.config import suggestions
from videotune.data.frame_counts import frame_rule, snap_frames
from videotune.interop.translated_key import TranslatedKey
from videotune.model_spec import ModelSpec


def with_valid_previews(
    rows: Sequence[TranslatedKey], spec: ModelSpec | None
) -> list[TranslatedKey]:
    """Return the rows with previews that the model can sample: their frames, and an
    image to begin with only if it takes one.

    Args:
        rows: the rows.
        spec: facts about the base model, if it is known.
    """
    if spec is None:
        return list(rows)

    result = []
    for row in rows:
        ours = dict(row.ours)
        if "sample.frames" in ours:
            ours["sample.frames"] = _valid_frames(ours["sample.frames"], spec)
        if isinstance(ours.get("samples"), list):
            ours["samples"] = [
                _valid_prompt(prompt, spec) for prompt in ours["samples"]
            ]

        notes = [row.note]
        if _texts_of("image", ours) != _texts_of("image", row.ours):
            notes.append(f"{spec.title} takes no image to begin with")
        if _texts_of("last_frame", ours) != _texts_of("last_frame", row.ours):
            notes.append("a last frame needs last_frame in conditions")
        if _texts_of("frames", ours) != _texts_of("frames", row.ours):
            notes.append(f"{spec.title} samples {frame_rule(spec.rules)}")
        if ours != row.ours:
            note = "; ".join(filter(None, notes))
            row = replace(row, ours=ours, verdict="translated", note=note)
        result.append(row)
    return result


def with_given_files(rows: Sequence[TranslatedKey]) -> list[TranslatedKey]:
    """Return the rows with previews that a run can make which is given the whole video or
    the whole sound: only those that name its file.
    """
    learnt = {tuple(row.ours["generate"]) for row in rows if row.ours.get("generate")}
    needed = {("video",): "sound", ("sound",): "video"}
    names = {needed[parts] for parts in learnt if parts in needed}
    return [_with_given_files(row, names) for row in rows]


def _with_given_files(row: TranslatedKey, names: set[str]) -> TranslatedKey:
    """Return a row with the previews that name all of these files and no other ones.

    Args:
        row: the row.
        names: "sound", "video" or nothing.
    """
    prompts = row.ours.get("samples")
    if not isinstance(prompts, list):
        return row

    valid_prompts = []
    for prompt in prompts:
        keys = dict(prompt) if isinstance(prompt, dict) else {"prompt": prompt}
        if not names <= set(keys):
            continue
        for name in ("sound", "video"):
            if name not in names:
                keys.pop(name, None)
        valid_prompts.append(keys if len(keys) > 1 else keys["prompt"])
    if valid_prompts == prompts:
        return row

    ours = {key: value for key, value in row.ours.items() if key != "samples"}
    if valid_prompts:
        ours["samples"] = valid_prompts
    note = row.note
    if len(valid_prompts) < len(prompts):
        needed_files = " and ".join(sorted(names))
        left_out = (
            f"a preview of this run needs a {needed_files}: prompts without one that is here "
            "are left out"
        )
        note = f"{note}; {left_out}" if note else left_out
    verdict = row.verdict if ours or row.verdict == "differs" else "none"
    return replace(row, ours=ours, verdict=verdict, note=note)


def _texts_of(name: str, value: Any) -> list[str]:
    """Return the values of a key wherever it is in nested data, as texts."""
    leaves = suggestions.flat_leaves(value)
    return [str(leaf) for key, leaf in leaves.items() if key.split(".")[-1] == name]


def _valid_frames(frames: Any, spec: ModelSpec) -> Any:
    is_count = isinstance(frames, int) and frames > 0
    return snap_frames(frames, spec.rules) if is_count else frames


def _valid_prompt(prompt: Any, spec: ModelSpec) -> Any:
    """Return an entry of ``samples`` with what the model can sample."""
    if not isinstance(prompt, dict):
        return prompt
    valid_prompt = dict(prompt)
    if "frames" in prompt:
        valid_prompt["frames"] = _valid_frames(prompt["frames"], spec)
    if spec.image_conditioning == "none":
        valid_prompt.pop("image", None)
    # An imported config learns none.
    valid_prompt.pop("last_frame", None)
    return valid_prompt
