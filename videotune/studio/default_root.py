"""The folder of the projects, where the command line names none."""

from pathlib import Path

FOLDER_NAME = "videotune-projects"


def default_root() -> Path:
    """Return the folder of projects of this user: the one in the home folder, wherever
    the studio is started. A folder of the same name below the current folder comes
    first, since earlier versions put the projects there.
    """
    here = Path.cwd() / FOLDER_NAME
    return here if here.is_dir() else Path.home() / FOLDER_NAME


def other_root(root: Path) -> Path | None:
    """Return another folder of projects that the user has: the one in the home folder;
    None if there is none, or it is ``root`` itself.
    """
    home_root = Path.home() / FOLDER_NAME
    is_same = home_root.resolve() == root.resolve()
    return None if is_same or not home_root.is_dir() else home_root
