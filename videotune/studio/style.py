"""How the studio looks: Gradio's theme without fonts from elsewhere, our own parts, and the report's charts among them."""

from pathlib import Path
from typing import Any

import videotune.reporter

OF_A_PAGE = (":root", "--", "@media (prefers", "*{", "body{", "main{", '"DejaVu Sans"')
"""What the report's rules for a page of its own begin with: the studio's page has others."""


def theme() -> Any:
    """Gradio's own colours with the system's fonts: nothing is fetched from anywhere."""
    import gradio as gr

    sans = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]
    return gr.themes.Default(primary_hue="blue", font=sans, font_mono=["ui-monospace", "DejaVu Sans Mono", "monospace"])


def css() -> str:
    """Our rules, and those of the report's sections, both within our own parts of the page alone."""
    report = (Path(videotune.reporter.__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    inside = "\n".join(line for line in report.splitlines() if not line.startswith(OF_A_PAGE))
    own = (Path(__file__).parent / "static" / "studio.css").read_text(encoding="utf-8")
    return f".vt{{{inside.strip()}}}\n{own}"
