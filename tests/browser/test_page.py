"""The pages of a report and of a plan in a real browser: from disk, with the network off."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_folder import GIB, write_run

from launcher.compare.report.report_cli import main
from launcher.util.page import page_html

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the page's tests need chromium (apt-get install chromium)"
)

HOSTILE = "<img src=x onerror=document.title='pwned'>"
REASON = "</script><script>document.title='pwned'</script> CUDA out of memory"


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    losses = [8 - 0.02 * step for step in range(300)]
    write_run(folder / "single", losses=losses, strategy="single", ranks=1, step_s=1.0, gpu=True)
    write_run(folder / "ddp", losses=losses, step_s=0.6, peak_bytes=2 * GIB, gpu=True)
    nearly = [loss + 1e-6 for loss in losses]
    write_run(folder / "zero2", losses=nearly, strategy="zero2", step_s=0.5, gpu=True)
    write_run(folder / HOSTILE, losses=nearly, strategy="fsdp", step_s=0.9, gpu=True)
    write_run(folder / "oom", state="oom", reason=REASON, ledgers=False, gpu=True)
    assert main([str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Chromium's sandbox does not start for root, which is who runs in a container.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield running
        running.close()


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def page(browser: Any, page_path: Path, complaints: list[str]) -> Iterator[Any]:
    yield from opened(browser, page_path, complaints)


@pytest.fixture
def plan(browser: Any, plan_path: Path, complaints: list[str]) -> Iterator[Any]:
    yield from opened(browser, plan_path, complaints)


def opened(browser: Any, path: Path, complaints: list[str]) -> Iterator[Any]:
    """The open page; what it logs or asks the network for is a complaint."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda r: None if r.url == path.as_uri() else complaints.append(r.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("svg")
    yield tab
    context.close()
    assert complaints == []


def choice(sharding: str, precision: str, used_gib: float, tokens_per_s: float) -> dict[str, Any]:
    """A row of a plan on GPUs of 8 GiB, as forecast/table.py makes it."""
    fits = used_gib <= 8
    return {
        "sharding": sharding,
        "precision": precision,
        "activation_checkpointing": "none",
        "micro_batch": 8,
        "largest_micro_batch": 16 if fits else None,
        "verdict": "does not fit" if not fits else "tight" if used_gib > 7.6 else "fits",
        "used_bytes": int(used_gib * GIB),
        "share": used_gib / 8,
        "step_time_s": 0.5 if fits else None,
        "tokens_per_s": tokens_per_s if fits else None,
        "highest_in": f"backward of later steps: 52% is {HOSTILE}",
        "lines": {
            "params_bytes": int(used_gib * GIB / 2),
            "activations_bytes": int(used_gib * GIB / 2),
        },
    }


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        *(choice("zero2", "bf16", 7.08, 846_330), choice("zero3+cpu+param", "bf16", 0.6, 64_887)),
        *(choice("ddp", "bf16", 7.9, 900), choice("zero2", "fp32", 7.5, 70_000)),
        *(choice("ddp", "fp32", 95.0, 0), choice("fsdp-grad-op", "fp32", 9.0, 0)),
    ]
    data = {
        **{"model": "gpt2", "parameters": 124_439_808, "global_batch": 64, "seq_len": 1024},
        **{"devices": 4, "memory_bytes": 8 * GIB, "machine": "A100", "source": "data sheet"},
        "range": [0.76, 1.15],
        **{
            "command": "torchrun --nproc 4 -m launcher.train --zero 2 " + 9 * "--flag ",
            "rows": rows,
        },
    }
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    path.write_text(page_html("shardscale plan", ("scatter.js", "plan.js"), data))
    return path


def hover(page: Any, locator: Any) -> None:
    """Hover when scrolling there is over: scrolling puts the tooltip away."""
    locator.scroll_into_view_if_needed()
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    locator.hover()


def names(page: Any) -> list[str]:
    return list(page.locator("#rows tbody th").all_inner_texts())


def test_every_section_is_drawn(page: Any) -> None:
    assert page.locator("h2").all_inner_texts() == [
        "Runs",
        "Throughput against memory",
        "Memory breakdown",
        "Time breakdown",
        "Loss curves",
        "Device over time",
    ]
    assert page.locator("svg").count() >= 6
    goals = page.locator(".goals").inner_text()
    assert "fastest under 24 GiB" in goals
    verdict = page.locator("section", has_text="Loss curves").locator(".lede")
    assert re.search(r"fp32: over 3 runs the largest difference is 1\.0e-6", verdict.inner_text())


