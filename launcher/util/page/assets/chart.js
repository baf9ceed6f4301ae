// What all charts share: elements, scales, axes, tooltips and a way through the marks by keyboard.

const SVG = "http://www.w3.org/2000/svg";

// Every text on this page gets in through here, as text.
function html(name, { text, className, ...attributes } = {}, ...children) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function svg(name, { text, style, ...attributes } = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  for (const [key, value] of Object.entries(style ?? {})) element.style.setProperty(key, value);
  element.append(...children);
  return element;
}

function swatch(colour) {
  const box = html("span", { className: "swatch" });
  box.style.background = colour;
  return box;
}

// Draws again when the width changes, so that text keeps its size on every screen.
function drawn(host, draw) {
  let width = 0;
  const redraw = () => {
    if (width > 0) host.replaceChildren(draw(width));
  };
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now !== width) {
      width = now;
      redraw();
    }
  }).observe(host);
  return redraw;
}

function linear([from, to], [start, end]) {
  const span = to - from || 1;
  return (value) => start + ((value - from) / span) * (end - start);
}

function logarithmic([from, to], range) {
  const inner = linear([Math.log10(from), Math.log10(to)], range);
  return (value) => inner(Math.log10(value));
}

// Round values that cover a range, about `count` of them; the step is 1, 2, 2.5 or 5 times 10^k,
// and a whole number where only `whole` ones mean something.
function ticks([from, to], count, whole = false) {
  const rough = Math.max((to - from || Math.abs(to) || 1) / count, whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) =>
    factor * power >= rough * 0.999 && !(whole && (factor * power) % 1));
  const first = Math.ceil(from / step - 1e-9);
  const last = Math.floor(to / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) =>
    Number(((first + i) * step).toPrecision(12)),
  );
}

// The range of values with some air, from zero where zero is near.
function domain(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [0, 1];
  const air = (high - low) * 0.07 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low < high * 0.4 ? 0 : low - air, high + air];
}

function tickText(value) {
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) {
    return value.toExponential().replace("e+", "e");
  }
  return value.toLocaleString("en-US", { maximumFractionDigits: 4 });
}

// Axes with hairline grid; returns the group. `x`, `y`: { scale, ticks, title, text }.
function axes(box, x, y) {
  const group = svg("g");
  for (const value of y.ticks) {
    const at = y.scale(value);
    group.append(
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }),
      svg("text", {
        x: box.left - 8, y: at, "text-anchor": "end", "dominant-baseline": "central",
        text: (y.text ?? tickText)(value),
      }),
    );
  }
  group.append(
    svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
  );
  for (const value of x.ticks) {
    const attributes = { x: x.scale(value), y: box.bottom + 17, "text-anchor": "middle" };
    group.append(svg("text", { ...attributes, text: (x.text ?? tickText)(value) }));
  }
  group.append(
    svg("text", { x: box.right, y: box.bottom + 34, "text-anchor": "end", text: x.title }),
    svg("text", { x: 0, y: box.top - 12, "text-anchor": "start", text: y.title }),
  );
  return group;
}

const tooltip = {
  element: document.getElementById("tooltip"),
  // `rows`: [label, value, current?]
  show(title, rows, x, y) {
    this.element.replaceChildren(
      html("div", { className: "title", text: title }),
      ...rows.map(([label, value, current]) =>
        html("div", { className: current ? "row now" : "row" },
          html("span", { text: label }), html("span", { text: value })),
      ),
    );
    this.element.hidden = false;
    const { width, height } = this.element.getBoundingClientRect();
    const left = x + 14 + width > innerWidth - 8 ? x - 14 - width : x + 14;
    const top = y + 14 + height > innerHeight - 8 ? y - 14 - height : y + 14;
    this.element.style.left = `${Math.max(8, left)}px`;
    this.element.style.top = `${Math.max(8, top)}px`;
  },
  hide() {
    this.element.hidden = true;
  },
};

addEventListener("scroll", () => tooltip.hide(), { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && tooltip.hide());

// Gives a mark its tooltip, for the mouse and for the keyboard.
function explained(mark, title, rows) {
  mark.classList.add("mark");
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", [title, ...rows.map(([l, v]) => `${l} ${v}`)].join(", "));
  mark.addEventListener("mousemove", (e) => tooltip.show(title, rows, e.clientX, e.clientY));
  mark.addEventListener("mouseleave", () => tooltip.hide());
  mark.addEventListener("focus", () => {
    const box = mark.getBoundingClientRect();
    tooltip.show(title, rows, box.x + box.width / 2, box.y + box.height / 2);
  });
  mark.addEventListener("blur", () => tooltip.hide());
  return mark;
}

// One tab stop for all marks of a chart; the arrow keys go from one to the next.
function walkable(chart) {
  const marks = [...chart.querySelectorAll(".mark")];
  marks.forEach((mark, i) => mark.setAttribute("tabindex", i === 0 ? "0" : "-1"));
  chart.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const from = marks.indexOf(document.activeElement);
    if (!(event.key in moves) || from < 0) return;
    event.preventDefault();
    const to = marks[(from + moves[event.key] + marks.length) % marks.length];
    marks[from].setAttribute("tabindex", "-1");
    to.setAttribute("tabindex", "0");
    to.focus();
  });
  return chart;
}

// Text cut to a width by an ellipsis; the whole of it stays in the mark's tooltip.
function cut(text, width) {
  const most = Math.max(4, Math.floor(width / 6.6));
  return text.length <= most ? text : text.slice(0, most - 1) + "\u2026";
}
