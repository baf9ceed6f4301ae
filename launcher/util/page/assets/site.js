// The calculator: a choice is asked of the planner, and what it says is drawn as it comes.

const VERDICTS = { fits: "fits", tight: "tight", "does not fit": "none" };
const ORDER = ["fits", "tight", "does not fit"];
const COLUMNS = [
  ["rank", "#", "count", "Best first: what fits, then what is tight, by speed; the simplest of those that tie"],
  ["sharding", "sharding", "text", "Sharding and offload"],
  ["precision", "precision", "text", "Precision of the computation"],
  ["activation_checkpointing", "checkpointing", "text", "What is computed again in the backward"],
  ["micro_batch", "micro-batch", "count", "Sequences per GPU and forward: the fastest that fits"],
  ["used_bytes", "predicted", "bytes", "What a GPU uses at the highest moment"],
  ["verdict", "verdict", "text", "Tight is more than 95% of the memory"],
  ["tokens_per_s", "tokens/s", "rate", "Predicted, all GPUs"],
].map(([key, title, kind, help]) => ({ key, title, kind, help }));

const pythons = new Pythons();
let fields = readHash(location.hash);
let asked = 0; // the number of the question that is on the page
let about = null; // what the planner said of it
let rows = []; // what it has assessed so far

const STAGES = ["unpacking Python", "compiling Python", "starting it with the planner"];
const progress = html("progress", { max: STAGES.length, value: 0, "aria-label": "Start of the planner" });
const starting = html("p", { className: "note", id: "starting" }, progress, html("span", {}));
const status = html("p", { className: "note", role: "status", id: "status" });
const result = html("div", { id: "result" });
// On a screen where the fields push the answer away: the answer in a line, and a way there.
const glance = html("button", { type: "button", id: "glance", hidden: "" });
glance.addEventListener("click", () => result.scrollIntoView({ block: "start" }));
const nameOf = (row) => [row.sharding, row.precision,
  row.activation_checkpointing === "none" ? "" : `${row.activation_checkpointing} checkpointing`,
  `micro-batch ${row.micro_batch}`].filter(Boolean).join(" \u00b7 ");
// As launcher/forecast/order.py ranks: among speeds that nobody can tell apart, the simplest first.
const ties = (a, b) => a.least_total_s / a.tokens_per_step <= b.most_total_s / b.tokens_per_step &&
  b.least_total_s / b.tokens_per_step <= a.most_total_s / a.tokens_per_step;
const simpler = (a, b) => {
  const at = a.simplicity.findIndex((place, i) => place !== b.simplicity[i]);
  return at < 0 ? 0 : a.simplicity[at] - b.simplicity[at];
};

function bestFirst(all) {
  const found = [];
  for (const verdict of ORDER.slice(0, -1)) {
    let left = all.filter((row) => row.verdict === verdict)
      .sort((a, b) => b.tokens_per_s - a.tokens_per_s || a.used_bytes - b.used_bytes);
    while (left.length) {
      const tied = left.filter((row) => ties(row, left[0]));
      left = left.filter((row) => !tied.includes(row));
      found.push(...tied.sort(simpler));
    }
  }
  const rest = all.filter((row) => row.verdict === ORDER.at(-1));
  return [...found, ...rest.sort((a, b) => a.used_bytes - b.used_bytes)];
}

// What a link says of the row whose bars and command are shown, where it is not the best.
const pickOf = (row) => [row.sharding, row.precision, row.activation_checkpointing].join(" ");
const picked = () => rows.find((row) => pickOf(row) === fields.pick);

function remember(next) {
  fields = next;
  history.replaceState(null, "", location.pathname + location.search + writeHash(fields));
}

const parts = form((next) => {
  remember(next);
  parts.show(fields);
  plan();
});

// What the page answers before its Python is there: the default question, planned beforehand.
function planned() {
  asked += 1;
  about = data.first.about;
  parts.offer([...new Set(data.first.rows.map((row) => row.sharding))], fields.sharding);
  rows = bestFirst(data.first.rows);
  rows.forEach((each, i) => { each.rank = i + 1; });
  status.textContent = `${counted(rows.length, "choice")} planned beforehand.`;
  draw();
}

function staged(stage) {
  progress.value = stage;
  starting.lastChild.textContent = ` The planner starts in this page: ${STAGES[stage]} \u2026`;
  starting.hidden = stage === STAGES.length;
}

