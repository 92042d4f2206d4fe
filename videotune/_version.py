"""The version and the start time, without importing the package."""

from time import perf_counter

__version__ = "0.2.0"

BEGUN = perf_counter()
"""Start of the program. The command line measures a run's time from here."""
