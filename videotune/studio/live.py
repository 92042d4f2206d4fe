"""Live pages: one stream of server-sent events a page, which carries the regions that have changed."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from videotune.errors import VideotuneError
from videotune.studio.web import Regions, asked, made, tag

EVERY = 1.0
"""Seconds between two looks at what a page shows, while nobody changes anything."""


def router(pages: Mapping[str, Regions]) -> APIRouter:
    """The stream of every page; ``tags`` in its address say what the page shows already."""
    routes = APIRouter()

    def regions_of(page: str) -> Regions:
        if page not in pages:
            raise HTTPException(404, "there is no such page")
        return pages[page]

    @routes.get("/live", response_class=EventSourceResponse)
    async def live(
        request: Request, regions: Annotated[Regions, Depends(regions_of)], tags: str = ""
    ) -> AsyncIterator[ServerSentEvent]:
        shown = dict(each.split(":", 1) for each in tags.split(",") if ":" in each)
        while not request.app.state.is_ending():
            ticket = request.app.state.changes.ticket()
            try:
                now = await run_in_threadpool(asked, request)
            except VideotuneError as error:
                yield ServerSentEvent(event="gone", data=str(error))
                return
            for name in [one for one in regions if one in shown]:
                text = await run_in_threadpool(made, regions, name, now)
                if shown[name] != (new := tag(text)):
                    shown[name] = new
                    yield ServerSentEvent(
                        event="region", data={"id": f"r-{name}", "html": text, "tag": new}
                    )
            with suppress(TimeoutError):
                await asyncio.wait_for(ticket.wait(), EVERY)

    return routes
