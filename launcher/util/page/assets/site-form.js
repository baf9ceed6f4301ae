// What is asked: fields, the part of the address that holds them, and the planner's arguments.

const OWN = [
  ["layers", "layers"], ["d_model", "width"], ["heads", "heads"], ["kv_heads", "key/value heads"],
  ["head_dim", "width of a head"], ["d_ff", "MLP width"], ["vocab_size", "vocabulary"],
  ["context", "context"],
];
const DEFAULTS = {
  model: "gpt2-xl", gpu: "A100-80GB", gpus: "4", gpus_per_node: "", seq_len: "", global_batch: "",
  train: "full", lora_rank: "8", precision: "bf16", sharding: "", activation_checkpointing: "",
  micro_batch: "", pick: "", ...Object.fromEntries(OWN.map(([name]) => [name, ""])),
};
const MOST = 2 ** 31 - 1;

// The fields of a link: what is not in it is at its default, and what nobody knows is left out.
function readHash(hash) {
  const given = Object.fromEntries(new URLSearchParams(hash.replace(/^#/, "")));
  const known = Object.entries(given).filter(([name]) => name in DEFAULTS);
  return { ...DEFAULTS, ...Object.fromEntries(known) };
}

function writeHash(fields) {
  const changed = Object.entries(fields).filter(([name, value]) => value !== DEFAULTS[name]);
  return changed.length === 0 ? "" : "#" + new URLSearchParams(changed);
}

// The arguments of `shardscale plan`.
function planArguments(fields) {
  const flags = [["model", fields.model]];
  for (const [name] of OWN) flags.push([name, ownDimension(fields, name)]);
  flags.push(["gpu", fields.gpu], ["gpus", fields.gpus], ["gpus_per_node", fields.gpus_per_node]);
  flags.push(["seq_len", fields.seq_len], ["global_batch", fields.global_batch]);
  if (fields.train === "lora") flags.push(["lora_rank", fields.lora_rank]);
  for (const name of ["precision", "activation_checkpointing", "micro_batch"]) {
    flags.push([name, fields[name]]);
  }
  return flags.filter(([, value]) => value !== "").flatMap(([name, value]) =>
    [`--${name.replaceAll("_", "-")}`, value]);
}

// A dimension that is not the named model's own; a head's width follows from the others.
function ownDimension(fields, name) {
  const named = data.models[fields.model];
  return named !== undefined && fields[name] === String(named[name]) ? "" : fields[name];
}

function field(name, title, input, help = "") {
  input.id = name;
  const label = html("label", { for: name, text: title });
  const hint = help ? [html("span", { className: "help", id: `${name}-help`, text: help })] : [];
  if (help) input.setAttribute("aria-describedby", `${name}-help`);
  return html("div", { className: "field" }, label, input, ...hint);
}

function picker(options) {
  return html("select", {}, ...options.map(([value, name]) => html("option", { value, text: name })));
}

function number(placeholder = "") {
  const input = html("input", { type: "number", min: 1, max: MOST, step: 1, inputmode: "numeric" });
  input.placeholder = placeholder;
  return input;
}

function group(title, ...fields) {
  return html("fieldset", {}, html("legend", { text: title }), html("div", { className: "fields" }, ...fields));
}

// Returns { element, show(fields), offer(shardings) }; `changed(fields)` hears of every change.
function form(changed) {
  const same = (names) => names.map((name) => [name, name]);
  const gpus = Object.entries(data.gpus).map(([name, size]) => [name, `${name} \u00b7 ${bytesText(size)}`]);
  const own = OWN.map(([name, title]) => field(name, title, number()));
  const details = html("details", { id: "own" }, html("summary", { text: "Dimensions of your own" }),
    html("div", { className: "fields" }, ...own));
  const rank = field("lora_rank", "rank of adapters", number());
  const element = html("form", { "aria-label": "What you want to train, and on what" },
    group("Model", field("model", "model", picker(same(Object.keys(data.models)))),
      field("train", "train", picker([["full", "all weights"], ["lora", "LoRA adapters"]])), rank),
    details,
    group("Batch", field("seq_len", "tokens per sequence", number()),
      field("global_batch", "sequences per step", number(), "over all GPUs; empty: what fits")),
    group("Machine", field("gpu", "GPU", picker(gpus)), field("gpus", "how many", number()),
      field("gpus_per_node", "in each node", number())),
    group("How", field("sharding", "sharding and offload", picker([["", "best (search)"]])),
      field("activation_checkpointing", "checkpointing", picker([["", "best (search)"], ...same(data.checkpointing)])),
      field("precision", "precision", picker([...same(data.precisions), ["", "best (search)"]])),
      field("micro_batch", "micro-batch", number("best"))));
  const inputs = [...element.querySelectorAll("select, input")];
  const values = () => ({ ...DEFAULTS, // what was picked among the answers to another question is over
    ...Object.fromEntries(inputs.map((input) => [input.id, input.value.trim()])) });
  const told = () => {
    const fields = values();
    const named = data.models[fields.model];
    for (const [name] of OWN) {
      if (fields[name] === String(named[name])) fields[name] = "";
    }
    changed(fields);
  };
  element.addEventListener("submit", (event) => event.preventDefault());
  element.addEventListener("change", (event) => {
    if (event.target.id === "model") for (const [name] of OWN) element.querySelector(`#${name}`).value = "";
    told();
  });

  function show(fields) {
    for (const input of inputs) {
      // What a link says and no list has: the planner will say what is wrong with it.
      if (input.tagName === "SELECT" && ![...input.options].some((o) => o.value === fields[input.id])) {
        input.append(html("option", { value: fields[input.id], text: fields[input.id] }));
      }
      input.value = fields[input.id];
    }
    const named = data.models[fields.model] ?? {};
    for (const [name] of OWN) {
      element.querySelector(`#${name}`).placeholder = name === "head_dim" && fields.d_model ? "width / heads" : named[name] ?? "";
      if (fields[name] !== "") details.open = true;
    }
    element.querySelector("#seq_len").placeholder = Math.min(fields.context || named.context || 4096, 4096);
    element.querySelector("#gpus_per_node").placeholder = Math.min(fields.gpus || 1, 8);
    rank.hidden = fields.train !== "lora";
  }

  function offer(shardings, chosen) {
    const select = element.querySelector("#sharding");
    const names = shardings.includes(chosen) || chosen === "" ? shardings : [...shardings, chosen];
    select.replaceChildren(...[["", "best (search)"], ...same(names)].map(([value, name]) =>
      html("option", { value, text: name })));
    select.value = chosen;
  }
  return { element, show, offer };
}
