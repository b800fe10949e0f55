// The chart of ranges: names that the keyboard can reach, and beside them the picture, drawn once it is visible.
const CHUNK = 40;

class RangeChart {
  constructor(onChoose) {
    this.list = byId("range-rows");
    this.onChoose = onChoose;
    this.seen = new IntersectionObserver((entries) => this.draw(entries), { root: this.list, rootMargin: "600px 0px" });
    this.list.addEventListener("scroll", () => this.tellMore());
    this.list.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.resized()).observe(this.list);
    this.rows = [];
  }

  show(report, rows, chosen) {
    this.report = report;
    this.rows = rows;
    this.domain = rangeDomain(report, rows.filter((row) => !row.design));
    this.chosen = Math.max(rows.findIndex((row) => row.key === chosen), chosen ? 0 : gravest(rows));
    this.rebuild();
  }

  rebuild() {
    this.seen.disconnect();
    this.width = Math.max(this.list.clientWidth, 280);
    const names = Math.round(Math.min(300, this.width * 0.38));
    byId("range").style.setProperty("--names", `${names}px`);
    this.plotWidth = this.width - names;
    this.names = shortNames(this.rows.map((row) => row.name), Math.max(Math.floor((names - 12) / 7.6), 8));
    const chunks = [];
    for (let start = 0; start < this.rows.length; start += CHUNK) {
      const chunk = element("div", { class: "range-chunk", role: "presentation" });
      chunk.start = start;
      chunk.style.height = `${Math.min(CHUNK, this.rows.length - start) * ROW}px`;
      this.seen.observe(chunk);
      chunks.push(chunk);
    }
    this.list.replaceChildren(...chunks);
    if (!this.rows.length) this.list.replaceChildren(element("p", { class: "none" }, "No row matches."));
    this.drawAxis();
    this.tellMore();
  }

  // Tell how many rows the scrolling box has.
  tellMore() {
    const below = this.rows.length - Math.ceil((this.list.scrollTop + this.list.clientHeight) / ROW);
    byId("range-more").textContent = below > 0 ? `${below} more rows below: scroll, or use the arrow keys` : "";
  }

  drawAxis() {
    byId("range-axis").replaceChildren(element("span"), rangeAxis(this.report, this.domain, this.plotWidth));
  }

  draw(entries) {
    for (const { target, isIntersecting } of entries)
      if (isIntersecting && !target.childElementCount) this.fill(target);
  }

  fill(chunk) {
    const rows = this.rows.slice(chunk.start, chunk.start + CHUNK);
    const names = element("div", { role: "presentation" });
    rows.forEach((row, i) => names.append(this.nameOf(row, chunk.start + i)));
    const picture = rangePlot(this.report, rows, this.domain, this.plotWidth);
    picture.setAttribute("aria-hidden", "true");
    picture.addEventListener("click", (event) => {
      const top = picture.getBoundingClientRect().top;
      this.choose(chunk.start + Math.min(Math.floor((event.clientY - top) / ROW), rows.length - 1));
    });
    chunk.replaceChildren(names, picture);
  }

  nameOf(row, index) {
    const said = `${row.name}: ${describe(row)}`;
    const chosen = index === this.chosen;
    const made = element("button", {
      type: "button", class: `row-name ${row.worst}`, role: "option", "aria-selected": String(chosen),
      tabindex: chosen ? 0 : -1, "aria-label": said, title: said, "data-row": index,
      onclick: () => this.choose(index),
    }, element("bdi", {}, this.names[index]));
    return made;
  }

  choose(index, focus = false) {
    if (index < 0 || index >= this.rows.length) return;
    const chunk = this.list.children[Math.floor(index / CHUNK)];
    if (!chunk.childElementCount) this.fill(chunk);
    const old = this.list.querySelector('[aria-selected="true"]');
    if (old) { old.setAttribute("aria-selected", "false"); old.tabIndex = -1; }
    this.chosen = index;
    const button = this.list.querySelector(`[data-row="${index}"]`);
    button.setAttribute("aria-selected", "true");
    button.tabIndex = 0;
    if (focus) button.focus();
    this.onChoose(this.rows[index]);
  }

  reveal(index) {
    this.list.scrollTop = index * ROW - this.list.clientHeight / 2;
    this.choose(index);
  }

  move(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(this.chosen + steps[event.key], 0), this.rows.length - 1), true);
  }

  resized() {
    if (this.report && Math.abs(this.list.clientWidth - this.width) > 1) this.rebuild();
  }

  // Draw all rows for printing, up to a length that people still page through.
  fillForPrint() {
    [...this.list.children].forEach((chunk, i) => {
      if (i < 5) { if (!chunk.childElementCount) this.fill(chunk); } else chunk.hidden = true;
    });
    const left = this.rows.length - 5 * CHUNK;
    byId("range-more").textContent = left > 0 ? `${left} more rows are not printed` : "";
  }

  afterPrint() {
    for (const chunk of this.list.children) chunk.hidden = false;
    this.tellMore();
  }
}

