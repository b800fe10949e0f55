// Light or dark theme: that of the system, until the button is used.
function prepareTheme() {
  const root = document.documentElement, button = document.getElementById("theme");
  const dark = () => (root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { root.style.colorScheme = dark() ? "light" : "dark"; label(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();
}

prepareTheme();

function keyOf(fill, text) {
  const swatch = element("i");
  swatch.style.background = fill;
  return element("span", {}, swatch, text);
}