def test_table_sorts_by_click_and_by_keyboard(page: Any) -> None:
    assert names(page) == ["zero2", "ddp", HOSTILE, "single", "oom"]
    page.get_by_role("button", name="tokens/s", exact=True).click()
    header = page.locator('th[data-key="tokens_per_s"]')
    assert header.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")  # the header keeps the focus
    assert header.get_attribute("aria-sort") == "ascending"
    assert names(page) == ["single", HOSTILE, "ddp", "zero2", "oom"]  # unknown stays last
    page.get_by_role("button", name="run", exact=True).click()
    assert names(page) == [HOSTILE, "ddp", "oom", "single", "zero2"]
    assert page.locator("th[aria-sort]").count() == 1


def test_unknown_figures_say_so(page: Any) -> None:
    cells = page.locator("#rows tbody tr", has_text="oom").locator("td").all_inner_texts()
    assert "n/a" in cells
    assert not {"0", "0.0", "NaN", "null", "undefined"} & set(cells)


def test_bars_tell_their_figures_to_mouse_and_keyboard(page: Any) -> None:
    tooltip = page.locator("#tooltip")
    bars = page.locator("section", has_text="Memory breakdown").locator("rect.mark")
    assert tooltip.is_hidden()
    hover(page, bars.first)
    assert tooltip.is_visible()
    assert "zero2, rank 0" in tooltip.inner_text()
    assert re.search(r"parameters\s+128 MiB", tooltip.inner_text())
    page.mouse.move(1, 1)
    assert tooltip.is_hidden()
    bars.first.focus()
    page.keyboard.press("ArrowRight")
    assert re.search(r"gradients", bars.nth(1).get_attribute("aria-label"))
    assert tooltip.is_visible()
    page.keyboard.press("Escape")
    assert tooltip.is_hidden()


def test_pareto_front_is_marked(page: Any) -> None:
    section = page.locator("section", has_text="Throughput against memory")
    marks = section.locator("circle.mark").evaluate_all("m => m.map(e => e.ariaLabel)")
    front = [label.split(",")[0] for label in marks if "on the Pareto front yes" in label]
    assert front == ["zero2"]
    section.locator("select").select_option("device_used_bytes")
    assert "device used" in section.locator("svg").text_content()


def test_lines_follow_the_mouse_and_can_be_put_away(page: Any) -> None:
    section = page.locator("section", has_text="Loss curves")
    hover(page, section.locator("svg").first)
    assert re.search(r"step \d+\s", page.locator("#tooltip").inner_text())
    assert section.locator("svg").first.locator("path.curve").count() == 4
    section.get_by_role("button", name="ddp").click()
    assert section.locator("svg").first.locator("path.curve").count() == 3


def test_hostile_names_are_text(page: Any) -> None:
    assert page.title() == "shardscale report"
    assert page.locator("img").count() == 0
    assert page.locator("body script").count() == 2
    assert "</script><script>" in page.locator(".failures").inner_text()


@pytest.mark.parametrize("which", ["page", "plan"])
@pytest.mark.parametrize("width", [390, 800])
def test_narrow_screens_scroll_the_table_and_not_the_page(
    which: str, width: int, request: pytest.FixtureRequest
) -> None:
    page = request.getfixturevalue(which)
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_function(f"document.querySelector('svg').clientWidth < {width}")
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    area = page.locator(".scroll").first
    wider = area.evaluate("e => e.scrollWidth - e.clientWidth")
    assert page.locator(".hint").first.is_visible() is (wider > 1)
    if width == 390:
        assert wider > 1
        # The figures that the page is about are on the screen, and so is the name when scrolled.
        assert all(right_of(page, heading) <= width for heading in FIGURES[which])
        area.evaluate("e => e.scrollLeft = 300")
        assert 0 <= page.locator("#rows tbody th").first.bounding_box()["x"] < 60


FIGURES = {"page": ("allocated peak", "tokens/s"), "plan": ("predicted", "verdict")}


def right_of(page: Any, heading: str) -> float:
    box = page.get_by_role("columnheader", name=heading, exact=True).bounding_box()
    return float(box["x"] + box["width"])


def test_steps_are_whole_numbers(page: Any) -> None:
    ticks = page.evaluate(
        "[[1, 10], [1, 3], [1, 18], [0, 1], [1, 300]].map(r => ticks(r, 4, true))"
    )
    assert all(float(tick).is_integer() for row in ticks for tick in row)
    assert [len(row) >= 2 for row in ticks] == [True] * 5
    section = page.locator("section", has_text="Loss curves")
    below = section.locator("svg").first.locator("text[text-anchor=middle]").all_text_contents()
    assert below
    assert all(tick.isdigit() for tick in below)


