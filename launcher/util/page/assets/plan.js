// The page of a plan: what fits, how close, how fast.

const MOST_BARS = 60;
const rows = data.rows.map((row, i) => ({ ...row, rank: i + 1 }));
const VERDICTS = { fits: "fits", tight: "tight", "does not fit": "none" };
const COLUMNS = [
  ["rank", "#", "count", "Place by what the plan was asked for, best first"],
  ["sharding", "sharding", "text", "Sharding choice"],
  ["precision", "precision", "text", "Precision of the computation"],
  ["activation_checkpointing", "checkpointing", "text", "What is computed again in the backward"],
  ["micro_batch", "micro-batch", "count", "Sequences per GPU and forward: the fastest that fits"],
  ["largest_micro_batch", "largest", "count", "The largest micro-batch that fits"],
  ["used_bytes", "predicted", "bytes", "What a GPU uses at the highest moment"],
  ["share", "of memory", "percent", "Predicted over the GPU's memory"],
  ["verdict", "verdict", "text", "Tight is more than 95% of the memory"],
  ["step_time_s", "s/step", "seconds", `Predicted time of an optimizer step; four of five measured runs took ${data.range[0]} to ${data.range[1]} of it`],
  ["tokens_per_s", "tokens/s", "rate", "Predicted, all GPUs"],
  ["highest_in", "highest in", "text", "The moment that takes most, and what most of it is"],
].map(([key, title, kind, help]) => ({ key, title, kind, help }))
  // Seconds of different batches cannot be compared.
  .filter(({ key }) => key !== "step_time_s" || data.global_batch !== null);
const FIRST_ON_A_PHONE = ["sharding", "used_bytes", "verdict", "tokens_per_s"];
const FILTERS = [
  ["sharding", "sharding"], ["precision", "precision"],
  ["activation_checkpointing", "checkpointing"], ["verdict", "verdict"],
];
const chosen = {};
let bestOfEach = true; // of each sharding, as on the console
const firsts = new Set([...new Set(rows.map((row) => row.sharding))].map((sharding) =>
  rows.find((row) => row.sharding === sharding)));

const nameOf = (row) => `${row.sharding} \u00b7 ${row.precision}` +
  (row.activation_checkpointing === "none" ? "" : ` \u00b7 ${row.activation_checkpointing} checkpointing`);
const labelOf = (row) => [row.sharding, row.precision, row.activation_checkpointing, row.micro_batch]
  .filter((part) => part !== "none").join(" \u00b7 ");
const shownRows = () => rows.filter((row) => (!bestOfEach || firsts.has(row)) &&
  Object.entries(chosen).every(([key, value]) => value === "" || row[key] === value));

function header() {
  const best = rows[0];
  const fitting = rows.filter((row) => row.verdict !== "does not fit");
  const least = rows.reduce((a, b) => (b.used_bytes < a.used_bytes ? b : a));
  const memory = bytesText(data.memory_bytes);
  const told = (row) => `${bytesText(row.used_bytes)} predicted` +
    (row.tokens_per_s === null ? "" : `, ${shown(row.tokens_per_s, "rate")} tokens/s`);
  const all = [["least memory", nameOf(least), told(least)]];
  if (fitting.length) all.unshift(["best", nameOf(best), `${told(best)}, micro-batch ${best.micro_batch}`]);
  const lede = `${grouped(data.parameters)} parameters, ${data.global_batch === null ? "sequences of" : `global batch ${data.global_batch} x`} ${data.seq_len} tokens. ` +
    `${fitting.length} of ${counted(rows.length, "choice")} fit into ${memory} of each GPU; speeds are of ${data.machine} (${data.source}).`;
  return html("header", {}, html("p", { className: "kicker", text: "shardscale plan" }),
    html("h1", { text: `${data.model} on ${data.devices} x ${memory}` }),
    html("p", { className: "lede", text: lede }), tiles(all),
    html("pre", { text: data.command }));
}

function planCell(row, column, best) {
  if (column.key === "sharding") {
    const parts = row.sharding.split(/(?<=[+-])/); // where a name may go on in the next line
    return html("th", { scope: "row", className: "name" }, ...parts.flatMap((part) =>
      [document.createTextNode(part), document.createElement("wbr")]));
  }
  if (column.key === "verdict") {
    return html("td", {}, html("span", { className: `state ${VERDICTS[row.verdict]}`, text: row.verdict }));
  }
  if (column.key === "highest_in") return html("td", { className: "phrase small", text: row.highest_in });
  return plainCell(row, column, best);
}

