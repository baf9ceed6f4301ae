// The page of `shardscale report`.

const runs = data.runs;
const FEW = 10;
const ELSEWHERE = new Set(["reason", "strategy_also_called"]); // under the table; with the strategy

const MEMORY = {
  allocated_peak_bytes: "allocated peak",
  reserved_peak_bytes: "reserved peak",
  device_used_bytes: "device used",
  tracked_live_bytes: "tracked live peak",
  resident_set_bytes: "resident set",
};
const PHASES = {
  data: ["data", "buffers"],
  forward: ["forward", "grads"],
  backward: ["backward", "params"],
  step: ["step", "activations"],
  other: ["other", "rest"],
};
const MOMENTS = {
  peak: "at its peak",
  oom: "when out of memory",
  held: "between steps",
  now: "between steps",
  predicted: "predicted",
};

// A colour per run for up to FEW runs, else a colour per strategy.
const strategies = [...new Set(runs.map((run) => run.strategy))];
const colourIndex = (i) => (runs.length <= FEW ? i : strategies.indexOf(runs[i].strategy)) % 10;
const colourOf = (i) => `var(--c${colourIndex(i)})`;

function header() {
  const done = runs.filter((run) => run.state === "completed").length;
  const models = [...new Set(runs.map((run) => run.model))].map((m) => m ?? "unknown model");
  const title = `${models.slice(0, 3).join(", ")}: ${counted(runs.length, "run")}`;
  const rest = runs.length - done;
  const states = rest === 0 ? "All completed." : `${done} completed, ${rest} did not.`;
  const one = data.settings.length === 1;
  const made = new Date(data.made_unix_s * 1000).toISOString().slice(0, 16).replace("T", " ");
  const lede = `${states} ${one ? `Setting: ${data.settings[0].setting}.` : `${data.settings.length} settings.`}`;
  const top = html("header", {},
    html("p", { className: "kicker", text: `shardscale report \u00b7 ${made} UTC` }),
    html("h1", { text: title }), html("p", { className: "lede", text: lede }));
  for (const { setting, goals } of data.settings) {
    if (goals.length === 0) continue;
    if (!one) top.append(html("p", { className: "of-setting", text: setting }));
    top.append(tiles(goals.map(({ goal, winners, figures }) => [goal, winners, figures])));
  }
  return top;
}

// How far single steps were from the mean, and how many there were.
function spreadText(run) {
  if (run.steady_steps === null) return null;
  const steps = counted(run.steady_steps, "step");
  if (run.tokens_per_s_p25 === null) return `${steps}: no spread`;
  return `${shown(run.tokens_per_s_p25, "rate")}\u2013${shown(run.tokens_per_s_p75, "rate")}, ${steps}`;
}

function runCell(row, column, best) {
  const value = row[column.key];
  const text = shown(value, column.kind);
  if (column.key === "run") {
    return html("th", { scope: "row", className: "name" },
      swatch(colourOf(runs.indexOf(row))), document.createTextNode(text));
  }
  if (column.key === "state") {
    const known = ["completed", "oom", "failed", "timeout", "lost"].includes(value) ? value : "";
    return html("td", {}, html("span", { className: `state ${known}`, text }));
  }
  if (column.key === "strategy") {
    const also = { className: "also", text: shown(row.strategy_also_called, "text") };
    return html("td", {}, document.createTextNode(text), html("span", also));
  }
  if (column.key === "differs") return html("td", { className: "wide small", text: value ?? "" });
  if (column.key === "position" && value === null) return html("td", { text: "" });
  if (column.key === "loss_difference" && row.loss_note === "reference") {
    return html("td", { className: "number unknown", text: "reference" });
  }
  const td = plainCell(row, column, best);
  if (column.key === "loss_difference" && row.loss_note) td.title = row.loss_note;
  const spread = column.key === "tokens_per_s" && value !== null ? spreadText(row) : null;
  if (spread) td.append(html("span", { className: "also", text: spread }));
  return td;
}

// On a phone what fits beside the name are the figures that the page is about.
const FIRST_ON_A_PHONE = ["run", "memory", "tokens_per_s", "step_time_s", "state"];

