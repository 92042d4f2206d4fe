// The page Projects: a new one, another name, an import.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-rename-of]");
    if (!button) return;
    const form = document.querySelector("[data-rename]");
    form.dataset.rename = button.dataset.renameOf; form.elements.title.value = button.dataset.title;
    $("rename").showModal(); form.elements.title.select();
  });
  // a button that opens the dialog with a model chosen
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-choose]");
    if (!button) return;
    const option = document.querySelector(`#new [name=preset][value="${CSS.escape(button.dataset.choose)}"]`);
    option.checked = true;
    $("new-chosen").textContent = `Model: ${option.value}. It is chosen in the list below; type a name and create the project.`;
    $("new-chosen").hidden = false;
    $("new-title").focus();
  });
  document.addEventListener("change", (event) => { if (event.target.matches("#new [name=preset]")) $("new-chosen").hidden = true; });
  $("new").addEventListener("close", () => { $("new-chosen").hidden = true; });
  // a name is typed first; by itself a dialog gives the focus to its first button, Close
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-open=new]")) $("new-title").focus();
  });
  document.addEventListener("submit", async (event) => {
    if (!event.target.matches("[data-rename]")) return;
    event.preventDefault();
    const answer = await vt.post(`/p/${encodeURIComponent(event.target.dataset.rename)}/rename`, { title: event.target.elements.title.value });
    if (answer.ok) $("rename").close();
  });

  $("new-card").addEventListener("change", () => {
    const isOther = $("new-card").value === "other";
    $("new-memory").hidden = !isOther;
    if (isOther) $("new-vram").focus(); else $("new-vram").value = "";
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.target.id !== "new-models") return;
    const wrong = !$("new-card-error").hidden;
    for (const field of [$("new-card"), $("new-vram")]) wrong ? field.setAttribute("aria-invalid", "true") : field.removeAttribute("aria-invalid");
  });

  document.addEventListener("change", (event) => {
    if (!event.target.matches("[data-import]") || !event.target.files.length) return;
    const file = event.target.files[0], request = new XMLHttpRequest(), said = $("import-said");
    request.open("POST", `/import?name=${encodeURIComponent(file.name)}`);
    request.setRequestHeader("HX-Request", "true");
    request.upload.onprogress = (moved) => { said.textContent = `sending: ${Math.floor(100 * moved.loaded / Math.max(1, moved.total))} %`; };
    request.onload = () => {
      said.textContent = "";
      if (request.status >= 400) return vt.tellAtField($("import-file"), request.responseText.slice(0, 500) || `error ${request.status}`);
      vt.answered({ headers: { get: (name) => request.getResponseHeader(name) } });
      if (request.status < 300) $("import").close();
    };
    request.onerror = () => { said.textContent = "The file did not arrive: the studio does not answer. Choose it again when it does."; };
    request.send(file);
  });
})();
