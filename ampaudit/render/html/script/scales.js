// Which loss scales suit: what each would flush, and the window of each layer.
function showScales(report) {
  const scales = report.scales;
  for (const id of ["scale-figure", "window-figure"]) if (byId(id)) byId(id).hidden = !scales;
  if (!scales || !byId("scale-figure")) return;
  const width = Math.max(byId("scale-figure").clientWidth, 320);
  byId("scale-plot").replaceChildren(flushedPlot(scales, width));
  byId("window-plot").replaceChildren(windowPlot(scales, width));
}

function flushedPlot(scales, width) {
  const rows = scales.rows.map(([exponent, flushed, over]) => ({ exponent, flushed, over }));
  const low = Math.max(scales.low, 0), high = Math.min(scales.high, 24);
  const fits = low <= high ? [{ x1: low - 0.5, x2: high + 0.5 }] : [];
  const most = Math.max(...rows.map((row) => row.flushed), 0.01);
  const plot = Plot.plot({
    width, height: 190, marginLeft: 48, marginTop: 22, style: { fontSize: "11px" },
    x: { domain: [-0.7, 24.7], label: "loss scale" }, y: { domain: [0, most * 1.1], label: null },
    marks: [
      Plot.rectX(fits, { x1: "x1", x2: "x2", y1: 0, y2: most * 1.1, fill: "var(--good-fill)" }),
      Plot.axisX(ticks([0, 24], width), { tickFormat: power }),
      Plot.axisY({ ticks: 4, tickFormat: (v) => `${100 * v >= 1 || v === 0 ? Math.round(100 * v) : (100 * v).toPrecision(1)}%` }),
      Plot.rectY(rows, { x1: (d) => d.exponent - 0.35, x2: (d) => d.exponent + 0.35, y: "flushed",
        fill: (d) => (d.over ? "var(--broken)" : "var(--gradient)"),
        title: (d) => `${power(d.exponent)}: ${(100 * d.flushed).toFixed(2)}% flushed, ${d.over} overflow` }),
      Plot.text(rows.filter((row) => row.over), { x: "exponent", y: "flushed", dy: -8, text: (d) => String(d.over), fill: "var(--bad)" }),
      Plot.ruleY([0], { stroke: "var(--soft)" }),
    ],
  });
  return described(plot, fits.length
    ? `Scales from ${power(scales.low)} to ${power(scales.high)} suit every layer.` : "No scale suits every layer.");
}

const WINDOWS = 30;

function windowPlot(scales, width) {
  const rows = scales.layers
    .map(([layer, low, high, flushed, at]) => ({ layer, low, high, flushed, at }))
    .sort((a, b) => a.high - a.low - (b.high - b.low)).slice(0, WINDOWS);
  const left = Math.min(280, width * 0.34);
  const short = shortNames(rows.map((row) => row.layer), Math.floor(left / 7));
  const names = new Map(rows.map((row, i) => [row.layer, short[i]]));
  const more = scales.layers.length - rows.length;
  byId("window-more").textContent = more > 0 ? `${more} more layers have wider windows` : "";
  const ends = rows.flatMap((row) => [row.low, row.high]);
  const domain = [Math.max(Math.min(...ends, 0), -20), Math.min(Math.max(...ends, 24), 40)];
  const plot = Plot.plot({
    width, height: 40 + 20 * rows.length, marginLeft: left, marginTop: 4, marginBottom: 34, style: { fontSize: "11px" },
    x: { domain, label: "loss scale", clamp: true }, y: { domain: rows.map((row) => row.layer), label: null, type: "band", padding: 0.35 },
    marks: [
      Plot.axisX(ticks(domain, width - left), { tickFormat: power }),
      Plot.axisY({ tickSize: 0, tickFormat: (d) => names.get(d) }),
      Plot.barX(rows.filter((row) => row.low <= row.high), { y: "layer", x1: "low", x2: "high", fill: "var(--gradient)", fillOpacity: 0.75,
        title: (d) => `${d.layer}: ${power(d.low)} to ${power(d.high)}; ${d.at} overflows first` }),
      Plot.text(rows.filter((row) => row.low > row.high), { y: "layer", x: () => domain[0], text: () => "no scale suits", textAnchor: "start", fill: "var(--bad)" }),
      Plot.ruleX([scales.scale], { stroke: "var(--ink)", strokeDasharray: "4,3" }),
    ],
  });
  return described(plot, `Windows of ${rows.length} layers; this run's scale is ${power(scales.scale)}.`);
}
