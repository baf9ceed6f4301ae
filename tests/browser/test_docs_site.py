"""The documentation's site: built without a warning, complete by itself, readable on a phone."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (390, 1440)
CUT = """() => {
  const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const shown = (e) => { while (e && !scrolls(e)) e = e.parentElement; return e !== null; };
  const parts = "p, li, td, th, pre, code, h1, h2, h3";
  return [...document.querySelectorAll(`.md-content :is(${parts})`)]
    .filter((e) => e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 6 && !shown(e))
    .map((e) => `${e.tagName} ${e.textContent.trim().slice(0, 60)}`);
}"""
"""Elements whose text runs off their box, by more than the padding of code, and does not scroll."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs the extra docs: pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert (site / "questions" / "cuda-out-of-memory-zero-3" / "index.html").exists()
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any("ZeRO-3" in entry["title"] for entry in index["docs"])


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=[\"']?https?:|<link[^>]*stylesheet[^>]*https?:"
    )
    for page in site.rglob("*.html"):
        if "results" not in page.parts:
            assert not loaded.search(page.read_text(encoding="utf-8")), page


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
def test_no_text_runs_off_its_box(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    pages = [page for page in sorted(site.rglob("index.html")) if "results" not in page.parts]
    assert len(pages) > 40
    found = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        tab = browser.new_page()
        for page in pages:
            tab.goto(page.as_uri())
            for width in WIDTHS:
                tab.set_viewport_size({"width": width, "height": 900})
                cut = tab.evaluate(CUT)
                wide = tab.evaluate("document.documentElement.scrollWidth")
                name = page.parent.relative_to(site)
                found += [f"{name} at {width}: {what}" for what in cut]
                found += [f"{name} at {width} is {wide} wide"] if wide > width else []
        browser.close()
    assert not found, "\n".join(found)
