"""Draws the README's pictures, light and dark: a plan beside a report, and published bytes.

    python bench/pictures.py          writes docs/assets/{plan-and-report,published}-*

The plan is what `shardscale plan` prints now. The report is bench/results/sample-report, of four
real trainings on two CPU processes. Needs chromium and the extra dev.
"""

import html
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import matplotlib
from docs_commands import ROOT, Command, run
from playwright.sync_api import sync_playwright

ASSETS = ROOT / "docs" / "assets"
REPORT = ROOT / "bench" / "results" / "sample-report" / "report.html"
PUBLISHED = ROOT / "bench" / "results" / "published.json"
PLAN = Command(
    text="shardscale plan --model llama-3.1-8b --gpus 4 --gpu A100-80GB --precision bf16 "
    "--seq-len 4096 --quiet"
)
THEMES: dict[Literal["light", "dark"], tuple[str, str, str]] = {
    "light": ("#ffffff", "#1f2328", "#d0d7de"),
    "dark": ("#0d1117", "#e6edf3", "#30363d"),
}
"""Name -> paper, ink and lines, as GitHub has them."""
GIB = 2**30
PAGE = """<!doctype html><meta charset="utf-8"><style>
  body {{ margin: 0; padding: 16px; display: flex; gap: 16px; background: {paper}; color: {ink}; }}
  figure {{ margin: 0; height: 730px; border: 1px solid {line}; border-radius: 8px;
    overflow: hidden; }}
  figcaption {{ font: 13px sans-serif; padding: 8px 14px; border-bottom: 1px solid {line}; }}
  pre {{ font: 12px/1.45 monospace; margin: 0; padding: 12px; width: 84ch; white-space: pre-wrap; }}
  iframe {{ border: 0; width: 1060px; height: 1200px; transform: scale(.585);
    transform-origin: 0 0; }}
  figure:last-child {{ width: 620px; }}
</style>
<figure><figcaption>before: shardscale plan, in seconds, without a GPU</figcaption>
  <pre>{plan}</pre></figure>
<figure><figcaption>after: shardscale report, of a small model on two CPU processes</figcaption>
  <iframe src="{report}"></iframe></figure>
"""


def draw_plan_and_report() -> None:
    """Photograph the plan's lines beside the first screen of the report."""
    with tempfile.TemporaryDirectory() as folder:
        lines = run(PLAN, Path(folder))
        shown = html.escape("$ " + PLAN.text.replace(" --precision", " \\\n    --precision"))
        text = f"{shown}\n\n" + html.escape("\n".join(lines))
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        with sync_playwright() as started:
            path = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = started.chromium.launch(executable_path=path, args=arguments)
            for theme, (paper, ink, line) in THEMES.items():
                page = Path(folder) / f"{theme}.html"
                values = {"paper": paper, "ink": ink, "line": line, "report": REPORT.as_uri()}
                page.write_text(PAGE.format(plan=text, **values), encoding="utf-8")
                tab = browser.new_context(color_scheme=theme, device_scale_factor=1.5).new_page()
                tab.set_viewport_size({"width": 1322, "height": 764})
                tab.goto(page.as_uri())
                tab.frames[1].locator("h2", has_text="Throughput").evaluate(
                    "title => scrollTo(0, title.parentElement.getBoundingClientRect().top)"
                )
                tab.wait_for_timeout(1000)  # the report's figures are drawn
                tab.screenshot(path=ASSETS / f"plan-and-report-{theme}.png")
            browser.close()


def draw_published() -> None:
    """Draw predicted over published bytes, a point per figure of bench/published.py."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]
    for theme, (_, ink, line) in THEMES.items():
        colours = {"text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": line}
        ticks = {"xtick.color": ink, "ytick.color": ink, "svg.hashsalt": "shardscale"}
        with plt.rc_context({**colours, **ticks}):
            drawing, axis = plt.subplots(figsize=(6.4, 4.4))
            for to, colour, marker in (("check", "#2f81f7", "o"), ("fit", "#8b949e", "s")):
                points = [
                    (row[f"{kind}_bytes"] / GIB, row[f"planned_{kind}_bytes"] / GIB)
                    for row in rows
                    for kind in ("allocated", "reserved")
                    if row["to"] == to and not row["unlike_bytes"]
                    if row[f"{kind}_bytes"] and row[f"planned_{kind}_bytes"]
                ]
                label = f"rows that {'check' if to == 'check' else 'helped to fit seconds'}"
                axis.scatter(*zip(*points, strict=True), s=18, c=colour, marker=marker, label=label)
            ends = (12, 200)
            axis.plot(ends, ends, color=line, linewidth=1, zorder=0)
            axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_locator(matplotlib.ticker.FixedLocator((16, 32, 64, 128)))
                side.set_major_formatter("{x:.0f}")
                side.set_minor_locator(matplotlib.ticker.NullLocator())
            axis.set(xlabel="published, GiB of a GPU", ylabel="predicted, GiB")
            axis.legend(frameon=False)
            path = ASSETS / f"published-{theme}.svg"
            drawing.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
            plt.close(drawing)


if __name__ == "__main__":
    draw_published()
    draw_plan_and_report()
