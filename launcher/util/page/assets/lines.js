// Lines over each other, with a cross-hair that follows the mouse or the arrow keys.

const MOST_TOLD = 12;

function nearest(xs, value) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle;
    else high = middle;
  }
  return value - xs[low] <= xs[high] - value ? low : high;
}

// Unknown values break the line; a value alone between two gaps still shows, as a dot.
function pathOf(line, x, y) {
  let [path, pen] = ["", false];
  line.x.forEach((at, i) => {
    const value = line.y[i];
    if (value === null) {
      pen = false;
      return;
    }
    path += `${pen ? "L" : "M"}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
    if (!pen) path += "h.01";
    pen = true;
  });
  return path;
}

// `lines`: { name, colour, x: [], y: [] }; `log` for the y axis, `whole` for x; `xText`, `yText` for tooltips.
function lineChart(lines, { xTitle, yTitle, xText, yText, log = false, whole = false, height = 300 }) {
  return (width) => {
    const box = { left: 62, right: width - 12, top: 30, bottom: height - 44 };
    const xs = domain(lines.flatMap((line) => [line.x[0], line.x.at(-1)]));
    const exact = [Math.min(...lines.map((l) => l.x[0])), Math.max(...lines.map((l) => l.x.at(-1)))];
    const values = lines.flatMap((line) => line.y.filter((v) => v !== null && (!log || v > 0)));
    const ys = log ? decades(values) : domain(values);
    const x = linear(exact[0] < exact[1] ? exact : xs, [box.left, box.right]);
    const scale = (log ? logarithmic : linear)(ys, [box.bottom, box.top]);
    const y = (value) => scale(log ? Math.max(value, ys[0]) : value); // 0 lies on the floor
    const chart = svg("svg", {
      width, height, role: "img", tabindex: "0", "aria-label": `${yTitle} over ${xTitle}`,
    });
    chart.append(axes(box,
      { scale: x, ticks: ticks(exact, width < 560 ? 4 : 8, whole), title: xTitle },
      { scale, ticks: log ? powers(ys) : ticks(ys, 5), title: yTitle }));
    const paths = lines.map((line) => svg("path", {
      class: "curve", d: pathOf(line, x, y),
      style: { stroke: line.colour },
    }));
    chart.append(...paths);
    follow(chart, lines, { box, x, y, xText, yText, paths, exact });
    return chart;
  };
}

function decades(values) {
  if (values.length === 0) return [1e-6, 1];
  const low = Math.floor(Math.log10(values.reduce((a, b) => Math.min(a, b))));
  const high = Math.ceil(Math.log10(values.reduce((a, b) => Math.max(a, b))));
  return [10 ** low, 10 ** Math.max(high, low + 1)];
}

function powers([from, to]) {
  const [low, high] = [Math.round(Math.log10(from)), Math.round(Math.log10(to))];
  const every = Math.ceil((high - low) / 6);
  const count = Math.floor((high - low) / every) + 1;
  return Array.from({ length: count }, (_, i) => Number(`1e${low + i * every}`));
}

function follow(chart, lines, { box, x, y, xText, yText, paths, exact }) {
  const cross = svg("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  chart.append(cross);
  const longest = lines.reduce((a, b) => (a.x.length >= b.x.length ? a : b));
  let index = 0;

  function tell(at, clientX, clientY, pointerY) {
    const told = lines.map((line, i) => {
      const found = nearest(line.x, at);
      const inside = at >= line.x[0] && at <= line.x.at(-1) + (exact[1] - exact[0]) / 50;
      return { i, name: line.name, value: inside ? line.y[found] : null };
    }).filter((t) => t.value !== null);
    told.sort((a, b) => b.value - a.value);
    const distance = (t) => Math.abs(y(t.value) - pointerY);
    const close = pointerY === null ? null : told.reduce((a, b) => (distance(a) <= distance(b) ? a : b), told[0]);
    paths.forEach((path, i) => path.classList.toggle("faded", lines.length > 12 && close?.i !== i && close !== null));
    cross.setAttribute("x1", x(at));
    cross.setAttribute("x2", x(at));
    cross.setAttribute("visibility", "visible");
    let rows = told;
    if (told.length > MOST_TOLD) {
      const middle = Math.max(0, told.indexOf(close) - MOST_TOLD / 2);
      rows = told.slice(middle, middle + MOST_TOLD);
    }
    tooltip.show(xText(at), rows.map((t) => [t.name, yText(t.value), t === close]), clientX, clientY);
  }

  function hide() {
    cross.setAttribute("visibility", "hidden");
    paths.forEach((path) => path.classList.remove("faded"));
    tooltip.hide();
  }

  chart.addEventListener("mousemove", (event) => {
    const frame = chart.getBoundingClientRect();
    const share = (event.clientX - frame.x - box.left) / (box.right - box.left);
    if (share < -0.01 || share > 1.01) return hide();
    const wanted = exact[0] + share * (exact[1] - exact[0]);
    index = nearest(longest.x, wanted);
    tell(longest.x[index], event.clientX, event.clientY, event.clientY - frame.y);
  });
  chart.addEventListener("mouseleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    index = Math.max(0, Math.min(longest.x.length - 1, index + moves[event.key]));
    const frame = chart.getBoundingClientRect();
    tell(longest.x[index], frame.x + x(longest.x[index]), frame.y + box.top + 20, null);
  });
}
