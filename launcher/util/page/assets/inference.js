// Results of `infer-bench`.

function inferenceSection(found) {
  const numbers = found.titles.map((_, i) => i).slice(3);
  const table = plainTable(found.titles, found.rows, numbers);
  const missing = html("ul", { className: "failures" },
    ...found.reasons.map((text) => html("li", { text })));
  return section("Inference", found.lede, [], table, ...(found.reasons.length ? [missing] : []));
}
