// Keys that act without the mouse, and the dialog that lists them (?).
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const project = () => document.body.dataset.project;
  const click = (id) => () => { const control = $(id); if (control && !control.closest("[hidden]")) control.click(); };
  const open = (page) => () => {
    if (project()) location.assign(`/p/${encodeURIComponent(project())}/${page}`);
    else vt.toast("No project is open here. Press g p, then open one.");
  };
  // the pages of the whole studio keep the project that was open
  const keeping = (address) => () => location.assign(project() ? `${address}?project=${encodeURIComponent(project())}` : address);
  const step = (by) => () => {
    const slider = $("viewer-step");
    if (!slider || $("viewer").hidden) return;
    slider.value = +slider.value + by; slider.dispatchEvent(new Event("input"));
  };

  // [keys, what they do, the action, the element that must be on the page]
  const SHORTCUTS = [
    ["?", "show these keys", () => $("shortcuts").showModal()],
    ["n", "go to the next step", click("next-step"), "next-step"],
    ["g p", "projects", () => location.assign("/")],
    ["g d", "data", open("data")],
    ["g s", "setup", open("setup")],
    ["g t", "train", open("train")],
    ["g r", "results", open("results")],
    ["g q", "queue", keeping("/queue")],
    ["g o", "settings of the studio", keeping("/settings")],
    ["/", "search", () => $("find").focus(), "find"],
    ["k", "play or pause the previews", click("viewer-play"), "viewer"],
    ["j", "earlier preview", step(-1), "viewer"],
    ["l", "later preview", step(1), "viewer"],
    ["a", "previews of all steps", click("viewer-all"), "viewer"],
    ["w", "wipe between before and after", click("viewer-wipe"), "viewer"],
    ["f", "large view", click("viewer-large"), "viewer"],
  ];
  const here = () => SHORTCUTS.filter(([, , , needed]) => !needed || $(needed));

  function list() {
    const rows = here().map(([keys, words]) => {
      const term = document.createElement("dt"), text = document.createElement("dd");
      keys.split(" ").forEach((key) => term.append(Object.assign(document.createElement("kbd"), { textContent: key }), " "));
      text.textContent = words;
      return [term, text];
    });
    $("shortcut-list").replaceChildren(...rows.flat());
  }

  // The next step leads to its place, also on the same page: a dialog opens, a button that only opens something is pressed,
  // any other part comes into sight and is marked, and its button has the focus, so that Enter does it.
  // A browser opens its choice of files only on a click, so not after a page has loaded.
  function lead(afterClick) {
    const named = location.hash ? $(decodeURIComponent(location.hash.slice(1))) : null, place = named ?? $("main");
    if (place.matches("dialog")) { if (!place.open) place.showModal(); return; }
    const within = (selector) => place.querySelector(selector);
    // a caption is asked for only of a clip that can be used; of another, the first button of its card
    const inTiles = within(".clip:not([data-label='cannot be used']) textarea.caption:placeholder-shown") ?? within(".clip[data-label='cannot be used'] .clip-actions .btn");
    const button = place.matches(".btn:not(:disabled)") ? place : inTiles ?? within(".btn.primary:not(:disabled)");
    if (button?.matches(afterClick ? "[data-open],[data-files]" : "[data-open]")) { button.focus(); button.click(); return; }
    // a button that cannot be pressed is explained beside it
    const why = place.matches(":disabled") ? $(place.getAttribute("aria-describedby")) : null, marked = button ?? why ?? place;
    const aside = place.closest(".plan-side");
    if (aside && !button) aside.classList.add("open");
    // a plan that is longer than the window slides under the bar as the page is scrolled
    if (aside && getComputedStyle(aside).position === "sticky") scrollTo(0, 0);
    (button ?? marked).scrollIntoView({ block: "nearest" });
    if (!button && place.getBoundingClientRect().top < 0) place.scrollIntoView({ block: "start" });
    marked.classList.add("led-to");
    const unmark = () => marked.classList.remove("led-to");
    if (!button && marked.tabIndex < 0) marked.tabIndex = -1;
    (button ?? marked).focus({ preventScroll: true });
    if (button) button.addEventListener("blur", unmark, { once: true });
    else setTimeout(unmark, 4000);
  }
  document.addEventListener("click", (event) => {
    const link = event.target.closest("#next-step");
    if (!link || link.pathname + link.search !== location.pathname + location.search) return;
    event.preventDefault();  // the browser's own jump would take the focus away again
    history.replaceState(null, "", link.hash || location.pathname + location.search);
    lead(true);
  });
  addEventListener("load", () => {
    const place = location.hash && $(decodeURIComponent(location.hash.slice(1)));
    if (place && (place.matches("dialog") || $("next-step")?.hash === location.hash)) setTimeout(() => lead(false), 100);
  });

  let first = "", since = 0;  // the first key of a pair such as "g d"
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.target.closest("input,textarea,select,[contenteditable]") || document.querySelector("dialog[open]")) return;
    const pressed = first && Date.now() - since < 1500 ? `${first} ${event.key}` : event.key;
    const found = here().find(([keys]) => keys === pressed);
    first = here().some(([keys]) => keys.startsWith(`${event.key} `)) ? event.key : "";
    since = Date.now();
    if (!found) return;
    event.preventDefault();
    if (found[0] === "?") list();
    found[2]();
  });
  document.addEventListener("click", (event) => { if (event.target.closest("[data-open=shortcuts]")) list(); }, true);
})();