function tableSection() {
  let all = false;
  const columns = () => {
    const now = data.columns.filter((c) => !ELSEWHERE.has(c.key) && (all || c.brief));
    if (!PHONE.matches) return now;
    const memory = now.find((c) => c.key in MEMORY);
    const first = FIRST_ON_A_PHONE.map((key) => (key === "memory" ? memory : now.find((c) => c.key === key)))
      .filter((c) => c !== undefined);
    return [...first, ...now.filter((c) => !first.includes(c))];
  };
  const table = sortableTable({
    rows: () => runs, columns, cellOf: runCell, competes: (run) => run.state === "completed",
    name: "run", caption: "Runs, ranked by tokens/s", sorted: { key: "position", descending: false },
  });
  const control = checkbox("all columns", (on) => { all = on; table.redraw(); });
  const failed = runs.filter((run) => run.reason || run.notes.length);
  const failures = html("ul", { className: "failures" }, ...failed.flatMap((run) => [
    ...(run.reason ? [`${run.state}${run.where ? ` in ${run.where}` : ""}: ${run.reason}`] : []), ...run.notes,
  ].map((text) => html("li", {}, html("b", { text: run.run }), document.createTextNode(` \u2014 ${text}`)))));
  return section("Runs",
    "Ranked by throughput; click a heading to sort. Below tokens/s: interquartile range over steps, and number of timed steps. 1 GiB is 2\u00b3\u2070 bytes; n/a: not measured.",
    [control], table.element, ...(failed.length ? [failures] : []));
}

function scatterSection() {
  const done = runs.map((run, i) => ({ run, i })).filter(({ run }) => run.state === "completed" && run.tokens_per_s !== null);
  const kinds = Object.keys(MEMORY).filter((kind) => done.some(({ run }) => run[kind] !== null));
  const title = "Throughput against memory";
  if (kinds.length === 0) {
    return section(title, "No completed run has both throughput and peak memory.", []);
  }
  const count = (kind) => done.filter(({ run }) => run[kind] !== null).length;
  const first = kinds.reduce((a, b) => (count(b) > count(a) ? b : a));
  kinds.sort((a, b) => (b === first) - (a === first));
  const unit = (kind) => axisUnit(done.map(({ run }) => run[kind] ?? 0));
  const draw = (kind) => scatter(done.filter(({ run }) => run[kind] !== null).map(({ run, i }) => ({
    spread: run.tokens_per_s_p25 === null ? null : [run.tokens_per_s_p25, run.tokens_per_s_p75],
    x: run[kind] / unit(kind)[0], y: run.tokens_per_s, name: run.run, colour: colourOf(i),
    front: run.pareto.includes(kind), setting: run.setting,
    tips: [
      ["strategy", `${run.strategy} = ${run.strategy_also_called ?? "n/a"}`],
      [MEMORY[kind], shown(run[kind], "bytes")],
      ["tokens/s", shown(run.tokens_per_s, "rate")],
      ["tokens/s, median step", shown(run.tokens_per_s_median, "rate")],
      ["interquartile range", spreadText(run) ?? "n/a"],
      ["time per step", shown(run.step_time_s, "seconds")],
      ["on the Pareto front", run.pareto.includes(kind) ? "yes" : "no"],
    ],
  })), { xTitle: `${MEMORY[kind]}, highest rank (${unit(kind)[1]})`, yTitle: "tokens/s, all ranks" });
  const chart = figure(draw(first));
  const pick = choice("memory", kinds.map((kind) => [kind, MEMORY[kind]]), (kind) => chart.set(draw(kind)));
  return section(title,
    "Filled points and the dashed line are the Pareto front: no other run is both faster and smaller. Up and to the left is better. Points are means over all timed steps, vertical bars the middle half of the single steps: a few slow steps put a point below its bar.",
    kinds.length > 1 ? [pick] : [], ...runLegend(), chart.host);
}

function runLegend() {
  if (runs.length <= FEW) return [];
  return [html("div", { className: "legend" }, ...strategies.map((strategy, i) =>
    html("span", {}, swatch(`var(--c${i % 10})`), document.createTextNode(strategy ?? "n/a"))))];
}

function ledgerRows(everyRank) {
  const mixed = new Set(runs.flatMap((run) => run.ledgers.map((entry) => MOMENTS[entry.moment]))).size > 1;
  return runs.flatMap((run) => {
    const size = (entry) => Object.entries(entry.lines).reduce((sum, [k, v]) => sum + (k in LINES ? v : 0), 0);
    let entries = run.ledgers;
    if (!everyRank) {
      const kind = (entry) => `${entry.place} ${entry.moment}`;
      entries = entries.filter((e) => !entries.some((o) => kind(o) === kind(e) &&
        (size(o) > size(e) || (size(o) === size(e) && o.rank < e.rank))));
    }
    return entries.map((entry) => {
      const place = entry.place === "device" ? "" : `, ${entry.place}`;
      const moment = MOMENTS[entry.moment] ?? entry.moment;
      const when = entry.moment === "peak" && entry.phase ? `, in ${entry.phase} of step ${entry.step}` : "";
      return {
        label: `${run.run} \u00b7 rank ${entry.rank}${place}${mixed ? `, ${moment}` : ""}`,
        title: `${run.run}, rank ${entry.rank}, ${entry.place}, ${moment}${when}`,
        group: run.run,
        parts: Object.keys(LINES).filter((key) => key in entry.lines).map((key) => [key, entry.lines[key]]),
      };
    });
  });
}

