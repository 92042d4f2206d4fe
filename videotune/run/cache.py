"""``cache``: encode clips and captions now, so that a training starts at once."""

from __future__ import annotations

from videotune.cache.store import Store
from videotune.errors import DONE
from videotune.run.console import bar, say
from videotune.run.job import Words, open_job, refuse_skips, settle
from videotune.run.models import fill_cache, open_models, prompts_of


def cache(words: Words, *, allow_skips: str | None = None) -> int:
    """Fill the cache with everything that a run of these words would need."""
    resolved, spec, base = settle(words)
    with bar("reading clips") as progress:
        job = open_job(resolved, spec, base, lambda done, total, path: progress.update(done, total, path))
    refuse_skips(job, allow_skips)
    for note in job.notes:
        say(f"note: {note}")
    family = open_models(spec, base, job.config)
    fill_cache(job, family, Store(job.cache), prompts_of(job))
    print(f"{len(job.library.windows) + len(job.library.held_out_windows)} windows are cached in {job.cache}")
    return DONE
