// Tables that sort by any column, with mouse or keyboard; unknown values come last.

const HIGH_IS_BEST = new Set([
  "tokens_per_s", "tokens_per_s_median", "tokens_per_s_p25", "tokens_per_s_p75",
  "tokens_per_s_per_rank", "tflops_per_rank", "mfu", "largest_micro_batch",
]);
const LOW_IS_BEST = new Set([
  "step_time_s", "allocated_peak_bytes", "reserved_peak_bytes", "device_used_bytes",
  "tracked_live_bytes", "resident_set_bytes", "perplexity", "test_loss", "used_bytes",
]);

function compared(a, b, descending) {
  const unknown = (a === null) - (b === null);
  if (unknown || a === null) return unknown;
  const order = typeof a === "string" ? a.localeCompare(String(b), "en", { numeric: true }) : a - b;
  return descending ? -order : order;
}

// Text of the best of two or more values; equal texts tie.
function bestOf(rows, { key, kind }) {
  const known = rows.map((row) => row[key]).filter((value) => value !== null);
  if (known.length < 2) return null;
  if (HIGH_IS_BEST.has(key)) return shown(Math.max(...known), kind);
  return LOW_IS_BEST.has(key) ? shown(Math.min(...known), kind) : null;
}

// Default cell of a row and column.
function plainCell(row, column, best) {
  const value = row[column.key];
  const text = shown(value, column.kind);
  const names = [column.kind === "text" ? "" : "number"];
  if (value === null) names.push("unknown");
  if (best !== null && text === best) names.push("best");
  return html("td", { className: names.join(" "), text });
}

// `rows()` and `columns()` return what to show: rows in order, columns as { key, title, kind,
// help }. `cellOf(row, column, best)` makes a cell, `competes(row)` tells whether a row can be best.
// The column `name` stays in place when others scroll. Returns { element, redraw, order }.
function sortableTable({ rows, columns, cellOf, competes, name, caption, sorted, changed }) {
  const head = html("tr");
  const body = html("tbody");
  const table = html("table", { id: "rows", "aria-label": caption }, html("thead", {}, head), body);
  const framed = scrolling(table);

  function sortBy(column) {
    const again = sorted.key === column.key;
    const descending = again ? !sorted.descending : HIGH_IS_BEST.has(column.key);
    sorted = { key: column.key, descending };
    redraw();
    head.querySelector(`[data-key="${column.key}"] button`).focus();
  }

  function header(column) {
    const button = html("button", { type: "button", text: column.title, title: column.help });
    button.addEventListener("click", () => sortBy(column));
    const kind = column.key === name ? "name" : column.kind === "text" ? "" : "number";
    const th = html("th", { scope: "col", className: kind, "data-key": column.key }, button);
    if (column.key === sorted.key) {
      th.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
    }
    return th;
  }

  const order = () => [...rows()].sort(
    (a, b) => compared(a[sorted.key], b[sorted.key], sorted.descending));

  function redraw() {
    const now = columns();
    head.replaceChildren(...now.map(header));
    const competing = rows().filter(competes);
    const best = Object.fromEntries(now.map((c) => [c.key, bestOf(competing, c)]));
    body.replaceChildren(...order().map((row) => html("tr", {},
      ...now.map((c) => cellOf(row, c, competes(row) ? best[c.key] : null)))));
    changed?.();
  }

  redraw();
  PHONE.addEventListener("change", redraw);
  return { element: framed, redraw, order };
}

// A table that scrolls sideways, with a hint when it does.
function scrolling(table) {
  const name = { role: "region", "aria-label": table.getAttribute("aria-label") ?? "table" };
  const area = html("div", { className: "scroll", tabindex: "0", ...name }, table);
  const hint = html("p", { className: "hint", text: "More columns: scroll sideways \u2192" });
  const frame = html("div", { className: "framed" }, area);
  const look = () => {
    const left = area.scrollWidth - area.clientWidth;
    hint.hidden = left <= 1;
    frame.classList.toggle("more", left - area.scrollLeft > 1);
  };
  area.addEventListener("scroll", look, { passive: true });
  const observer = new ResizeObserver(look);
  observer.observe(area);
  observer.observe(table);
  return html("div", {}, hint, frame);
}

// A plain table of titles and text cells; the columns in `numbers` are figures.
function plainTable(titles, rows, numbers) {
  const side = (i) => (numbers.includes(i) ? "number" : i === 0 ? "name" : "wide");
  const head = titles.map((text, i) => html("th", { scope: "col", className: side(i), text }));
  const body = rows.map((cells) =>
    html("tr", {}, ...cells.map((text, i) => {
      const className = side(i) + (text === "n/a" ? " unknown" : "");
      return html("td", { className, text });
    })));
  return scrolling(
    html("table", {}, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...body)));
}