function ledgerSection() {
  const title = "Memory breakdown";
  const every = ledgerRows(true);
  if (every.length === 0) return section(title, "n/a: no run wrote a ledger.", []);
  const moments = runs.flatMap((run) => run.ledgers.map((entry) => MOMENTS[entry.moment] ?? entry.moment));
  const largest = Math.max(...every.map((row) => row.parts.reduce((sum, [, v]) => sum + v, 0)));
  const [unit, name] = axisUnit([largest]);
  const draw = (rows) => stackedBars(rows, { look: LINES, text: bytesText, unit, axisTitle: name });
  const worst = ledgerRows(false);
  const startAll = every.length <= 24;
  const chart = figure(draw(startAll ? every : worst));
  const toggle = checkbox("every rank", (on) => chart.set(draw(on ? every : worst)));
  toggle.firstChild.checked = startAll;
  const used = new Set(every.flatMap((row) => row.parts.filter(([, v]) => v > 0).map(([key]) => key)));
  const told = [...new Set(moments)].join(" or ");
  return section(title,
    `Every byte of a rank by use, ${told}. Blue and green: held between steps. Orange: needed during a step.`,
    every.length > worst.length ? [toggle] : [], barLegend(LINES, used), chart.host);
}

function phaseSection() {
  const rows = runs.filter((run) => run.phases_s).map((run) => ({
    label: run.run, title: run.run, group: "", parts: Object.entries(run.phases_s),
  }));
  const title = "Time breakdown";
  if (rows.length === 0) return section(title, "n/a: no run finished warm-up.", []);
  const text = (seconds) => shown(seconds, "seconds");
  const chart = figure(stackedBars(rows, { look: PHASES, text, unit: 1, axisTitle: "seconds per step" }));
  const used = new Set(rows.flatMap((row) => row.parts.filter(([, v]) => v > 0).map(([key]) => key)));
  return section(title, "Mean step time of rank 0 by phase, without warm-up.", [],
    barLegend(PHASES, used), chart.host);
}

function lossVerdict() {
  const byPrecision = new Map();
  for (const run of runs.filter((r) => r.loss_difference !== null)) {
    const worst = byPrecision.get(run.precision);
    if (!worst || run.loss_difference > worst.loss_difference) byPrecision.set(run.precision, run);
  }
  if (byPrecision.size === 0) return "No two runs share model, data, batch, seed and steps, so no losses are compared.";
  return "Equal model, data, batch and seed should give equal losses. " + [...byPrecision].map(([precision, run]) => {
    const compared = runs.filter((r) => r.loss_difference !== null && r.precision === precision).length;
    return run.loss_difference === 0
      ? `${precision}: ${counted(compared, "run")} identical to ${run.reference} at every step.`
      : `${precision}: over ${counted(compared, "run")} the largest difference is ${shown(run.loss_difference, "gap")}, at step ${run.loss_difference_step} (${run.run} against ${run.reference}).`;
  }).join(" ");
}