function choicesSection() {
  const limit = data.memory_bytes;
  const [unit, name] = axisUnit([limit]);
  const bars = () => stackedBars(
    table.order().slice(0, MOST_BARS).map((row) => ({
      label: labelOf(row), group: "",
      title: `${nameOf(row)}, micro-batch ${row.micro_batch}: ${row.verdict}`,
      parts: Object.entries(row.lines),
    })), { look: LINES, text: bytesText, unit, axisTitle: `${name} of each GPU`, limit });
  const count = html("p", { className: "note", role: "status" });
  let chart = null;
  const changed = () => {
    count.textContent = `${shownRows().length} of ${counted(rows.length, "choice")} shown.`;
    chart?.set(shownRows().length ? bars() : () => html("p", { className: "note", text: "No choice is left." }));
  };
  const table = sortableTable({
    rows: shownRows, cellOf: planCell, competes: (row) => row.verdict !== "does not fit",
    columns: () => {
      if (!PHONE.matches) return COLUMNS;
      const first = FIRST_ON_A_PHONE.map((key) => COLUMNS.find((c) => c.key === key));
      return [...first, ...COLUMNS.filter((c) => !first.includes(c))];
    },
    name: "sharding", caption: "Choices, best first", sorted: { key: "rank", descending: false },
    changed: () => changed(),
  });
  chart = figure(shownRows().length ? bars() : null);
  const filters = FILTERS.map(([key, title]) => {
    const values = [...new Set(rows.map((row) => row[key]))];
    return choice(title, [["", "all"], ...values.map((value) => [value, value])], (value) => {
      chosen[key] = value;
      table.redraw();
    });
  });
  const only = checkbox("only the best of each sharding", (on) => {
    bestOfEach = on;
    table.redraw();
  });
  only.firstChild.checked = bestOfEach;
  filters.push(only);
  changed();
  const used = new Set(rows.flatMap((row) => Object.entries(row.lines).filter(([, v]) => v > 0).map(([key]) => key)));
  return [
    section("Choices", "Best first; a click on a heading sorts by it, the table and the bars below.", filters, table.element, count),
    section("Where the memory would be",
      `Bytes of each GPU at the highest moment; the red line is its memory, ${bytesText(limit)}. A bar that needs far more is cut off, its figure is not. A label is sharding, precision, checkpointing and micro-batch.`,
      [], barLegend(LINES, used), chart.host),
  ];
}

// Names of the points that no other beats in one without losing in the other.
function front(points) {
  return new Set(points.filter((p) => !points.some((o) =>
    o.used_bytes <= p.used_bytes && o.tokens_per_s >= p.tokens_per_s &&
    (o.used_bytes < p.used_bytes || o.tokens_per_s > p.tokens_per_s))));
}

function tradeSection() {
  const title = "Throughput against memory";
  const points = rows.filter((row) => row.tokens_per_s !== null);
  if (points.length === 0) return section(title, "Nothing fits, so there is nothing to weigh.", []);
  const best = front(points);
  const [unit, name] = axisUnit(points.map((row) => row.used_bytes));
  const shardings = [...new Set(rows.map((row) => row.sharding))];
  const colour = (row) => `var(--c${shardings.indexOf(row.sharding) % 10})`;
  const chart = figure(scatter(points.map((row) => ({
    x: row.used_bytes / unit, y: row.tokens_per_s, name: nameOf(row), colour: colour(row),
    front: best.has(row), setting: "", spread: null,
    tips: [
      ["micro-batch", shown(row.micro_batch, "count")],
      ["predicted", bytesText(row.used_bytes)],
      ["tokens/s", shown(row.tokens_per_s, "rate")],
    ],
  })), { xTitle: `predicted, each GPU (${name})`, yTitle: "tokens/s, all GPUs" }));
  return section(title,
    "What fits. Filled points and the dashed line: nothing else is both faster and smaller.", [], chart.host);
}

put(header(), ...choicesSection(), tradeSection(), notes([
  "Predicted is all that a GPU uses at its highest moment: what the caching allocator reserves, the CUDA context and NCCL. 1 GiB is 2\u00b3\u2070 bytes.",
  `Seconds are the middle of a range: four of five measured runs took ${data.range[0]} to ${data.range[1]} of what is predicted. What differs by less may be ordered otherwise on your GPUs.`,
  "The first step is told apart from later steps, because optimizer states are made at its end and are there from then on.",
]));
