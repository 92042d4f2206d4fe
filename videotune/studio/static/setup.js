// The page Setup: each field is saved as it is left; a value that another tab has changed is shown, never written over.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const at = $("setup").dataset.at, was = new Map();
  let chain = Promise.resolve();
  const later = (act) => { chain = chain.then(act, act); return chain; };

  // what a field held when it was begun to be edited: live updates may change data-saved meanwhile
  const begin = (key, field) => { if (!was.has(key)) was.set(key, field.dataset.saved ?? ""); };
  document.addEventListener("focusin", (event) => {
    const field = event.target.closest("[data-key]");
    if (field) { was.delete(field.dataset.key); begin(field.dataset.key, field); }
  });
  function tell(key, field, words) {
    const place = $(`e-${key}`);
    if (place) place.textContent = words;
    if (field.matches("input,select,textarea")) words ? field.setAttribute("aria-invalid", "true") : field.removeAttribute("aria-invalid");
  }
  function save(key, field, value) {
    begin(key, field);
    return later(async () => {
      const before = was.get(key);
      if (before === value) { tell(key, field, ""); return; }
      const answer = await vt.post(`${at}/set`, { key, value, was: before });
      if (answer.ok) { const { now } = await answer.json(); was.set(key, now); field.dataset.saved = now; tell(key, field, ""); }
      else if (answer.status === 409) conflict(await answer.json(), field);
      else tell(key, field, await answer.text());
    });
  }
  function conflict({ key, now, yours }, field) {
    tell(key, field, `Changed elsewhere meanwhile: it is ${now === "" ? "the default" : `"${now}"`} now, and you typed ${yours === "" ? "nothing" : `"${yours}"`}.`);
    const row = document.createElement("span"), keep = document.createElement("button"), use = document.createElement("button");
    row.className = "row"; keep.type = use.type = "button"; keep.className = use.className = "btn small";
    keep.textContent = now === "" ? "Keep the default" : `Keep ${now.slice(0, 40)}`; use.textContent = `Use ${yours === "" ? "the default" : yours.slice(0, 40)}`;
    keep.onclick = () => { was.set(key, now); tell(key, field, ""); fill(field, now); };
    use.onclick = () => { was.set(key, now); save(key, field, yours); };
    row.append(keep, use); $(`e-${key}`).append(row);
  }
  const fill = (field, text) => { field.id === "prompts" ? location.reload() : field.value = text; };

  document.addEventListener("change", (event) => {
    const field = event.target;
    if (field.matches("[data-key]")) save(field.dataset.key, field, field.value.trim());
    if (field.matches("[data-fact]")) vt.post(`${at}/fact`, { key: field.dataset.fact, value: field.type === "checkbox" ? String(field.checked) : field.value });
    if (field.closest("#prompts")) savePrompts();
    if (field.id === "import-theirs") theirs(field.files);
    if (field.id === "preset-fits") presets();
  });
  document.addEventListener("click", (event) => {
    const reset = event.target.closest("[data-reset]"), drop = event.target.closest("[data-drop-prompt]");
    if (reset) {
      const field = $(`f-${reset.dataset.reset}`);
      was.set(reset.dataset.reset, field.dataset.saved); field.value = ""; save(reset.dataset.reset, field, ""); field.focus();
    }
    if (drop) { drop.closest("li").remove(); savePrompts(); $("add-prompt").focus(); }
    if (event.target.closest("#add-prompt")) addPrompt();
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
  function addPrompt() {
    const list = document.querySelector(".prompts"), row = document.createElement("li"), text = document.createElement("textarea"), drop = document.createElement("button");
    row.className = "row"; text.rows = 1; drop.type = "button"; drop.className = "btn icon ghost"; drop.dataset.dropPrompt = ""; drop.textContent = "×";
    const number = list.children.length + 1;
    text.setAttribute("aria-label", `Prompt ${number}`); drop.setAttribute("aria-label", `Remove prompt ${number}`);
    row.append(text, drop); list.append(row); text.focus();
  }
  function savePrompts() {
    const texts = [...document.querySelectorAll("#prompts textarea")].map((one) => one.value.trim()).filter(Boolean);
    const values = texts.map((text) => { try { const found = JSON.parse(text); return typeof found === "object" && found ? found : text; } catch { return text; } });
    save("samples", $("prompts"), values.length ? JSON.stringify(values) : "");
  }

  // search
  function filter() {
    const word = ($("find")?.value || "").trim().toLowerCase();
    let any = false;
    for (const group of document.querySelectorAll("#all .keys")) {
      let shown = 0;
      for (const one of group.querySelectorAll(".setting")) { one.hidden = Boolean(word) && !word.split(/\s+/).every((part) => one.dataset.find.includes(part)); shown += !one.hidden; }
      group.hidden = !shown; any ||= shown > 0;
      if (word) group.open = shown > 0; else if (group.dataset.searched) group.open = false;
      if (word) group.dataset.searched = "1"; else delete group.dataset.searched;
    }
    if ($("none-found")) $("none-found").hidden = any;
  }
  function presets() {
    const word = $("preset-find").value.trim().toLowerCase(), gb = Number($("cards")?.dataset.gb || 0), only = $("preset-fits").checked;
    let any = false;
    for (const one of document.querySelectorAll(".preset")) {
      one.hidden = (word && !word.split(/\s+/).every((part) => one.dataset.find.includes(part))) || (only && Number(one.dataset.need || 0) > (gb ? gb + 1 : 0));
      any ||= !one.hidden;
    }
    if ($("no-preset")) $("no-preset").hidden = any;
  }
  document.addEventListener("input", (event) => { if (event.target.id === "find") filter(); if (event.target.id === "preset-find") presets(); });
  document.addEventListener("vt:region", (event) => {
    if (event.target.id === "r-settings" && $("find")?.value) filter();
    if (event.target.id === "r-gallery") presets();
  });

  for (const field of document.querySelectorAll("input[data-key],textarea[data-key]"))  // typed before this script was here
    if (field !== document.activeElement && field.value.trim() !== field.dataset.saved) save(field.dataset.key, field, field.value.trim());

  // another trainer's config
  async function theirs(files) {
    for (const file of files) {
      const answer = await fetch(`${at}/import?name=${encodeURIComponent(file.name)}`, { method: "POST", headers: { "HX-Request": "true" }, body: file });
      vt.answered(answer);
    }
  }
  document.addEventListener("dragover", (event) => { if ([...event.dataTransfer.types].includes("Files")) { event.preventDefault(); document.body.classList.add("dropping"); } });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  document.addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    if (event.dataTransfer.files.length) { event.preventDefault(); theirs(event.dataTransfer.files); }
  });
})();
