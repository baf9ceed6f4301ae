"""What the page of `shardscale site` says against what `shardscale plan` says, of random choices.

    python bench/calculator.py [--count 40] [--seed 1] [--pyodide FILE.tgz] [--chromium PATH]
        [--output bench/results]

The page is opened from disk in a real browser without a network, and each question is asked of its
own Python; `plan` runs here, with torch. Models are named ones and ones with dimensions of their
own. Writes calculator.json and calculator.md.
"""

import argparse
import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from playwright.sync_api import Page, sync_playwright
from runs import table

from launcher.forecast import plan_cli as plan_cli
from launcher.forecast.trace import blocks
from launcher.measure.hardware import GPUS
from launcher.model.sizes import NAMED
from launcher.tools.site import site_cli as site_cli
from launcher.util.errors import ExitCode

SHARDINGS = (
    "ddp",
    "fsdp",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2+cpu",
    "zero3+cpu",
    "fsdp+cpu",
)
SIDES = ("plan", "page")
KEPT = ("used_bytes", "host_bytes", "tokens_per_s")
MOST_APART = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pyodide", type=Path)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        out = Path(folder) / "site"
        archive = [] if options.pyodide is None else ["--pyodide", str(options.pyodide)]
        if site_cli.main([str(out), *archive]) != 0:
            sys.exit(1)
        browser = started.chromium.launch(
            executable_path=options.chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_context(offline=True).new_page()
        page.set_default_timeout(600_000)
        # A question that takes little time, which the page asks itself.
        page.goto((out / "index.html").as_uri() + "#model=nano&activation_checkpointing=none")
        rows: list[dict[str, Any]] = []
        while len(rows) < options.count:
            rows += compared(page, question(drawn))
            print(f"{len(rows)} of {options.count}", file=sys.stderr)
        browser.close()
    write(rows, options.output)
    if worst(rows) > MOST_APART:
        sys.exit(f"they are {worst(rows):.2%} apart")


def question(drawn: random.Random) -> list[str]:
    """Arguments of a plan that has one choice for each micro-batch."""
    name = drawn.choice([name for name in NAMED if name != "nano"])
    model = NAMED[name]
    argv = ["--model", name, "--tensor-parallel", "1", "--context-parallel", "1"]
    if drawn.random() < 0.5:  # dimensions of its own
        kv_heads = drawn.choice([1, 2, 4, 8])
        heads = kv_heads * drawn.choice([1, 2, 4, 5])
        head_dim = drawn.choice([64, 80, 128])
        dimensions = {
            "layers": drawn.randint(6, 40),
            "d_model": 64 * drawn.randint(8, 80),
            "heads": heads,
            "kv-heads": kv_heads,
            "head-dim": head_dim,
            "d-ff": 128 * drawn.randint(8, 120),
            "vocab-size": drawn.randint(10_000, 160_000),
        }
        argv += [text for key, value in dimensions.items() for text in (f"--{key}", str(value))]
    gpu = drawn.choice([gpu for gpu in GPUS if gpu.bf16_flops_per_s is not None])
    gpus = drawn.choice([2, 4, 8, 16, 64])
    seq_len = drawn.choice([length for length in (256, 512, 1024, 2048) if length <= model.context])
    argv += ["--gpu", gpu.name, "--gpus", str(gpus), "--seq-len", str(seq_len)]
    argv += ["--micro-batch", str(drawn.choice([1, 2, 3, 4, 8]))]
    if drawn.random() < 0.3:
        argv += ["--lora-rank", str(drawn.choice([4, 8, 16, 64]))]
    argv += ["--precision", drawn.choice(["bf16", "bf16", "fp32"])]
    argv += ["--activation-checkpointing", drawn.choice(["none", "selective", "full"])]
    return [*argv, *sharding_flags(drawn.choice(SHARDINGS))]


def sharding_flags(label: str) -> list[str]:
    base, _, offload = label.partition("+")
    flags = ["--zero", base[4:]] if base.startswith("zero") else ["--strategy", base]
    return [*flags, "--offload-optimizer", offload or "none"]


def compared(page: Page, argv: list[str]) -> list[dict[str, Any]]:
    """One row for each choice; none where both refuse with the same words."""
    text = json.dumps(argv)
    here, refused = planned(argv)
    there = page.evaluate("(argv) => pythons.ask('choices_of', [argv])", text)
    if refused or "refused" in there:
        assert there.get("refused") == refused, f"{argv}: {there} against {refused}"
        return []
    rows = []
    for number, choice in enumerate(there["choices"]):
        row = page.evaluate(
            "([argv, number]) => pythons.ask('assessed', [argv, number])", [text, number]
        )
        names = ("sharding", "precision", "activation_checkpointing")
        (other,) = (r for r in here if all(r[name] == choice[name] for name in names))
        rows.append(
            {
                "arguments": argv,
                "sharding": row["sharding"],
                "verdict": [other["verdict"], row["verdict"]],
                "plan": {name: other[name] for name in KEPT},
                "page": {name: row[name] for name in KEPT},
                "apart": apart(other, row),
            }
        )
    return rows


def planned(argv: list[str]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows that `plan --json` prints; where it refuses, none and the reason."""
    said, refusal = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(refusal),
        mock.patch.object(blocks, "stored_trace", return_value=None),  # the page's own traces
        mock.patch.object(blocks, "stored_work", return_value=None),
    ):
        code = plan_cli.main([*argv, "--no-calibration", "--json"])
    if code == ExitCode.REFUSED:
        return [], refusal.getvalue().strip().removeprefix("shardscale: ")
    return json.loads(said.getvalue()), None


def apart(plan: dict[str, Any], page: dict[str, Any]) -> float:
    """The largest relative difference of bytes, bytes by category and seconds."""
    pairs = [(plan["used_bytes"], page["used_bytes"]), (plan["host_bytes"], page["host_bytes"])]
    if page["tokens_per_s"] is not None:
        pairs.append((plan["tokens_per_s"], page["tokens_per_s"]))
    found = [abs(there - here) / here for here, there in pairs if here]
    device = plan["ledger"]["device"]
    # Of what a category holds next to nothing is left out: a share of all is what a bar shows.
    found += [
        abs(size - device[name]) / plan["used_bytes"]
        for name, size in page["lines"].items()
        if device.get(name)
    ]
    return float(max(found))


def worst(rows: list[dict[str, Any]]) -> float:
    return max(float(row["apart"]) for row in rows)


def write(rows: list[dict[str, Any]], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "calculator.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    same = sum(
        all(row["plan"][name] == row["page"][name] for name in ("used_bytes", "host_bytes"))
        for row in rows
    )
    cells = [
        [
            " ".join(row["arguments"]),
            f"{row['plan']['used_bytes']:,}",
            f"{row['page']['used_bytes']:,}",
            *(
                "-" if (speed := row[of]["tokens_per_s"]) is None else f"{speed:,.1f}"
                for of in SIDES
            ),
            f"{row['apart']:.1e}",
        ]
        for row in rows
    ]
    own = sum("--head-dim" in row["arguments"] for row in rows)
    verdicts = sum(row["verdict"][0] == row["verdict"][1] for row in rows)
    lines = [
        "# The calculator's page against the planner",
        "",
        f"`python bench/calculator.py`: {len(rows)} random choices, {own} of them with dimensions "
        f"of their own. {same} say the same to the byte, the furthest are {worst(rows):.1g} of a "
        f"figure apart (bytes in all and by category, host bytes, tokens/s), and {verdicts} have "
        "the same verdict. Speeds are shown of what fits.",
        "",
        table(["choice", "plan, bytes", "page, bytes", "plan, tokens/s", "page", "apart"], cells),
    ]
    (output / "calculator.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
