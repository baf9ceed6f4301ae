// Parts of pages: data, sections with controls, charts that can be redrawn.

const data = JSON.parse(document.getElementById("data").textContent);
const PHONE = matchMedia("(max-width: 640px)");

// Lines of a ledger, in stacking order.
const LINES = {
  params_bytes: ["parameters", "params"],
  frozen_bytes: ["frozen weights", "frozen"],
  master_bytes: ["master weights", "master"],
  masks_bytes: ["masks of pruned weights", "masks"],
  grads_bytes: ["gradients", "grads"],
  optimizer_bytes: ["optimizer states", "optimizer"],
  buffers_bytes: ["communication buffers", "buffers"],
  activations_bytes: ["activations", "activations"],
  temporary_bytes: ["temporary", "temporary"],
  allocator_slack_bytes: ["allocator slack", "slack"],
  context_bytes: ["context and NCCL", "context"],
  unexplained_bytes: ["unexplained", "unexplained"],
};

function section(title, lede, controls, ...content) {
  const words = html("div", {}, html("h2", { text: title }), html("p", { className: "lede", text: lede }));
  const head = html("div", { className: "head" }, words);
  if (controls.length) head.append(html("div", { className: "controls" }, ...controls));
  return html("section", {}, head, ...content);
}

function figure(draw) {
  const host = html("figure");
  let current = draw;
  const redraw = drawn(host, (width) => current(width));
  return { host, set(next) { current = next; redraw(); } };
}

function checkbox(text, changed) {
  const box = html("input", { type: "checkbox" });
  box.addEventListener("change", () => changed(box.checked));
  return html("label", {}, box, document.createTextNode(text));
}

function choice(text, options, changed) {
  const select = html("select", {}, ...options.map(([value, name]) => html("option", { value, text: name })));
  select.addEventListener("change", () => changed(select.value));
  return html("label", {}, document.createTextNode(text), select);
}


// What matters most, as large text: `tiles` are [what, who, figures].
function tiles(all) {
  return html("dl", { className: "goals" }, ...all.map(([what, who, figures]) =>
    html("div", {}, html("dt", { text: what }), html("dd", { className: "winner", text: who }),
      html("dd", { className: "figures", text: figures }))));
}

// For an axis of sizes: the unit that fits the largest.
function axisUnit(sizes) {
  return unitOf(Math.max(...sizes, 1));
}

function notes(texts) {
  return html("footer", {}, ...texts.map((text) => html("p", { className: "note", text })));
}

function put(...sections) {
  document.getElementById("page").replaceChildren(...sections);
}
