"""The parts of the report that the page Train shows have styles of the studio's own."""

import re
from pathlib import Path

from videotune import studio
from videotune.reporter.charts import Line, line_chart
from videotune.studio.web import render

WITHOUT_STYLE = {"chart"}
"""Classes that need no style."""


def test_each_class_of_a_chart_has_a_style() -> None:
    chart = line_chart(
        [
            Line("training clips", [(0, 1.0), (20, 0.6)], "one", dots=True),
            Line("held out", [(0, 1.0), (20, 0.8)], "two pale", dots=True),
        ],
        says="Error by step",
        x_label="step",
        marks=[20],
    )
    grounds = {"chart": chart, "best": 20, "changes": [], "clips": []}
    exposure = {"absent": "", "clips": [], "regularization": {"num": 0}}
    page = render("train_exposure", d=exposure, grounds=grounds)

    folder = Path(studio.__file__).parent / "static"
    styles = (folder / "studio.css").read_text() + (folder / "train.css").read_text()
    classes = set(" ".join(re.findall(r'class="([^"]+)"', page)).split())
    assert {"axes", "plot", "line", "key"} <= classes
    unstyled = {name for name in classes if not re.search(rf"\.{name}\b", styles)}
    assert unstyled <= WITHOUT_STYLE
