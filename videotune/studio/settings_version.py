"""When the settings of a project were last changed, by which pages see a change of another
tab.
"""

from contextlib import suppress

from videotune.studio.projects import CONFIG, PROJECT_FILE, Project


def settings_version(project: Project) -> int:
    """Return a number that grows with each change of the settings or the facts: the time
    of the last one, in microseconds.
    """
    times = [0]
    for name in (CONFIG, PROJECT_FILE):
        with suppress(OSError):
            times.append((project.folder / name).stat().st_mtime_ns // 1000)
    return max(times)
