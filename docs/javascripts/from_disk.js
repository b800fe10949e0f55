// Browsers run no search worker from a file, and the theme hides the field: say what helps.
if (location.protocol === "file:") {
  const note = document.createElement("small");
  note.textContent = "Search needs a server: python -m http.server";
  document.querySelector(".md-header__inner").append(note);
}
