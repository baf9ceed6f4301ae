// Throughput against peak memory, with the Pareto front.

// `points`: { x, y, name, colour, front, tips, setting, spread: [low, high] of y or null }
function scatter(points, { xTitle, yTitle }) {
  return (width) => {
    const height = Math.max(300, Math.min(430, width * 0.46));
    const box = { left: 62, right: width - 18, top: 30, bottom: height - 44 };
    const [xs, ys] = [domain(points.map((p) => p.x)), domain(points.flatMap((p) => [p.y, ...(p.spread ?? [])]))];
    const x = linear(xs, [box.left, box.right]);
    const y = linear(ys, [box.bottom, box.top]);
    const chart = svg("svg", { width, height, role: "group" });
    chart.append(axes(box,
      { scale: x, ticks: ticks(xs, width < 560 ? 4 : 8), title: xTitle },
      { scale: y, ticks: ticks(ys, 5), title: yTitle }));
    for (const setting of new Set(points.map((p) => p.setting))) {
      const front = points.filter((p) => p.front && p.setting === setting);
      front.sort((a, b) => a.x - b.x);
      const line = front.map((p, i) =>
        i === 0 ? `M${x(p.x)},${y(p.y)}` : `H${x(p.x)}V${y(p.y)}`).join("");
      if (front.length > 1) chart.append(svg("path", { class: "front", d: line }));
    }
    chart.append(...points.filter((p) => p.spread).map((p) => svg("line", {
      class: "spread", x1: x(p.x), x2: x(p.x), y1: y(p.spread[0]), y2: y(p.spread[1]),
      style: { stroke: p.colour },
    })));
    const dots = points.map((p) => {
      const dot = svg("circle", {
        cx: x(p.x), cy: y(p.y), r: p.front ? 6.5 : 5,
        style: {
          fill: p.front ? p.colour : "var(--paper)", stroke: p.colour, "stroke-width": "1.8",
        },
      });
      return explained(dot, p.name, p.tips);
    });
    chart.append(...pointLabels(points, x, y, box), ...dots);
    return walkable(chart);
  };
}

const MANY = 16;

// Names beside their points, where there is room; the front's come first, and alone among many.
function pointLabels(points, x, y, box) {
  const taken = points.map((p) => ({ left: x(p.x) - 7, right: x(p.x) + 7, top: y(p.y) - 7, bottom: y(p.y) + 7 }));
  const free = (area, own) => area.left >= box.left && area.right <= box.right + 14 &&
    taken.every((t, i) => i === own || area.right < t.left || area.left > t.right ||
      area.bottom < t.top || area.top > t.bottom);
  const labels = [];
  const named = points.map((p, i) => i).filter((i) => points.length <= MANY || points[i].front);
  const order = named.sort((a, b) => points[b].front - points[a].front);
  for (const i of order) {
    const text = cut(points[i].name, 170);
    const [px, py, size] = [x(points[i].x), y(points[i].y), text.length * 6.7];
    const places = [
      ["start", px + 11, py, 0], ["end", px - 11, py, -size],
      ["middle", px, py - 15, -size / 2], ["middle", px, py + 15, -size / 2],
    ];
    for (const [anchor, lx, ly, shift] of places) {
      const area = { left: lx + shift, right: lx + shift + size, top: ly - 7, bottom: ly + 7 };
      if (!free(area, i)) continue;
      taken.push(area);
      labels.push(svg("text", {
        class: "label", x: lx, y: ly, "text-anchor": anchor, "dominant-baseline": "central", text,
      }));
      break;
    }
  }
  return labels;
}