async function plan() {
  const argv = JSON.stringify(planArguments(fields));
  if (argv === JSON.stringify(data.first.argv) && !fields.sharding && !fields.pick) return planned();
  const mine = ++asked;
  const current = () => mine === asked;
  status.textContent = "Planning \u2026";
  try {
    const found = await pythons.ask("choices_of", [argv], current);
    if (!current()) return;
    if (found.refused !== undefined) return refuse(found.refused);
    about = found;
    rows = [];
    parts.offer([...new Set(found.choices.map((choice) => choice.sharding))], fields.sharding);
    // Fastest first, and as in the planner's search: what is slower than a choice of the same
    // sharding that fits is left out.
    const wanted = found.choices.map((choice, number) => [choice, number])
      .filter(([choice]) => fields.sharding === "" || choice.sharding === fields.sharding)
      .sort(([a], [b]) => b.most_tokens_per_s - a.most_tokens_per_s);
    const fastest = {};
    const worth = (choice) => current() && choice.most_tokens_per_s >= (fastest[choice.sharding] ?? 0);
    if (wanted.length === 0) {
      return refuse(`${fields.sharding} is not among what can run with the other choices: take another one.`);
    }
    let done = 0;
    const told = () => {
      status.textContent = done < wanted.length
        ? `Planning: ${done} of ${counted(wanted.length, "choice")} \u2026`
        : `${counted(wanted.length, "choice")} planned${rows.length < done ? "; those that are slower than one of the same sharding that fits are left out" : ""}.`;
    };
    told();
    await Promise.all(wanted.map(async ([choice, number]) => {
      const row = await pythons.ask("assessed", [argv, number], () => worth(choice));
      if (!current()) return;
      done += 1;
      if (row === null) return told();
      if (row.refused !== undefined) throw new Error(row.refused);
      if (row.verdict === "fits") {
        fastest[row.sharding] = Math.max(fastest[row.sharding] ?? 0, row.tokens_per_s);
      }
      rows.push(row);
      rows = bestFirst(rows);
      rows.forEach((each, i) => { each.rank = i + 1; });
      told();
      draw();
    }));
  } catch (error) {
    if (current()) refuse(error.message);
  }
}

function refuse(sentence) {
  rows = [];
  status.textContent = "";
  glance.hidden = true;
  result.replaceChildren(html("p", { className: "refused", role: "alert", text: sentence }));
}

function verdictOf(row) {
  const share = `${bytesText(row.used_bytes)} of ${bytesText(row.memory_bytes)}`;
  return {
    fits: ["It fits", share], tight: ["It is tight", share],
    "does not fit": ["It does not fit", `${bytesText(row.used_bytes)}, ${bytesText(-row.margin_bytes)} too much`],
  }[row.verdict];
}

// As a range: how long runs took of what is predicted is known from published ones.
function secondsOf(row) {
  if (row.step_time_s === null) return "n/a";
  return `${threeDigits(row.least_total_s)} to ${threeDigits(row.most_total_s)} s`;
}

function summary(row) {
  const [verdict, memory] = verdictOf(row);
  const speed = row.tokens_per_s === null ? "n/a" : `${shown(row.tokens_per_s, "rate")} tokens/s on all GPUs`;
  const more = [["host memory", row.host_bytes], ["disk", row.disk_bytes]].filter(([, size]) => size > 0)
    .map(([what, size]) => `${bytesText(size)} of ${what} for each GPU`);
  const all = tiles([
    [`of each GPU, ${row.verdict === "tight" ? "above 95%" : "at the highest moment"}`, verdict, memory],
    ["an optimizer step", secondsOf(row), speed],
    ["sharding", row.sharding, [nameOf(row).split(" \u00b7 ").slice(1).join(" \u00b7 "), ...more].join("; ")],
  ]);
  all.querySelector(".winner").classList.add("state", VERDICTS[row.verdict]);
  all.classList.add("verdict");
  return all;
}

function copied(button, copy) {
  button.addEventListener("click", async () => {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(copy());
      button.textContent = "copied";
    } catch {
      button.textContent = "select and copy it by hand";
    }
    setTimeout(() => { button.textContent = before; }, 2000);
  });
  return button;
}

// The arguments of a plan with nothing left to choose.
function exactly(row) {
  const [, training] = row.command.split(" -m launcher.train ");
  const machine = ["gpu", "gpus", "gpus_per_node"].filter((name) => fields[name] !== "")
    .map((name) => `--${name.replaceAll("_", "-")} ${fields[name]}`);
  return [...machine, training];
}

function commands(row) {
  const terminal = ["shardscale plan", ...(picked() === undefined && fields.sharding === "" ? planArguments(fields) : exactly(row))].join(" ");
  const block = (id, text) => html("div", { className: "command" }, html("pre", { id, text, tabindex: 0 }),
    copied(html("button", { type: "button", text: "copy", "aria-label": `copy: ${text}` }), () => text));
  const link = copied(html("button", { type: "button", id: "link", text: "copy a link to this choice" }), () => location.href);
  const told = row.verdict === "does not fit" ? [] : [html("h3", { text: "To run it" }), block("command", row.command)];
  return html("div", { className: "commands" }, ...told, html("h3", { text: "The same question in a terminal" }),
    block("question", terminal), link);
}

