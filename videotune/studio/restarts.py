"""How processes of a run ended: unexpectedly, so that the queue has started the run again,
or because its clips have changed.
"""

from videotune.queue import jobs
from videotune.queue.entries import QueueEntry
from videotune.queue.jobs import QueuedJob
from videotune.reporter.read import Run
from videotune.studio import queue_page
from videotune.studio.status import process_progress
from videotune.studio.web import PageContext


def unexpected_end(
    page: PageContext, entry: QueueEntry | None, job: QueuedJob | None
) -> QueuedJob | None:
    """Return the process that ended unexpectedly and in whose place the queue has
    started the present one; None if there is none.
    """
    if entry is None or job is None or not job.is_running:
        return None
    earlier_jobs = [
        other
        for other in jobs.all_jobs(queue_page.queue_folder(page.root), entry.kind)
        if other.about == entry.name
        and other.turn == job.turn
        and other.started < job.started
    ]
    if earlier_jobs and earlier_jobs[0].state in ("dead", "failed"):
        return earlier_jobs[0]
    return None


def restart_step(run: Run, job: QueuedJob | None) -> int:
    """Return the step after which the present process of a run continues."""
    if job is not None and (run.written or 0) >= job.started:
        resume_record = run.last("resume")
        return int(resume_record["from_step"] or 0)
    return process_progress(run, job).done


def stopped_by_changed_clips(job: QueuedJob | None) -> bool:
    """Whether a resume has ended because clips or captions have changed."""
    if job is None or job.state != "failed":
        return False
    return "--allow-data-change" in jobs.describe_outcome(job)
