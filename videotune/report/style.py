"""The page's style sheet: light or dark as the reader's system says, from a telephone's width upwards."""

CSS = """
:root{color-scheme:light dark;--ground:#fbfbf9;--panel:#ffffff;--ink:#1b1c1e;--soft:#62646a;--rule:#dedfdb;
--blue:#1f66d1;--orange:#c2570c;--green:#147a45;--red:#c22f35;--violet:#7350c8}
@media (prefers-color-scheme:dark){:root{--ground:#141517;--panel:#1c1e21;--ink:#e8e8e4;--soft:#a0a2a8;--rule:#34373c;
--blue:#74a9ff;--orange:#f2a25a;--green:#57c78b;--red:#ff8385;--violet:#b49cff}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 10px;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 8px}
h3{font-size:1rem;margin:18px 0 6px}
p{margin:0 0 10px;overflow-wrap:anywhere}
ul{margin:0 0 10px;padding-left:1.2em;overflow-wrap:anywhere}
section{background:var(--panel);border:1px solid var(--rule);border-radius:10px;padding:16px;margin-top:16px}
nav{display:flex;flex-wrap:wrap;gap:2px 14px;margin-top:12px}
a{color:var(--blue);overflow-wrap:anywhere}
.state{font-size:1.05rem}
.missing,.soft{color:var(--soft)}
.badge{display:inline-block;border:1px solid currentColor;border-radius:6px;padding:0 7px;margin-right:6px;
font-size:.85em;font-weight:600;white-space:nowrap}
.good{color:var(--green)}.care{color:var(--orange)}.bad{color:var(--red)}.calm{color:var(--blue)}.quiet{color:var(--soft)}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(160px,1fr));gap:10px 18px;margin:12px 0}
.facts>div{border-left:2px solid var(--rule);padding-left:9px;overflow-wrap:anywhere}
.facts b{display:block;font-weight:600;font-variant-numeric:tabular-nums}
.facts span{color:var(--soft);font-size:.87em}
.scroll{overflow-x:auto;margin-bottom:12px}
table{border-collapse:collapse;width:100%;font-size:.9em;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:5px 12px 5px 0;border-bottom:1px solid var(--rule)}
td:first-child,td:last-child{overflow-wrap:anywhere}
table.cards td:first-child{min-width:170px}
td:first-child code{overflow-wrap:normal}
th{color:var(--soft);font-weight:500;white-space:nowrap}
td p,td ul{margin:0}
code{font:.92em ui-monospace,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--blue);margin:8px 0}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:.87em;color:var(--soft);margin-bottom:6px}
.key{display:inline-block;width:16px;height:0;border-top:3px solid;vertical-align:middle;margin-right:6px}
.axes{display:grid;grid-template-columns:46px 1fr;grid-template-rows:auto 20px}
.ys,.xs{position:relative;font-size:12px;color:var(--soft);font-variant-numeric:tabular-nums}
.ys span{position:absolute;right:7px;transform:translateY(-50%);line-height:1}
.xs{grid-column:2}
.xs span{position:absolute;transform:translateX(-50%);top:4px;line-height:1}
.plot{border-bottom:1px solid var(--rule)}
.plot svg{display:block;width:100%;height:100%;overflow:visible}
.x-label{text-align:center;font-size:12px;color:var(--soft);margin:2px 0 0 46px}
path{fill:none}
path.grid{stroke:var(--rule);stroke-width:1}
path.line{stroke-width:2;stroke-linejoin:round}
path.dots{stroke-width:7;stroke-linecap:round}
path.mark{stroke:var(--red);stroke-width:2}
.one{stroke:var(--blue);border-color:var(--blue)}.two{stroke:var(--orange);border-color:var(--orange)}
.three{stroke:var(--green);border-color:var(--green)}.four{stroke:var(--violet);border-color:var(--violet)}
.faint{stroke:var(--blue);border-color:var(--blue);opacity:.5}
path.line.faint{stroke-width:1.2}
path.line.pale,.key.pale{stroke-dasharray:5 4;border-top-style:dashed}
.multiples{display:grid;grid-template-columns:repeat(auto-fill,minmax(280px,1fr));gap:14px 20px}
.multiples h4,.pair h4{font-size:.87em;font-weight:500;margin:0 0 4px}
.pair{display:grid;margin-top:16px;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:16px 24px}
.multiples h4 span{color:var(--soft);white-space:nowrap}
.pair>div,.multiples>div{min-width:0}
.bars{display:grid;grid-template-columns:minmax(90px,34%) 1fr max-content;gap:4px 10px;align-items:center;font-size:.87em;
font-variant-numeric:tabular-nums}
.bars>span:nth-child(3n+1){overflow:hidden;text-overflow:ellipsis;white-space:nowrap;direction:rtl;text-align:left}
.bar{position:relative;height:11px;border-radius:3px;background:color-mix(in srgb,currentColor 22%,transparent)}
.bar i{display:block;height:100%;border-radius:3px;background:currentColor}
.grid-scroll{overflow-x:auto}
.samples{display:grid;grid-template-columns:repeat(var(--columns),minmax(128px,200px));gap:6px 10px;width:max-content;
min-width:100%}
.samples .prompt{grid-column:1/-1;margin-top:10px}
.samples .prompt span{position:sticky;left:0;display:inline-block;max-width:min(100%,calc(100vw - 70px));
overflow-wrap:anywhere}
figure{margin:0;min-width:0}
.beside{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:16px 24px}
.beside p{margin:0 0 6px}
.beside video,.compared video{display:block;width:100%;border-radius:6px;background:#000}
.compared video{max-width:720px}
.names{display:grid;gap:4px;text-align:center;font-size:.87em;color:var(--soft)}
table img{display:block;max-width:160px;height:auto;margin-top:4px;border-radius:4px}
.inner{padding-left:1.4em;color:var(--soft)}
pre{overflow-x:auto;background:var(--ground);border:1px solid var(--rule);border-radius:6px;padding:10px 12px;
margin:0 0 12px;font-size:.9em}
pre code{overflow-wrap:normal}
ol{margin:0 0 10px;padding-left:1.4em}
figure video{display:block;width:100%;border-radius:6px;background:#000}
figcaption{font-size:.82em;color:var(--soft)}
@media (max-width:640px){
main{padding:12px 8px 40px}section{padding:12px}
.multiples{grid-template-columns:1fr 1fr;gap:10px 12px}.multiples .axes{grid-template-columns:36px 1fr}
.bars{grid-template-columns:1fr max-content}.bars>span:nth-child(3n+1){grid-column:1/-1;margin-top:4px}
table.cards thead{display:none}
table.cards,table.cards tbody,table.cards tr,table.cards td{display:block;width:100%}
table.cards tr{border-bottom:1px solid var(--rule);padding:8px 0}
table.cards td{border:0;padding:1px 0 1px 92px;position:relative;min-height:1.5em}
table.cards td:first-child{padding-left:0;font-weight:600}
table.cards td:not(:first-child)::before{content:attr(data-label);position:absolute;left:0;color:var(--soft)}
table.cards td:empty{display:none}
}
"""
