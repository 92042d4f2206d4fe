// What every page does: live regions, answers shown as toasts, questions before what takes something away, dialogs.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const esc = (words) => String(words ?? "").replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

  // What is wrong with a form is said at its field, which gets the focus, or else in its dialog above the buttons, until the field is
  // changed, or the form is sent again or closed.
  const sentForm = () => document.querySelector("form[data-sent]");
  function tellAtField(field, words) {
    forgetField(field);
    const line = Object.assign(document.createElement("p"), { className: "error field-error", id: `${field.id}-error`, textContent: words });
    line.setAttribute("role", "alert");
    field.setAttribute("aria-invalid", "true");
    if (!field.hasAttribute("aria-describedby")) field.setAttribute("aria-describedby", line.id);
    for (let folded = field.closest("details"); folded; folded = folded.parentElement.closest("details")) folded.open = true;
    (field.closest(".path-entry") ?? field).after(line);
    field.focus({ preventScroll: true }); field.scrollIntoView({ block: "center" });
  }
  function forgetField(field) {
    $(`${field.id}-error`)?.remove(); field.removeAttribute("aria-invalid");
    if (field.getAttribute("aria-describedby") === `${field.id}-error`) field.removeAttribute("aria-describedby");
  }
  function forgetFields(within) { for (const line of within.querySelectorAll?.(".field-error") ?? []) forgetField($(line.id.slice(0, -"-error".length))); }
  const canShow = (field) => field?.id && field.type !== "hidden" && (field.closest("details:not([open])") || field.getClientRects().length > 0);
  document.addEventListener("input", (event) => { if (event.target.id && $(`${event.target.id}-error`)?.matches(".field-error")) forgetField(event.target); });
  function tellInDialog(dialog, words) {
    const line = dialog.querySelector(".dialog-error") || document.createElement("p"), forms = [...dialog.querySelectorAll("form")];
    const form = forms.find((one) => one.contains(document.activeElement)) || forms.find((one) => one.dataset.sent) || forms[0], buttons = form?.querySelector(".row.end");
    line.className = "notice bad dialog-error"; line.setAttribute("role", "alert"); line.textContent = words;
    buttons ? buttons.before(line) : dialog.append(line);
    line.scrollIntoView({ block: "center" });  // a footer that stays in sight would cover it at the edge
  }
  function forget(dialog) { dialog?.querySelector?.(".dialog-error")?.remove(); if (dialog) forgetFields(dialog); }
  document.addEventListener("submit", (event) => {
    for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent;
    event.target.dataset.sent = "1"; forget(event.target.closest("dialog") ?? event.target);
  }, true);
  document.addEventListener("close", (event) => forget(event.target), true);

  // A button beside a line sends something, or shows a part of the page.
  function toastButton(line, { words, post: address, values, show }) {
    const button = document.createElement("button");
    button.type = "button"; button.className = "toast-action"; button.textContent = words;
    button.onclick = () => { line.remove(); if (show) $(show)?.scrollIntoView({ block: "start" }); else post(address, values); };
    return button;
  }
  function toast(words, bad, action, fieldName) {
    const field = bad && fieldName ? sentForm()?.elements[fieldName] : null;
    if (canShow(field)) return tellAtField(field, words);
    const dialog = [...document.querySelectorAll("dialog.sheet[open]")].at(-1);
    if (bad && dialog?.querySelector("form .row.end")) return tellInDialog(dialog, words);
    const line = document.createElement("div"), close = document.createElement("button");
    line.className = bad ? "toast bad" : "toast"; line.append(words);
    if (bad) line.setAttribute("role", "alert");
    close.type = "button"; close.textContent = "×"; close.setAttribute("aria-label", "Dismiss");
    close.onclick = () => line.remove();
    if (!bad) for (const old of document.querySelectorAll(".toast.bad")) old.remove();  // what was wrong before has been mended
    if (action) line.append(toastButton(line, action));
    line.append(close); $("toasts").append(line); raise();
    if (!action?.show) setTimeout(() => line.remove(), bad ? 15000 : action ? 10000 : 4000);
  }
  // An open dialog covers everything outside of it, so what has to be seen goes into it.
  function raise() {
    const open = [...document.querySelectorAll("dialog[open]")].at(-1) || document.body;
    for (const part of [$("lost"), $("toasts")]) if (part.parentElement !== open) open.append(part);
  }
  document.addEventListener("close", raise, true);
  document.addEventListener("toggle", raise, true);
  function answered(response) {  // of a request that htmx has not sent
    const told = JSON.parse(response.headers.get("HX-Trigger") || "{}"), go = response.headers.get("HX-Redirect");
    for (const [name, detail] of Object.entries(told)) document.body.dispatchEvent(new CustomEvent(name, { detail, bubbles: true }));
    if (go) location.assign(go);
  }
  // A request that never throws: without an answer it is one of status 503, so that no caller forgets that case.
  const SILENT = "The studio does not answer.";
  async function ask(url, options = {}) {
    try {
      const response = await fetch(url, options);
      if (response.status === 401) location.assign("/login");
      return response;
    } catch { return new Response(SILENT, { status: 503 }); }
  }
  const isSilent = (response) => response.status >= 502 && response.status <= 504;
  async function post(url, values = {}) {
    const response = await ask(url, { method: "POST", headers: { "HX-Request": "true" }, body: new URLSearchParams(values) });
    if (isSilent(response)) toast(`Not done. ${SILENT} Try again when it does.`, true);
    answered(response);
    return response;
  }
  const isTyping = () => document.activeElement.matches("input,textarea,select");

  // A field holds the saved value that it shows in data-saved or data-was (a group of inputs that are one value has it, too), and each
  // save is compared with that. So the two change together: a field that is being edited keeps both, so that another tab's value is asked
  // about; any other takes both, also under the cursor.
  const baseOf = (field) => field.dataset.was ?? field.dataset.saved;
  const isEdited = (input) => input.type !== "checkbox" && input.value.trim() !== (baseOf(input) ?? input.defaultValue).trim();
  function takeValue(field, fresh) {
    if (field.type === "checkbox") field.checked = fresh.checked;
    else if (field.value !== fresh.value) {
      const fromEnd = field.value.length - field.selectionEnd;
      field.value = fresh.value;
      const caret = Math.max(0, field.value.length - fromEnd);
      field.setSelectionRange(caret, caret);
    }
  }
  function mayMorph(old, fresh) {
    if (!(old instanceof HTMLElement)) return true;
    if ("keep" in old.dataset) return false;
    const active = document.activeElement, isInput = active.matches("input, textarea");
    if (!isInput || !old.contains(active)) return true;
    const isOutdated = baseOf(old) !== undefined && baseOf(old) !== baseOf(fresh);
    if (isOutdated && isEdited(active)) return false;
    if (old === active && old.closest("[data-saved], [data-was]") && !isEdited(old)) takeValue(old, fresh);
    return true;
  }
  window.vt = { toast, post, ask, isSilent, esc, answered, isTyping, mayMorph, tellAtField };

  // what was wrong with a value is out of date once another value is saved
  document.addEventListener("vt:save", ({ detail }) => {
    if (detail.state !== "saved") return;
    const key = detail.name.split(" ").pop(), name = document.querySelector(`label[for="f-${CSS.escape(key)}"]`)?.firstChild?.textContent.trim();
    for (const line of document.querySelectorAll(".toast.bad")) if ([key, name].some((word) => word && line.textContent.startsWith(`${word}: `))) line.remove();
  });
  document.addEventListener("toast", (event) => toast(event.detail.words, event.detail.bad, event.detail.action, event.detail.field));
  for (const name of ["htmx:sendError", "htmx:timeout"]) document.addEventListener(name, () => toast(`Not done. ${SILENT} Try again when it does.`, true));
  document.addEventListener("htmx:responseError", (event) => {
    const status = event.detail.xhr.status;
    if (status === 401) location.assign("/login");
    else if (!event.detail.xhr.getResponseHeader("HX-Trigger")) toast(event.detail.xhr.responseText.slice(0, 500) || `error ${status}`, true);
  });
  document.addEventListener("htmx:confirm", (event) => {
    if (!event.detail.question) return;
    event.preventDefault();
    $("confirm-words").textContent = event.detail.question;
    $("confirm-yes").onclick = () => { $("confirm").close(); event.detail.issueRequest(true); };
    $("confirm").showModal();
  });

  // A training that downloads much, takes days or does not fit is asked about; "Start anyway" sends the form again.
  document.addEventListener("ask", (event) => {
    const asker = event.target, form = asker.closest("form"), dialog = $("start-ask");
    $("start-ask-title").textContent = event.detail.title ?? "Start this training?";
    $("start-ask-yes").textContent = event.detail.yes ?? "Start anyway";
    $("start-ask-lines").replaceChildren(...event.detail.lines.map((line) => Object.assign(document.createElement("li"), { textContent: line })));
    $("start-ask-yes").onclick = () => {
      dialog.close();
      if (!form) return post(asker.getAttribute("hx-post"), { ...JSON.parse(asker.getAttribute("hx-vals")), sure: "1" });
      const sure = Object.assign(document.createElement("input"), { type: "hidden", name: "sure", value: "1" });
      form.append(sure); htmx.trigger(form, "submit"); sure.remove();
    };
    dialog.showModal(); raise();
  });

  // dialogs, menus, explanations
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open]"), closer = event.target.closest("[data-close]"), word = event.target.closest(".help-word");
    const unfolder = event.target.closest("[data-unfold]"), folded = unfolder && $(unfolder.dataset.unfold);
    if (folded) folded.open = true;
    if (opener) { $(opener.dataset.open).showModal(); raise(); }
    if (closer) closer.closest("dialog").close();
    if (word) word.setAttribute("aria-expanded", String(word.getAttribute("aria-expanded") !== "true"));
    for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target) || event.target.closest(".menu-list .btn")) menu.open = false;
    if (event.target.matches("dialog.sheet")) event.target.close();
    if (event.target.closest("[data-theme-next]")) {
      const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
      const next = dark ? "light" : "dark";
      document.documentElement.dataset.theme = next; localStorage.setItem("vt-theme", next);
      document.dispatchEvent(new CustomEvent("vt:theme"));
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const menu of document.querySelectorAll("details.menu[open]")) { menu.open = false; menu.querySelector("summary").focus(); }
    for (const word of document.querySelectorAll(".help-word[aria-expanded=true]")) word.setAttribute("aria-expanded", "false");
  });
  // A form in a dialog, or a button that says so, closes it once it is done. Not htmx:afterRequest: it does not arrive if the stream
  // has replaced the button before the answer comes.
  document.addEventListener("htmx:beforeRequest", (event) => {
    if (!event.target.matches("dialog form, dialog [data-closes]")) return;
    const dialog = event.target.closest("dialog"), { xhr } = event.detail;
    xhr.addEventListener("load", () => { if (xhr.status < 400) dialog.close(); });
  });

  // times in the reader's own zone
  function times(within) {
    for (const one of within.querySelectorAll("time[data-clock],time[data-ago]")) {
      const then = new Date(one.dateTime), minutes = (Date.now() - then) / 60000;
      if (isNaN(then)) continue;
      const today = then.toDateString() === new Date().toDateString();
      one.title = then.toLocaleString();
      one.textContent = "ago" in one.dataset
        ? minutes < 1 / 6 ? "just now" : minutes < 1 ? `${10 * Math.floor(6 * minutes)} s ago` : minutes < 60 ? `${Math.floor(minutes)} min ago` : minutes < 1440 ? `${Math.floor(minutes / 60)} h ago` : then.toLocaleDateString()
        : today ? then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : then.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    }
  }

  // live regions: one stream a page, none while the page is hidden (a browser keeps six connections to a host)
  const kept = new Set(["open", "aria-expanded"]);
  const options = {
    morphStyle: "innerHTML",
    // What is being typed stays. A focused button has new words all the same.
    get ignoreActiveValue() { return vt.isTyping(); },
    callbacks: {
      beforeNodeMorphed: mayMorph,
      beforeAttributeUpdated: (name, node) => !(kept.has(name) && node.matches("details,dialog,.help-word")) && !(node.matches("video") && name === "autoplay") && !(node.matches("[data-hear], .film-button") && name === "aria-pressed"),
    },
  };
  function show(place, text) {
    Idiomorph.morph(place, text, options);
    htmx.process(place); times(place);
    place.dispatchEvent(new CustomEvent("vt:region", { bubbles: true }));
  }
  // The server sends a beat twice a second: without one it is gone, frozen, or out of reach.
  const SILENCE = 1600, TICK = 200, RETRY = 2000, RENEW = 10000;
  let stream = null, quiet = 0;
  function heard() { quiet = 0; if (vt.isLost) connected(true); }
  function connected(is) {
    vt.isLost = !is;
    document.body.classList.toggle("lost", !is);
    $("lost").hidden = is; raise();
    document.body.style.setProperty("--lost", is ? "0px" : `${$("lost").offsetHeight}px`);
    if (is) for (const line of document.querySelectorAll(".toast.bad")) if (line.textContent.includes(SILENT)) line.remove();
    document.dispatchEvent(new CustomEvent(is ? "vt:back" : "vt:lost"));
  }
  function listen() {
    stream?.close(); stream = null; quiet = 0;
    const regions = [...document.querySelectorAll(".region[data-tag]")];
    if (document.hidden || !regions.length) return;
    const words = new URLSearchParams(location.search);
    words.set("page", document.body.dataset.page);
    if (document.body.dataset.project) words.set("project", document.body.dataset.project);
    words.set("tags", regions.map((one) => `${one.id.slice(2)}:${one.dataset.tag}`).join(","));
    stream = new EventSource(`/live?${words}`);
    stream.addEventListener("region", (event) => {
      heard();
      const data = JSON.parse(event.data), place = $(data.id);
      if (place) { place.dataset.tag = data.tag; show(place, data.html); title(); }
    });
    stream.addEventListener("beat", heard);
    stream.addEventListener("gone", () => location.assign("/"));
    stream.onerror = () => {
      if (!vt.isLost) connected(false);
      const closed = stream; closed.close(); setTimeout(() => { if (stream === closed) listen(); }, RETRY);
    };
  }
  setInterval(() => {  // counted in ticks, so that a busy page is not taken for a silent server
    if (!stream || document.hidden) return;
    quiet += TICK;
    if (quiet >= SILENCE && !vt.isLost) connected(false);
    if (vt.isLost && stream.readyState !== EventSource.CLOSED && quiet >= RENEW) listen();
  }, TICK);
  // One sound at a time: what is switched on silences the other videos of the page.
  for (const kind of ["volumechange", "play"]) document.addEventListener(kind, (event) => {
    const heard = event.target;
    if (heard.muted || heard.paused) return;
    for (const other of document.querySelectorAll("video, audio")) if (other !== heard) other.muted = true;
  }, true);

  const own = document.title;
  function title() {
    const share = document.querySelector("#r-status [data-share]")?.dataset.share;
    document.title = share ? `${share} · ${own}` : own;
  }
  // How tall the bar at the top is, which stays in sight, and the plan: what stands below them or beside them goes by it.
  function measure() {
    const top = document.querySelector(".top"), plan = document.querySelector(".plan-side");
    if (top) document.documentElement.style.setProperty("--top", `${top.offsetHeight}px`);
    if (plan) document.documentElement.style.setProperty("--plan-height", `${plan.offsetHeight}px`);
  }
  document.addEventListener("DOMContentLoaded", () => {
    const sizes = new ResizeObserver(measure);
    for (const part of document.querySelectorAll(".top, .plan-side")) sizes.observe(part);
    measure();
  });
  document.addEventListener("visibilitychange", listen);
  addEventListener("pagehide", () => stream?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
  document.addEventListener("DOMContentLoaded", () => { times(document); title(); listen(); });
  setInterval(() => times(document), 10000);
})();
