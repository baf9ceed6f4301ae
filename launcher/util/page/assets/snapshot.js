// The page of a memory snapshot: a timeline, the peak's contents, lifetimes, fragmentation.

const PEAK_COLUMNS = [
  ["phase", "allocated in", "text", "The phase that allocated it"],
  ["where", "module or line", "text", "Module's forward, or else the line of the program"],
  ["size_bytes", "bytes", "bytes", "Bytes alive at the peak"],
  ["share", "of peak", "percent", "Share of the peak"],
  ["tensors", "tensors", "count", "Number of allocations"],
].map(([key, title, kind, help]) => ({ key, title, kind, help }));
const LIFETIME_COLUMNS = [
  ["phase", "allocated in", "text", "The phase that allocated it"],
  ["where", "module or line", "text", "Module's forward, or else the line of the program"],
  ["size_bytes", "bytes in all", "bytes", "Sum over the recording"],
  ["lived_share", "lived", "percent", "Share of the recording's events, weighted by bytes"],
].map(([key, title, kind, help]) => ({ key, title, kind, help }));
const COLOURS = ["activations", "grads", "optimizer", "temporary", "params"];

function timeline(device) {
  const time = device.timeline;
  const [unit, name] = axisUnit([device.peak_reserved_bytes]);
  const x = time.event.map((event) => Math.max(0, event));
  const totals = time.allocated_bytes.map((parts) => parts.reduce((a, b) => a + b, 0));
  const phases = data.phases.map((phase, i) => ({
    name: phase, colour: `var(--${COLOURS[i]})`, x, y: time.allocated_bytes.map((parts) => parts[i] / unit),
  })).filter((line) => line.y.some((value) => value > 0));
  const lines = [
    { name: "reserved", colour: "var(--slack)", x, y: time.reserved_bytes.map((v) => v / unit) },
    { name: "allocated", colour: "var(--c0)", x, y: totals.map((v) => v / unit) },
    ...phases,
  ];
  const legend = html("div", { className: "legend" }, ...lines.map((line) =>
    html("span", {}, swatch(line.colour), document.createTextNode(line.name))));
  const chart = figure(lineChart(lines, {
    xTitle: "event of the allocator", yTitle: name, whole: true,
    xText: (at) => `event ${grouped(at)}`, yText: (v) => bytesText(v * unit),
  }));
  return section("Timeline", "Allocated bytes by the phase that allocated them; each point is the highest moment of its span.",
    [], legend, chart.host);
}

function listing(title, lede, rows, columns, sorted) {
  const table = sortableTable({
    rows: () => rows, columns: () => columns, competes: () => false,
    cellOf: (row, column, best) => (["phase", "where"].includes(column.key)
      ? html("td", { className: "phrase", text: row[column.key] }) : plainCell(row, column, best)),
    name: "where", caption: title, sorted: { key: sorted, descending: true }, changed: () => {},
  });
  return section(title, lede, [], table.element);
}

function deviceSections(device) {
  const held = device.fragmentation;
  const failed = device.out_of_memory_bytes.map((bytes) => `out of memory for ${bytesText(bytes)}`);
  const tile = tiles([
    ["allocated peak", bytesText(device.peak_allocated_bytes), `event ${grouped(Math.max(0, device.peak_event))} of ${grouped(device.events)}`],
    ["reserved peak", bytesText(device.peak_reserved_bytes), failed.join(", ") || "no allocation failed"],
    ["free at the end", bytesText(held.free_bytes), `of ${bytesText(held.reserved_bytes)} in ${counted(held.segments, "segment")}; largest block ${bytesText(held.largest_free_bytes)}; ${bytesText(held.stuck_bytes)} held by tensors in use`],
  ]);
  const peak = device.at_peak.map((row) => ({ ...row, share: row.size_bytes / Math.max(1, device.peak_allocated_bytes) }));
  return [
    section(`GPU ${device.device}`, "", [], tile), timeline(device),
    listing("At the peak", "What was alive at the highest moment.", peak, PEAK_COLUMNS, "size_bytes"),
    listing("Lifetimes", "What occupies memory longest.", device.over_time, LIFETIME_COLUMNS, "lived_share"),
  ];
}

put(
  html("header", {}, html("p", { className: "kicker", text: "shardscale snapshot" }),
    html("h1", { text: data.file.split("/").at(-1) })),
  ...data.devices.flatMap(deviceSections),
  notes(["Phases are read off the recorded stacks: allocations of autograd's own threads have none and count as other."]),
);
