// The studio's own script: parts that keep themselves up to date, fields that save themselves, buttons that ask first,
// a table of thousands of clips of which only the rows in sight exist, and videos that play in step.
"use strict";
(() => {
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
      place.id = "vt-told"; place.setAttribute("role", "status"); place.setAttribute("aria-live", "polite");
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
    for (const element of document.querySelectorAll("[data-live]")) {
      if (!lives.has(element)) lives.set(element, { every: Number(element.dataset.every) || Infinity, next: 0 });
      const state = lives.get(element);
      if (shown(element) && Date.now() >= state.next) load(element);
    }
    for (const [element] of lives) if (!element.isConnected) lives.delete(element);
    for (const table of document.querySelectorAll("[data-clips]:not([data-made])")) if (shown(table)) make(table);
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
  document.addEventListener("keydown", (event) => {  // as in any form, Enter in a field asks
    if (event.key === "Enter" && event.target.matches("[data-form] input:not([type=checkbox])")) event.target.closest("[data-form]").querySelector("[data-ask]").click();
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

  // --- files that are sent ---------------------------------------------------------------------------------------------
  function send(file, place) {
    return new Promise((done) => {
      const request = new XMLHttpRequest(), words = new URLSearchParams({ project: project(), name: file.name });
      request.open("POST", `/studio/upload?${words}`);
      request.upload.onprogress = (event) => {
        place.textContent = `sending ${file.name}: ${Math.floor(100 * event.loaded / Math.max(1, event.total))} %`;
      };
      request.onload = () => {
        try { done(request.status === 200 ? JSON.parse(request.responseText) : [{ name: file.name, taken: false, reason: request.responseText }]); }
        catch (error) { done([{ name: file.name, taken: false, reason: String(error) }]); }
      };
      request.onerror = () => done([{ name: file.name, taken: false, reason: "it did not arrive: is the studio still running?" }]);
      request.send(file);
    });
  }
  async function upload(files) {
    const told = document.getElementById("upload-told"), line = document.createElement("p"), got = [];
    told.replaceChildren(line); line.className = "working";
    for (const file of files) got.push(...await send(file, line));
    const taken = got.filter((one) => one.taken).length, refused = got.filter((one) => !one.taken);
    line.className = taken ? "done good" : "done"; line.textContent = taken ? `${taken} file${taken === 1 ? "" : "s"} added` : "nothing was added";
    if (refused.length) {
      const list = document.createElement("ul"); list.className = "bad"; list.setAttribute("role", "alert");
      for (const one of refused.slice(0, 50)) { const item = document.createElement("li"); item.textContent = `${one.name}: ${one.reason}`; list.append(item); }
      told.append(`${refused.length} not taken:`, list);
    }
    if (taken) settle({ error: (await ask("check", {})).error });
  }
  function watchFiles() {
    const drop = document.getElementById("upload"), input = drop.querySelector("input");
    input.onchange = async () => { const files = [...input.files]; input.value = ""; await upload(files); };
    for (const kind of ["dragover", "dragleave", "drop"]) drop.addEventListener(kind, (event) => {
      event.preventDefault(); drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files.length) upload([...event.dataTransfer.files]);
    });
  }

  // --- the pages: which one is open is part of the address, so that a reload ends where it began -----------------------
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function openPage(name) {
    const wanted = tabs.find((tab) => tab.dataset.page === name) || tabs[0];
    for (const tab of tabs) {
      const selected = tab === wanted;
      tab.setAttribute("aria-selected", String(selected)); tab.tabIndex = selected ? 0 : -1;
      document.getElementById(`page-${tab.dataset.page}`).hidden = !selected;
    }
    look();
  }
  function choose(tab) {
    const words = query(); words.set("tab", tab.dataset.page);
    history.replaceState(history.state, "", `?${words}`);
    openPage(tab.dataset.page); tab.focus();
  }
  function watchTabs() {
    for (const [i, tab] of tabs.entries()) {
      tab.onclick = () => choose(tab);
      tab.onkeydown = (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step) choose(tabs[(i + step + tabs.length) % tabs.length]);
      };
    }
    openPage(query().get("tab") || (project() ? "data" : "project"));
  }
  if (tabs.length) { watchFiles(); watchTabs(); setInterval(look, 200); document.addEventListener("visibilitychange", look); }
})();
