"""The tests of making the toy import its script from research/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "research"))
