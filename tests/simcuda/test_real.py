"""benchmarks/real.py from the first part to the page, on the stand-in card."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simcuda.with_card import ROOT, environment_with_card

PRESET = "wan 2.1 1.3B LoRA 16GB"


@pytest.mark.slow
def test_a_preset_is_measured_from_its_plan_to_its_page(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "real.py")
    words = ("--work", "real", "--peer", "other=sleep 0.0{steps}")
    done = subprocess.run(
        [sys.executable, script, "--tiny", "--presets", PRESET, *words],
        capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path,
        env=environment_with_card(tmp_path / "site"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    page = tmp_path / "real" / "page"
    found = json.loads((page / "real.json").read_text(encoding="utf-8"))
    row = found["presets"][PRESET]
    assert "stand-in card" in found["machine"]["device"]
    assert row["run"]["gib"] is not None, "the peak on the card"
    assert row["run"]["seconds_a_step"] > 0
    assert 0 < row["peers"]["other"]["seconds_a_step"] < 1
    assert row["profile"]
    text = (page / "README.md").read_text(encoding="utf-8")
    assert row["previews"]["picture"] in text
    assert (page / row["previews"]["picture"]).stat().st_size > 1000
