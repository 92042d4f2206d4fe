// The page Data: tiles that play, captions that save themselves, selection, uploads, the large player.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const $ = (id) => document.getElementById(id);
  const tiles = $("tiles"), base = $("data-tools").dataset.base, project = base.replace(/\/data$/, "");
  const picked = new Set();
  let all = false, last = null;  // all: everything that the filter shows is selected, tiles that are not loaded too

  // --- the grid: filter, refresh -------------------------------------------------------------------------------------
  const staying = new Set();  // clips captioned under this filter: they keep their tiles until it is chosen anew
  let aside = new URLSearchParams(location.search).get("aside") ?? "";  // the page says how to keep clips aside, until the filter is chosen anew
  const filterQuery = () => ({ q: $("find").value, state: $("state").value, ...(aside && { aside }) });
  const query = () => (staying.size ? { ...filterQuery(), stay: [...staying].join("\n") } : filterQuery());
  const options = {
    morphStyle: "innerHTML",
    get ignoreActiveValue() { return vt.isTyping(); },
    callbacks: {
      beforeNodeMorphed: (old, fresh) => {
        const may = vt.mayMorph(old, fresh);
        if (!may && old.matches(".clip-open")) old.dataset.stale = "";
        return may;
      },
      beforeAttributeUpdated: (name, node) => !(name === "open" && node.matches("details")) && !(name === "class" && node.matches("img")),
    },
  };
  let asking = 0;
  async function refresh(fromTop) {
    const turn = ++asking, shown = tiles.querySelectorAll(".clip").length;
    const count = fromTop ? 60 : Math.max(60, Math.ceil(shown / 60) * 60);
    const answer = await vt.ask(`${base}/tiles?${new URLSearchParams({ ...query(), count })}`);
    const text = await answer.text();
    if (turn !== asking || !answer.ok) return;
    Idiomorph.morph(tiles, text, options);
    htmx.process(tiles); marks(); unsavedAgain();
    if (!$("player").open) askNext();
  }
  let typing = 0;
  function filter() {
    staying.clear(); aside = "";
    const words = new URLSearchParams(Object.entries(filterQuery()).filter(([, value]) => value));
    history.replaceState(null, "", words.size ? `?${words}` : location.pathname);
    all = false; refresh(true);
  }
  $("find").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(filter, 150); });
  $("state").addEventListener("change", filter);
  let version = $("data-version")?.dataset.version;
  document.addEventListener("vt:region", () => {
    const now = $("data-version")?.dataset.version;
    if (now !== version) { version = now; refresh().then(tellScenes); renewState(); }
  });
  // A film that is cut leaves its place in the grid, and its scenes appear above all clips, which may be out of sight.
  const cutting = new Set();
  const isInSight = (part) => part.getBoundingClientRect().top < innerHeight && part.getBoundingClientRect().bottom > 0;
  async function tellScenes() {
    for (const path of [...cutting].filter((film) => !tileOf(film) && film !== showing)) {
      cutting.delete(path);
      const answer = await vt.ask(`${base}/gone?${new URLSearchParams({ path })}`);
      if (!answer.ok) continue;
      const { text, scenes } = await answer.json(), part = $(`scenes-${encodeURIComponent(scenes)}`);
      if (part && !isInSight(part)) vt.toast(text, false, { words: "Show them", show: part.id });
    }
  }
  document.addEventListener("htmx:afterSettle", marks);
  tiles.addEventListener("error", (event) => { if (event.target.matches("img")) event.target.classList.add("none"); }, true);
  tiles.addEventListener("load", (event) => { if (event.target.matches("img")) event.target.classList.remove("none"); }, true);

  // --- a tile plays while the pointer or the focus is on it ------------------------------------------------------------
  const VIDEO = /\.(mp4|m4v|mov|webm|mkv|avi|gif)$/i;
  function play(view) {
    const open = view.querySelector(".clip-open"), path = open.dataset.view || open.dataset.play;
    if (view.querySelector("video") || !path || !VIDEO.test(path) || !open.querySelector("img")) return;
    open.dataset.keep = "";  // the badges beside it are drawn anew all the same
    const video = document.createElement("video");
    video.muted = video.loop = video.playsInline = true; video.preload = "auto"; video.tabIndex = -1;
    video.setAttribute("aria-hidden", "true");
    video.src = `${project}/file?path=${encodeURIComponent(path)}`;
    video.onerror = () => halt(view);
    open.append(video); video.play().catch(() => {});
  }
  function halt(view) {
    const video = view.querySelector("video");
    if (video) { video.onerror = null; video.removeAttribute("src"); video.load(); video.remove(); }
    const open = view.querySelector(".clip-open"), isStale = "stale" in open.dataset;
    delete open.dataset.keep; delete open.dataset.stale;
    if (isStale) refresh();
  }
  const main = $("main");
  main.addEventListener("pointerover", (event) => { const view = event.target.closest?.(".clip-view"); if (view && event.pointerType !== "touch") play(view); });
  main.addEventListener("pointerout", (event) => { const view = event.target.closest?.(".clip-view"); if (view && !view.contains(event.relatedTarget)) halt(view); });
  main.addEventListener("focusin", (event) => { if (event.target.matches(".clip-open:focus-visible")) play(event.target.parentElement); });
  main.addEventListener("focusout", (event) => { if (event.target.matches(".clip-open")) halt(event.target.parentElement); });

  // --- captions ------------------------------------------------------------------------------------------------------
  // A caption has up to two fields, the one of its tile and the one of the player; both are marked by its path.
  const NOT_SAVED = "not saved yet: the studio does not answer; it is sent again by itself";
  const clean = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean).join("\n");
  const tileOf = (path) => tiles.querySelector(`.clip[data-path="${CSS.escape(path)}"]`);
  const fieldsOf = (path) => [...document.querySelectorAll(".clip .caption")].filter((field) => field.closest(".clip").dataset.path === path);
  function save(field) {
    const path = field.closest(".clip").dataset.path;
    if (tileOf(path)) staying.add(path);
    const text = field.value, was = field.dataset.was;
    if (text.trim() === was.trim() && !vt.entry(`caption ${path}`)) { delete field.dataset.keep; mark(field, ""); return; }
    vt.save(`caption ${path}`, { url: `${base}/caption`, values: { path, text }, field: "text", was });
  }
  function mark(field, words, bad) {
    const place = field.closest(".clip").querySelector(".saved-mark");
    if (!place) return;
    place.textContent = words; place.hidden = !words; place.classList.toggle("bad", Boolean(bad));
    if (words === "saved") setTimeout(() => { if (place.textContent === "saved") place.hidden = true; }, 2500);
  }
  const conflicts = new Map(), savedAt = new Map();  // by path: what is not decided yet, and the number of the last save
  let saves = 0;
  document.addEventListener("vt:save", ({ detail }) => {
    if (!detail.name.startsWith("caption ")) return;
    const { path, text } = detail.entry.values, fields = fieldsOf(path);
    for (const field of fields) outcome(field, text, detail);
    if (detail.state === "saved") savedAt.set(path, ++saves);
    if (detail.state === "conflict") { conflicts.set(path, { text, theirs: detail.theirs }); askNext(); }
  });
  const isSeen = (path) => fieldsOf(path).some((field) => field.id === "player-text" || !$("player").open);
  // A conflict that nobody sees, as the filter hides its tile or the player has gone on, is asked about in the player, one after another.
  function askNext() {
    const shownField = $("player-text");
    if (shownField && undecided(shownField)) return;
    const path = [...conflicts.keys()].find((other) => !isSeen(other));
    if (path === undefined) return;
    if (shownField) save(shownField);
    open(path, true);
  }
  function decide(path, theirs, text) {
    conflicts.delete(path);
    for (const field of fieldsOf(path)) {
      field.closest(".clip").querySelector(".conflict").hidden = true;
      field.dataset.was = theirs; field.value = text;
      if (text === theirs) delete field.dataset.keep;
    }
  }
  function outcome(field, text, { state, text: message, yours, now, ...detail }) {
    const isTyped = field === document.activeElement && field.value !== text;  // typed on since
    if (state === "sending" || state === "unsaved") {
      field.dataset.keep = "";
      if (!isTyped) field.value = text;
      mark(field, state === "unsaved" ? NOT_SAVED : "", true);
    } else if (state === "saved") {
      field.dataset.was = clean(text);
      if (!isTyped) { field.value = clean(text); delete field.dataset.keep; }
      mark(field, "saved");
    } else if (state === "conflict") { field.dataset.keep = ""; mark(field, ""); conflict(field, detail.theirs); }
    else { field.dataset.keep = ""; mark(field, `not saved: ${message}`, true); }
  }
  function unsavedAgain() {  // tiles that came later
    for (const field of tiles.querySelectorAll(".caption")) {
      const entry = vt.entry(`caption ${field.closest(".clip").dataset.path}`);
      if (entry && !("keep" in field.dataset)) outcome(field, entry.values.text, { state: "unsaved" });
    }
  }
  function conflict(field, theirs) {
    const clip = field.closest(".clip"), box = clip.querySelector(".conflict"), path = clip.dataset.path;
    const keepMine = () => { decide(path, theirs, field.value); save(field); };
    const takeTheirs = () => decide(path, theirs, theirs);
    const quote = document.createElement("blockquote"); quote.textContent = theirs || "no caption";
    const says = document.createElement("p"); says.textContent = "This caption was changed in another window or by another program. It is now:";
    const button = (words, act) => {
      const made = document.createElement("button");
      made.type = "button"; made.className = "btn"; made.textContent = words;
      made.onclick = () => { act(); askNext(); };
      return made;
    };
    const row = document.createElement("div"); row.className = "row";
    row.append(button("Keep mine", keepMine), button("Take theirs", takeTheirs));
    box.setAttribute("role", "alert"); box.replaceChildren(says, quote, row); box.hidden = false;
  }
  document.addEventListener("input", ({ target }) => {
    if (!target.matches(".clip .caption")) return;
    target.dataset.keep = "";
    const open = conflicts.get(target.closest(".clip").dataset.path);
    if (open) open.text = target.value;
  });
  const undecided = (field) => !field.closest(".clip").querySelector(".conflict").hidden;
  document.addEventListener("change", (event) => {
    // a click on "Keep mine" blurs the field: a save of that blur would draw the buttons anew under the pointer
    if (event.target.matches(".clip .caption") && !undecided(event.target)) save(event.target);
  });
  tiles.addEventListener("keydown", (event) => {
    if (event.target.matches(".caption") && event.key === "Enter" && (event.ctrlKey || event.metaKey)) save(event.target);
    // Captions are written one after another; Shift+Tab leads back through the buttons between them.
    const isTab = event.key === "Tab" && !event.shiftKey && !event.ctrlKey && !event.altKey;
    if (!isTab || !event.target.matches(".caption") || undecided(event.target)) return;
    const next = nextCaption(event.target);
    if (next) { event.preventDefault(); next.focus(); }
  });
  function nextCaption(field) {
    const captions = [...tiles.querySelectorAll(".caption")];
    return captions[captions.indexOf(field) + 1];
  }
  // A tile whose caption is written stays where it is on the screen, while notes above it come and go.
  let writtenTop = 0;
  const writtenTile = () => document.activeElement?.closest("#tiles .clip:has(.caption:focus)");
  const topOf = (tile) => tile.getBoundingClientRect().top;
  const rememberTop = () => { const tile = writtenTile(); if (tile) writtenTop = topOf(tile); };
  document.addEventListener("focusin", rememberTop);
  addEventListener("scroll", rememberTop, { passive: true });
  new ResizeObserver(() => {
    const tile = writtenTile();
    if (tile) scrollBy({ top: topOf(tile) - writtenTop, behavior: "instant" });
    rememberTop();
  }).observe(main);

  for (const field of tiles.querySelectorAll(".caption"))  // typed before this script was here
    if (field !== document.activeElement && field.value !== field.defaultValue) save(field);

  // --- selection -----------------------------------------------------------------------------------------------------
  function marks() {
    for (const picture of tiles.querySelectorAll("img")) if (picture.complete && !picture.naturalWidth && picture.currentSrc) picture.classList.add("none");
    for (const tile of tiles.querySelectorAll(".clip")) {
      const box = tile.querySelector("[data-pick]"), on = all || picked.has(tile.dataset.path);
      if (box) { box.checked = on; tile.classList.toggle("picked", on); }
    }
    const count = all ? Number($("tiles-found")?.dataset.found || 0) : picked.size;
    $("picked").hidden = !count; $("picked-said").textContent = `${count} selected`;
    tiles.classList.toggle("picking", count > 0);
  }
  tiles.addEventListener("click", (event) => {
    if (!event.target.matches("[data-pick]")) return;
    const boxes = [...tiles.querySelectorAll("[data-pick]")], at = boxes.indexOf(event.target), on = event.target.checked;
    if (all) { all = false; for (const one of boxes) picked.add(one.closest(".clip").dataset.path); }
    const from = event.shiftKey && last && boxes.indexOf(last) >= 0 ? boxes.indexOf(last) : at;
    for (const one of boxes.slice(Math.min(from, at), Math.max(from, at) + 1)) picked[on ? "add" : "delete"](one.closest(".clip").dataset.path);
    last = event.target; marks();
  });
  const chosen = () => {
    const words = new URLSearchParams();
    if (all || !picked.size) { words.set("all", "1"); for (const [key, value] of Object.entries(query())) words.set(key, value); }
    else for (const path of picked) words.append("path", path);
    return words;
  };
  function unpick() { picked.clear(); all = false; marks(); }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && (picked.size || all) && !document.querySelector("dialog[open]")) unpick();
  });

  // --- buttons of tiles and of the selection ---------------------------------------------------------------------------
  document.addEventListener("click", async (event) => {
    const act = event.target.closest("[data-act]"), tile = event.target.closest(".clip,#player-state"), view = event.target.closest("[data-view]");
    if (event.target.closest("[data-all]")) { all = true; marks(); }
    if (event.target.closest("[data-clear]")) unpick();
    if (act) {
      const words = tile ? new URLSearchParams({ path: tile.dataset.path }) : chosen();
      words.set("to", act.dataset.act);
      if (tile?.id === "player-state") leaving = tile.dataset.path;
      const answer = await vt.post(`${base}/move`, words);
      if (answer.ok && !tile) unpick();
      if (answer.ok && tile) { picked.delete(tile.dataset.path); marks(); }
      if (answer.ok && tile?.id === "player-state") await leavePlace(tile.dataset.path, act.dataset.act);
      leaving = null;
    }
    const select = event.target.closest("[data-select]");
    if (select) { all = false; picked.clear(); for (const path of JSON.parse(select.dataset.select)) picked.add(path); marks(); $("picked").scrollIntoView({ block: "nearest" }); }
    if (event.target.closest("[data-cut]")) { cutting.add(tile.dataset.path); vt.post(`${base}/cut`, { path: tile.dataset.path }); }
    if (event.target.closest("[data-write]")) (tile.querySelector(".caption") || $("player-text")).focus();
    if (view) {
      const writing = view.closest("#without") !== null;
      shown = writing ? { q: "", state: "without" } : query();
      visited.clear();
      open(view.dataset.view, writing);
    }
    const playing = event.target.closest("[data-play]");
    if (playing) { const video = playing.querySelector("video"); if (video) video.muted = !video.muted; else play(playing.parentElement); }
    const files = event.target.closest("[data-files]");
    if (files) $(files.dataset.files).click();
    const bring = event.target.closest("[data-bring]");
    if (bring) {
      const answer = await vt.post(`${base}/caption`, { path: bring.dataset.bring, was: bring.dataset.was, text: bring.dataset.text, by: "restore" });
      if (answer.status === 409) vt.toast("The caption has changed since. Open the clip again.", true);
      if (answer.ok) { vt.toast("Caption restored"); open(bring.dataset.bring); }
    }
  });

  // --- the large player ------------------------------------------------------------------------------------------------
  let showing = null, shown = query(), turn = 0;  // shown: the filter that the arrows follow
  let leaving = null;  // the clip that a button of the player is moving just now
  // A clip that was captioned leaves the filter. The arrows lead back to the latest ones all the same.
  const MOST_VISITED = 100, visited = new Set();
  const clipQuery = (path) => {
    const stay = [...(shown.stay ?? "").split("\n"), ...visited].filter(Boolean).slice(-MOST_VISITED);
    return new URLSearchParams({ path, ...shown, stay: stay.join("\n") });
  };
  async function open(path, writing = false) {
    const left = $("player-text"), wasUndecided = left && undecided(left);
    const current = ++turn, before = saves, answer = await vt.ask(`${base}/clip?${clipQuery(path)}`);
    const text = await answer.text();
    if (current !== turn) return;
    if (left?.isConnected && !wasUndecided && undecided(left)) return;  // its save met another caption meanwhile: it stays
    if ((savedAt.get(path) ?? 0) > before) return open(path, writing);  // this answer may have the caption of before
    if (!answer.ok) return vt.toast(text, true);
    showing = path; visited.add(path); $("player-body").innerHTML = text;
    if (!$("player").open) $("player").showModal();
    const field = $("player-text"), entry = vt.entry(`caption ${path}`);
    if (field && entry) outcome(field, entry.values.text, { state: "unsaved" });
    if (field && conflicts.has(path)) {
      const { text: mine, theirs } = conflicts.get(path);
      field.value = mine; field.dataset.keep = ""; conflict(field, theirs);
    }
    if (writing && field) { field.focus(); field.setSelectionRange(field.value.length, field.value.length); } else $("player-title").focus();
    const film = $("player-film"), sound = $("player-sound");
    if (film) {
      film.addEventListener("timeupdate", () => { if (film.isConnected) $("player-time").textContent = `${film.currentTime.toFixed(2)} s`; });
      film.addEventListener("error", () => { if (film.isConnected) $("player-unplayable").hidden = false; });
      follow(film, document.querySelectorAll("#player .player-companion"));
      film.play().catch(() => {});
    }
    if (sound) { const got = await vt.ask(sound.dataset.sound); if (got.ok && sound.isConnected) sound.innerHTML = await got.text(); }
  }
  // the videos that belong to the clip play in step with it
  const MOST_DRIFT = 0.08;  // seconds that a video may be ahead or behind while it plays
  const MOST_DRIFT_HALTED = 0.004;  // and while it stands: less than a frame, more than a browser rounds
  function follow(film, companions) {
    const align = (most) => {
      for (const video of companions) {
        const end = Number.isFinite(video.duration) ? video.duration - 0.001 : film.currentTime;
        const time = Math.max(0, Math.min(film.currentTime, end));
        if (Math.abs(video.currentTime - time) > most) video.currentTime = time;
      }
    };
    const play = () => { align(MOST_DRIFT); for (const video of companions) video.play().catch(() => {}); };
    const halt = () => { for (const video of companions) video.pause(); align(0); };
    film.addEventListener("play", play); film.addEventListener("playing", play);
    film.addEventListener("pause", halt); film.addEventListener("waiting", halt);
    film.addEventListener("seeking", () => align(0)); film.addEventListener("seeked", () => align(0));
    film.addEventListener("timeupdate", () => { if (!film.paused) align(MOST_DRIFT); });
    film.addEventListener("ratechange", () => { for (const video of companions) video.playbackRate = film.playbackRate; });
    for (const video of companions) video.addEventListener("loadedmetadata", () => align(0));
    // A browser may correct the time of a film after it has said that the film stands, and says nothing then.
    const watch = setInterval(() => {
      if (!film.isConnected) return clearInterval(watch);
      if (!film.paused) return;
      for (const video of companions) if (!video.paused) video.pause();
      if (![...companions].some((video) => video.seeking)) align(MOST_DRIFT_HALTED);
    }, 200);
  }
  // what the player says about the clip that it shows: after a change of the caption, and after a check
  async function renewState() {
    if (!$("player").open || !showing) return;
    const path = showing, answer = await vt.ask(`${base}/clip?${clipQuery(path)}`);
    if (answer.status >= 400 && answer.status < 500) return leaveGone(path);
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html"), state = page.getElementById("player-state"), place = $("player-state");
    if (path !== showing) return;
    if (state && place && place.innerHTML !== state.innerHTML) Idiomorph.morph(place, state.innerHTML, { morphStyle: "innerHTML" });
    followOtherTab(path, page.getElementById("player-text"));
  }
  // A caption that another tab has saved is shown, unless something is typed here that is not saved yet.
  function followOtherTab(path, fresh) {
    const field = $("player-text");
    if (!field || !fresh || field.dataset.was === fresh.dataset.was) return;
    if (field.value !== field.dataset.was || vt.entry(`caption ${path}`) || undecided(field)) return;
    field.value = field.dataset.was = fresh.dataset.was;
  }
  document.addEventListener("vt:save", ({ detail }) => { if (detail.state === "saved" && detail.name === `caption ${showing}`) renewState(); });
  // the clip that the player shows was moved: show it at its new place, or the next one
  async function leavePlace(path, to) {
    const next = [...document.querySelectorAll("#player [data-step-clip]:enabled")].at(-1)?.dataset.stepClip;
    if (to !== "bin") await open(to + path.slice(path.indexOf("/")));
    else if (next) await open(next);
    else closePlayer();
  }
  // The clip that the player shows was removed or moved by a job, in another tab or by another program.
  async function leaveGone(path) {
    const answer = await vt.ask(`${base}/gone?${new URLSearchParams({ path })}`);
    if (!answer.ok) return;
    const { moved, text } = await answer.json();
    if (path !== showing || path === leaving || !$("player").open) return;
    const field = $("player-text"), typed = field && field.value !== field.dataset.was ? field.value : "";
    conflicts.delete(path);
    if (moved) {
      await open(moved);
      if (typed && showing === moved) { $("player-text").value = typed; save($("player-text")); }
      return;
    }
    closePlayer();
    vt.toast(typed ? `${text}. Its caption is not saved: ${typed}` : text, Boolean(typed));
    document.querySelector(".scenes")?.scrollIntoView({ block: "nearest" });
  }
  function closePlayer() { $("player-body").replaceChildren(); $("player").close(); }
  $("player").addEventListener("close", () => { if ($("player-text")) save($("player-text")); $("player-body").replaceChildren(); tiles.querySelector(`[data-view="${CSS.escape(showing)}"]`)?.focus(); });
  function frame(step) {
    const film = $("player-film");
    if (!film) return;
    film.pause();
    const fps = Number(film.dataset.fps) || 24, at = Math.round(film.currentTime * fps - 0.5) + step;
    film.currentTime = Math.max(0, Math.min((film.duration || 1e9) - 0.001, (at + 0.5) / fps));
  }
  $("player").addEventListener("click", (event) => {
    const step = event.target.closest("[data-frame]"), other = event.target.closest("[data-step-clip]");
    if (step) frame(Number(step.dataset.frame));
    if (other) stepTo(Number(other.dataset.direction), false);
  });
  function stepTo(direction, writing) {
    const button = document.querySelector(`[data-step-clip][data-direction="${direction}"]`), field = $("player-text");
    if (field && !undecided(field)) save(field);
    if (button && !button.disabled) open(button.dataset.stepClip, writing);
    else if (field && writing) vt.toast(direction > 0 ? "This is the last clip." : "This is the first clip.");
  }
  $("player").addEventListener("keydown", (event) => {
    const writing = event.target.id === "player-text";
    const isEnter = event.key === "Enter" && (event.ctrlKey || event.metaKey);
    const isNext = event.key === "PageDown" || (isEnter && !event.shiftKey);
    const isPrevious = event.key === "PageUp" || (isEnter && event.shiftKey);
    if (isNext || isPrevious) { event.preventDefault(); stepTo(isNext ? 1 : -1, writing); return; }
    if (event.target.matches("input, textarea")) return;
    if (event.key === "c" && $("player-text") && !event.ctrlKey && !event.metaKey) { event.preventDefault(); $("player-text").focus(); }
    if (event.key === "," || event.key === ".") { event.preventDefault(); frame(event.key === "," ? -1 : 1); }
  });

  // --- changes of many captions ------------------------------------------------------------------------------------------
  const form = $("edit-form");
  async function preview() {
    const words = chosen();
    for (const [key, value] of new FormData(form)) words.set(key, value);
    $("edit-to-field").hidden = $("edit-how").value !== "replace";
    const answer = await vt.ask(`${base}/captions?${words}`);
    const text = answer.ok ? await answer.text() : "", focused = document.activeElement?.id;
    $("edit-preview").innerHTML = text;
    if (focused === "edit-with-aside") $(focused)?.focus();
    $("edit-go").disabled = !Number($("edit-count")?.dataset.count);
  }
  form.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(preview, 150); });
  form.addEventListener("htmx:configRequest", (event) => {
    for (const [key, value] of chosen()) {
      const values = event.detail.parameters;
      if (values.append) values.append(key, value); else values[key] = value;
    }
  });
  new MutationObserver(() => { if ($("edit-captions").open) preview(); }).observe($("edit-captions"), { attributes: true, attributeFilter: ["open"] });

  // --- uploads -------------------------------------------------------------------------------------------------------------
  function send(one, moved) {
    return new Promise((done) => {
      const request = new XMLHttpRequest();
      request.open("POST", `${base}/upload?name=${encodeURIComponent(one.name)}`);
      request.setRequestHeader("HX-Request", "true");
      request.upload.onprogress = (event) => moved(event.loaded);
      const failed = (reason, again) => done([{ name: one.name, taken: false, reason, files: 0, again: again && one }]);
      request.onload = () => {
        moved(one.file.size);
        if (request.status !== 200) return failed(request.responseText.slice(0, 300) || `error ${request.status}`);
        done(JSON.parse(request.responseText));
      };
      request.onerror = () => failed("it did not arrive: the studio does not answer", true);
      request.send(one.file);
    });
  }
  let queue = [], busy = false, totals = null;
  async function upload(found) {
    found = found.filter((one) => !/(^|\/)(\.|Thumbs\.db$|desktop\.ini$)/i.test(one.name));
    if (!found.length) return;
    if (!busy) { totals = { files: 0, size: 0, sent: 0, done: 0, added: 0, there: 0, refused: [] }; }
    totals.files += found.length; totals.size += found.reduce((sum, one) => sum + one.file.size, 0);
    queue.push(...found);
    if (busy) return;
    busy = true; $("sent").hidden = false; $("sent-refused").replaceChildren(); document.body.classList.add("sending");
    const worker = async () => {
      for (let one; (one = queue.shift());) {
        let before = 0;
        const results = await send(one, (now) => { totals.sent += now - before; before = now; told(); });
        totals.done += 1;
        for (const each of results) {
          if (!each.taken) totals.refused.push(each);
          else if (each.reason === "was there already") totals.there += 1;
          else totals.added += each.files;
        }
        told();
      }
    };
    await Promise.all([worker(), worker(), worker()]);
    busy = false; document.body.classList.remove("sending"); told();
    $("sent-refused").replaceChildren(...totals.refused.map((one) => { const line = document.createElement("li"); line.textContent = `${one.name}: ${one.reason}`; return line; }));
    if (!totals.refused.length) setTimeout(() => { if (!busy) $("sent").hidden = true; }, 6000);
  }
  $("sent-close").addEventListener("click", () => { $("sent").hidden = true; });
  $("sent-again").addEventListener("click", () => upload(totals.refused.map((one) => one.again).filter(Boolean)));
  const files = (count) => `${count} ${count === 1 ? "file" : "files"}`;
  function told() {
    $("sent-bar").style.width = `${busy ? Math.floor(100 * totals.sent / Math.max(1, totals.size)) : 100}%`;
    const said = busy ? `Sending ${files(totals.files)}: ${totals.done} done` :
      [`${files(totals.added)} added`, totals.there && `${totals.there} there already`, totals.refused.length && `${totals.refused.length} refused`].filter(Boolean).join(", ");
    if ($("sent-said").textContent !== said) $("sent-said").textContent = said;
    $("sent").classList.toggle("care", !busy && totals.refused.length > 0); $("sent").dataset.done = String(!busy);
    $("sent-close").hidden = busy; $("sent-again").hidden = busy || !totals.refused.some((one) => one.again);
  }
  for (const id of ["files", "folder"]) $(id).addEventListener("change", (event) => {
    upload([...event.target.files].map((file) => ({ file, name: file.webkitRelativePath || file.name })));
    event.target.value = "";
  });
  async function walk(entry, above, found) {
    if (entry.isFile) found.push({ file: await new Promise((done, fail) => entry.file(done, fail)), name: above + entry.name });
    else {
      const reader = entry.createReader();
      for (let some; (some = await new Promise((done, fail) => reader.readEntries(done, fail))).length;) for (const one of some) await walk(one, `${above}${entry.name}/`, found);
    }
  }
  const carries = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  document.addEventListener("dragover", (event) => { if (carries(event)) { event.preventDefault(); $("drop").hidden = false; } });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").hidden = true; });
  document.addEventListener("drop", async (event) => {
    $("drop").hidden = true;
    if (!carries(event)) return;
    event.preventDefault();
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean), found = [];
    if (!entries.length) found.push(...[...event.dataTransfer.files].map((file) => ({ file, name: file.name })));
    try { for (const entry of entries) await walk(entry, "", found); }
    catch (error) { vt.toast(`A folder could not be read: ${error.message}`, true); }
    upload(found);
  });

  // --- auto-caption: who writes, a test of the server ------------------------------------------------------------------
  function writer() {
    const how = document.querySelector("#auto-caption [name=how]:checked")?.value;
    $("auto-server").hidden = how !== "server";
    $("auto-name").hidden = how !== "server" && how !== "";
  }
  $("auto-caption").addEventListener("change", (event) => { if (event.target.name === "how") writer(); });
  $("auto-test").addEventListener("click", async () => {
    const said = $("auto-tested"), model = $("auto-model");
    said.className = "muted"; said.textContent = "asking …"; $("auto-test").disabled = true;
    const answer = await vt.ask(`${base}/test-server`, { method: "POST", headers: { "HX-Request": "true" }, body: new URLSearchParams({ endpoint: $("auto-endpoint").value, model: model.value }) });
    $("auto-test").disabled = false;
    const found = answer.ok ? await answer.json() : { good: false, said: await answer.text(), models: [] };
    said.className = found.good ? "good" : "bad"; said.textContent = found.said;
    $("auto-models").replaceChildren(...found.models.map((name) => { const option = document.createElement("option"); option.value = name; return option; }));
    model.setAttribute("list", "auto-models");
    if (found.models.length && !model.value) model.value = found.models[0];
  });
  writer(); marks(); unsavedAgain();
});
