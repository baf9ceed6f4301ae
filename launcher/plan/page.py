"""A plan as one HTML file: a bar of bytes for each choice, no script, no network."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from launcher.plan.assess import Assessment, Place
from launcher.sizes import gib

# Colours that stay apart for colour-blind readers (Okabe and Ito, 2008), one per line of a ledger.
LOOK: Final = {
    "params": ("parameters", "#0072b2"),
    "master": ("master weights", "#56b4e9"),
    "grads": ("gradients", "#009e73"),
    "optimizer": ("optimizer states", "#e69f00"),
    "buffers": ("communication buffers", "#cc79a7"),
    "activations": ("activations", "#d55e00"),
    "temporary": ("temporary", "#f0e442"),
    "slack": ("allocator slack", "#999999"),
    "fixed": ("CUDA context and NCCL", "#555555"),
}
_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; }
p { margin: .4rem 0; }
pre { padding: .8rem; border: 1px solid #8886; border-radius: .4rem; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; margin-top: 1rem; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid #8884; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.bar { width: 30%; }
td:last-child { white-space: nowrap; }
.frame { position: relative; height: 1.3rem; background: #8882; border-radius: .2rem; }
.bytes { display: flex; height: 100%; overflow: hidden; border-radius: .2rem; }
.edge { position: absolute; top: -.15rem; bottom: -.15rem; width: 2px; background: #d00; }
.fits { color: #0a7d2c; } .tight { color: #b36b00; } .does-not-fit { color: #c62828; }
@media (prefers-color-scheme: dark) {
  .fits { color: #5ad17a; } .tight { color: #ffb74d; } .does-not-fit { color: #ff8a80; }
}
.key { display: inline-block; margin-right: 1rem; white-space: nowrap; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; }
"""


def write_page(path: Path, found: Sequence[Assessment], place: Place, command: str) -> None:
    """Write the page to `path`."""
    path.write_text(page_html(found, place, command), encoding="utf-8")


def page_html(found: Sequence[Assessment], place: Place, command: str) -> str:
    """The page's text."""
    run = found[0].run
    widest = max(place.memory_bytes, *(a.used_bytes for a in found if a.margin_bytes >= 0), 0)
    widest = int(1.25 * widest)  # of what does not fit, as much as shows that it does not
    keys = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{name}</span>'
        for name, colour in LOOK.values()
    )
    rows = "\n".join(_row(a, place, widest) for a in found)
    title = f"Plan: {run.config.model.model} on {place.world_size} x {gib(place.memory_bytes)}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width">
<style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>{run.model.parameter_count:,} parameters, global batch {run.global_batch} x {run.seq_len} tokens;
{escape(place.machine.name)} ({escape(place.machine.source)}). Bytes of each GPU at the highest
moment; the red line is its memory. Best first.</p>
<pre>{escape(command)}</pre>
<p>{keys}</p>
<table><thead><tr><th>sharding</th><th>precision</th><th>checkpointing</th>
<th class="number">micro-batch</th><th class="number">predicted</th><th>bytes</th><th></th>
<th class="number">s/step</th><th class="number">tokens/s</th><th>highest in</th></tr></thead>
<tbody>
{rows}
</tbody></table>
</body></html>
"""


def _row(a: Assessment, place: Place, widest: int) -> str:
    fits = a.verdict != "does not fit"
    edge = 100 * place.memory_bytes / widest
    cells = (
        f"<td>{escape(a.choice.label)}</td><td>{a.choice.precision}</td>"
        f"<td>{a.choice.checkpointing}</td>"
        f'<td class="number">{a.run.config.data.micro_batch}</td>'
        f'<td class="number">{gib(a.used_bytes)}</td>'
        f'<td class="bar"><div class="frame"><div class="bytes">{_bar(a, place, widest)}</div>'
        f'<div class="edge" style="left:{edge:.2f}%"></div></div></td>'
        f'<td class="{a.verdict.replace(" ", "-")}">{a.verdict}</td>'
    )
    speed = (
        f'<td class="number">{a.time.total_s:.3g}</td>'
        f'<td class="number">{a.time.tokens_per_s:,.0f}</td>'
        if fits
        else '<td class="number">-</td><td class="number">-</td>'
    )
    return f"<tr>{cells}{speed}<td>{escape(a.why_not)}</td></tr>"


def _bar(a: Assessment, place: Place, widest: int) -> str:
    lines = a.highest.device
    sizes = {name: getattr(lines, f"{name}_bytes", None) or 0 for name in LOOK}
    sizes["slack"] = max(0, a.reserved_bytes - (lines.used_bytes or 0))
    sizes["fixed"] = place.fixed_bytes
    return "".join(
        f'<div style="flex:none;width:{100 * size / widest:.3f}%;background:{LOOK[name][1]}" '
        f'title="{LOOK[name][0]}: {gib(size)}"></div>'
        for name, size in sizes.items()
        if size
    )
