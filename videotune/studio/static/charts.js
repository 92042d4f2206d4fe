// The curves of one run or of several, drawn by uPlot: hover, zoom, smoothing, logarithmic axis, marks of checkpoints.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("charts");
  if (!place || !window.uPlot) return;
  const $ = (id) => document.getElementById(id);
  const texts = JSON.parse(place.dataset.texts), own = place.dataset.run, box = $("chart-box");
  const kept = (() => { try { return JSON.parse(localStorage.getItem("vt-charts")) || {}; } catch { return {}; } })();
  const state = { chart: kept.chart in texts && texts[kept.chart].length < 3 ? kept.chart : "loss", smooth: kept.smooth ?? 60, log: Boolean(kept.log), hidden: kept.hidden || {}, runs: [own] };
  const keep = () => localStorage.setItem("vt-charts", JSON.stringify({ chart: state.chart, smooth: state.smooth, log: state.log, hidden: state.hidden }));
  let data = [], mark = "", plot = null, shape = "", zoomed = false, timer = 0;

  const css = (name) => {  // a colour of tokens.css as the theme has it now
    const probe = document.createElement("i"); probe.style.color = `var(${name})`; place.append(probe);
    const colour = getComputedStyle(probe).color; probe.remove(); return colour;
  };
  const faint = (colour, share) => colour.replace(/^rgba?\(([^)]+)\)$/, (_, parts) => `rgba(${parts.split(",").slice(0, 3).join(",")},${share})`);
  const number = (value) => value == null ? "–" : Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));

  function smoothed(values) {  // exponential moving average, without the bias of its first values
    const weight = state.smooth / 100; let mean = 0, sum = 0;
    return values.map((value) => {
      if (value == null) return null;
      mean = mean * weight + value * (1 - weight); sum = sum * weight + (1 - weight);
      return mean / sum;
    });
  }
  const jumps = () => ["loss", "noise", "sound_noise", "norm", "speed"].includes(state.chart);

  function lines() {  // every curve of the chosen chart, named with its run where several are shown
    const found = [];
    for (const run of data) for (const curve of run.charts[state.chart] || []) {
      if (curve.x.length) found.push({ name: data.length > 1 ? `${run.name}: ${curve.name}` : curve.name, curve });
    }
    return found;
  }
  function table(found) {  // all curves over the steps of all
    const steps = [...new Set(found.flatMap((line) => line.curve.x))].sort((a, b) => a - b);
    const at = new Map(steps.map((step, index) => [step, index]));
    const columns = found.map(({ curve }) => {
      const values = new Array(steps.length).fill(null);
      curve.x.forEach((step, index) => { values[at.get(step)] = curve.y[index]; });
      return values;
    });
    return [steps, columns];
  }
  // Checkpoints and previews stand below the axis, each kind in a named line, so that none is taken for a value of a curve.
  const lanes = { previews: ["Previews", "Previews drawn at step"], saves: ["Checkpoints", "Checkpoint of step"] };
  function marks(u) {
    const bar = u.root.querySelector(".chart-marks"), run = data[0];
    if (!bar || !run) return;
    const left = u.bbox.left / devicePixelRatio, width = u.bbox.width / devicePixelRatio;
    const rows = Object.entries(lanes).filter(([kind]) => run[kind].length).map(([kind, [title, words]]) => {
      const row = document.createElement("div"); row.className = `chart-lane ${kind}`;
      row.append(Object.assign(document.createElement("b"), { textContent: title }));
      for (const step of run[kind]) {
        const x = u.valToPos(step, "x");
        if (x < -1 || x > width + 1) continue;
        const mark = document.createElement("i"); mark.dataset.said = `${words} ${step}`; mark.style.left = `${left + x}px`;
        if (x > width * 0.85) mark.className = "at-end";
        row.append(mark);
      }
      return row;
    });
    bar.replaceChildren(...rows);
  }
  // what the strokes and circles of the curves are
  function strokes(found, smooth) {
    if (smooth) return "Strong line: smoothed. Pale line: the value of each step.";
    return found.some(({ curve }) => curve.x.length <= 60) ? "Each circle is a measured value; the lines only join them." : "";
  }

  function draw() {
    const found = lines(), [steps, columns] = table(found), smooth = jumps() && state.smooth > 0;
    $("chart-about").textContent = texts[state.chart][1];
    $("chart-smooth").disabled = !jumps();
    words(found);
    $("chart-strokes").textContent = found.length ? strokes(found, smooth) : "";
    if (!found.length) {
      plot?.destroy(); plot = null; shape = "";
      box.replaceChildren(Object.assign(document.createElement("p"), { className: "no-values", textContent: "No values yet." }));
      return;
    }
    const palette = [1, 2, 3, 4, 5, 6].map((n) => css(`--chart-${n}`)), ink = css("--muted"), line = css("--line");
    const values = [steps], series = [{ label: "step" }];
    found.forEach(({ name, curve }, index) => {
      const colour = palette[index % 6], dash = index >= 6 ? [6, 3] : undefined, show = !state.hidden[name], few = curve.x.length <= 60;
      const common = { spanGaps: true, show, scale: "y", value: (_, value) => number(value) };
      if (smooth) {
        series.push({ ...common, label: `${name} (each)`, stroke: faint(colour, 0.28), width: 1, points: { show: false }, of: name, extra: true });
        values.push(columns[index]);
      }
      series.push({ ...common, label: name, stroke: colour, width: 2, dash, points: { show: few && !smooth, size: 6 }, of: name });
      values.push(smooth ? smoothed(columns[index]) : columns[index]);
    });
    const now = JSON.stringify([state.chart, state.log, series.map((one) => one.label), palette, smooth]);
    if (plot && now === shape) {
      const { min, max } = plot.scales.x;
      plot.setData(values, !zoomed);
      if (zoomed) plot.setScale("x", { min, max });
      return;
    }
    plot?.destroy(); box.replaceChildren(); shape = now; zoomed = false; $("chart-reset").hidden = true;
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
    plot = new uPlot({
      width: box.clientWidth, height: Math.max(280, Math.min(440, innerHeight * 0.42)), series, legend: { live: true, markers: { dash: (u, index) => (u.series[index].dash ? "dashed" : "solid") } },
      cursor: { sync: { key: "vt" }, drag: { x: true, y: false }, focus: { prox: 24 } }, focus: { alpha: 0.4 },
      scales: { x: { time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high] }, y: { distr: state.log ? 3 : 1 } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? String(tick) : "") }, { ...axis, size: 64, values: (_, ticks) => ticks.map((tick) => tick == null ? "" : number(tick)) }],
      hooks: {
        draw: [marks],
        setSelect: [(u) => { zoomed = u.select.width > 0 || zoomed; $("chart-reset").hidden = !zoomed; }],
        setSeries: [(u, index, options) => {
          if (index == null || options.show == null) return;
          const name = u.series[index].of; state.hidden[name] = !options.show; keep();
          u.series.forEach((one, other) => { if (one.of === name && one.show !== options.show) u.setSeries(other, { show: options.show }); });
        }],
      },
    }, values, box);
    plot.root.querySelector(".u-wrap").after(Object.assign(document.createElement("div"), { className: "chart-marks" }));
    marks(plot);
    box.querySelectorAll(".u-legend .u-series").forEach((row, index) => {
      if (series[index]?.extra) row.hidden = true;
      if (!index || series[index]?.extra) return;
      const head = row.querySelector("th"); head.tabIndex = 0; head.setAttribute("role", "button"); head.setAttribute("aria-label", `Show ${series[index].label}`);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); head.click(); } });
    });
    plot.root.setAttribute("role", "group"); plot.root.setAttribute("aria-label", texts[state.chart][0]);
  }

  function words(found) {  // the same as a sentence and a small table
    const told = found.map(({ name, curve }) => {
      const y = curve.y, last = smoothed(y).at(-1), low = y.reduce((a, b) => Math.min(a, b), Infinity), high = y.reduce((a, b) => Math.max(a, b), -Infinity);
      return { name, first: number(y[0]), last: number(jumps() ? last : y.at(-1)), low: number(low), high: number(high), step: curve.x.at(-1) };
    });
    $("chart-sentence").textContent = told.slice(0, 2).map((one) => `${one.name}: ${one.first} at first, ${one.last} at step ${one.step}.`).join(" ") + lists();
    const row = (cells, kind) => { const tr = document.createElement("tr"); tr.append(...cells.map((cell) => Object.assign(document.createElement(kind), { textContent: cell }))); return tr; };
    $("chart-table").replaceChildren(row(["curve", "first", "last", "lowest", "highest"], "th"), ...told.map((one) => row([one.name, one.first, one.last, one.low, one.high], "td")));
  }

  function lists() {  // the marks below the axis in words
    const run = data[0];
    return run ? Object.entries(lanes).filter(([kind]) => run[kind].length).map(([kind, [title]]) => ` ${title} at steps ${run[kind].join(", ")}.`).join("") : "";
  }

  function notes() {  // of checkpoints that could not be read
    const lines = data.flatMap((run) => run.notes);
    $("chart-notes").textContent = lines.join("\n"); $("chart-notes").hidden = !lines.length;
  }

  async function load() {
    clearTimeout(timer);
    const address = new URLSearchParams(state.runs.map((name) => ["run", name]));
    try {
      const answer = await fetch(`${place.dataset.url}?${address}`, { headers: mark ? { "If-None-Match": mark } : {}, cache: "no-store" });
      if (answer.status === 200) { mark = answer.headers.get("ETag"); data = await answer.json(); notes(); offer(); draw(); }
    } catch { /* the page says that the studio does not answer; the next look tries again */ }
    again();
  }
  function again() {
    const running = document.querySelector("#r-run .badge")?.textContent;
    const busy = ["running", "stopping", "ending", "queued"].includes(running) || data.some((run) => run.pending);
    if (!document.hidden) timer = setTimeout(load, busy ? 3000 : 15000);
  }

  const tabs = [...place.querySelectorAll("[role=tab]")];
  function offer() {  // charts that only some runs have
    for (const tab of tabs) if ("optional" in tab.dataset) tab.hidden = !data.some((run) => run.charts[tab.dataset.chart]?.length);
    if (tabs.some((tab) => tab.hidden && tab.dataset.chart === state.chart)) choose("loss");
  }
  function choose(chart) {
    state.chart = chart; keep();
    for (const tab of tabs) { const on = tab.dataset.chart === chart; tab.setAttribute("aria-selected", on); tab.tabIndex = on ? 0 : -1; if (on) $("chart-panel").setAttribute("aria-labelledby", tab.id); }
    draw();
  }
  place.addEventListener("click", (event) => { const tab = event.target.closest("[role=tab]"); if (tab) choose(tab.dataset.chart); });
  place.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], shown = tabs.filter((tab) => !tab.hidden), at = shown.indexOf(document.activeElement);
    if (!step || at < 0) return;
    const next = shown[(at + step + shown.length) % shown.length]; next.focus(); choose(next.dataset.chart); event.preventDefault();
  });
  $("chart-smooth").value = state.smooth; $("chart-log").checked = state.log; $("chart-smooth-value").textContent = state.smooth;
  $("chart-smooth").addEventListener("input", (event) => { state.smooth = +event.target.value; $("chart-smooth-value").textContent = state.smooth; keep(); draw(); });
  $("chart-log").addEventListener("change", (event) => { state.log = event.target.checked; keep(); draw(); });
  $("chart-reset").addEventListener("click", () => { zoomed = false; shape = ""; draw(); });
  box.addEventListener("dblclick", () => { zoomed = false; $("chart-reset").hidden = true; });
  $("chart-runs")?.addEventListener("change", () => {
    state.runs = [own, ...[...place.querySelectorAll("#chart-runs input:checked")].map((one) => one.value)]; mark = ""; load();
  });
  new ResizeObserver(() => { if (plot && Math.abs(plot.width - box.clientWidth) > 1) plot.setSize({ width: box.clientWidth, height: plot.height }); }).observe(box);
  const recolour = () => { shape = ""; draw(); };
  document.addEventListener("vt:theme", recolour); matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  document.addEventListener("visibilitychange", () => document.hidden ? clearTimeout(timer) : load());
  choose(state.chart); load();
});
