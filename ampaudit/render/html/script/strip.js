// Headroom of 16-bit values over depth: the smallest of each stretch. A click selects its row.
const STEPS = [
  [0, "var(--heat-0)", "breaks"], [1, "var(--heat-1)", "under 1"], [3, "var(--heat-2)", "1 to 3"],
  [6, "var(--heat-3)", "3 to 6"], [10, "var(--heat-4)", "6 to 10"], [Infinity, "var(--heat-5)", "over 10"],
];
const heat = (head) => STEPS.find(([limit]) => head < limit)[1];

function showStrip(report, rows, onRow) {
  const held = rows.filter((row) => row.lower && !row.design && row.head !== null && !row.sites[0].weight);
  const slopes = rows.filter((row) => row.ghead !== null);
  byId("strip").hidden = held.length < 2 && !slopes.length;
  byId("slopes").hidden = !slopes.length;
  if (byId("strip").hidden) return;
  const nearest = drawStrip("strip", held.map((row) => ({ row, head: row.head, broken: row.broken })), onRow);
  byId("strip-text").textContent = nearest ? `Least: ${bits(nearest.head)} at ${nearest.row.name}.` : "";
  const worst = drawStrip("slopes", slopes.map((row) => ({ row, head: row.ghead, broken: row.gbroken })), onRow);
  if (worst) byId("slopes-text").textContent = `The worst, ${worst.row.name}: ${gradientText(worst.row.sites[0])}; times the loss scale ${number(report.lossScale)}.`;
  byId("strip-key").replaceChildren(...STEPS.map(([, fill, text]) => keyOf(fill, text)));
}

// Draw one strip; return the worst of its rows.
function drawStrip(id, held, onRow) {
  if (!held.length) return byId(`${id}-plot`).replaceChildren();
  const rank = (cell) => cell.head - (cell.broken ? 1e6 : 0);
  const worst = (part) => part.reduce((a, b) => (rank(b) < rank(a) ? b : a));
  const width = Math.max(byId(`${id}-plot`).clientWidth, 300);
  const count = Math.min(held.length, Math.floor(width / 3));
  const cells = [];
  for (let i = 0; i < count; i++) {
    const cell = worst(held.slice(Math.floor((i * held.length) / count), Math.floor(((i + 1) * held.length) / count)));
    cells.push({ ...cell, i, fill: cell.broken ? STEPS[0][1] : heat(cell.head) });
  }
  const plot = Plot.plot({
    width, height: 34, margin: 0, axis: null, x: { domain: [0, count], range: [0, width] },
    y: { domain: [0, 1], range: [34, 0] },
    marks: [Plot.rectX(cells, { x1: "i", x2: (d) => d.i + 1, y1: 0, y2: 1, fill: "fill", insetRight: count > 200 ? 0 : 1,
      title: (d) => `${d.row.name}: ${bits(d.head)}` })],
  });
  plot.setAttribute("aria-hidden", "true");
  plot.style.cursor = "pointer";
  plot.addEventListener("click", (event) => {
    const box = plot.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * count);
    onRow(cells[Math.min(Math.max(at, 0), count - 1)].row.name);
  });
  byId(`${id}-plot`).replaceChildren(plot);
  return worst(held);
}
