"""Table of `infer-bench`: on the console, in Markdown, and on a page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.util.page import page_html
from launcher.util.sizes import gib
from launcher.util.tables import Column, print_table, say

FOLDER, RESULT_FILE = "inference", "inference.json"

# Key of a row -> its column; the highest rank is dropped first on a narrow terminal.
FIGURES = {
    "peak_bytes": Column(title="peak memory", rank=1, right=True),
    "own_bytes": Column(title="model memory", rank=6, right=True),
    "prefill_s": Column(title="prefill ms", rank=5, right=True),
    "token_s": Column(title="token ms", rank=2, right=True),
    "token_p90_s": Column(title="token p90 ms", rank=7, right=True),
    "cpu_s": Column(title="token CPU ms", rank=6, right=True),
    "tokens_per_s": Column(title="tokens/s", rank=0, right=True),
    "tokens_per_s_ratio": Column(title="over PyTorch fp32", rank=4, right=True),
    "perplexity": Column(title="perplexity", rank=0, right=True),
    "same_tokens": Column(title="same tokens", rank=3, right=True),
}
NAMES = ("run", "engine", "weights")
COLUMNS = (*(Column(title=name, rank=0) for name in NAMES), *FIGURES.values())


def table_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Format the rows: names, then figures."""
    new_tokens = found["settings"]["new_tokens"]
    return [
        [*(row[name] for name in NAMES), *(_shown(key, row, new_tokens) for key in FIGURES)]
        for row in found["rows"]
    ]


def _shown(key: str, row: Mapping[str, Any], new_tokens: int) -> str:
    if key == "own_bytes":
        peak, before = row["peak_bytes"], row["before_model_bytes"]
        return "n/a" if None in (peak, before) else gib(max(0, peak - before))
    value = row[key]
    if value is None:
        return "n/a"
    if key == "peak_bytes":
        return gib(value)
    if key in ("prefill_s", "token_s", "token_p90_s", "cpu_s"):
        return f"{value * 1e3:.3g}"
    if key == "same_tokens":
        return f"{value} of {new_tokens}"
    return {"tokens_per_s": f"{value:.4g}", "tokens_per_s_ratio": f"{value:.2f}x"}.get(
        key, f"{value:.2f}"
    )


def reasons(found: Mapping[str, Any]) -> list[str]:
    """List the reasons for missing figures, each with its cases."""
    cases: dict[str, list[str]] = {}
    for row in found["rows"]:
        if row["reason"] is not None:
            cases.setdefault(row["reason"], []).append(", ".join(row[name] for name in NAMES))
    return [f"{'; '.join(names)}: n/a: {reason}" for reason, names in cases.items()]


def lede(found: Mapping[str, Any]) -> str:
    """Describe the measurement."""
    settings, machine = found["settings"], found["machine"]
    memory = (
        "memory allocated by torch"
        if found["memory"] == "allocated"
        else "the process's resident set (model memory: its increase since before the model)"
    )
    return (
        f"{machine['device']}, {found['threads']} threads: {settings['prompts']} prompts of "
        f"{settings['prompt_tokens']} tokens from the validation text, {settings['new_tokens']} "
        f"greedy tokens each, {settings['repeats']} repeats; perplexity over "
        f"{settings['sequences']} sequences. Each engine runs in its own process. Peak memory is "
        f"{memory} during decoding. CPU time is summed over threads. Same tokens: length of the "
        "prefix shared with PyTorch in fp32, for the worst prompt."
    )


def print_rows(found: Mapping[str, Any], out: Path) -> None:
    """Print the table, and the reasons for missing figures."""
    print_table(COLUMNS, table_rows(found), otherwise=f"{out / 'inference.md'} has them all")
    for line in reasons(found):
        say(line)
    say(f"written to {out}: inference.json, inference.md, inference.html")


def markdown_text(found: Mapping[str, Any]) -> str:
    """Format the description, a GitHub table and the reasons for missing figures."""
    titles = [column.title for column in COLUMNS]
    lines = [titles, ["---:" if column.right else "---" for column in COLUMNS], *table_rows(found)]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    listed = "\n".join(f"- {line}" for line in reasons(found))
    return "\n\n".join(filter(None, (lede(found), table, listed))) + "\n"


def for_page(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of `inference.js`."""
    return {
        "titles": [column.title for column in COLUMNS],
        "rows": table_rows(found),
        "lede": lede(found),
        "reasons": reasons(found),
    }


def page(found: Mapping[str, Any]) -> str:
    """Return the whole page."""
    return page_html(
        "shardscale infer-bench",
        ("inference.js", "inference_page.js"),
        {"inference": for_page(found), "made_unix_s": found["made_unix_s"]},
    )