function bars(row) {
  const [unit, name] = axisUnit([row.memory_bytes, row.used_bytes]);
  const used = new Set(Object.entries(row.lines).filter(([, value]) => value > 0).map(([key]) => key));
  const lines = stackedBars([{
    label: row.sharding, title: nameOf(row), group: "", parts: Object.entries(row.lines),
  }], { look: LINES, text: bytesText, unit, axisTitle: `${name} of each GPU`, limit: row.memory_bytes });
  const chart = figure(lines);
  const listed = html("table", { className: "bytes", "aria-label": "Bytes by category" }, html("tbody", {},
    ...Object.entries(row.lines).filter(([, size]) => size > 0).map(([key, size]) =>
      html("tr", {}, html("th", { scope: "row" }, swatch(`var(--${LINES[key][1]})`), document.createTextNode(LINES[key][0])),
        html("td", { className: "number", text: bytesText(size) }),
        html("td", { className: "number", text: shown(size / row.used_bytes, "percent") })))));
  return section("Where the memory is",
    `Bytes of each GPU at its highest moment, ${row.highest_in}; the red line is its memory.`,
    [], chart.host, html("div", { className: "scroll listed" }, listed));
}

function ways() {
  const table = sortableTable({
    rows: () => rows, competes: (row) => row.verdict !== "does not fit",
    columns: () => COLUMNS.filter((column) => column.key !== "precision" || fields.precision === ""),
    name: "sharding", caption: "Choices, best first",
    sorted: { key: "rank", descending: false }, changed: () => {},
    cellOf: (row, column, best) => {
      if (column.key === "sharding") return chooser(row);
      if (column.key === "step_time_s" && row.step_time_s !== null) {
        const tied = row !== rows[0] && ties(row, rows[0]) ? " =" : "";
        return html("td", { className: "number", text: secondsOf(row) + tied });
      }
      if (column.key !== "verdict") return plainCell(row, column, best);
      return html("td", {}, html("span", { className: `state ${VERDICTS[row.verdict]}`, text: row.verdict }));
    },
  });
  return section("Every way", "The planner's choices; one that is picked is shown above, with its command. = is as fast as the first, for all that can be told.", [], table.element);
}

function chooser(row) {
  const parts = row.sharding.split(/(?<=[+-])/); // where a name may go on in the next line
  const button = html("button", { type: "button", className: "pick",
    "aria-pressed": String(row === shownRow()), "aria-label": `show ${nameOf(row)}` },
  ...parts.flatMap((part) => [document.createTextNode(part), document.createElement("wbr")]));
  button.addEventListener("click", () => {
    remember({ ...fields, pick: pickOf(row) });
    draw();
    document.getElementById("result").scrollIntoView({ block: "nearest" });
  });
  return html("th", { scope: "row", className: "name" }, button);
}

const shownRow = () => picked() ?? rows[0];

function draw() {
  const focused = document.activeElement?.getAttribute("aria-label");
  const row = shownRow();
  const size = `${grouped(about.parameters)} parameters` +
    (about.trained === about.parameters ? "" : `, ${grouped(about.trained)} of them trained`);
  result.replaceChildren(
    html("p", { className: "lede", text: `${size}; ${row.global_batch} x ${about.seq_len} tokens in a step.` }),
    summary(row), commands(row), bars(row), ways());
  glance.replaceChildren(html("span", { className: `state ${VERDICTS[row.verdict]}`, text: verdictOf(row).join(": ") }));
  glance.hidden = false;
  if (focused) [...result.querySelectorAll("[aria-label]")].find((e) => e.getAttribute("aria-label") === focused)?.focus({ preventScroll: true });
}

addEventListener("hashchange", () => {
  fields = readHash(location.hash);
  parts.show(fields);
  plan();
});
put(
  html("header", {}, html("p", { className: "kicker", text: "shardscale" }),
    html("h1", { text: "Will it fit, and how fast?" }),
    html("p", { className: "lede", text: "The planner of shardscale, in this page: no server, and nothing leaves your browser." })),
  html("div", { className: "calculator" }, parts.element, html("div", {}, starting, status, result)),
  ...(parent === window ? [glance] : []),
  notes([
    "Predicted is all that a GPU uses at its highest moment: what the caching allocator reserves, the CUDA context and NCCL. 1 GiB is 2\u00b3\u2070 bytes.",
    "Sequences and matrices that are cut over GPUs are not tried here; shardscale plan tries them too.",
  ]));
parts.show(fields);
// Within another page, as high as its content, so that nothing scrolls in what scrolls.
if (parent !== window) {
  new ResizeObserver(() => parent.postMessage({ height: document.body.scrollHeight }, "*")).observe(document.body);
}
pythons.start(staged).catch((error) => refuse(`The planner does not start in this browser: ${error.message}`));
plan();
