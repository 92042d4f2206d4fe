"""mkdocs hooks: each page's Markdown beside its HTML, and llms.txt, the list of them for programs that read text."""

from pathlib import Path
from typing import Any


def on_post_build(config: Any) -> None:
    """Copy the pages' sources to PAGE/index.md and write llms.txt."""
    site, docs = Path(config["site_dir"]), Path(config["docs_dir"])
    lines = [
        f"# {config['site_name']}",
        "",
        f"> {config['site_description']}",
        "",
        "## Docs",
        "",
    ]
    for page in sorted(docs.glob("*.md")):
        target = site / "index.md" if page.stem == "index" else site / page.stem / "index.md"
        if target.parent.is_dir():
            text = page.read_text(encoding="utf-8")
            target.write_text(text, encoding="utf-8")
            title = next(line[2:] for line in text.splitlines() if line.startswith("# "))
            lines.append(f"- [{title}]({target.relative_to(site).as_posix()})")
    agents = docs.parent / "AGENTS.md"
    (site / "AGENTS.md").write_text(agents.read_text(encoding="utf-8"), encoding="utf-8")
    lines.append("- [For programs that drive videotune](AGENTS.md)")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
