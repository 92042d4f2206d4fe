"""How the studio looks: Gradio's theme without fonts from elsewhere, and the styles of its own parts, light and dark."""

from __future__ import annotations

from typing import Any

from videotune.report.style import CSS as REPORT


def theme() -> Any:
    """Gradio's own colours with the system's fonts: nothing is fetched from anywhere."""
    import gradio as gr

    sans = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]
    return gr.themes.Default(primary_hue="blue", font=sans, font_mono=["ui-monospace", "DejaVu Sans Mono", "monospace"])


_INSIDE = "\n".join(line for line in REPORT.splitlines() if not line.startswith((":root", "--", "@media (prefers", "*{", "body{", "main{")) and "sans-serif}" not in line)
"""The report's rules, without those for a page of its own."""

OWN = """
position:relative;color:var(--ink);font-size:15px;line-height:1.5;
--ink:var(--body-text-color);--soft:var(--body-text-color-subdued);--rule:var(--border-color-primary);--panel:var(--block-background-fill);--ground:var(--body-background-fill);
--blue:#1f66d1;--orange:#b04c05;--green:#147a45;--red:#c22f35;--violet:#7350c8;
& h2{font-size:1.15rem;font-weight:600;margin:14px 0 8px}& h3{font-size:1rem;font-weight:600;margin:14px 0 6px}
& a{color:var(--blue);text-decoration:underline}& small{color:var(--soft);display:block}& abbr{cursor:help;text-decoration:underline dotted}
& button,& select,& input,& textarea{font:inherit;color:inherit;background:var(--input-background-fill);border:1px solid var(--border-color-primary);border-radius:6px;padding:5px 9px;max-width:100%}
& button{cursor:pointer;background:var(--button-secondary-background-fill);color:var(--button-secondary-text-color)}
& button.go{background:var(--button-primary-background-fill);color:var(--button-primary-text-color)}& button.stop{border-color:var(--red)}
& :is(button,a,input,select,textarea,summary,abbr,.clips):focus-visible{outline:3px solid var(--blue);outline-offset:1px}
& [aria-invalid=true],& .wrong{border-color:var(--red)!important}
& .row{display:flex;flex-wrap:wrap;gap:8px 12px;align-items:end;margin:8px 0}& .entry span{display:block;font-size:.87em;color:var(--soft)}
& .cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(260px,1fr));gap:12px}& .cards table{display:table}
& .card{border:1px solid var(--rule);border-radius:10px;padding:10px 14px;background:var(--panel)}& .card.chosen{border-color:var(--blue)}& .card h3{margin:0}
& .empty{border:1px dashed var(--rule);border-radius:10px;padding:16px;margin:8px 0}& .empty ol{padding-left:1.4em;list-style:decimal}
& ul{list-style:disc}
& .fields{display:grid;grid-template-columns:repeat(auto-fill,minmax(250px,1fr));gap:12px 18px;align-items:start}
& .field{display:flex;flex-direction:column;gap:3px;min-width:0}& .field label{font-weight:600}& .field em{font-weight:400;color:var(--soft);font-size:.85em}
& .field.own{border-left:3px solid var(--blue);padding-left:8px}& .field input[type=checkbox]{align-self:start;width:20px;height:20px}& .field small{font-size:.84em}
& .said{font-size:.85em;min-height:1.2em;overflow-wrap:anywhere}& [hidden]{display:none!important}& .keys{margin:8px 0}& .keys>summary{font-weight:600}
& .meter{height:12px;border-radius:6px;background:var(--rule);overflow:hidden;margin:6px 0}& .meter i{display:block;height:100%;background:currentColor}
& .working{display:flex;gap:10px;align-items:center;flex-wrap:wrap;overflow-wrap:anywhere}
& .spin{width:14px;height:14px;border:2px solid var(--rule);border-top-color:var(--blue);border-radius:50%;animation:vt-turn 1s linear infinite;flex:none}
& pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85em;max-height:320px;overflow:auto;background:var(--background-fill-secondary);padding:8px;border-radius:6px}
& nav.runs{display:flex;gap:6px 14px;flex-wrap:wrap}& nav.runs .on{font-weight:700;text-decoration:none}
& .filters{display:flex;gap:8px;flex-wrap:wrap;align-items:center;margin:10px 0}& .filters input{flex:1 1 220px}
& .clips{position:relative;height:min(64vh,640px);overflow-y:auto;border:1px solid var(--rule);border-radius:8px}& .clips .all{position:relative}
& .clip{position:absolute;left:0;right:0;height:92px;padding:6px 10px;display:grid;grid-template-columns:112px minmax(140px,1.1fr) minmax(150px,1.6fr) 84px;gap:10px;border-bottom:1px solid var(--rule);overflow:hidden}
& .clip .pic{background:var(--background-fill-secondary);border-radius:4px;height:78px;overflow:hidden}& .clip img{width:100%;height:100%;object-fit:contain}
& .clip .what{display:flex;flex-direction:column;min-width:0;font-size:.9em}& .clip b,& .clip .what>span{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
& .clip .why{white-space:normal!important;font-size:.86em;line-height:1.25;display:-webkit-box;-webkit-line-clamp:2;-webkit-box-orient:vertical}
& .clip textarea{height:78px;resize:none;font-size:.87em;line-height:1.3}& .clip .acts{display:flex;flex-direction:column;gap:5px}& .clip .acts button{font-size:.78em;padding:3px 4px}
& .samples{display:grid;grid-template-columns:repeat(var(--columns),minmax(150px,1fr));gap:10px}& .samples .prompt{grid-column:1/-1}
& figure{margin:0}& figure video,& figure img{width:100%;border-radius:6px;background:#000;display:block;image-rendering:auto;aspect-ratio:1;object-fit:contain}
& figcaption{font-size:.82em;color:var(--soft);overflow-wrap:anywhere}& .grid-scroll{overflow-x:auto}
& .tries{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:10px;margin-top:10px}
& .check{display:block;margin:6px 0}& .check small{display:inline}& .download{display:inline-block;font-weight:600}
& section{background:none}& .state{font-size:1.05rem;margin:6px 0 10px}& .legend{margin:4px 0}
&.lost{opacity:.6}&.head{display:flex;justify-content:space-between;gap:12px;flex-wrap:wrap;align-items:baseline}&.head h1{margin:0;font-size:1.25rem;font-weight:650}
&.good{color:var(--green)}&.bad{color:var(--red)}
"""

CSS = (
    ".vt{" + OWN.replace("\n&", "\n&") + "}\n.vt{" + _INSIDE.strip() + "}\n"
    """
.dark .vt,.dark.vt{--blue:#74a9ff;--orange:#f2a25a;--green:#57c78b;--red:#ff8385;--violet:#b49cff}
@keyframes vt-turn{to{transform:rotate(360deg)}}
@media (prefers-reduced-motion:reduce){.vt .spin{animation:none}}
#vt-told{position:fixed;right:12px;bottom:12px;z-index:1000;max-width:min(480px,calc(100vw - 24px))}
#vt-told p{background:var(--block-background-fill);border:1px solid currentColor;border-radius:8px;padding:10px 14px;margin:6px 0 0;cursor:pointer}
.gradio-container{max-width:1240px!important;margin:0 auto!important}
@media (max-width:640px){
.vt .clip{grid-template-columns:64px 1fr 1.2fr;gap:6px;padding:6px}.vt .clip .acts{display:none}.vt .clip:focus-within .acts{display:flex;position:absolute;right:4px;bottom:4px;flex-direction:row}
.gradio-container{padding:6px!important}
}
"""
)
