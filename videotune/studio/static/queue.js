// The page Queue: waiting entries are put in order by mouse, touch, or the buttons up and down.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  function send() {
    const words = new URLSearchParams();
    for (const row of $("waiting").children) words.append("name", row.dataset.name);
    return vt.post("/queue/order", words);
  }
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-move]");
    if (!button) return;
    const row = button.closest("li"), id = button.id;
    if (button.dataset.move < 0) row.previousElementSibling?.before(row); else row.nextElementSibling?.after(row);
    await send();
    $(id)?.focus();
  });
  let dragged = null;
  document.addEventListener("pointerdown", (event) => {
    const grip = event.target.closest(".grip");
    if (!grip || event.button) return;
    event.preventDefault();
    dragged = grip.closest("li"); dragged.classList.add("dragged"); $("waiting").dataset.keep = "";
  });
  document.addEventListener("pointermove", (event) => {
    if (!dragged) return;
    for (const row of $("waiting").children) {
      const box = row.getBoundingClientRect();
      if (row === dragged || event.clientY < box.top || event.clientY > box.bottom) continue;
      if (event.clientY < (box.top + box.bottom) / 2) row.before(dragged); else row.after(dragged);
      break;
    }
  });
  async function drop() {
    if (!dragged) return;
    dragged.classList.remove("dragged"); dragged = null; delete $("waiting").dataset.keep;
    await send();
  }
  document.addEventListener("pointerup", drop);
  document.addEventListener("pointercancel", drop);
})();
