"""The table of `infer-bench`: on the console, in Markdown, and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launcher.util.page import page_html
from launcher.util.sizes import gib
from launcher.util.tables import Column, print_table, say

FOLDER, RESULT_FILE = "inference", "inference.json"


class Figure(NamedTuple):
    """A column."""

    key: str
    title: str
    rank: int
    """The highest goes first where a terminal is narrow."""


FIGURES = (
    Figure("peak_bytes", "peak memory", 1),
    Figure("own_bytes", "of it the model's", 6),
    Figure("prefill_s", "prefill ms", 5),
    Figure("token_s", "token ms", 2),
    Figure("token_p90_s", "token p90 ms", 7),
    Figure("cpu_s", "token CPU ms", 6),
    Figure("tokens_per_s", "tokens/s", 0),
    Figure("tokens_per_s_ratio", "over PyTorch fp32", 4),
    Figure("perplexity", "perplexity", 0),
    Figure("same_tokens", "same tokens", 3),
)
NAMES = ("run", "engine", "weights")


def cells(row: Mapping[str, Any], new_tokens: int) -> list[str]:
    """The figures of a row, as they are read."""
    return [_shown(figure.key, row, new_tokens) for figure in FIGURES]


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
    """Why there are no figures, each reason once."""
    told: dict[str, list[str]] = {}
    for row in found["rows"]:
        if row["reason"] is not None:
            place = ", ".join(row[name] for name in NAMES)
            told.setdefault(row["reason"], []).append(place)
    return [f"{'; '.join(places)}: n/a: {reason}" for reason, places in told.items()]


def lede(found: Mapping[str, Any]) -> str:
    """What the figures are of."""
    settings, machine = found["settings"], found["machine"]
    memory = (
        "allocated by torch"
        if found["memory"] == "allocated"
        else (
            "the resident set of its process (its own: less what the process had before the model)"
        )
    )
    return (
        f"{machine['device']}, {found['threads']} threads: {settings['prompts']} prompts of "
        f"{settings['prompt_tokens']} tokens from the validation text, {settings['new_tokens']} "
        f"greedy tokens each, {settings['repeats']} times; perplexity of {settings['sequences']} "
        f"sequences. Each engine runs in its own process, and peak memory is {memory} while "
        "prompts are continued. CPU time is that of all threads. Same tokens: from the beginning "
        "on, as PyTorch in fp32, of the worst prompt."
    )


def print_rows(found: Mapping[str, Any], out: Path) -> None:
    """The table, and why some figures are not there."""
    new_tokens = found["settings"]["new_tokens"]
    rows = [[*(row[name] for name in NAMES), *cells(row, new_tokens)] for row in found["rows"]]
    columns = [Column(title=name, rank=0) for name in NAMES]
    columns += [Column(title=f.title, rank=f.rank, right=True) for f in FIGURES]
    print_table(columns, rows, otherwise=f"{out / 'inference.md'} has them all")
    for line in reasons(found):
        say(line)
    say(f"written to {out}: inference.json, inference.md, inference.html")


def markdown_text(found: Mapping[str, Any]) -> str:
    """A GitHub table with what it is of."""
    new_tokens = found["settings"]["new_tokens"]
    titles = [*NAMES, *(figure.title for figure in FIGURES)]
    lines = [titles, [*(["---"] * len(NAMES)), *(["---:"] * len(FIGURES))]]
    lines += [[*(row[name] for name in NAMES), *cells(row, new_tokens)] for row in found["rows"]]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    listed = "\n".join(f"- {line}" for line in reasons(found))
    return "\n\n".join(filter(None, (lede(found), table, listed))) + "\n"


def for_page(found: Mapping[str, Any]) -> dict[str, Any]:
    """What `inference.js` shows."""
    new_tokens = found["settings"]["new_tokens"]
    return {
        "titles": [*NAMES, *(figure.title for figure in FIGURES)],
        "rows": [
            [*(row[name] for name in NAMES), *cells(row, new_tokens)] for row in found["rows"]
        ],
        "lede": lede(found),
        "reasons": reasons(found),
    }


def page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    return page_html(
        "shardscale infer-bench",
        ("inference.js", "inference_page.js"),
        {"inference": for_page(found), "made_unix_s": found["made_unix_s"]},
    )