function lossSection() {
  const named = runs.map((run, i) => ({ name: run.run, colour: colourOf(i) }));
  const curves = named.flatMap((line, i) => (data.curves[i] ? [{ ...line, ...data.curves[i] }] : []));
  const gaps = named.flatMap((line, i) => (data.gaps[i] ? [{ ...line, ...data.gaps[i] }] : []));
  if (curves.length === 0) return section("Losses", "n/a: no run finished a step.", []);
  const hidden = new Set();
  const kept = (lines) => {
    const left = lines.filter((line) => !hidden.has(line.name));
    return left.length ? left : lines;
  };
  const step = { xTitle: "step", whole: true, xText: (x) => `step ${x}` };
  const drawLoss = () => lineChart(kept(curves), { ...step, yTitle: "training loss", yText: (v) => v.toFixed(4) });
  const drawGap = () => lineChart(kept(gaps), {
    ...step, yTitle: "|difference from the reference's loss|", yText: (v) => shown(v, "gap"), log: true, height: 240,
  });
  const loss = figure(drawLoss());
  const gap = gaps.some((line) => line.y.some((v) => v > 0)) ? figure(drawGap()) : null;
  const legend = html("div", { className: "legend" }, ...curves.map((line) => {
    const button = html("button", { type: "button", "aria-pressed": "true" },
      swatch(line.colour), document.createTextNode(line.name));
    button.addEventListener("click", () => {
      if (!hidden.delete(line.name)) hidden.add(line.name);
      button.setAttribute("aria-pressed", String(!hidden.has(line.name)));
      loss.set(drawLoss());
      gap?.set(drawGap());
    });
    return button;
  }));
  const rows = runs.map((run) => [run.run, run.reference ?? "n/a",
    shown(run.loss_difference, "gap"), shown(run.loss_difference_step, "count"),
    run.loss_note ?? "over all steps"]);
  const table = plainTable(["run", "against", "largest difference", "at step", ""], rows, [2, 3]);
  const folded = html("details", { className: "below" },
    html("summary", { text: "Runs and their references" }), table);
  folded.open = runs.length <= FEW;
  if (gap) gap.host.classList.add("below");
  return section("Loss curves", lossVerdict(), [], legend, loss.host, ...(gap ? [gap.host] : []), folded);
}

function timelineSection() {
  const title = "Device over time";
  const sampled = runs.map((run, i) => i).filter((i) => data.timelines[i].length);
  if (sampled.length === 0) return section(title, "n/a: no run has device samples.", []);
  const metrics = [
    ["memory_used_bytes", "memory used, whole device", "bytes"],
    ["gpu_utilization_percent", "GPU utilization (%)", ""],
    ["power_w", "power (W)", ""],
    ["temperature_c", "temperature (\u00b0C)", ""],
    ["host_rss_bytes", "resident set of the process", "bytes"],
  ];
  const linesOf = (key, chosen) => {
    const one = chosen === "" ? null : Number(chosen);
    const wanted = one === null ? sampled.map((i) => [i, data.timelines[i].slice(0, 1)]) : [[one, data.timelines[one]]];
    return wanted.flatMap(([i, ranks]) => ranks.filter((rank) => key in rank).map((rank, r) => {
      const known = rank[key].map((v, k) => [rank.t_s[k], v]).filter(([, v]) => v !== null);
      return {
        name: one === null ? runs[i].run : `rank ${rank.rank}`,
        colour: one === null ? colourOf(i) : `var(--c${r % 10})`,
        x: known.map(([t]) => t), y: known.map(([, v]) => v),
      };
    }));
  };
  const grid = html("div", { className: "multiples" });
  const draw = (chosen) => grid.replaceChildren(...metrics.flatMap(([key, name, kind]) => {
    const lines = linesOf(key, chosen);
    if (lines.length === 0) return [];
    const [unit, unitName] = kind ? axisUnit(lines.flatMap((line) => line.y)) : [1, ""];
    for (const line of lines) line.y = line.y.map((v) => v / unit);
    const yText = (v) => (kind ? shown(v * unit, kind) : v.toFixed(0));
    return [figure(lineChart(lines, {
      xTitle: "seconds", yTitle: kind ? `${name} (${unitName})` : name, xText: (x) => `${x.toFixed(1)} s`, yText, height: 240,
    })).host];
  }));
  draw("");
  const pick = choice("show", [["", "all runs, rank 0"], ...sampled.map((i) => [String(i), `${runs[i].run}, every rank`])], draw);
  const nvml = data.timelines.some((ranks) => ranks.some((rank) => rank.source === "nvml"));
  return section(title, nvml
    ? "NVML samples of each rank's GPU. Memory is of the whole device, maximum per interval."
    : "These runs had no NVML: this is the resident set of the process, not device memory.",
  [pick], grid);
}

function footer() {
  return notes([
    "Kinds of memory are never mixed: allocated and reserved peak are of the GPU's caching allocator, device used is of the whole device, resident set is of a CPU process, libraries included.",
    "tokens/s and step time exclude the first two steps.",
    ...data.environments.map((text) => `Made with ${text}.`),
  ]);
}

put(
  header(), tableSection(), scatterSection(), ledgerSection(), phaseSection(), lossSection(),
  timelineSection(), ...(data.inference ? [inferenceSection(data.inference)] : []), footer(),
);
