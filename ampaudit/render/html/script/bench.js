// Two bar charts: the parts of predicted memory, and speed with its spread.
const PARTS = [
  ["weights", "var(--lower)"], ["masters", "var(--heat-4)"], ["gradients", "var(--warn)"],
  ["optimizer", "var(--gradient)"], ["activations", "var(--proof)"], ["peak", "var(--wide)"],
];

function frame(marks, label) {
  const rows = reports.map((row) => row.name);
  const width = Math.max(byId("memory-plot").clientWidth, 300);
  return Plot.plot({
    width, height: 46 + 30 * rows.length, marginLeft: Math.min(190, width * 0.36), marginRight: 90, marginTop: 6, marginBottom: 38,
    style: { fontSize: "12px" }, x: { label, grid: true, zero: true }, y: { domain: rows, label: null, type: "band", padding: 0.25 },
    marks: [Plot.axisY({ tickSize: 0 }), ...marks, Plot.ruleX([0], { stroke: "var(--soft)" })],
  });
}

function drawMemory() {
  const bars = [];
  for (const row of reports) {
    let left = 0;
    for (const [part, fill] of PARTS) {
      const value = row.parts[part] || 0;
      if (value) bars.push({ name: row.name, x1: left, x2: left + value, fill, title: `${row.name}: ${part} ${number(value)} MB` });
      left += value;
    }
  }
  const ends = reports.filter((row) => row.peak);
  const plot = frame([
    Plot.barX(bars, { y: "name", x1: "x1", x2: "x2", fill: "fill", title: "title" }),
    Plot.text(ends, { y: "name", x: "peak", text: (d) => `${number(d.peak)} MB`, textAnchor: "start", dx: 6, fill: "var(--ink)" }),
  ], "MB");
  const used = PARTS.filter(([part]) => reports.some((row) => row.parts[part]));
  byId("memory-key").replaceChildren(...used.map(([part, fill]) => keyOf(fill, part === "peak" ? "measured, not split" : part)));
  byId("memory-plot").replaceChildren(described(plot, `Peak memory: ${ends.map((d) => `${d.name} ${number(d.peak)} MB`).join("; ")}.`));
}

function drawSpeed() {
  const rows = reports.filter((row) => row.speed);
  const fill = (row) => (row.finite === false ? "var(--broken)" : "var(--lower)");
  const note = (row) => (row.finite === false ? "inf or NaN" : row.sqnr === null ? "" : `${row.sqnr.toFixed(0)} dB`);
  const plot = frame([
    Plot.barX(rows, { y: "name", x: "speed", fill }),
    Plot.ruleY(rows, { y: "name", x1: "slowest", x2: "fastest", stroke: "var(--ink)", strokeWidth: 1.5 }),
    Plot.text(rows, { y: "name", x: "fastest", text: (d) => `${number(d.speed)}  ${note(d)}`, textAnchor: "start", dx: 6, fill: "var(--ink)" }),
  ], "samples a second");
  byId("speed-plot").replaceChildren(described(plot, `Samples a second: ${rows.map((d) => `${d.name} ${number(d.speed)}`).join("; ")}.`));
}

function draw() {
  drawMemory();
  drawSpeed();
}

draw();
let drawn = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawn) { drawn = innerWidth; draw(); } });
