// Values that save themselves: one after another, again after a silence of the studio, and after a reload of the page.
// Each change of state is an event "vt:save" with the value's name and its state: sending, unsaved, saved, conflict, refused.
"use strict";
(() => {
  const STORE = `vt-unsaved ${location.pathname}`, RETRY = 2000, PATIENCE = 1500, LONGEST = 30000, KEPT_ALIVE = 60000;
  const entries = new Map();
  let working = false, timer = 0, silent = false, leaving = false;

  try { for (const [name, entry] of JSON.parse(sessionStorage.getItem(STORE) || "[]")) entries.set(name, entry); } catch { /* no storage: nothing to send again */ }
  function persist() {
    try { entries.size ? sessionStorage.setItem(STORE, JSON.stringify([...entries])) : sessionStorage.removeItem(STORE); } catch { /* full or forbidden: the warning before leaving stays */ }
  }
  function tell(name, state, entry, more = {}) { document.dispatchEvent(new CustomEvent("vt:save", { detail: { name, state, entry, ...more } })); }
  function tellAll() { silent = true; for (const [name, entry] of entries) tell(name, "unsaved", entry); }

  // values[field] is the value itself; was: what the page took for the saved one. A value of ours that may have arrived counts as such too.
  function save(name, { url, values, field, was = "" }) {
    const earlier = entries.get(name), value = values[field];
    if (earlier?.values[field] === value) { work(); return; }
    const before = earlier ? [...new Set([...earlier.was, ...(earlier.sent ? [earlier.values[field]] : [])])] : [was];
    const entry = { url, values, field, was: before, sent: false };
    entries.delete(name);
    if (before.length === 1 && before[0] === value) { persist(); tell(name, "saved", entry, { now: value }); return; }
    entries.set(name, entry); persist();
    tell(name, silent || vt.isLost ? "unsaved" : "sending", entry);
    work();
  }
  async function work() {
    if (working) return;
    working = true; clearTimeout(timer);
    while (entries.size) {
      const [name, entry] = entries.entries().next().value;
      const { status, text, tag } = await send(entry);
      const isNewest = entries.get(name) === entry;
      if (!status) { tellAll(); timer = setTimeout(work, RETRY); break; }
      silent = false;
      if (!isNewest) continue;
      entries.delete(name); persist();
      if (status < 300) tell(name, "saved", entry, { ...answerOf(text), tag });
      else if (status === 409) tell(name, "conflict", entry, answerOf(text));
      else tell(name, "refused", entry, { text });
    }
    working = false;
  }
  function answerOf(text) { try { return JSON.parse(text); } catch { return {}; } }
  async function send(entry) {
    entry.sent = true; persist();
    const body = new URLSearchParams(entry.values);
    for (const text of entry.was) body.append("was", text);
    const patience = setTimeout(tellAll, PATIENCE), size = String(body).length;
    const answer = await vt.ask(entry.url, {
      method: "POST", headers: { "HX-Request": "true" }, body, signal: AbortSignal.timeout(LONGEST), keepalive: size < KEPT_ALIVE,
    });
    let text = "", status = answer.status;
    try { text = await answer.text(); } catch { status = 0; }
    clearTimeout(patience);
    if (status === 401) leaving = true;  // to the login; the values wait in the storage
    if (vt.isSilent(answer) || status === 401) status = 0;
    else vt.answered(answer);
    return { status, text, tag: answer.headers.get("VT-Settings") };
  }

  document.addEventListener("vt:back", work);
  document.addEventListener("vt:lost", tellAll);
  addEventListener("beforeunload", (event) => {
    document.activeElement?.blur?.();  // what is being typed is a change too
    if (entries.size && !leaving && (silent || vt.isLost)) event.preventDefault();
  });
  document.addEventListener("DOMContentLoaded", () => setTimeout(() => {
    if (!entries.size) return;
    for (const [name, entry] of entries) tell(name, "unsaved", entry);
    vt.toast(`${entries.size === 1 ? "A change was" : `${entries.size} changes were`} not saved before this page was loaded. It is sent again.`);
    work();
  }));
  document.addEventListener("vt:save", () => {
    const count = entries.size, note = document.getElementById("lost-unsaved");
    note.textContent = count ? ` ${count === 1 ? "One change is" : `${count} changes are`} not saved yet; the page sends ${count === 1 ? "it" : "them"} as soon as the studio answers.` : "";
  });
  vt.save = save;
  vt.entry = (name) => entries.get(name);
  vt.unsaved = () => entries.size;
})();
