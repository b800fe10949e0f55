// Suitable loss scales: the gradients that each would flush to zero, and the window of each layer.
function showScales(report) {
  const scales = report.scales;
  for (const id of ["scale-figure", "window-figure"]) if (byId(id)) byId(id).hidden = !scales;
  if (!scales || !byId("scale-figure")) return;
  const width = Math.max(byId("scale-figure").clientWidth, 320);
  const frame = scaleFrame(scales, width);
  byId("scale-plot").replaceChildren(flushedPlot(scales, frame));
  byId("window-plot").replaceChildren(windowPlot(scales, frame));
}

// Both charts share the position of their axis, so a scale is at the same place in both.
function scaleFrame(scales, width) {
  const ends = scales.layers.flatMap(([, low, high]) => [low, high]);
  const domain = [Math.max(Math.min(...ends, 0), -20) - 0.7, Math.min(Math.max(...ends, 24), 40) + 0.7];
  const marginLeft = Math.min(280, width * 0.34);
  return {
    options: { width, marginLeft, x: { domain, label: "loss scale", clamp: true }, style: { fontSize: "11px" } },
    axis: () => Plot.axisX(ticks(domain, width - marginLeft), { tickFormat: power }),
    each: Math.ceil(((domain[1] - domain[0]) * 13) / (width - marginLeft)),  // labels a number of scales apart
    run: () => Plot.ruleX([scales.scale], { stroke: "var(--ink)", strokeDasharray: "4,3" }),
  };
}

function flushedPlot(scales, frame) {
  const rows = scales.rows.map(([exponent, flushed, over]) => ({ exponent, flushed, over }));
  const [least, largest] = frame.options.x.domain;
  const window = { x1: Math.max(scales.low - 0.5, least), x2: Math.min(scales.high + 0.5, largest) };
  const fits = scales.low <= scales.high && window.x1 < window.x2 ? [window] : [];
  const most = Math.max(...rows.map((row) => row.flushed), 0.01);
  const plot = Plot.plot({
    ...frame.options, height: 190, marginTop: 22, y: { domain: [0, most * 1.1], label: null },
    marks: [
      Plot.rectX(fits, { x1: "x1", x2: "x2", y1: 0, y2: most * 1.1, fill: "var(--good-fill)" }),
      frame.axis(),
      Plot.axisY({ ticks: 4, tickFormat: (v) => `${100 * v >= 1 || v === 0 ? Math.round(100 * v) : (100 * v).toPrecision(1)}%` }),
      Plot.rectY(rows, { x1: (d) => d.exponent - 0.35, x2: (d) => d.exponent + 0.35, y: "flushed",
        fill: (d) => (d.over ? "var(--broken)" : "var(--gradient)"),
        title: (d) => `${power(d.exponent)}: ${(100 * d.flushed).toFixed(2)}% flushed, ${d.over} overflow` }),
      Plot.text(rows.filter((row) => row.over && row.exponent % frame.each === 0), { x: "exponent", y: "flushed", dy: -8, text: (d) => String(d.over), fill: "var(--bad)" }),
      Plot.ruleY([0], { stroke: "var(--soft)" }),
      frame.run(),
    ],
  });
  return described(plot, fits.length
    ? `Scales from ${power(scales.low)} to ${power(scales.high)} suit every layer.` : "No scale suits every layer.");
}

const WINDOWS = 30;

function windowPlot(scales, frame) {
  const rows = scales.layers
    .map(([layer, low, high, flushed, at]) => ({ layer, low, high, flushed, at }))
    .sort((a, b) => a.high - a.low - (b.high - b.low)).slice(0, WINDOWS);
  const short = shortNames(rows.map((row) => row.layer), Math.floor(frame.options.marginLeft / 7));
  const names = new Map(rows.map((row, i) => [row.layer, short[i]]));
  const more = scales.layers.length - rows.length;
  byId("window-more").textContent = more > 0 ? `${more} more layers have wider windows` : "";
  const plot = Plot.plot({
    ...frame.options, height: 40 + 20 * rows.length, marginTop: 4, marginBottom: 34, y: { domain: rows.map((row) => row.layer), label: null, type: "band", padding: 0.35 },
    marks: [
      frame.axis(),
      Plot.axisY({ tickSize: 0, tickFormat: (d) => names.get(d) }),
      Plot.barX(rows.filter((row) => row.low <= row.high), { y: "layer", x1: "low", x2: "high", fill: "var(--gradient)", fillOpacity: 0.75,
        title: (d) => `${d.layer}: ${power(d.low)} to ${power(d.high)}; ${d.at} overflows first` }),
      Plot.text(rows.filter((row) => row.low > row.high), { y: "layer", x: () => frame.options.x.domain[0], text: () => "no scale suits", textAnchor: "start", fill: "var(--bad)" }),
      frame.run(),
    ],
  });
  return described(plot, `Windows of ${rows.length} layers; this run's scale is ${power(scales.scale)}.`);
}
