// Horizontal stacked bars.

const BAR = 17;

// `rows`: { label, title, parts: [[key, value]], group } drawn in order; `look[key]`: [name, colour].
// `text` makes a value readable, `unit` divides it for the axis. `limit` is a line that bars may
// cross, and beyond 1.25 of it they are cut off.
function stackedBars(rows, { look, text, unit, axisTitle, limit = null }) {
  return (width) => {
    const narrow = width < 560;
    const labelWidth = narrow ? 0 : Math.min(270, Math.max(...rows.map((r) => 7 * r.label.length)));
    const rowHeight = narrow ? BAR + 24 : BAR + 9;
    const gaps = rows.map((row, i) => (i > 0 && row.group !== rows[i - 1].group ? 7 : 0));
    const gapsBefore = gaps.map((_, i) => gaps.slice(0, i + 1).reduce((a, b) => a + b, 0));
    const body = rows.length * rowHeight + (gapsBefore.at(-1) ?? 0);
    const box = { left: labelWidth + (narrow ? 0 : 12), right: width - 78, top: 6, bottom: body + 8 };
    const totals = rows.map((row) => row.parts.reduce((sum, [, value]) => sum + Math.max(0, value), 0));
    const cap = limit === null ? Infinity : 1.25 * limit;
    const most = Math.min(cap, Math.max(...totals, limit ?? 0)) / unit || 1;
    const inside = linear([0, most], [box.left, box.right]);
    const x = (value) => inside(Math.min(value, most));
    const chart = svg("svg", { width, height: box.bottom + 40, role: "group" });
    for (const value of ticks([0, most], narrow ? 3 : 6)) {
      chart.append(
        svg("line", { class: "grid", x1: x(value), x2: x(value), y1: box.top, y2: box.bottom }),
        svg("text", { x: x(value), y: box.bottom + 16, "text-anchor": "middle", text: tickText(value) }),
      );
    }
    chart.append(
      svg("text", { x: box.right, y: box.bottom + 33, "text-anchor": "end", text: axisTitle }));
    if (limit !== null) {
      chart.append(svg("line", {
        class: "limit", x1: x(limit / unit), x2: x(limit / unit), y1: box.top, y2: box.bottom,
      }));
    }
    rows.forEach((row, i) => {
      const top = box.top + 4 + i * rowHeight + gapsBefore[i] + (narrow ? 17 : 0);
      chart.append(barLabel(row, narrow, top, labelWidth, width));
      chart.append(...barParts(row, { look, text, x, unit, top, total: totals[i] }));
      const end = { class: "total", x: x(totals[i] / unit) + 7, y: top + BAR / 2, "dominant-baseline": "central" };
      chart.append(svg("text", { ...end, text: text(totals[i]) }));
    });
    return walkable(chart);
  };
}

function barLabel(row, narrow, top, labelWidth, width) {
  const place = narrow
    ? { x: 0, y: top - 5 }
    : { x: labelWidth, y: top + BAR / 2, "text-anchor": "end", "dominant-baseline": "central" };
  return svg("text", { class: "label", ...place, text: cut(row.label, narrow ? width : labelWidth) },
    svg("title", { text: row.title }));
}

function barParts(row, { look, text, x, unit, top, total }) {
  let start = 0;
  const tips = row.parts.map(([key, value]) => [look[key][0], text(value)]);
  return row.parts.filter(([, value]) => value > 0).map(([key, value]) => {
    const [from, to] = [x(start / unit), x((start + value) / unit)];
    start += value;
    const bar = svg("rect", {
      x: from, y: top, width: Math.max(0.5, to - from - 0.75), height: BAR,
      style: { fill: `var(--${look[key][1]})` },
    });
    const rows = tips.map(([name, told]) => [name, told, name === look[key][0]]);
    return explained(bar, row.title, [...rows, ["total", text(total)]]);
  });
}

function barLegend(look, used) {
  const items = Object.entries(look).filter(([key]) => used.has(key));
  return html("div", { className: "legend" }, ...items.map(([, [name, colour]]) =>
    html("span", {}, swatch(`var(--${colour})`), document.createTextNode(name))));
}
