"""The version, and when the program began: what any module may ask without importing the package."""

from time import perf_counter

__version__ = "0.2.0"

BEGUN = perf_counter()
"""When the program began, as near as it can say itself: the command line counts a run's time from here."""