// The row that is selected first: one that breaks, or else the one nearest to the limit.
function gravest(rows) {
  const rank = (row) => row.peak === null && row.bound !== null && !row.design ? -row.bound : (row.broken ? -1e6 : 0) + (row.worst === "error" ? -1e3 : 0) + (row.lower && !row.design ? row.head ?? 1e3 : 1e6);
  return rows.reduce((best, row, i) => (rank(row) < rank(rows[best]) ? i : best), 0);
}

function describe(row) {
  const parts = [row.lower ? "judged in 16 bits" : "float32"];
  if (row.peak !== null) parts.push(`peak ${number(2 ** row.peak)}`);
  if (row.head !== null && (row.lower || row.broken)) parts.push(`headroom ${bits(row.head)}`);
  if (row.bound !== null) parts.push(`proved bound ${number(2 ** row.bound)}`);
  if (row.design) parts.push("large by design");
  if (row.worst) parts.push(row.worst);
  return parts.join(", ");
}

// A standalone picture to share, with names beside the rows and CSS variables replaced by colors.
function picture(report, rows, domain, title, keys) {
  const width = 1000, left = 330, height = rows.length * ROW, foot = 62 + height;
  const places = keys.map(([fill, text], i) => ({ fill, text, x: domain[0] + ((domain[1] - domain[0]) * i) / keys.length }));
  const plot = Plot.plot({
    width, height: foot + 36, marginLeft: left, marginTop: 62, marginBottom: 36, marginRight: 14, axis: null,
    x: { domain, clamp: true }, y: { type: "linear", domain: [-0.5, rows.length - 0.5], range: [62, 62 + height] },
    style: { background: "var(--page)", color: "var(--ink)", fontFamily: "sans-serif", fontSize: "12px" },
    marks: [
      ...bands(report, domain, -0.5, rows.length - 0.5),
      ...rowMarks(rows, domain),
      Plot.text(shortNames(rows.map((row) => row.name), 46), { y: (d, i) => i, frameAnchor: "left", dx: -8, textAnchor: "end", text: (d) => d, fill: "var(--ink)" }),
      Plot.text(ticks(domain, width - left), { x: (d) => d, frameAnchor: "top", dy: -10, text: power, fill: "var(--soft)" }),
      Plot.text(limits(report, domain), { x: "at", frameAnchor: "top", dy: -26, text: "text", fill: "var(--ink)" }),
      Plot.dot(places, { x: "x", frameAnchor: "bottom", dx: 6, dy: 22, r: 5, fill: "fill", symbol: "square" }),
      Plot.text(places, { x: "x", frameAnchor: "bottom", dx: 16, dy: 22, textAnchor: "start", lineAnchor: "middle", text: "text", fill: "var(--ink)" }),
      Plot.text([title], { frameAnchor: "top-left", dx: 10 - left, dy: -46, text: (d) => d, fontWeight: 600, fill: "var(--ink)" }),
    ],
  });
  return resolved(plot);
}

function resolved(plot) {
  const probe = element("span");
  document.body.append(probe);
  const text = new XMLSerializer().serializeToString(plot).replace(/var\((--[a-z-]+)\)/g, (_, name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return text;
}
