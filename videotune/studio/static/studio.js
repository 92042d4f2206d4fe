// What every page does: live regions, answers shown as toasts, questions before what takes something away, dialogs.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const esc = (words) => String(words ?? "").replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

  function toast(words, bad) {
    const line = document.createElement("div"), close = document.createElement("button");
    line.className = bad ? "toast bad" : "toast"; line.append(words);
    if (bad) line.setAttribute("role", "alert");
    close.type = "button"; close.textContent = "×"; close.setAttribute("aria-label", "Dismiss");
    close.onclick = () => line.remove();
    line.append(close); (document.querySelector("dialog[open]") || document.body).append($("toasts")); $("toasts").append(line);
    setTimeout(() => line.remove(), bad ? 15000 : 4000);
  }
  function answered(response) {  // of a request that htmx has not sent
    const told = JSON.parse(response.headers.get("HX-Trigger") || "{}"), go = response.headers.get("HX-Redirect");
    for (const [name, detail] of Object.entries(told)) document.body.dispatchEvent(new CustomEvent(name, { detail, bubbles: true }));
    if (go) location.assign(go);
  }
  async function post(url, values = {}) {
    try {
      const response = await fetch(url, { method: "POST", headers: { "HX-Request": "true" }, body: new URLSearchParams(values) });
      answered(response);
      return response;
    } catch (error) { toast("The studio does not answer. Is it still running? Nothing that it had started is lost.", true); throw error; }
  }
  window.vt = { toast, post, esc, answered };

  document.addEventListener("toast", (event) => toast(event.detail.words, event.detail.bad));
  document.addEventListener("htmx:sendError", () => toast("The studio does not answer. Is it still running?", true));
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

  // dialogs, menus, explanations
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open]"), closer = event.target.closest("[data-close]"), word = event.target.closest(".help-word");
    if (opener) $(opener.dataset.open).showModal();
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
  document.addEventListener("htmx:afterRequest", (event) => {  // a form in a dialog closes it once it is done
    if (event.detail.successful && event.target.matches("dialog form")) event.target.closest("dialog").close();
  });

  // times in the reader's own zone
  function times(within) {
    for (const one of within.querySelectorAll("time[data-clock],time[data-ago]")) {
      const then = new Date(one.dateTime), minutes = (Date.now() - then) / 60000;
      if (isNaN(then)) continue;
      const today = then.toDateString() === new Date().toDateString();
      one.title = then.toLocaleString();
      one.textContent = "ago" in one.dataset
        ? minutes < 1 ? "just now" : minutes < 60 ? `${Math.floor(minutes)} min ago` : minutes < 1440 ? `${Math.floor(minutes / 60)} h ago` : then.toLocaleDateString()
        : today ? then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : then.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    }
  }

  // live regions: one stream a page, none while the page is hidden (a browser keeps six connections to a host)
  const kept = new Set(["open", "aria-expanded"]);
  const options = {
    morphStyle: "innerHTML", ignoreActiveValue: true,
    callbacks: {
      beforeNodeMorphed: (old) => !(old.dataset && "keep" in old.dataset),
      beforeAttributeUpdated: (name, node) => !(kept.has(name) && node.matches("details,dialog,.help-word")) && !(node.matches("video") && name === "autoplay"),
    },
  };
  let stream = null;
  function show(place, text) {
    Idiomorph.morph(place, text, options);
    htmx.process(place); times(place);
    place.dispatchEvent(new CustomEvent("vt:region", { bubbles: true }));
  }
  function listen() {
    stream?.close(); stream = null;
    const regions = [...document.querySelectorAll(".region[data-tag]")];
    if (document.hidden || !regions.length) return;
    const words = new URLSearchParams(location.search);
    words.set("page", document.body.dataset.page);
    if (document.body.dataset.project) words.set("project", document.body.dataset.project);
    words.set("tags", regions.map((one) => `${one.id.slice(2)}:${one.dataset.tag}`).join(","));
    stream = new EventSource(`/live?${words}`);
    stream.addEventListener("region", (event) => {
      const data = JSON.parse(event.data), place = $(data.id);
      if (place) { place.dataset.tag = data.tag; show(place, data.html); title(); }
    });
    stream.addEventListener("gone", () => location.assign("/"));
    stream.onopen = () => { $("lost").hidden = true; document.body.classList.remove("lost"); };
    stream.onerror = () => {
      $("lost").hidden = false; document.body.classList.add("lost");
      const closed = stream; setTimeout(() => { if (stream === closed) listen(); }, 2000); closed.close();
    };
  }
  const own = document.title;
  function title() {
    const share = document.querySelector("#r-status [data-share]")?.dataset.share;
    document.title = share ? `${share} · ${own}` : own;
  }
  document.addEventListener("visibilitychange", listen);
  addEventListener("pagehide", () => stream?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
  document.addEventListener("DOMContentLoaded", () => { times(document); title(); listen(); });
  setInterval(() => times(document), 30000);

  // the page Projects
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-rename-of]");
    if (!button) return;
    const form = document.querySelector("[data-rename]");
    form.dataset.rename = button.dataset.renameOf; form.elements.title.value = button.dataset.title;
    $("rename").showModal(); form.elements.title.select();
  });
  document.addEventListener("submit", async (event) => {
    if (!event.target.matches("[data-rename]")) return;
    event.preventDefault();
    const answer = await post(`/p/${encodeURIComponent(event.target.dataset.rename)}/rename`, { title: event.target.elements.title.value });
    if (answer.ok) $("rename").close();
  });
  document.addEventListener("change", (event) => {
    if (!event.target.matches("[data-import]") || !event.target.files.length) return;
    const file = event.target.files[0], request = new XMLHttpRequest(), said = $("import-said");
    request.open("POST", `/import?name=${encodeURIComponent(file.name)}`);
    request.setRequestHeader("HX-Request", "true");
    request.upload.onprogress = (moved) => { said.textContent = `sending: ${Math.floor(100 * moved.loaded / Math.max(1, moved.total))} %`; };
    request.onload = () => {
      said.textContent = "";
      answered({ headers: { get: (name) => request.getResponseHeader(name) } });
      if (request.status < 300) $("import").close();
    };
    request.onerror = () => { said.textContent = "The file did not arrive. Is the studio still running?"; };
    request.send(file);
  });
})();
