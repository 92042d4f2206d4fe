"""Live pages: one stream of server-sent events per page, with the regions that have
changed.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from videotune.errors import VideotuneError
from videotune.studio.web import Regions, content_tag, page_context, render_region

POLL_INTERVAL = 1.0
"""Seconds between two renderings of an open page while no request changes anything."""

BEAT_INTERVAL = 0.5
"""Most seconds between two events of a stream; a page without one for three times as
long reports that the server does not answer.
"""


def router(pages: Mapping[str, Regions]) -> APIRouter:
    """Build the stream route of all pages; its ``tags`` parameter lists what a page
    shows.
    """
    routes = APIRouter()

    def regions_of(page: str) -> Regions:
        if page not in pages:
            raise HTTPException(404, "there is no such page")
        return pages[page]

    @routes.get("/live", response_class=EventSourceResponse)
    async def live(
        request: Request,
        page: str,
        regions: Annotated[Regions, Depends(regions_of)],
        tags: str = "",
    ) -> AsyncIterator[ServerSentEvent]:
        tag_by_region = _parse_tags(tags)

        while not request.app.state.is_ending():
            next_change = request.app.state.changes.next_change()
            try:
                context = await run_in_threadpool(page_context, request)
            except VideotuneError as error:
                yield ServerSentEvent(event="gone", data=str(error))
                return

            context = replace(context, name=page)
            for name in [name for name in regions if name in tag_by_region]:
                rendering = asyncio.ensure_future(
                    run_in_threadpool(render_region, regions, name, context)
                )
                async for beat in _beats_until(rendering):
                    yield beat
                text = rendering.result()
                tag = content_tag(text)
                if tag != tag_by_region[name]:
                    tag_by_region[name] = tag
                    data = {"id": f"r-{name}", "html": text, "tag": tag}
                    yield ServerSentEvent(event="region", data=data)

            waiting = asyncio.ensure_future(next_change.wait())
            async for beat in _beats_until(waiting, POLL_INTERVAL):
                yield beat

    return routes


def _parse_tags(tags: str) -> dict[str, str]:
    """Return the tag of each region that a page shows, from ``name:tag,name:tag``."""
    return dict(pair.split(":", 1) for pair in tags.split(",") if ":" in pair)


async def _beats_until(
    task: asyncio.Future[Any], timeout: float = math.inf
) -> AsyncIterator[ServerSentEvent]:
    """Yield a beat now and at each interval until a task is done, or cancel it after a
    timeout.

    A page that hears no beat knows that the server is gone, or frozen.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    try:
        yield ServerSentEvent(event="beat", data=0)
        while not task.done() and clock() < deadline:
            seconds = min(BEAT_INTERVAL, deadline - clock())
            await asyncio.wait({task}, timeout=seconds)
            yield ServerSentEvent(event="beat", data=0)
    finally:
        task.cancel()