def test_tile_table_and_tooltip_have_the_same_digits(page: Any) -> None:
    tile = page.locator(".goals > div", has_text="fastest").first.locator(".figures").inner_text()
    figures = re.fullmatch(r"(\S+ [KMG]iB) allocated peak, (\S+) tokens/s", tile)
    assert figures
    memory, rate = figures.groups()
    row = page.locator("#rows tbody tr", has_text="zero2")
    cells = row.locator("td").all_inner_texts()
    assert memory in cells
    assert any(cell.split("\n")[0] == rate for cell in cells)
    assert page.evaluate("[0.0114 * GIB, 1.125 * GIB, 999.96 * GIB, 0].map(bytesText)") == [
        *("11.7 MiB", "1.13 GiB", "1,000 GiB", "0 B")
    ]
    section = page.locator("section", has_text="Throughput against memory")
    marks = section.locator("circle.mark").evaluate_all("m => m.map(e => e.ariaLabel)")
    told = next(label for label in marks if label.startswith("zero2"))
    assert f"allocated peak {memory}" in told
    assert f"tokens/s {rate}" in told
    assert "298 steps" in told


def test_a_tie_is_called_one(page: Any) -> None:
    tile = page.locator(".goals > div", has_text="lowest perplexity")
    assert tile.locator(".figures").inner_text() == "a tie: 600.00 on the test split"
    assert "and 1 more" in tile.locator(".winner").inner_text()
    best = page.locator("#rows td.best", has_text="600.00")
    assert best.count() == 4


def test_a_plan_sorts_filters_and_redraws_its_bars(plan: Any) -> None:
    bars = plan.locator("section", has_text="Where the memory would be").locator("svg text.total")
    assert names(plan) == ["zero2", "zero3+cpu+param", "ddp", "fsdp-grad-op"]  # the best of each
    plan.get_by_label("only the best of each sharding").uncheck()
    assert len(names(plan)) == 6
    assert bars.all_text_contents()[0] == "7.08 GiB"
    plan.get_by_role("button", name="predicted", exact=True).click()
    assert names(plan)[0] == "zero3+cpu+param"
    assert bars.all_text_contents() == [
        "614 MiB",
        "7.08 GiB",
        "7.50 GiB",
        "7.90 GiB",
        "9.00 GiB",
        "95.0 GiB",
    ]
    plan.keyboard.press("Enter")  # the header keeps the focus
    assert names(plan)[0] == "ddp"
    plan.get_by_label("verdict").select_option("does not fit")
    assert names(plan) == ["ddp", "fsdp-grad-op"]
    assert plan.locator("[role=status]").inner_text() == "2 of 6 choices shown."
    plan.get_by_label("precision").select_option("bf16")
    assert names(plan) == []
    assert plan.title() == "shardscale plan", "what is hostile is text"
    assert "No choice is left" in plan.locator("figure").first.inner_text()


def test_a_plan_keeps_its_verdict_on_one_line_and_its_bars_readable(plan: Any) -> None:
    plan.set_viewport_size({"width": 390, "height": 800})
    plan.wait_for_function("document.querySelector('svg').clientWidth < 390")
    verdict = plan.locator(".state.none").first
    assert verdict.inner_text() == "does not fit"
    assert verdict.bounding_box()["height"] < 30
    widths = plan.locator("rect.mark").evaluate_all("m => m.map(e => e.getBBox().width)")
    assert max(widths) > 120
    assert plan.locator("line.limit").count() == 1
    ticks = plan.locator("svg").first.locator("text[text-anchor=middle]").all_text_contents()
    assert len(ticks) >= 2, "a scale"


def test_light_and_dark_are_both_readable(page: Any, tmp_path: Path) -> None:
    pictures = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        pictures[scheme] = page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        assert contrast(page, "body") > 12
        assert contrast(page, ".lede") > 4.5
    assert pictures["light"] != pictures["dark"]


def contrast(page: Any, selector: str) -> float:
    """WCAG contrast ratio of an element's text against the page."""
    colours = page.evaluate(
        "s => [getComputedStyle(document.querySelector(s)).color,"
        " getComputedStyle(document.body).backgroundColor]",
        selector,
    )
    light, dark = sorted(map(luminance, colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
