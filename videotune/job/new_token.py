"""The new token of an embedding, in the captions of a library."""

from dataclasses import replace

from videotune.config.schema import Config
from videotune.data.captions import with_token
from videotune.data.library import Library


def with_new_token(library: Library, config: Config) -> tuple[Library, list[str]]:
    """Put the new token of an embedding into every caption that lacks it, because such
    a caption would teach nothing.

    Returns:
        The library, and notes on what was done.
    """
    if config.training_method != "EMBEDDING":
        return library, []

    token = config.embedding.token
    lacking = 0
    total = 0
    clips = []
    for clip in library.clips:
        total += len(clip.captions)
        lacking += sum(token not in caption for caption in clip.captions)
        captions = tuple(with_token(caption, token) for caption in clip.captions)
        clips.append(replace(clip, captions=captions))
    accounts = []
    for account in library.accounts:
        captions_of_account = [
            with_token(caption, token) for caption in account["captions"]
        ]
        accounts.append(account | {"captions": captions_of_account})

    notes = [f"the new token is {token!r}: use it in prompts"]
    if lacking:
        notes.append(
            f"{lacking} of {total} captions do not contain {token!r}: it is put in front of them"
        )
    return replace(library, clips=tuple(clips), accounts=tuple(accounts)), notes
