// Details of the selected row: numbers, source, sites, and the histogram of its exponents.
function showDetail(report, row, onSite) {
  const panel = byId("detail");
  if (!row) {
    panel.replaceChildren();
    return;
  }
  const single = row.sites.length === 1 ? row.sites[0] : null;
  const facts = element("dl");
  for (const [label, text] of single ? siteFacts(single, roomLabel(report, row)) : layerFacts(row, roomLabel(report, row))) {
    if (text) facts.append(element("dt", {}, label), element("dd", {}, text));
  }
  const parts = [element("h3", {}, row.name), element("p", { class: "hint" }, single ? single.type : `${row.sites.length} sites`)];
  panel.replaceChildren(...parts, histogram(report, row), facts, ...(single ? [] : [siteList(row, onSite)]));
}

// Headroom below the format's largest value; for float32 rows, the headroom they would have in that format.
const roomLabel = (report, row) => (row.lower && report.level !== "ranges" ? "Headroom" : `In ${report.dtype}`);

function siteFacts(site, room) {
  const broke = [site.inf && `${number(site.inf)} infinite`, site.nan && `${number(site.nan)} NaN`].filter(Boolean);
  return [
    ["Op", site.op], ["Held in", site.precision], ["Verdict", site.verdict], ["Findings", site.findings],
    ["Peak", number(site.peak)], [room, site.head === null ? "" : bits(site.head)],
    ["Broke", broke.length ? `${broke.join(", ")} of ${number(site.count)}` : ""],
    ["Smallest", number(site.low)], ["Proved bound", number(site.bound)],
    ["Accuracy", site.sqnr === null ? "" : `${site.sqnr.toFixed(0)} dB`],
    ["Alone", site.alone === null ? "" : `${site.alone.toFixed(0)} dB`],
    ["Gradient", gradientText(site)], ...site.evidence,
    ["Rule", site.rule], ["Why", site.why], ["Line", site.file && `${site.file}:${site.line}`],
  ];
}

function layerFacts(row, room) {
  return [
    ["Held in", row.lower ? row.sites[0].precision : [...new Set(row.sites.map((s) => s.precision))].join(", ")],
    ["Peak", greatest(row.sites, "peak")], [room, row.head === null ? "" : bits(row.head)],
    ["Proved bound", greatest(row.sites, "bound")], ["Gradient", greatest([...row.sites, ...row.weights], "gpeak")],
    ["Findings", [...new Set(row.sites.flatMap((s) => s.findings.split(" ")).filter(Boolean))].join(" ")],
    ...row.sites.flatMap((site) => site.evidence),
  ];
}

// The largest of the sites' numbers. The rows have logarithms, which would round it.
function greatest(sites, name) {
  const known = sites.map((site) => site[name]).filter((value) => value !== null);
  return known.length ? number(Math.max(...known)) : "";
}

function gradientText(site) {
  if (site.gpeak === null) return "";
  const broke = site.gbroke ? `, ${number(site.gbroke)} of ${number(site.gcount)} infinite or NaN` : "";
  const room = site.glower && site.ghead !== null ? `, ${bits(site.ghead)}` : "";
  const gone = site.gflushed ? `, ${(100 * site.gflushed).toFixed(1)}% flushed` : "";
  return `peak ${number(site.gpeak)}${room}${broke}${gone}`;
}

const LISTED = 12;

function siteList(row, onSite) {
  const list = element("ul");
  const sites = [...row.sites].sort((a, b) => (a.head ?? 1e9) - (b.head ?? 1e9)).slice(0, LISTED);
  for (const site of sites) {
    const label = `${site.op}${site.head === null ? "" : `, ${bits(site.head)}`}`;
    list.append(element("li", {}, element("button", { type: "button", onclick: () => onSite(site.site) }, label)));
  }
  if (row.sites.length > LISTED) list.append(element("li", { class: "hint" }, `and ${row.sites.length - LISTED} more`));
  return list;
}

function histogram(report, row) {
  const values = together(row.sites.map((site) => site.bins));
  const slopes = together([...row.sites, ...row.weights].map((site) => site.gbins));
  if (!values.length && !slopes.length) return element("p", { class: "hint" }, report.level === "static" ? "Nothing was run." : "No values but zeros.");
  const all = [...values, ...slopes].map((bin) => bin.exponent);
  const domain = [Math.min(...all) - 2, Math.max(...all, Math.log2(report.max) < 64 ? Math.log2(report.max) + 2 : -99) + 2];
  const bars = (bins, fill, opacity) =>
    Plot.rectY(bins, { x1: "exponent", x2: (d) => d.exponent + 1, y: "share", fill, fillOpacity: opacity, insetLeft: 0.5, insetRight: 0.5 });
  const top = Math.max(...[...values, ...slopes].map((bin) => bin.share)) * 1.05;
  const plot = Plot.plot({
    width: 296, height: 170, marginLeft: 34, marginBottom: 34, marginTop: 6, marginRight: 6, style: { fontSize: "11px" },
    x: { domain, label: "magnitude" }, y: { domain: [0, top], label: null },
    marks: [
      ...bands(report, domain, 0, top),
      Plot.axisX(ticks(domain, 260), { tickFormat: power }), Plot.axisY({ ticks: 3, tickFormat: (v) => `${Math.round(100 * v)}%` }),
      bars(values, row.broken ? "var(--broken)" : "var(--lower)", 0.9), bars(slopes, row.gbroken ? "var(--broken)" : "var(--gradient)", 0.6),
      Plot.ruleY([0], { stroke: "var(--soft)" }),
    ],
  });
  const mode = values.length ? values.reduce((a, b) => (b.share > a.share ? b : a)) : null;
  return described(plot, mode
    ? `Histogram of exponents: from ${power(values[0].exponent)} to ${power(values[values.length - 1].exponent + 1)}, most of them at ${power(mode.exponent)}.`
    : "Histogram of the gradient's exponents.");
}
