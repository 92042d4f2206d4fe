"""videotune fine-tunes video diffusion models on your own clips, and tells the truth about the run."""

import logging
import os
from time import perf_counter

__version__ = "0.1.0"

# Products of matrices on the CPU have the same bits wherever their operands lie: without it a weight that is mapped from a
# file and its copy elsewhere round differently on some processors. MKL reads it at its first call.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on some CPUs it asks for a package that is not needed

BEGUN = perf_counter()
"""When the program began, as near as it can say itself: the command line counts a run's time from here."""
