// The filters of the findings. The findings themselves are in the HTML.
function filterFindings() {
  const levels = new Set([...document.querySelectorAll('[name="severity"]:checked')].map((box) => box.value));
  const code = byId("code").value, words = byId("text").value.toLowerCase();
  let shown = 0, all = 0;
  for (const found of document.querySelectorAll(".findings:not([hidden]) .finding")) {
    const level = found.dataset.severity === "suppressed" ? "note" : found.dataset.severity;
    const fits = levels.has(level) && (!code || found.dataset.code === code) &&
      (!words || found.textContent.toLowerCase().includes(words));
    found.hidden = !fits;
    shown += fits ? 1 : 0;
    all += 1;
  }
  byId("finding-count").textContent = all ? `${shown} of ${all} shown` : "";
}

function prepareFindings() {
  byId("finding-controls").hidden = !document.querySelector(".finding");
  for (const id of ["code", "text"]) byId(id).addEventListener("input", filterFindings);
  for (const box of document.querySelectorAll('[name="severity"]')) box.addEventListener("change", filterFindings);
  for (const link of document.querySelectorAll('a[href^="#page-"]'))
    link.addEventListener("click", () => { byId(link.getAttribute("href").slice(1)).open = true; });
}
