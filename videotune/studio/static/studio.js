// The studio's own script: parts that keep themselves up to date, fields that save themselves, buttons that ask first,
// a table of thousands of clips of which only the rows in sight exist, and videos that play in step.
"use strict";
const videotune = (() => {
  const query = () => new URLSearchParams(location.search);
  const project = () => query().get("project") || "";
  const shown = (element) => element.offsetParent !== null && !document.hidden;
  const escape = (words) => String(words ?? "").replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

  async function ask(action, body) {
    let answer;
    try {
      const response = await fetch(`/studio/do/${action}`, {
        method: "POST", headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ project: project(), ...body }),
      });
      answer = await response.json();
    } catch (error) {
      answer = { error: "The studio does not answer. Is it still running? Nothing that it had started is lost." };
    }
    return answer;
  }

  function tell(words, bad) {
    let place = document.getElementById("vt-told");
    if (!place) {
      place = document.createElement("div");
      place.id = "vt-told"; place.className = "vt"; place.setAttribute("role", "status"); place.setAttribute("aria-live", "polite");
      document.body.append(place);
    }
    const line = document.createElement("p");
    line.textContent = words; line.className = bad ? "bad" : "good"; line.tabIndex = 0;
    line.onclick = () => line.remove();
    place.append(line);
    setTimeout(() => line.remove(), bad ? 15000 : 5000);
  }

  function settle(answer) {
    if (answer.error) tell(answer.error, true);
    else if (answer.say) tell(answer.say, false);
    if (answer.go) location.assign(answer.go);
    else refresh();
  }

  // --- parts that keep themselves up to date -------------------------------------------------------------------------
  const lives = new Map();
  let edits = 0;  // how often something was typed into a field of the form
  async function load(element) {
    const state = lives.get(element);
    if (state.busy) return;
    state.busy = true;
    try {
      const headers = state.tag ? { "If-None-Match": state.tag } : {};
      const words = query(), before = edits; words.delete("tab");
      const response = await fetch(`/studio/part/${element.dataset.live}?${words}`, { headers, cache: "no-store" });
      if (response.status === 200) {
        const text = await response.text();
        if (edits !== before && element.querySelector("[data-key]")) { state.busy = false; state.next = 0; return; }  // it was asked for before
        if (!element.contains(document.activeElement) || !document.activeElement.matches("input, textarea, select")) {
          state.tag = response.headers.get("ETag");
          put(element, text);
          const account = element.querySelector("[data-table]")?.dataset.table || "";  // another account: the rows say other things
          if (element.dataset.live === "data" && account !== state.account) {
            state.account = account; for (const table of document.querySelectorAll("[data-clips]")) table.reload?.();
          }
        }
      } else if (response.status !== 304) put(element, `<p class="bad">${escape(await response.text())}</p>`);
      document.body.classList.remove("vt-lost");
    } catch (error) {
      document.body.classList.add("vt-lost");
    }
    state.busy = false; state.next = Date.now() + state.every;
  }
  const chosen = (one) => one.type === "checkbox" ? one.checked !== one.defaultChecked
    : one.matches("select") ? one.selectedIndex > 0 : one.value !== one.defaultValue;
  const place = (one) => `${one.closest("[id]")?.id} ${one.name}`;
  function put(element, text) {  // what was opened, and what was chosen in small forms and not sent yet, stays
    const kept = new Map([...element.querySelectorAll("[data-form] [name]")].filter(chosen).map((one) => [place(one), one.type === "checkbox" ? one.checked : one.value]));
    const open = [...element.querySelectorAll("details[open]")].map((one) => one.id || one.querySelector("summary").textContent);
    element.innerHTML = text;
    for (const one of element.querySelectorAll("details")) {
      if (open.includes(one.id || one.querySelector("summary").textContent)) one.open = true;
    }
    for (const one of kept.size ? element.querySelectorAll("[data-form] [name]") : []) {
      if (!kept.has(place(one))) continue;
      if (one.type === "checkbox") one.checked = kept.get(place(one)); else one.value = kept.get(place(one));
    }
    element.dataset.ready = "yes";
  }
  function refresh(but) {
    for (const [element, state] of lives) {
      if (but && element.dataset.live === but) continue;
      state.next = 0; if (element.isConnected && shown(element)) load(element);
    }
    for (const table of document.querySelectorAll("[data-clips]")) if (shown(table)) table.reload?.();
  }
  function look() {
    if (!opened) { openPage(); if (!opened) return; }
    for (const element of document.querySelectorAll("[data-live]")) {
      if (!lives.has(element)) lives.set(element, { every: Number(element.dataset.every) || Infinity, next: 0 });
      const state = lives.get(element);
      if (shown(element) && Date.now() >= state.next) load(element);
    }
    for (const [element] of lives) if (!element.isConnected) lives.delete(element);
    for (const table of document.querySelectorAll("[data-clips]:not([data-made])")) if (shown(table)) make(table);
    const go = document.querySelector("[data-go]");
    if (go) { const where = go.dataset.go; go.removeAttribute("data-go"); location.assign(where); }
  }

  // --- fields and buttons --------------------------------------------------------------------------------------------
  let planning = 0;
  async function save(field) {
    const said = field.closest(".field")?.querySelector(".said");
    const answer = await ask(field.dataset.do || "set", { key: field.dataset.key, value: field.type === "checkbox" ? String(field.checked) : field.value });
    if (said) {
      said.textContent = answer.error || "saved"; said.className = answer.error ? "said bad" : "said good";
      field.setAttribute("aria-invalid", answer.error ? "true" : "false");
    } else if (answer.error) tell(answer.error, true);
    if (answer.error) return;
    if (field.dataset.do !== "fact") field.closest(".field").classList.toggle("own", field.value !== "");
    if (answer.reload) { field.blur(); refresh(); }
    clearTimeout(planning);
    planning = setTimeout(async () => { await ask("plan", {}); refresh("setup"); }, 1200);
  }
  document.addEventListener("change", (event) => { if (event.target.matches("[data-key]")) { edits += 1; save(event.target); } });
  document.addEventListener("input", (event) => {
    if (event.target.matches("[data-key]")) edits += 1;
    if (!event.target.matches("[data-find]")) return;
    const words = event.target.value.toLowerCase(), form = event.target.closest(".vt");
    for (const field of form.querySelectorAll(".keys .field")) field.hidden = words && !field.textContent.toLowerCase().includes(words);
    for (const part of form.querySelectorAll("details.keys")) {
      part.hidden = words && !part.querySelector(".field:not([hidden])"); if (words) part.open = !part.hidden;
    }
  });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-ask]");
    if (!button) { if (event.target.closest("[data-play]")) play(event.target.closest("[data-play]")); return; }
    event.preventDefault();
    if (button.dataset.confirm && !window.confirm(button.dataset.confirm)) return;
    const body = { ...JSON.parse(button.dataset.body || "{}") };
    for (const field of button.closest("[data-form]")?.querySelectorAll("[name]") || []) body[field.name] = field.type === "checkbox" ? field.checked : field.value;
    button.disabled = true;
    const answer = await ask(button.dataset.ask, body);
    button.disabled = false; button.blur();
    settle(answer);
  });
  function play(button) {
    const videos = [...document.querySelectorAll(button.dataset.play)].filter((one) => one.offsetParent !== null);
    const going = videos.some((one) => !one.paused);
    for (const one of videos) { if (going) one.pause(); else { one.currentTime = 0; one.loop = true; } }
    if (!going) Promise.all(videos.map((one) => one.play().catch(() => 0)));
    button.textContent = going ? "Play all in step" : "Pause all";
  }

  // --- the table of clips --------------------------------------------------------------------------------------------
  const HEIGHT = 92;
  function make(box) {
    box.dataset.made = "yes";
    box.innerHTML = `<div class="filters"><input type="search" aria-label="find clips by name or caption" placeholder="find in names and captions">
      <select aria-label="show clips of one state"></select><span class="count" role="status"></span></div>
      <div class="clips" tabindex="0" role="list" aria-label="clips"><div class="all"></div></div>`;
    const find = box.querySelector("input"), choose = box.querySelector("select"), view = box.querySelector(".clips"), all = box.querySelector(".all");
    let rows = [], kept = [], made = new Map(), spare = [], tag = "", tall = 0, drawn = 0;
    box.reload = async () => {
      const response = await fetch(`/studio/clips?project=${encodeURIComponent(project())}`, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (response.status === 304) return;
      if (!response.ok) { made.clear(); spare = []; all.innerHTML = `<p class="bad">${escape(await response.text())}</p>`; return; }
      tag = response.headers.get("ETag"); 
      const old = new Map(rows.map((row) => [row.path, row]));
      rows = (await response.json()).map((row) => {  // the same object as before, so that a row that is being written to stays
        const was = old.get(row.path) || {};
        for (const key of Object.keys(was)) delete was[key];
        return know(Object.assign(was, row));
      });
      const count = {}; for (const row of rows) count[row.state] = (count[row.state] || 0) + 1;
      const was = choose.value;
      choose.innerHTML = `<option value="">all ${rows.length} clips</option>` + Object.entries(count).map(([state, n]) => `<option value="${state}">${state}: ${n}</option>`).join("");
      choose.value = count[was] ? was : "";
      filter();
    };
    function filter() {
      const words = find.value.toLowerCase(), state = choose.value;
      kept = rows.filter((row) => (!state || row.state === state) && (!words || row.words.includes(words)));
      const there = new Set(kept);
      for (const [row, element] of made) {
        const within = element.contains(document.activeElement);
        if (!there.has(row)) { if (within) document.activeElement.blur(); free(row, element); } else if (!within) fill(element, row);
      }
      all.style.height = `${kept.length * HEIGHT}px`;
      box.querySelector(".count").textContent = kept.length === rows.length ? "" : `${kept.length} of ${rows.length}`;
      if (!rows.length) { made.clear(); spare = []; all.innerHTML = '<p class="soft">No clips yet: add some above.</p>'; } else all.querySelector(":scope > p")?.remove();
      draw();
    }
    function draw() {
      const first = Math.max(0, Math.floor(view.scrollTop / HEIGHT) - 3), last = Math.min(kept.length, first + Math.ceil(tall / HEIGHT) + 6);
      const wanted = new Set(kept.slice(first, last));
      for (const [row, element] of made) if (!wanted.has(row) && !element.contains(document.activeElement)) free(row, element);
      for (let i = first; i < last; i++) {
        let element = made.get(kept[i]);
        if (!element) { element = spare.pop() || blank(); fill(element, kept[i]); made.set(kept[i], element); }
        element.style.transform = `translateY(${i * HEIGHT}px)`;
      }
      for (const element of spare) element.hidden = true;
    }
    function free(row, element) { made.delete(row); spare.push(element); delete element.dataset.path; }
    function blank() {  // rows are used again: making one costs ten times what filling it does
      const element = document.createElement("div");
      element.className = "clip"; element.setAttribute("role", "listitem");
      element.innerHTML = `<div class="pic"><img alt=""></div>
        <div class="what"><b></b><span><span class="badge"></span><span class="soft"></span></span><span class="why"></span></div>
        <textarea placeholder="no caption yet: say what the clip shows"></textarea>
        <div class="acts"><button></button><button>take out</button></div>`;
      const [img, name, badge, facts, why, area] = ["img", "b", ".badge", ".soft", ".why", "textarea"].map((one) => element.querySelector(one));
      const [hold, out] = element.querySelectorAll("button");
      element.parts = { img, name, badge, facts, why, area, hold, out };
      img.onerror = () => { img.hidden = true; };
      why.onclick = () => tell(element.row.why, element.row.state === "skipped");  // a telephone shows no titles
      area.onchange = async () => {
        const row = element.row, words = area.value;
        const answer = await ask("caption", { path: row.path, text: words });
        if (answer.error) { tell(answer.error, true); area.classList.add("wrong"); return; }
        area.classList.remove("wrong"); row.caption = words; know(row); tell(answer.say); tag = "";
      };
      area.onkeydown = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) area.blur(); };
      hold.title = "Held-out clips are never trained on; they measure whether the model learns or copies.";
      hold.onclick = async () => settle(await ask("move", { path: element.row.path, to: element.row.part === "held-out" ? "clips" : "held-out" }));
      out.title = "Moves the clip into the project's folder 'removed'.";
      out.onclick = async () => {
        const path = element.row.path;
        if (window.confirm(`Take ${path} out of the data? It is moved to the folder "removed" of the project, not deleted.`)) settle(await ask("move", { path, to: "removed" }));
      };
      all.append(element);
      return element;
    }
    function fill(element, row) {
      const { img, name, badge, facts, why, area, hold, out } = element.parts;
      element.row = row; element.dataset.path = row.path; element.hidden = false;
      const source = row.id ? `/studio/thumb?project=${encodeURIComponent(project())}&id=${row.id}` : "";
      if (img.getAttribute("src") !== source) { if (source) img.src = source; else img.removeAttribute("src"); }
      img.hidden = !source;
      name.textContent = row.path.replace(/^clips\//, ""); name.title = row.path;
      badge.className = `badge ${{ used: "good", warned: "care", "held out": "calm", skipped: "bad" }[row.state] || "quiet"}`;
      badge.textContent = row.state;
      facts.textContent = [row.size, row.seconds ? `${row.seconds.toFixed(1)} s` : "", row.windows ? `${row.windows} window${row.windows > 1 ? "s" : ""}` : ""].filter(Boolean).join(", ");
      why.className = `why ${row.state === "skipped" ? "bad" : "soft"}`; why.textContent = why.title = row.why;
      area.value = row.caption; area.readOnly = Boolean(row.fixed); area.classList.remove("wrong");
      area.setAttribute("aria-label", `caption of ${row.path}`);
      area.title = row.fixed || "What the clip shows; each line is a caption of its own. Saved when you leave the field, or with Ctrl+Enter.";
      hold.hidden = out.hidden = !row.part; hold.textContent = row.part === "held-out" ? "train on it" : "hold out";
    }
    function know(row) { row.words = `${row.path}\n${row.caption}\n${row.why}`.toLowerCase(); return row; }
    find.oninput = filter; choose.onchange = filter;
    view.addEventListener("scroll", () => { if (!drawn) drawn = requestAnimationFrame(() => { drawn = 0; draw(); }); }, { passive: true });
    new ResizeObserver(() => { tall = view.clientHeight; draw(); }).observe(view);
    box.reload();
  }

  // --- the page of the tabs is part of the address, so that a reload ends where it began ------------------------------
  function watchTabs() {
    const names = ["project", "data", "setup", "train", "samples", "export"];
    document.addEventListener("click", (event) => {
      const tab = event.target.closest?.('[role="tab"], .overflow-dropdown button, .overflow-item');
      if (!tab) return;
      const name = names.find((one) => tab.textContent.trim().toLowerCase().endsWith(one));
      if (!name) return;
      const words = query(); words.set("tab", name);
      history.replaceState(history.state, "", `?${words}`);
      setTimeout(look, 30);
    });
  }
  let opened = false;  // the page of the address is opened here, without asking the server: no other one is seen before it
  function openPage() {
    const wanted = query().get("tab") || (project() ? "data" : "project");
    const tab = [...document.querySelectorAll('#pages [role="tab"]')].find((one) => one.textContent.trim().toLowerCase().endsWith(wanted));
    if (tab) { opened = true; if (tab.getAttribute("aria-selected") !== "true") tab.click(); }
    if (tab || Date.now() - begun > 60000) opened = true;
  }
  const begun = Date.now();
  watchTabs();
  setInterval(look, 200);
  document.addEventListener("visibilitychange", look);
  return { project, refresh: () => refresh(), tell, first: (...values) => [project(), ...values.slice(1)] };
})();
window.videotune = videotune;
