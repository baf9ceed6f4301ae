// The page of `infer-bench`.

const made = new Date(data.made_unix_s * 1000).toISOString().slice(0, 16).replace("T", " ");
put(
  html("header", {}, html("p", { className: "kicker", text: `shardscale infer-bench \u00b7 ${made} UTC` }),
    html("h1", { text: "Memory, latency and perplexity" })),
  inferenceSection(data.inference),
);
