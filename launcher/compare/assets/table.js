// The ranked table: every column sorts, by mouse and by keyboard; what is unknown comes last.

const HIGH_IS_BEST = new Set(["tokens_per_s", "tokens_per_s_per_rank", "tflops_per_rank", "mfu"]);
const LOW_IS_BEST = new Set([
  "step_time_s", "allocated_peak_bytes", "reserved_peak_bytes", "device_used_bytes",
  "tracked_live_bytes", "resident_set_bytes", "perplexity", "test_loss",
]);

function compared(a, b, descending) {
  const unknown = (a === null) - (b === null);
  if (unknown || a === null) return unknown;
  const order = typeof a === "string" ? a.localeCompare(String(b), "en", { numeric: true }) : a - b;
  return descending ? -order : order;
}

function bestOf(rows, key) {
  const known = rows.filter((row) => row.state === "completed" && row[key] !== null);
  if (known.length < 2) return null;
  const values = known.map((row) => row[key]);
  if (HIGH_IS_BEST.has(key)) return Math.max(...values);
  return LOW_IS_BEST.has(key) ? Math.min(...values) : null;
}

function cell(row, column, best, colour) {
  const value = row[column.key];
  const text = shown(value, column.kind);
  if (column.key === "run") {
    return html("th", { scope: "row", className: "name" },
      swatch(colour), document.createTextNode(text));
  }
  if (column.key === "state") {
    const known = ["completed", "oom", "failed", "timeout"].includes(value) ? value : "";
    return html("td", {}, html("span", { className: `state ${known}`, text }));
  }
  if (column.key === "strategy") {
    const also = { className: "also", text: shown(row.strategy_also_called, "text") };
    return html("td", {}, document.createTextNode(text), html("span", also));
  }
  if (column.key === "differs") return html("td", { className: "wide small", text: value ?? "" });
  if (column.key === "position" && value === null) return html("td", { text: "" });
  const names = [column.kind === "text" ? "" : "number"];
  if (column.key === "loss_difference" && row.loss_note === "reference") {
    return html("td", { className: "number unknown", text: "reference" });
  }
  if (value === null) names.push("unknown");
  if (best !== null && value === best && row.state === "completed") names.push("best");
  const attributes = { className: names.join(" "), text };
  if (column.key === "loss_difference" && row.loss_note) attributes.title = row.loss_note;
  return html("td", attributes);
}

// `colourOf(index in rows)`; `columns()` says which columns show now. Returns { element, redraw }.
function sortableTable(rows, columns, colourOf, caption) {
  let sorted = { key: "position", descending: false };
  const head = html("tr");
  const body = html("tbody");
  const table = html("table", { id: "runs", "aria-label": caption },
    html("thead", {}, head), body);

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
    const kind = column.key === "run" ? "name" : column.kind === "text" ? "" : "number";
    const th = html("th", { scope: "col", className: kind, "data-key": column.key }, button);
    if (column.key === sorted.key) {
      th.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
    }
    return th;
  }

  function redraw() {
    const now = columns();
    head.replaceChildren(...now.map(header));
    const best = Object.fromEntries(now.map((c) => [c.key, bestOf(rows, c.key)]));
    const order = rows.map((row, i) => [row, i]).sort(
      ([a], [b]) => compared(a[sorted.key], b[sorted.key], sorted.descending),
    );
    body.replaceChildren(...order.map(([row, i]) =>
      html("tr", {}, ...now.map((c) => cell(row, c, best[c.key], colourOf(i)))),
    ));
  }

  redraw();
  return { element: html("div", { className: "scroll", tabindex: "0" }, table), redraw };
}

// A plain table: titles, and rows of text cells; the columns in `numbers` are figures.
function plainTable(titles, rows, numbers, rowClass = () => "") {
  const side = (i) => (numbers.includes(i) ? "number" : i === 0 ? "name" : "wide");
  const head = titles.map((text, i) => html("th", { scope: "col", className: side(i), text }));
  const body = rows.map((cells, r) =>
    html("tr", { className: rowClass(r) }, ...cells.map((text, i) => {
      const className = side(i) + (text === "n/a" ? " unknown" : "");
      return html("td", { className, text });
    })));
  return html("div", { className: "scroll", tabindex: "0" },
    html("table", {}, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...body)));
}
