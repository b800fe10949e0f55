// Connects the parts of the page: the displayed report, the controls, light and dark theme, printing.
const state = { report: 0, chosen: null };
const cache = new Map();

function rowsOf(index, kind) {
  const key = `${index}/${kind}`;
  if (!cache.has(key)) {
    const sites = kind === "sites" ? null : rowsOf(index, "sites");
    const report = reports[index];
    cache.set(key, sites ? layerRows(sites) : unpacked(report.sites).map((site) => siteRow(site, report)));
  }
  return cache.get(key);
}

function shownRows() {
  const words = byId("name").value.toLowerCase(), kind = byId("kind").value;
  const keep = { all: () => true, lower: (r) => r.lower, wide: (r) => !r.lower, found: (r) => r.sites.some((s) => s.findings) }[kind];
  const rows = rowsOf(state.report, byId("rows").value)
    .filter((row) => keep(row) && (!words || row.name.toLowerCase().includes(words)));
  if (byId("order").value === "headroom") {
    const rank = (row) => (row.design || !row.lower ? 1e6 : 0) + (row.head ?? 1e3);
    rows.sort((a, b) => rank(a) - rank(b));
  }
  return rows;
}

const chart = new RangeChart((row) => {
  state.chosen = row.key;
  showDetail(reports[state.report], row, (site) => {
    byId("rows").value = "sites";
    state.chosen = site;
    showRange();
  });
});

function showRange() {
  const rows = shownRows();
  const all = rowsOf(state.report, byId("rows").value).length;
  byId("row-count").textContent = rows.length === all ? `${all} rows` : `${rows.length} of ${all} rows`;
  chart.show(reports[state.report], rows, state.chosen);
  if (rows.length && state.chosen) chart.reveal(chart.chosen);
  else if (rows.length) chart.choose(chart.chosen);
  else showDetail(reports[state.report], null);
}

function rowKeys() {
  const level = reports[state.report].level;
  const keys = {
    scan: [["var(--lower)", "16 bits"], ["var(--wide)", "kept in float32"], ["var(--broken)", "breaks"]],
    ranges: [["var(--lower)", "FP32 values"], ["var(--broken)", "would overflow"]],
    static: [],
  }[level];
  const rows = rowsOf(state.report, "sites");
  if (rows.some((row) => row.bound !== null)) keys.push(["var(--proof)", "proved bound"]);
  if (rows.some((row) => row.g2 !== null)) keys.push(["var(--gradient)", "gradient, times the loss scale"]);
  return keys;
}

function showKey(report) {
  const keys = rowKeys();
  keys.push(["var(--band)", `${report.dtype} normal`], ["var(--thin-band)", "subnormal: fewer digits"], ["var(--over-band)", "infinite"], ["var(--page)", "rounds to zero"]);
  byId("range-key").replaceChildren(...keys.map(([fill, text]) => keyOf(fill, text)));
}

function showReport(index) {
  state.report = index;
  for (const part of document.querySelectorAll(".of-report")) part.hidden = part.dataset.report !== String(index);
  for (const row of document.querySelectorAll(".policies tbody tr")) row.classList.toggle("chosen", row.dataset.report === String(index));
  for (const button of document.querySelectorAll(".choose")) button.setAttribute("aria-pressed", String(button.dataset.report === String(index)));
  const sites = rowsOf(index, "sites");
  for (const id of ["range", "range-controls", "save"]) byId(id).hidden = !sites.length;
  if (sites.length) {
    showKey(reports[index]);
    showRange();
    showStrip(reports[index], sites, (name) => {
      byId("rows").value = "sites";
      byId("name").value = "";
      byId("kind").value = "all";
      state.chosen = name;
      showRange();
    });
  }
  showScales(reports[index]);
  filterFindings();
}

function save() {
  const all = shownRows(), rows = all.slice(0, 60);
  const domain = rangeDomain(reports[state.report], rows.filter((row) => !row.design));
  const text = picture(reports[state.report], rows, domain, `${document.title}: ${reports[state.report].label}${all.length > rows.length ? `; ${all.length - rows.length} more rows` : ""}`, rowKeys());
  const link = element("a", { download: "ampaudit.svg", href: URL.createObjectURL(new Blob([text], { type: "image/svg+xml" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function prepare() {
  for (const id of ["rows", "order", "kind", "name"]) byId(id).addEventListener("input", showRange);
  for (const button of document.querySelectorAll(".choose")) button.addEventListener("click", () => showReport(Number(button.dataset.report)));
  byId("save").addEventListener("click", save);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    showScales(reports[state.report]);
    if (rowsOf(state.report, "sites").length) showStrip(reports[state.report], rowsOf(state.report, "sites"), () => {});
  });
  addEventListener("beforeprint", () => {
    chart.fillForPrint();
    for (const found of document.querySelectorAll(".finding.error")) found.open = true;
  });
  addEventListener("afterprint", () => chart.afterPrint());
  prepareFindings();
  showReport(0);
}

prepare();
