// Before the first paint: the theme that the reader has chosen; without one the system's holds.
"use strict";
(() => {
  const chosen = localStorage.getItem("vt-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
