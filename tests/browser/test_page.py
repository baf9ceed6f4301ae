"""The report's page in a real browser: from disk, with the network off."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_folder import GIB, write_run

from launcher.compare.report import main

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
    """The open page; what it logs or asks the network for is a complaint."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on(
        "request",
        lambda r: None if r.url == page_path.as_uri() else complaints.append(r.url),
    )
    tab.goto(page_path.as_uri())
    tab.wait_for_selector("svg")
    yield tab
    context.close()
    assert complaints == []


def hover(page: Any, locator: Any) -> None:
    """Hover when scrolling there is over: scrolling puts the tooltip away."""
    locator.scroll_into_view_if_needed()
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    locator.hover()


def names(page: Any) -> list[str]:
    return list(page.locator("#runs tbody th").all_inner_texts())


def test_every_section_is_drawn(page: Any) -> None:
    assert page.locator("h2").all_inner_texts() == [
        "Runs",
        "Throughput against memory",
        "Where the memory is",
        "Where the time goes",
        "Losses over each other",
        "The device over time",
    ]
    assert page.locator("svg").count() >= 6
    goals = page.locator(".goals").inner_text()
    assert "fastest under 24 GiB" in goals
    verdict = page.locator("section", has_text="Losses over each other").locator(".lede")
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
    cells = page.locator("#runs tbody tr", has_text="oom").locator("td").all_inner_texts()
    assert "n/a" in cells
    assert not {"0", "0.0", "NaN", "null", "undefined"} & set(cells)


def test_bars_tell_their_figures_to_mouse_and_keyboard(page: Any) -> None:
    tooltip = page.locator("#tooltip")
    bars = page.locator("section", has_text="Where the memory is").locator("rect.mark")
    assert tooltip.is_hidden()
    hover(page, bars.first)
    assert tooltip.is_visible()
    assert "zero2, rank 0" in tooltip.inner_text()
    assert re.search(r"parameters\s+0\.1[23] GiB", tooltip.inner_text())
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
    section = page.locator("section", has_text="Losses over each other")
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


def test_narrow_screens_scroll_the_table_and_not_the_page(page: Any) -> None:
    page.set_viewport_size({"width": 380, "height": 800})
    page.wait_for_function("document.querySelector('svg').clientWidth < 380")
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


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
