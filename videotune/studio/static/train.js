// The pages Train and Results: the viewer of previews, the log, parts that load when they are opened.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const $ = (id) => document.getElementById(id), viewer = $("viewer");
  const state = { row: "", left: "", besideStep: "", right: null, newest: true, playing: !matchMedia("(prefers-reduced-motion: reduce)").matches };
  let rows = null, start = "", beside = { run: "", rows: [], start: "" };
  const name = (row) => `${row.branch}\n${row.prompt}\n${row.seed}`;
  const url = (path) => viewer.dataset.file + encodeURIComponent(path);
  const poster = (address) => address.replace("/file?", "/poster?"); // a frame of the middle: many previews begin with black
  const said = (step, began = start) => step === 0 ? began.replace(/^the /, "") : `step ${step}`;  // a run may begin with a LoRA

  function read() {
    const place = $("previews-data");
    if (!place || !viewer) return;
    const next = JSON.parse(place.dataset.rows);
    if (JSON.stringify(next) === JSON.stringify(rows)) return;
    rows = next;
    start = place.dataset.start;
    viewer.hidden = !rows.length;
    if (rows.length) { chips(); show(); matrix(); }
  }
  const current = () => (rows || []).find((row) => name(row) === state.row) || rows?.[0];

  function chips() {
    const group = $("viewer-prompts"), there = new Map([...group.children].map((one) => [one.dataset.row, one]));
    rows.forEach((row) => {
      let chip = there.get(name(row));
      there.delete(name(row));
      if (!chip) {
        chip = document.createElement("button"); chip.type = "button"; chip.dataset.row = name(row);
        const video = Object.assign(document.createElement("video"), { muted: true, loop: true, playsInline: true, preload: "metadata" }), words = document.createElement("span");
        video.setAttribute("aria-hidden", "true"); video.tabIndex = -1;
        words.textContent = `${row.branch ? `${row.branch}: ` : ""}${row.prompt || "(empty prompt)"} · seed ${row.seed}`;
        chip.append(video, words); group.append(chip);
        chip.onclick = () => { state.row = name(row); if (!row.cells.some(([step]) => step === state.right)) { state.newest = true; } show(); };
        chip.onmouseenter = () => video.play().catch(() => {}); chip.onmouseleave = () => video.pause();
      }
      const last = url(row.cells.at(-1)[1]), video = chip.querySelector("video");
      if (video.getAttribute("src") !== last) { video.setAttribute("src", last); video.poster = poster(last); }
    });
    there.forEach((chip) => chip.remove());
    group.hidden = rows.length < 2 || !$("viewer-matrix").hidden;
  }

  function put(shot, path, words) {  // the same video goes on playing
    const video = shot.querySelector("video");
    shot.querySelector("figcaption").textContent = words;
    video.setAttribute("aria-label", words);
    if (video.getAttribute("src") === path) return;
    const at = shared();
    video.setAttribute("src", path);
    video.addEventListener("loadedmetadata", () => {
      viewer.style.setProperty("--shape", `${video.videoWidth}/${video.videoHeight}`);
      video.currentTime = Math.min(at, video.duration || 0);
    }, { once: true });
    if (state.playing) video.play().catch(() => {});
  }
  const videos = () => [...$("stage").querySelectorAll("video")].filter((one) => one.getAttribute("src"));
  const shared = () => videos().find((one) => !one.paused)?.currentTime || 0;

  // how loud a preview is and what is wrong with it, as the end of its label
  function remarkOf([, , fault, sound]) {
    const remarks = [sound, fault && `fault: ${fault}`].filter(Boolean);
    return remarks.length ? ` (${remarks.join("; ")})` : "";
  }
  function show() {
    const row = current(), steps = row.cells.map(([step]) => step), path = new Map(row.cells.map(([step, where]) => [step, where])), remarks = new Map(row.cells.map((cell) => [cell[0], remarkOf(cell)]));
    state.row = name(row);
    if (state.newest || !path.has(state.right)) state.right = steps.at(-1);
    const left = state.left !== "" && path.has(+state.left) ? +state.left : steps[0];
    $("viewer-prompt").textContent = `${row.branch ? `${row.branch}: ` : ""}${row.prompt} · seed ${row.seed}`;
    $("viewer-prompt").title = row.prompt;
    const choice = $("viewer-left"), other = besideCell(row, state.right);
    const choices = other
      ? [["nearest step", ""], ...besideRow(row).cells.map(([step]) => [`${beside.run}, ${said(step, beside.start)}`, step])]
      : steps.map((step) => [step === 0 ? `before (${said(0)})` : `step ${step}`, step]);
    if (choice.dataset.choices !== choices.join()) {
      choice.dataset.choices = choices.join();
      choice.replaceChildren(...choices.map(([words, step]) => new Option(words, step)));
    }
    choice.value = other ? state.besideStep : left;
    const slider = $("viewer-step"); slider.max = steps.length - 1; slider.value = steps.indexOf(state.right); slider.disabled = steps.length < 2;
    slider.setAttribute("aria-valuetext", said(state.right));
    $("viewer-at").textContent = said(state.right);
    if (other) put($("shot-left"), url(other[1]), `${beside.run}, ${said(other[0], beside.start)}${remarkOf(other)}`);
    else put($("shot-left"), url(path.get(left)), (left === 0 ? "before" : `step ${left}`) + remarks.get(left));
    put($("shot-right"), url(path.get(state.right)), (beside.run ? `${viewer.dataset.run}, ` : "") + said(state.right) + remarks.get(state.right));
    $("shot-left").hidden = !other && left === state.right && steps.length < 2;
    $("viewer-download").href = url(path.get(state.right));
    $("viewer-sound").hidden = ![...rows, ...beside.rows].some((one) => one.cells.some((cell) => cell[3]));
    near(row);
    for (const chip of $("viewer-prompts").children) chip.setAttribute("aria-pressed", chip.dataset.row === state.row);
  }
  const besideRow = (row) => beside.rows.find((one) => one.prompt === row.prompt && one.seed === row.seed);
  // the preview of the other run with the same prompt and seed, at the step that is chosen or the nearest one
  function besideCell(row, step) {
    const same = besideRow(row), chosen = state.besideStep !== "" && same?.cells.find((cell) => cell[0] === +state.besideStep);
    return chosen || same && same.cells.reduce((best, cell) => Math.abs(cell[0] - step) < Math.abs(best[0] - step) ? cell : best);
  }
  async function chooseBeside(run) {
    beside = { run: "", rows: [], start: "" };
    state.besideStep = "";
    if (run) {
      const answer = await fetch(viewer.dataset.previews + encodeURIComponent(run)).catch(() => null);
      if (!answer || !answer.ok) { $("viewer-beside").value = ""; vt.toast("The previews of that run could not be read. Try again.", true); return; }
      beside = { run, ...(await answer.json()) };
    }
    const matched = rows.some((row) => besideCell(row, 0));
    $("viewer-beside-said").textContent = run && !matched ? `${run} has no preview with these prompts and seeds` : "";
    show(); matrix();
  }
  // every preview: a line for each prompt and seed, a column for each step
  function matrix() {
    const place = $("viewer-matrix");
    if (place.hidden) return;
    const lines = rows.map((row) => ({ ...row, run: "" }));
    beside.rows.forEach((row) => lines.push({ ...row, run: beside.run }));
    lines.sort((a, b) => a.prompt.localeCompare(b.prompt) || a.seed - b.seed || a.run.localeCompare(b.run));
    const steps = [...new Set(lines.flatMap((row) => row.cells.map(([step]) => step)))].sort((a, b) => a - b);
    const mark = JSON.stringify([lines, steps]);
    if (place.dataset.mark === mark) return;
    place.dataset.mark = mark;
    const make = (kind, words = "") => Object.assign(document.createElement(kind), { textContent: words });
    const table = make("table"), head = table.createTHead().insertRow(), body = table.createTBody();
    head.append(make("th", "prompt"), ...steps.map((step) => make("th", said(step))));
    for (const row of lines) {
      const line = body.insertRow(), title = make("th", `${row.run ? `${row.run}: ` : ""}${row.branch ? `${row.branch}: ` : ""}${row.prompt || "(empty prompt)"} · seed ${row.seed}`), cells = new Map(row.cells.map((cell) => [cell[0], cell]));
      title.scope = "row"; line.append(title);
      for (const step of steps) {
        const place = line.insertCell(), cell = cells.get(step);
        if (!cell) continue;
        const button = make("button"), video = Object.assign(document.createElement("video"), { muted: true, loop: true, playsInline: true, preload: "metadata", tabIndex: -1 });
        button.type = "button"; button.setAttribute("aria-label", `Show ${said(step)} of ${row.prompt}${cell[2] ? `, which is ${cell[2]}` : ""}${cell[3] ? `, ${cell[3]}` : ""}`);
        if (cell[3]) button.title = cell[3];
        video.setAttribute("src", url(cell[1])); video.poster = poster(url(cell[1])); button.append(video);
        if (cell[2]) { const words = make("span", cell[2]); words.className = "badge care"; button.append(words); }
        button.onmouseenter = () => video.play().catch(() => {}); button.onmouseleave = () => video.pause();
        button.onclick = () => { if (row.run) return; state.row = name(row); state.right = step; state.newest = false; show(); $("stage").scrollIntoView({ block: "nearest" }); };
        place.append(button);
      }
    }
    place.replaceChildren(table);
  }
  function near(row) {
    const place = $("shot-near").querySelector(".near"), there = row.near?.path;
    $("viewer-near").hidden = !there;
    if (!there) { $("shot-near").hidden = true; return; }
    $("shot-near").querySelector("figcaption").textContent = `training clip: ${row.near.name}`;
    if (place.dataset.path === there) return;
    place.dataset.path = there;
    const video = /\.(mp4|webm|mov|m4v)$/i.test(there), one = document.createElement(video ? "video" : "img");
    Object.assign(one, video ? { muted: true, loop: true, playsInline: true } : { alt: "" });
    one.setAttribute("aria-label", `training clip ${row.near.name}`); one.setAttribute("src", url(there)); place.replaceChildren(one);
    if (video && state.playing) one.play().catch(() => {});
  }
  // the lists of checkpoints in the forms follow the run; what the user has chosen stays
  function savedSteps() {
    const place = $("saved-steps");
    for (const select of place ? document.querySelectorAll("select[data-saved-steps]") : []) {
      const seen = select.dataset.savedSteps;
      select.dataset.savedSteps = place.dataset.steps;
      if (!seen || seen === place.dataset.steps) { select.dataset.best ??= place.dataset.best; continue; }
      const chosen = select.value, isOwn = chosen !== select.dataset.best;
      for (const option of [...select.options]) if (+option.value > 0) option.remove();
      select.options[0].after(...JSON.parse(place.dataset.steps).map(([step, words]) => new Option(words, step)));
      select.value = isOwn ? chosen : place.dataset.best;
      select.dataset.best = place.dataset.best;
    }
  }
  savedSteps();
  document.addEventListener("vt:region", (event) => { if (event.target.id === "r-result") savedSteps(); });
  function play(on) {
    state.playing = on;
    const all = videos(), at = shared();
    all.forEach((one) => { if (on) { one.currentTime = Math.min(at, one.duration || at); one.play().catch(() => {}); } else one.pause(); });
    $("viewer-play").setAttribute("aria-label", on ? "Pause the videos" : "Play the videos");
    $("viewer-play").querySelector("use").setAttribute("href", `/static/vendor/icons.svg#${on ? "pause" : "play"}`);
  }
  function hear() {  // the sound of at most one of them; studio.js silences what else is heard
    for (const shot of ["shot-left", "shot-right"]) $(shot).querySelector("video").muted = $("viewer-sound").value !== shot;
  }
  function press(button) { const on = button.getAttribute("aria-pressed") !== "true"; button.setAttribute("aria-pressed", on); return on; }
  function large(on) {
    viewer.classList.toggle("large", on); document.body.style.overflow = on ? "hidden" : "";
    $("viewer-large").setAttribute("aria-label", on ? "Close the large view" : "Large view");
  }
  if (viewer) {
    $("viewer-step").addEventListener("input", (event) => {
      const steps = current().cells.map(([step]) => step);
      state.right = steps[+event.target.value]; state.newest = state.right === steps.at(-1); show();
    });
    $("viewer-left").addEventListener("change", (event) => { state[besideRow(current()) ? "besideStep" : "left"] = event.target.value; show(); });
    $("viewer-play").addEventListener("click", () => play(!state.playing));
    $("viewer-sound").addEventListener("change", () => { hear(); if ($("viewer-sound").value && !state.playing) play(true); });
    $("stage").addEventListener("volumechange", () => {  // it may have been silenced from elsewhere on the page
      const heard = ["shot-left", "shot-right"].find((shot) => !$(shot).querySelector("video").muted);
      $("viewer-sound").value = heard ?? "";
    }, true);
    $("viewer-all").addEventListener("click", (event) => {
      const on = press(event.currentTarget), table = $("viewer-matrix");
      table.hidden = !on; $("viewer-prompts").hidden = on || rows.length < 2; matrix();
      if (on) table.scrollIntoView({ block: "nearest" });  // it may open below the fold
    });
    $("viewer-beside")?.addEventListener("change", (event) => chooseBeside(event.target.value));
    $("viewer-wipe").addEventListener("click", (event) => { const on = press(event.currentTarget); $("stage").classList.toggle("wipe", on); $("wipe-line").hidden = !on; });
    $("wipe-line").addEventListener("input", (event) => $("stage").style.setProperty("--wipe", `${event.target.value}%`));
    $("viewer-near").addEventListener("click", (event) => { $("shot-near").hidden = !press(event.currentTarget); play(state.playing); });
    $("viewer-large").addEventListener("click", () => large(!viewer.classList.contains("large")));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") large(false);
      if (!["ArrowLeft", "ArrowRight"].includes(event.key) || !viewer.classList.contains("large") || event.target.matches("input,select")) return;
      const slider = $("viewer-step"); slider.value = +slider.value + (event.key === "ArrowRight" ? 1 : -1); slider.dispatchEvent(new Event("input"));
    });
    setInterval(() => {  // in step: a loop that has drifted is set right
      const all = videos().filter((one) => !one.paused && one.duration);
      all.slice(1).forEach((one) => { const gap = Math.abs(one.currentTime - all[0].currentTime); if (gap > 0.12 && gap < one.duration - 0.12) one.currentTime = all[0].currentTime; });
    }, 1000);
    document.addEventListener("vt:region", (event) => { if (event.target.id === "r-previews") read(); });
    read(); play(state.playing);
  }

  for (const kind of ["mouseover", "mouseout"]) document.addEventListener(kind, (event) => {
    const button = event.target.closest(".film-button");
    if (kind === "mouseout" && button?.getAttribute("aria-pressed") === "true") return;
    if (event.target.matches(".checkpoints video, .film-button video")) event.target[kind === "mouseover" ? "play" : "pause"]()?.catch?.(() => {});
  });

  document.addEventListener("click", (event) => {  // a small video without controls, which would hide it
    const button = event.target.closest(".film-button");
    if (!button) return;
    const isPlaying = button.getAttribute("aria-pressed") === "true", video = button.querySelector("video");
    button.setAttribute("aria-pressed", !isPlaying);
    isPlaying ? video.pause() : video.play().catch(() => {});
  });
  // A video of middle size has its controls only while it is pointed at or in focus.
  for (const kind of ["mouseover", "mouseout", "focusin", "focusout"]) document.addEventListener(kind, (event) => {
    if (event.target.matches("video[data-quiet]")) event.target.controls = kind === "mouseover" || kind === "focusin";
  });
  document.addEventListener("click", (event) => {  // its sound
    const button = event.target.closest("[data-hear]");
    if (!button) return;
    const video = button.closest("td,figure,article").querySelector("video");
    if (!video.muted) { video.muted = true; video.pause(); return; }
    video.muted = false;
    video.play().catch(() => {});
  });
  document.addEventListener("volumechange", (event) => {
    const button = event.target.closest("td,figure,article")?.querySelector("[data-hear]");
    if (button) button.setAttribute("aria-pressed", !event.target.muted);
  }, true);

  // choices of checkpoints in the dialog that trains on
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open=go-on]");
    if (!opener) return;
    const saves = JSON.parse(opener.dataset.saves).reverse();
    $("go-on-step").replaceChildren(new Option("the newest checkpoint", ""), ...saves.map((step) => new Option(`step ${step}`, step)), new Option("step 0, the beginning", "0"));
    $("branch-step").replaceChildren(...saves.map((step) => new Option(`step ${step}`, step)));
    $("branch-form").hidden = !saves.length;
    const steps = $("go-on-steps"), isComplete = opener.dataset.complete === "yes";
    steps.placeholder = opener.dataset.steps;
    steps.dataset.before = isComplete ? opener.dataset.steps : "";
    steps.dataset.newest = saves[0] ?? 0;
    checkSteps();
  });
  // A run that is done trains on only to a later end.
  function checkSteps() {
    const steps = $("go-on-steps"), from = $("go-on-step").value || steps.dataset.newest;
    const end = steps.value || steps.dataset.before;
    const isPast = end !== "" && Number(end) <= Number(from);
    steps.setCustomValidity(isPast ? `Step ${end} is no later than step ${from}, from which it trains on: give more than ${from}.` : "");
  }
  for (const id of ["go-on-step", "go-on-steps"]) $(id)?.addEventListener("input", checkSteps);

  // the log follows its end while it is open
  const log = $("log"); let timer = 0;
  async function tail() {
    clearTimeout(timer);
    if (!log.open || document.hidden) return;
    try {
      const answer = await fetch(`${log.dataset.url}&lines=true`), text = await answer.text(), pre = $("log-text");
      if (pre.textContent !== text) { pre.textContent = text; if ($("log-follow").checked) pre.scrollTop = pre.scrollHeight; }
    } catch { /* the page says that the studio does not answer */ }
    timer = setTimeout(tail, 2000);
  }
  log?.addEventListener("toggle", tail);
  document.addEventListener("visibilitychange", () => log && tail());

  // parts that are made when they are opened
  async function fill(part) {
    const answer = await vt.ask(part.dataset.once);
    if (!answer.ok) return false;
    const text = await answer.text();
    if (!part.open) return true;
    part.querySelector("[data-keep]").innerHTML = text;
    takeFigure(part);
    return true;
  }
  // The figure above an open part comes from the part: two readings of a run that goes on would give two numbers.
  function takeFigure(part) {
    const read = part.querySelector("[data-times-seen]"), figure = $("times-seen");
    if (!read || !figure) return;
    figure.textContent = read.dataset.timesSeen;
    figure.dataset.keep = "";
  }
  document.addEventListener("toggle", async (event) => {
    const part = event.target;
    if (!part.dataset?.once) return;
    if (!part.open) {
      delete $("times-seen")?.dataset.keep;
      part.querySelector("[data-keep]").replaceChildren();
      return;
    }
    if (await fill(part)) return;
    part.open = false;
    vt.toast("This part could not be loaded. Open it again.", true);
  }, true);
  let isFilling = false, isBehind = false;
  document.addEventListener("vt:region", async (event) => {  // an open one counts on with the run
    if (event.target.id !== "r-run") return;
    isBehind = true;
    if (isFilling) return;
    isFilling = true;
    while (isBehind) {
      isBehind = false;
      await Promise.all([...document.querySelectorAll("details[data-once][open]")].map(fill));
    }
    isFilling = false;
  });
  // A file that was asked for in the table of checkpoints is downloaded as soon as it is written.
  const awaited = new Set();
  document.addEventListener("click", (event) => { const button = event.target.closest("[data-make]"); if (button) awaited.add(button.dataset.make); });
  document.addEventListener("vt:region", (event) => {
    if (event.target.id !== "r-summary") return;
    for (const step of [...awaited]) {
      const links = document.querySelectorAll(`[data-made="${step}"]`);
      if (links.length) awaited.delete(step);
      for (const link of links) link.click();
    }
  });
});
