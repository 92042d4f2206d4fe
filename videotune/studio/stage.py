"""A part of the path of a project, from clips to a result."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, urlencode

from videotune.studio.projects import Project

StageState = Literal["done", "open", "blocked", "busy"]
"""Open: the user has something to do. Blocked: what is there cannot be used as it is.
Busy: the studio or a run works on it.
"""


@dataclass(frozen=True)
class Stage:
    """A part of the path."""

    name: str
    """Import, clips, captions, model, plan, run or result."""

    state: StageState

    text: str
    """How it stands: "13 clips", "2 of 13 without a caption"."""

    page: str
    """The page on which the user goes on."""

    action: str = ""
    """What the user does next here, as the words of a button; empty if nothing."""

    run: str = ""
    """The run that the page should show."""

    clips: str = ""
    """The state of the clips that the page Data should show."""

    part: str = ""
    """The part of the page that is meant."""

    def address(self, project: Project) -> str:
        """Return the address of its page."""
        values = {"run": self.run, "state": self.clips}
        query = urlencode({key: value for key, value in values.items() if value})
        address = f"/p/{quote(project.name, safe='')}/{self.page}"
        if query:
            address += f"?{query}"
        return f"{address}#{self.part}" if self.part else address
