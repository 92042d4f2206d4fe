// The dialog that chooses a folder or file: every field with a button [data-browse] uses it.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const $ = (id) => document.getElementById(id), dialog = $("folders");
  let field = null, kind = "folder", start = "", turn = 0, typing = 0;

  async function show(path, { isSearch = false, from = "" } = {}) {
    const current = ++turn;
    if (!isSearch) $("folders-find").value = "";
    const answer = await vt.ask(`/folders?${new URLSearchParams({ path, kind, start, q: $("folders-find").value })}`);
    const text = await answer.text();
    if (current !== turn) return;
    if (!answer.ok) return vt.toast(text.slice(0, 300), true);
    $("folders-body").innerHTML = text;
    $("folders-choose").disabled = !$("folder-here");
    if (isSearch || !dialog.open) return;
    const before = from && [...dialog.querySelectorAll(".folder-entry")].find((entry) => entry.dataset.folder === from);
    (before || dialog.querySelector(".folder-entry") || $("folders-find")).focus();
  }
  function choose(path) {
    dialog.close();
    const group = field.closest("details.keys");
    if (group) group.open = true;
    field.value = path;
    for (const name of ["input", "change"]) field.dispatchEvent(new Event(name, { bubbles: true }));
    field.focus();
  }
  const here = () => $("folder-here")?.dataset.path || "";
  function up() { const above = $("folder-up"), from = here(); if (above) show(above.dataset.folder, { from }); }

  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-browse]");
    if (opener) {
      field = $(opener.dataset.browse); kind = opener.dataset.kind || "folder"; start = opener.dataset.start || "";
      $("folders-title").textContent = kind === "file" ? "Choose a file or folder" : "Choose a folder";
      dialog.showModal(); show(field.value);
    }
    if (!dialog.contains(event.target)) return;
    const folder = event.target.closest("[data-folder]"), file = event.target.closest("[data-file]");
    if (folder) show(folder.dataset.folder);
    if (file) choose(file.dataset.file);
    if (event.target.closest("#folders-choose")) choose(here());
  });
  // The list may be of an earlier text: what is typed is searched first.
  async function openFirst() {
    clearTimeout(typing);
    await show(here(), { isSearch: true });
    dialog.querySelector(".folder-entry")?.click();
  }
  $("folders-find").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => show(here(), { isSearch: true }), 150); });
  dialog.addEventListener("keydown", (event) => {
    const entries = [...dialog.querySelectorAll(".folder-entry")], at = entries.indexOf(document.activeElement), isTyping = event.target.matches("input");
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: isTyping ? null : 0, End: isTyping ? null : entries.length - 1 }[event.key];
    if (to !== undefined && to !== null) { event.preventDefault(); (to < 0 ? $("folders-find") : entries[Math.min(to, entries.length - 1)])?.focus(); }
    // a key that is held down empties the search, and does not go on to leave the folder
    if (event.key === "Backspace" && (!isTyping || (!event.target.value && !event.repeat))) { event.preventDefault(); up(); }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !$("folders-choose").disabled) { event.preventDefault(); choose(here()); }
    if (event.key === "Enter" && !event.ctrlKey && !event.metaKey && event.target.id === "folders-find" && event.target.value) { event.preventDefault(); openFirst(); }
    if (event.key.length === 1 && !isTyping && event.key !== " " && !event.ctrlKey && !event.metaKey && !event.altKey) $("folders-find").focus();
    event.stopPropagation();  // a letter here is no key of the page
  });
});
