// Headroom of the 16-bit values over depth, the least of each stretch; a click goes to its row.
const STEPS = [
  [0, "var(--heat-0)", "breaks"], [1, "var(--heat-1)", "under 1"], [3, "var(--heat-2)", "1 to 3"],
  [6, "var(--heat-3)", "3 to 6"], [10, "var(--heat-4)", "6 to 10"], [Infinity, "var(--heat-5)", "over 10"],
];
const heat = (head) => STEPS.find(([limit]) => head < limit)[1];

function showStrip(report, rows, onRow) {
  const held = rows.filter((row) => row.lower && !row.design && row.head !== null && !row.sites[0].weight);
  byId("strip").hidden = held.length < 2;
  if (held.length < 2) return;
  const width = Math.max(byId("strip-plot").clientWidth, 300);
  const count = Math.min(held.length, Math.floor(width / 3));
  const cells = [];
  for (let i = 0; i < count; i++) {
    const part = held.slice(Math.floor((i * held.length) / count), Math.floor(((i + 1) * held.length) / count));
    const worst = part.reduce((a, b) => (b.head < a.head ? b : a));
    cells.push({ i, row: worst, fill: worst.broken ? STEPS[0][1] : heat(worst.head) });
  }
  const plot = Plot.plot({
    width, height: 34, margin: 0, axis: null, x: { domain: [0, count], range: [0, width] },
    y: { domain: [0, 1], range: [34, 0] },
    marks: [Plot.rectX(cells, { x1: "i", x2: (d) => d.i + 1, y1: 0, y2: 1, fill: "fill", insetRight: count > 200 ? 0 : 1,
      title: (d) => `${d.row.name}: ${bits(d.row.head)}` })],
  });
  plot.setAttribute("aria-hidden", "true");
  plot.style.cursor = "pointer";
  plot.addEventListener("click", (event) => {
    const box = plot.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * count);
    onRow(cells[Math.min(Math.max(at, 0), count - 1)].row.name);
  });
  byId("strip-plot").replaceChildren(plot);
  const worst = held.reduce((a, b) => (b.head < a.head ? b : a));
  byId("strip-text").textContent = `Least: ${bits(worst.head)} at ${worst.name}.`;
  byId("strip-key").replaceChildren(...STEPS.map(([, fill, text]) => keyOf(fill, text)));
}
