// The marks of the range chart, on screen and in the saved picture.
const ROW = 22;

// From a little below the smallest number that matters to a little above the largest.
function rangeDomain(report, rows) {
  const top = Math.log2(report.max), bottom = Math.log2(report.minSubnormal);
  let low = Infinity, high = -Infinity;
  for (const row of rows)
    for (const value of [row.q1, row.low, row.peak, row.g1, row.g2, row.bound])
      if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  if (!(low < high)) { low = Math.max(bottom, -30); high = Math.min(top, 30); }
  const span = top - bottom < 64;  // bfloat16's range is far wider than any model's values
  return span
    ? [Math.min(Math.max(low - 1, bottom - 6), bottom - 2), Math.max(Math.min(high + 1, top + 16), top + 3)]
    : [Math.max(low - 2, -60), Math.min(high + 2, 60)];
}

function bands(report, [low, high], y1, y2) {
  const top = Math.log2(report.max), normal = Math.log2(report.minNormal), bottom = Math.log2(report.minSubnormal);
  const parts = [
    { x1: normal, x2: top, fill: "var(--band)" },
    { x1: bottom, x2: normal, fill: "var(--thin-band)" },
    { x1: top, x2: high, fill: "var(--over-band)" },
  ];
  return parts
    .map((part) => ({ ...part, x1: Math.max(part.x1, low), x2: Math.min(part.x2, high), y1, y2 }))
    .filter((part) => part.x1 < part.x2)
    .map((part) => Plot.rectX([part], { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: part.fill }));
}

const color = (row) => (row.broken ? "var(--broken)" : row.lower ? "var(--lower)" : "var(--wide)");

// Rows at y = 0, 1, 2 ...: a thin bar from the smallest to the largest value, a thick one over nine tenths of them.
function rowMarks(rows, [left, right]) {
  const at = rows.map((row, y) => ({ ...row, y, fill: color(row), faint: row.design ? 0.25 : 1 }));
  const drawn = at.filter((row) => row.peak !== null);
  const inside = drawn.filter((row) => row.peak >= left && row.peak <= right);
  const beyond = drawn.filter((row) => row.peak > right);  // drawn as an arrow, since the value is off the chart
  const below = drawn.filter((row) => row.low !== null && row.low < left);
  const thin = drawn.map((row) => ({ ...row, from: row.low === null ? row.peak : Math.min(row.low, row.q1 ?? row.low) }));
  const thick = drawn.filter((row) => row.q1 !== null);
  const proved = at.filter((row) => row.bound !== null && row.peak !== null && row.bound >= row.peak);
  const never = at.filter((row) => row.bound !== null && row.peak === null);  // proved, but not measured
  const slopes = at.filter((row) => row.g2 !== null && row.g1 !== null);
  const slope = (row) => (row.gbroken ? "var(--broken)" : "var(--gradient)");
  return [
    Plot.ruleY(thin, { y: "y", x1: "from", x2: "peak", stroke: "fill", strokeWidth: 1.5, strokeOpacity: "faint" }),
    Plot.ruleY(thick, { y: "y", x1: "q1", x2: "q2", stroke: "fill", strokeWidth: 7, strokeOpacity: (d) => 0.85 * d.faint }),
    Plot.dot(inside, { x: "peak", y: "y", r: 3, fill: "fill", fillOpacity: "faint" }),
    Plot.ruleY(proved, { y: "y", x1: "peak", x2: "bound", stroke: "var(--proof)", strokeDasharray: "2,3" }),
    Plot.text(never.filter((row) => row.bound > right), { x: () => right, y: "y", text: () => "▸", fill: "var(--ink)", dx: -5, fontSize: 15 }),
    Plot.ruleY(never, { y: "y", x1: () => left, x2: "bound", stroke: "var(--proof)", strokeDasharray: "2,3" }),
    Plot.ruleX([...proved, ...never].filter((row) => row.bound <= right), { x: "bound", y1: (d) => d.y - 0.28, y2: (d) => d.y + 0.28, stroke: "var(--proof)", strokeWidth: 2.5 }),
    Plot.text(beyond, { x: () => right, y: "y", text: () => "▸", fill: "var(--ink)", dx: -5, fontSize: 15 }),
    Plot.text(below, { x: () => left, y: "y", text: () => "◂", fill: "var(--ink)", dx: 5, fontSize: 15 }),
    Plot.ruleY(slopes, { y: (d) => d.y + 0.33, x1: "g1", x2: "g2", stroke: slope, strokeWidth: 3, strokeLinecap: "round" }),
    Plot.text(slopes.filter((row) => row.g2 < left), { x: () => left, y: (d) => d.y + 0.33, text: () => "◂", fill: slope, dx: 5, fontSize: 13 }),
    Plot.text(slopes.filter((row) => row.g2 > right), { x: () => right, y: (d) => d.y + 0.33, text: () => "▸", fill: slope, dx: -5, fontSize: 13 }),
  ];
}

// Ticks at powers of two, 2 to 32 exponents apart. Superscripts are easier to read than 6.1e-05.
function ticks([low, high], width) {
  const step = [2, 4, 8, 16, 32].find((s) => (high - low) / s <= width / 52) || 32;
  const found = [];
  for (let e = Math.ceil(low / step) * step; e <= high; e += step) found.push(e);
  return found;
}

function limits(report, [low, high]) {
  return [
    { at: Math.log2(report.max), text: `max ${number(report.max)}` },
    { at: Math.log2(report.minNormal), text: `normal from ${number(report.minNormal)}` },
    { at: Math.log2(report.minSubnormal), text: `min ${number(report.minSubnormal)}` },
  ].filter((limit) => limit.at >= low && limit.at <= high);  // the most important first
}

function rangePlot(report, rows, domain, width) {
  const height = rows.length * ROW;
  return Plot.plot({
    width, height, margin: 0, axis: null,
    x: { domain, range: [0, width], clamp: true },
    y: { type: "linear", domain: [-0.5, rows.length - 0.5], range: [0, height] },
    marks: [
      ...bands(report, domain, -0.5, rows.length - 0.5),
      Plot.gridX(ticks(domain, width), { stroke: "var(--ink)", strokeOpacity: 0.08 }),
      Plot.ruleX(limits(report, domain).slice(0, 1), { x: "at", stroke: "var(--bad)", strokeWidth: 1.5 }),
      ...rowMarks(rows, domain),
    ],
  });
}

function rangeAxis(report, domain, width) {
  const named = [];
  for (const limit of limits(report, domain)) {
    const place = ((limit.at - domain[0]) / (domain[1] - domain[0])) * width;
    const dx = Math.min(0, width - place - 3.2 * limit.text.length);  // keep the label inside the right edge
    if (named.every((other) => Math.abs(other.place - place) > 105)) named.push({ ...limit, place, dx });
  }
  return Plot.plot({
    width, height: 40, margin: 0, axis: null, x: { domain, range: [0, width] }, y: { domain: [0, 40], range: [40, 0] },
    style: { overflow: "visible", fontSize: "11px", color: "var(--soft)" },
    marks: [
      Plot.text(ticks(domain, width), { x: (d) => d, y: 10, text: power, fill: "var(--soft)" }),
      ...named.map((limit) => Plot.text([limit], { x: "at", y: 30, dx: limit.dx, text: "text", fill: "var(--ink)" })),
      Plot.ruleX(named, { x: "at", y1: 18, y2: 24, stroke: "var(--soft)" }),
    ],
  });
}
