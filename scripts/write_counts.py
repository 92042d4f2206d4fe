"""Write tests/benchmarks/counts.json: the operations and bytes of the tiny model's step, ours and
those of other loops, which a test compares. They depend on torch's version.

    python scripts/write_counts.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from count import TINY, main  # noqa: E402

FILE = ROOT / "tests" / "benchmarks" / "counts.json"

if __name__ == "__main__":
    counts = main([TINY], ("train_dtype=BFLOAT_16",), with_peers=True)
    FILE.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
