// Unpacks columns into rows, sums rows by layer, and formats numbers.
const reports = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function unpacked(columns) {
  const names = Object.keys(columns);
  const first = columns[names[0]];
  const count = first ? (first.texts ? first.at : first).length : 0;
  const rows = new Array(count);
  for (let i = 0; i < count; i++) {
    const row = { index: i };
    for (const name of names) {
      const column = columns[name];
      row[name] = column.texts ? column.texts[column.at[i]] : column[i];
    }
    rows[i] = row;
  }
  return rows;
}

// Log2 of the magnitude below which the given share of a histogram lies. Bins begin with their first exponent.
function quantile(bins, share) {
  let total = 0;
  for (let i = 1; i < bins.length; i++) total += bins[i];
  let sum = 0;
  for (let i = 1; i < bins.length; i++) {
    if (bins[i] && sum + bins[i] >= share * total) return bins[0] + i - 1 + (share * total - sum) / bins[i];
    sum += bins[i];
  }
  return null;
}

const log2 = (value) => (value > 0 ? Math.log2(value) : null);
const RANK = { error: 2, warning: 1, "": 0 };

// Gradients are shown as training holds them: multiplied by the loss scale.
function siteRow(site, report) {
  const bins = site.bins, ranges = report.level === "ranges";
  if (site.gbins.length) site.gbins[0] += Math.round(Math.log2(report.lossScale));
  return {
    name: site.site, key: site.site, sites: [site], worst: site.worst, lower: ranges || site.precision === report.dtype, design: !!site.design,
    head: site.head, low: log2(site.low), peak: log2(site.peak), bound: log2(site.bound),
    q1: quantile(bins, 0.05), q2: quantile(bins, 0.95),
    broken: !!site.bad || site.inf + site.nan > 0 || site.verdict === "overflows" || (ranges && site.peak > report.max),
    gbroken: !!site.gbad || site.gbroke > 0, ghead: site.glower ? site.ghead : null, weights: [],
    g1: quantile(site.gbins, 0.02), g2: log2(site.gpeak), index: site.index,
  };
}

const least = (a, b) => (a === null ? b : b === null ? a : Math.min(a, b));
const most = (a, b) => (a === null ? b : b === null ? a : Math.max(a, b));

// One row per layer and kind of precision: 16-bit values and float32 ones have different limits.
function layerRows(rows) {
  const found = new Map();
  for (const row of rows) {
    const site = row.sites[0];
    if (site.weight) continue;
    const key = `${site.layer}\n${row.lower}\n${row.design}`;
    const known = found.get(key);
    if (!known) {
      found.set(key, { ...row, name: site.layer, key, sites: [site] });
      continue;
    }
    known.sites.push(site);
    if (RANK[row.worst] > RANK[known.worst]) known.worst = row.worst;
    for (const name of ["low", "head", "q1", "g1", "ghead"]) known[name] = least(known[name], row[name]);
    for (const name of ["peak", "bound", "q2", "g2"]) known[name] = most(known[name], row[name]);
    known.broken = known.broken || row.broken;
    known.gbroken = known.gbroken || row.gbroken;
  }
  for (const row of rows) {  // of weights, only gradients belong to the layer, and a bias's may cancel to zero
    const known = row.sites[0].weight && found.get(`${row.sites[0].layer}\n${row.lower}\nfalse`);
    if (!known) continue;
    known.weights.push(row.sites[0]);
    known.g1 = known.g1 ?? row.g1;
    known.g2 = most(known.g2, row.g2);
    known.ghead = least(known.ghead, row.ghead);
    known.gbroken = known.gbroken || row.gbroken;
  }
  return [...found.values()];
}

// The mean of several histograms of shares, with equal weights.
function together(histograms) {
  const sums = new Map();
  for (const bins of histograms)
    for (let i = 1; i < bins.length; i++) sums.set(bins[0] + i - 1, (sums.get(bins[0] + i - 1) || 0) + bins[i]);
  const total = [...sums.values()].reduce((a, b) => a + b, 0);
  return [...sums.entries()].sort((a, b) => a[0] - b[0]).map(([exponent, n]) => ({ exponent, share: n / total }));
}

// Format numbers as all other formats do: four digits, but integers below 100,000 in full.
function number(value) {
  if (value === null || value === undefined) return "";
  const rounded = Number(value.toPrecision(4)), size = Math.abs(rounded);
  if (Math.abs(value) >= 1e3 && Math.abs(value) < 1e7)
    return (Number.isInteger(value) && size < 1e5 ? value : rounded).toLocaleString("en-US");
  if (size !== 0 && (size < 1e-4 || size >= 1e4)) return rounded.toExponential().replace(/e([+-])(\d)$/, "e$10$2");
  return String(rounded);
}

const SUPER = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (exponent) => "2" + [...String(exponent)].map((c) => SUPER[c] || c).join("");
const bits = (value) => (value === null ? "all zeros" : `${value < 0 ? "−" : ""}${Math.abs(value).toFixed(1)} bits`);

// A picture with a sentence that describes it to screen readers.
function described(plot, text) {
  for (const part of plot.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label");
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", text);
  return plot;
}

// Shorten a name whose last part alone is too long to its end, after its rarest part if there is room.
function cutFront(parts, shared, letters) {
  const rarest = parts.slice(0, -1).reduce((a, b) => (a && shared.get(a) < shared.get(b) ? a : b), "");
  const head = rarest && rarest.length < letters / 3 ? `…${rarest.slice(0, -1)}…` : "…";
  return head + parts.join("").slice(head.length - letters);
}

// Shorten names to a number of characters. Drop the parts that most names share first, and never the last, so that
// names stay distinct: layers.17.attention.query and similar names become "…17…query".
function shortNames(names, letters) {
  const parts = names.map((name) => name.split(/(?<=[./])/));
  const shared = new Map();
  for (const own of parts) for (const part of new Set(own.slice(0, -1))) shared.set(part, (shared.get(part) || 0) + 1);
  return names.map((name, i) => {
    const kept = parts[i].map((part, at) => ({ part, rank: at === parts[i].length - 1 ? -1 : shared.get(part) }));
    let text = name;
    while (text.length > letters) {
      const common = kept.reduce((a, b) => (b.part !== null && b.rank > a.rank ? b : a), { rank: -1 });
      if (common.rank < 0) return cutFront(parts[i], shared, letters);
      common.part = null;
      common.rank = -1;
      text = kept.map((each) => each.part ?? "…").join("").replace(/[./]…/g, "…").replace(/…+/g, "…");
    }
    return text;
  });
}

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}
