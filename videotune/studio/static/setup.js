// The page Setup: each field is saved as it is left; a value that another tab has changed is shown, never written over.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const at = $("setup").dataset.at, was = new Map();
  const NOT_SAVED = "Not saved yet: the studio does not answer. It is sent again by itself.";

  // what a field held when it was begun to be edited: live updates may change data-saved meanwhile
  const begin = (key, field) => { if (!was.has(key)) was.set(key, field.dataset.saved ?? ""); };
  document.addEventListener("focusin", (event) => {
    const field = event.target.closest("[data-key]");
    if (field) { was.delete(field.dataset.key); begin(field.dataset.key, field); }
  });
  const isConditions = (field) => field.id === "f-conditions";
  const keyField = (key) => (key === "samples" ? $("prompts") : $(`f-${key}`));
  function tell(key, field, words) {
    const place = $(`e-${key}`);
    if (place) place.textContent = words;
    if (field && isConditions(field)) field.toggleAttribute("data-refused", Boolean(words));
    if (field?.matches("input,select,textarea")) words ? field.setAttribute("aria-invalid", "true") : field.removeAttribute("aria-invalid");
  }
  function save(key, field, value) {
    begin(key, field);
    vt.save(`key ${key}`, { url: `${at}/set`, values: { key, value }, field: "value", was: was.get(key) });
  }
  function saveFact(field) {
    const value = field.type === "checkbox" ? String(field.checked) : field.value.trim(), key = field.dataset.fact;
    vt.save(`fact ${key}`, { url: `${at}/fact`, values: { key, value }, field: "value", was: field.dataset.saved });
  }
  document.addEventListener("vt:save", ({ detail }) => {
    const [kind, key] = detail.name.split(" ");
    if (kind !== "key" && kind !== "fact") return;
    const field = kind === "key" ? keyField(key) : $(`f-fact-${key}`), id = kind === "key" ? key : `fact-${key}`;
    if (field) outcome(id, field, detail, kind === "key");
    ready();
  });
  function outcome(id, field, { state, entry, now, yours, tag, text }, isKey) {
    const key = entry.values.key, value = entry.values.value;
    if (state === "sending" || state === "unsaved") {
      field.dataset.keep = "";
      if (field !== document.activeElement && current(field) !== value) fill(field, value);
      if (state === "unsaved") tell(id, field, NOT_SAVED);
      return;
    }
    if (state === "conflict") { field.dataset.keep = ""; isKey ? conflict({ key, now, yours }, field) : factConflict(id, field, now); return; }
    if (state === "refused") { field.dataset.keep = ""; tell(id, field, `Not saved. ${text}`); return; }
    if (id !== "samples") delete field.dataset.keep;
    if (now !== undefined) { field.dataset.saved = now; if (isKey) was.set(key, now); }
    tell(id, field, "");
    if (tag) expected = Math.max(expected, Number(tag));
  }
  function conflict({ key, now, yours }, field) {
    tell(key, field, `Changed elsewhere meanwhile: it is ${now === "" ? "the default" : `"${now}"`} now, and you typed ${yours === "" ? "nothing" : `"${yours}"`}.`);
    const row = document.createElement("span"), keep = document.createElement("button"), use = document.createElement("button");
    row.className = "row"; keep.type = use.type = "button"; keep.className = use.className = "btn small";
    keep.textContent = now === "" ? "Keep the default" : `Keep ${now.slice(0, 40)}`; use.textContent = `Use ${yours === "" ? "the default" : yours.slice(0, 40)}`;
    const decided = () => { was.set(key, now); field.dataset.saved = now; tell(key, field, ""); if (key !== "samples") delete field.dataset.keep; };
    keep.onclick = () => { decided(); fill(field, now); ready(); };
    use.onclick = () => { decided(); save(key, field, yours); };
    row.append(keep, use); $(`e-${key}`).append(row);
  }
  function factConflict(id, field, now) {
    delete field.dataset.keep; field.dataset.saved = now;
    tell(id, field, "Changed elsewhere meanwhile; what the page shows now is saved."); fill(field, now);
  }
  const current = (field) => (field.id === "prompts" ? promptsText() : isConditions(field) ? conditionsText() : field.type === "checkbox" ? String(field.checked) : field.value);
  function fill(field, text) {
    if (field.id === "prompts") fillPrompts(text);
    else if (isConditions(field)) fillConditions(text);
    else if (field.type === "checkbox") field.checked = text === "true";
    else field.value = text;
  }

  // the plan belongs to the settings on the page, or shows no numbers; Start waits for it
  let expected = 0, changing = 0;
  function ready() {
    const plan = $("plan"), start = $("start");
    if (!plan) return;
    const isOld = vt.unsaved() > 0 || changing > 0 || Number(plan.dataset.version) < expected;
    plan.classList.toggle("stale", isOld);
    const refused = document.querySelector("#r-settings [aria-invalid=true], #r-settings [data-refused]");
    const why = refused ? "A value was not saved: see the red field." : vt.unsaved() && vt.isLost ? "A change is not saved yet." : isOld ? "Plan not ready: a change is being saved." : plan.dataset.why;
    start.disabled = Boolean(why);
    start.classList.toggle("primary", !("elsewhere" in plan.dataset));
    const said = why || plan.dataset.note || "";
    if ($("start-why").textContent !== said) $("start-why").textContent = said;
  }
  document.addEventListener("vt:save", () => setTimeout(ready));
  const isChange = (event) => event.detail.requestConfig?.verb === "post" && event.detail.pathInfo?.requestPath.startsWith(at) && !event.detail.pathInfo.requestPath.endsWith("/start");
  document.addEventListener("htmx:beforeRequest", (event) => {
    if (!isChange(event)) return;
    const { xhr } = event.detail;
    changing += 1;
    // Not htmx:afterRequest: it does not arrive if the stream has replaced the pressed button before the answer comes.
    xhr.addEventListener("loadend", () => {
      changing -= 1;
      expected = Math.max(expected, Number(xhr.getResponseHeader("VT-Settings") || 0));
      ready();
    });
    ready();
  });

  document.addEventListener("change", (event) => {
    const field = event.target;
    if (field.matches("[data-key]")) save(field.dataset.key, field, field.value.trim());
    if (field.matches("[data-fact]")) saveFact(field);
    if (field.matches("[data-prompt-file]")) showFiles(field.closest("li"));
    if (field.closest(".condition")) { showParts(field.closest(".condition")); save("conditions", $("f-conditions"), conditionsText()); }
    if (field.closest("#prompts")) savePrompts();
    if (field.id === "import-theirs") theirs(field.files);
    if (field.id === "preset-fits") { try { localStorage.setItem("vt-only-fits", field.checked ? "1" : ""); } catch { /* not kept */ } presets(); }
  });
  document.addEventListener("click", (event) => {
    const reset = event.target.closest("[data-reset]"), drop = event.target.closest("[data-drop-prompt]");
    if (reset) {
      const field = $(`f-${reset.dataset.reset}`);
      was.set(reset.dataset.reset, field.dataset.saved); fill(field, ""); save(reset.dataset.reset, field, ""); field.focus();
    }
    if (drop) { drop.closest("li").remove(); savePrompts(); $("add-prompt").focus(); }
    if (event.target.closest("#add-prompt")) { addPrompt().focus(); }
    const plain = event.target.closest("[data-drop-file]");
    if (plain) {
      const file = fileInput(plain.closest("li"), plain.dataset.dropFile);
      file.value = ""; file.dispatchEvent(new Event("change", { bubbles: true })); plain.closest("li").querySelector("textarea").focus();
    }
    if (event.target.closest(".prompt [data-browse]")) event.target.closest("details.menu")?.removeAttribute("open");
    if (event.target.closest("[data-plan-toggle]")) {
      const open = document.querySelector(".plan-side").classList.toggle("open");
      event.target.closest("[data-plan-toggle]").setAttribute("aria-label", open ? "Hide the plan" : "Show the plan");
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches("input[data-key]")) event.target.dispatchEvent(new Event("change", { bubbles: true }));
    if (event.key === "Escape") document.querySelector(".plan-side")?.classList.remove("open");
  });

  // prompts for previews
  let rows = 1000;  // numbers that the page itself does not give
  const fileInput = (row, key) => row.querySelector(`[data-prompt-file="${key}"]`);
  const rowHtml = () => $("prompt-row")?.dataset.row || "";  // none while the settings cannot be read
  const fileKeys = () => [...rowHtml().matchAll(/data-prompt-file="(\w+)"/g)].map((match) => match[1]);
  function addPrompt(words = "", files = {}) {
    const list = document.querySelector(".prompts"), holder = document.createElement("ol");
    holder.innerHTML = rowHtml().replaceAll('-NUMBER"', `-${rows += 1}"`).replaceAll("NUMBER", list.children.length + 1);
    const row = holder.firstElementChild, text = row.querySelector("textarea");
    text.value = words;
    for (const key of fileKeys()) fileInput(row, key).value = files[key] || "";
    showFiles(row);
    list.append(row);
    return text;
  }
  function showFiles(row) {
    for (const line of row.querySelectorAll(".prompt-file")) {
      const path = fileInput(row, line.dataset.line).value;
      line.hidden = !path; line.querySelector("[data-file-name]").textContent = path;
    }
  }
  // A prompt is its text, an object that is typed as JSON, or text with the files that the preview is given.
  function promptOf(row) {
    const text = row.querySelector("textarea").value.trim(), files = {};
    for (const input of row.querySelectorAll("[data-prompt-file]")) if (input.value) files[input.dataset.promptFile] = input.value;
    let value = text;
    try { const found = JSON.parse(text); if (typeof found === "object" && found && !Array.isArray(found)) value = found; } catch { /* a plain prompt */ }
    if (!text || !Object.keys(files).length) return value;
    return typeof value === "string" ? { prompt: value, ...files } : { ...value, ...files };
  }
  function promptsText() {
    const values = [...document.querySelectorAll("#prompts .prompt")].map(promptOf).filter(Boolean);
    return values.length ? JSON.stringify(values) : "";
  }
  function fillPrompts(text) {
    let values = [];
    try { values = JSON.parse(text || "[]"); } catch { values = text.split("\n"); }
    document.querySelector(".prompts").replaceChildren();
    for (const one of Array.isArray(values) ? values : []) {
      if (typeof one === "string") addPrompt(one);
      else if (Object.keys(one).filter((key) => !fileKeys().includes(key)).join() === "prompt") addPrompt(one.prompt, one);
      else addPrompt(JSON.stringify(one));
    }
  }
  // What a prompt may be given depends on other settings, and a preset or another tab brings other prompts: the rows are made again
  // unless one of them is typed in or not saved yet.
  let shownRow = rowHtml(), given = $("prompt-row")?.dataset.prompts;
  const isUndecided = () => vt.entry("key samples") || $("e-samples").textContent;
  function inOneForm(text) { try { return JSON.stringify(JSON.parse(text || "[]")); } catch { return JSON.stringify(text.split("\n")); } }
  function renewPrompts() {
    if (!rowHtml() || document.activeElement.matches("#prompts textarea") || isUndecided()) return;
    const fresh = $("prompt-row").dataset, isNewRow = fresh.row !== shownRow, isNew = fresh.prompts !== given;
    if (!isNewRow && !isNew) return;
    const text = isNew ? fresh.prompts : promptsText();
    shownRow = fresh.row; given = fresh.prompts;
    if (isNew) { $("prompts").dataset.saved = fresh.saved; was.delete("samples"); }
    if (isNewRow || inOneForm(text) !== inOneForm(promptsText())) fillPrompts(text);
  }
  // conditions: a check box each, with its share of the samples and its latent frames
  const conditions = () => [...document.querySelectorAll("#f-conditions .condition")];
  const partsOf = (row) => [...row.querySelectorAll("[data-part]")];
  function showParts(row) { row.querySelector(".condition-parts").hidden = !row.querySelector("[type=checkbox]").checked; }
  function numberOf(text) { const value = Number(text.replace(",", ".")); return Number.isNaN(value) ? text : value; }
  function conditionsText() {
    const values = conditions().filter((row) => row.querySelector("[type=checkbox]").checked).map((row) => {
      const value = { type: row.dataset.condition };
      for (const part of partsOf(row)) if (part.value.trim()) value[part.dataset.part] = numberOf(part.value.trim());
      return value;
    });
    // without a choice the preset's applies, so to have none of its is a choice too
    return values.length || $("f-conditions").dataset.below ? JSON.stringify(values) : "";
  }
  function fillConditions(text) {
    let values = [];
    try { values = JSON.parse(text || $("f-conditions").dataset.below || "[]"); } catch { /* shown as none */ }
    for (const row of conditions()) {
      const value = values.find((one) => one.type === row.dataset.condition);
      row.querySelector("[type=checkbox]").checked = Boolean(value);
      for (const part of partsOf(row)) part.value = value?.[part.dataset.part] ?? "";
      showParts(row);
    }
  }
  const savePrompts = () => save("samples", $("prompts"), promptsText());

  // what "?" beside a main field explains stands below all of them, so that no field moves
  function references() {
    for (const one of document.querySelectorAll(".front .more")) $(`ref-${one.id.slice(2)}`).hidden = !one.open;
  }
  document.addEventListener("toggle", (event) => { if (event.target.matches(".front .more")) references(); }, true);

  // search: settings whose name has the words; those whose explanation has them only if no name does, or on demand
  let searched = "", isWide = false;
  function filter() {
    const word = ($("find")?.value || "").trim().toLowerCase(), parts = word.split(/\s+/).filter(Boolean);
    if (word !== searched) { searched = word; isWide = false; }
    const all = [...document.querySelectorAll("#all .setting")], has = (one, part) => parts.every((word) => `${one.dataset[part]} ${one.closest(".keys").dataset.title}`.includes(word));
    const named = all.filter((one) => has(one, "name")), explained = all.filter((one) => has(one, "find"));
    const shown = new Set(named.length && !isWide ? named : explained), others = explained.length - named.length;
    for (const one of all) one.hidden = !shown.has(one);
    for (const group of document.querySelectorAll("#all .keys")) {
      const isShown = [...group.querySelectorAll(".setting")].some((one) => shown.has(one));
      group.hidden = !isShown;
      if (word) group.open = isShown; else if (group.dataset.searched) group.open = false;
      if (word) group.dataset.searched = "1"; else delete group.dataset.searched;
    }
    const inFront = word ? [...document.querySelectorAll(".front .setting")].filter((one) => parts.every((part) => one.dataset.name.includes(part))) : [];
    const links = inFront.map((one) => { const label = one.querySelector("label"), link = document.createElement("a"); link.href = `#${label.htmlFor}`; link.textContent = label.textContent.trim(); return link; });
    $("front-found").hidden = !links.length;
    $("front-found").replaceChildren("Above, in Settings: ", ...links.flatMap((link, place) => place ? [", ", link] : [link]));
    if ($("none-found")) $("none-found").hidden = shown.size > 0 || links.length > 0;
    const also = $("also-found");
    also.hidden = !word || isWide || !named.length || !others;
    also.querySelector("span").textContent = `The words are also in ${others === 1 ? "the explanation of one other setting" : `the explanations of ${others} other settings`}.`;
  }
  document.addEventListener("click", (event) => { if (event.target.closest("#also-found button")) { isWide = true; filter(); } });
  function presets() {
    const word = $("preset-find").value.trim().toLowerCase(), only = $("preset-fits").checked, parts = word.split(/\s+/);
    let any = false;
    for (const family of document.querySelectorAll(".preset")) {
      let shown = 0;
      // words that some sizes have show those; words of the family alone show all of its sizes
      const sizes = [...family.querySelectorAll(".size")], has = (text) => parts.every((part) => text.includes(part));
      const found = sizes.filter((size) => has(size.dataset.find)), isFamily = has(family.dataset.find);
      const named = isFamily || found.length > 0;
      for (const size of sizes) {
        const isOther = word && found.length > 0 && !found.includes(size);
        size.hidden = isOther || (only && size.dataset.fits === "no"); shown += !size.hidden;
      }
      const others = family.querySelector("details[id^=more-]");
      if (others && word && found.some((size) => others.contains(size))) others.open = true;
      family.hidden = !named || (sizes.length > 0 && !shown);
      any ||= !family.hidden;
    }
    if ($("no-preset")) $("no-preset").hidden = any;
  }
  document.addEventListener("input", (event) => { if (event.target.id === "find") filter(); if (event.target.id === "preset-find") presets(); });
  document.addEventListener("vt:region", (event) => {
    if (event.target.id === "r-settings" && $("find")?.value) filter();
    if (event.target.id === "r-gallery") presets();
    if (event.target.id === "r-plan") ready();
    if (event.target.id === "r-settings") { references(); renewPrompts(); }
  });

  for (const field of document.querySelectorAll("input[data-key],textarea[data-key]"))  // typed before this script was here
    if (field !== document.activeElement && field.value.trim() !== field.dataset.saved) save(field.dataset.key, field, field.value.trim());

  // another trainer's config
  async function theirs(files) {
    for (const file of files) {
      const answer = await vt.ask(`${at}/import?name=${encodeURIComponent(file.name)}`, { method: "POST", headers: { "HX-Request": "true" }, body: file });
      if (vt.isSilent(answer)) vt.toast(`${file.name} did not arrive. ${await answer.text()}`, true);
      vt.answered(answer);
    }
  }
  document.addEventListener("dragover", (event) => { if ([...event.dataTransfer.types].includes("Files")) { event.preventDefault(); document.body.classList.add("dropping"); } });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  document.addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    if (event.dataTransfer.files.length) { event.preventDefault(); theirs(event.dataTransfer.files); }
  });
  try { $("preset-fits").checked = localStorage.getItem("vt-only-fits") === "1"; } catch { /* not kept */ }
  // a link to a field opens its group
  function showField() {
    const field = location.hash.startsWith("#f-") && $(decodeURIComponent(location.hash.slice(1))), group = field && field.closest("details.keys");
    if (field && field.closest(".setting")?.hidden) { $("find").value = ""; filter(); }  // the search hides it
    if (group) group.open = true;
    if (field) { field.scrollIntoView({ block: "center" }); field.focus(); }
  }
  addEventListener("hashchange", showField); showField();
  document.addEventListener("click", (event) => { if (event.target.closest("a")?.getAttribute("href") === location.hash) showField(); });
  presets(); ready();
})();
