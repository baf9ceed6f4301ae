"""The calculator in a real browser: from disk, with the network off, by mouse and by keyboard."""

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from launcher.forecast import plan_cli as plan_cli
from launcher.tools.site.build import site_html
from launcher.tools.site.runtime import load
from launcher.util.errors import UserError

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the page's tests need chromium (apt-get install chromium)"
)

# A question with a single choice, which is soon answered.
SMALL = {
    **{"model": "gpt2", "gpus": "2", "sharding": "ddp", "activation_checkpointing": "none"},
    "micro_batch": "4",
}
PATIENCE_MS = 240_000
MOVE = "(hash) => new Promise((done) => { location.hash = hash; setTimeout(done, 100); })"
HOSTILE = "<img src=x onerror=document.title='pwned'>"


@pytest.fixture(scope="module")
def complaints() -> list[str]:
    return []


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    try:
        page = site_html(load(None))
    except UserError as error:
        pytest.skip(f"the page's tests need Pyodide: {error}")
    path = tmp_path_factory.mktemp("site") / "index.html"
    path.write_text(page, encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def page(address: str, complaints: list[str]) -> Iterator[Any]:
    """The open page; what it logs or asks the network for is a complaint."""
    # Chromium's sandbox does not start for root, which is who runs in a container.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        tab = browser.new_context(offline=True, viewport={"width": 1280, "height": 900}).new_page()
        tab.set_default_timeout(PATIENCE_MS)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: asked_for(request.url, address, complaints))
        tab.goto(f"{address}#{urlencode(SMALL)}")
        yield tab
        browser.close()


def asked_for(url: str, address: str, complaints: list[str]) -> None:
    if url.partition("#")[0] != address and not url.startswith("blob:"):
        complaints.append(url)


@pytest.fixture(autouse=True)
def _no_complaints(complaints: list[str]) -> Iterator[None]:
    yield
    assert complaints == []


def ask(page: Any, **changes: str) -> None:
    """Follow a link to a choice, and wait for all of its answer."""
    follow(page, **changes)
    planned(page)


def follow(page: Any, **changes: str) -> None:
    page.evaluate(MOVE, urlencode(SMALL | changes))


def planned(page: Any) -> None:
    page.locator("#status", has_text=" planned").wait_for()


def test_says_what_plan_says(page: Any, capsys: pytest.CaptureFixture[str]) -> None:
    planned(page)
    argv = "--model gpt2 --gpu A100-80GB --gpus 2 --strategy ddp --precision bf16 --micro-batch 4"
    argv += " --activation-checkpointing none --no-calibration --json"
    assert plan_cli.main(argv.split()) == 0
    (row,) = json.loads(capsys.readouterr().out)
    told = page.locator(".verdict").inner_text()
    assert "It fits" in told
    assert f"{row['used_bytes'] / 2**30:.2f} GiB of 79.1 GiB" in told
    assert f"{row['tokens_per_s']:,.0f} tokens/s" in told
    held = row["ledger"]["device"]["optimizer_bytes"]
    lines = page.locator("table.bytes").inner_text()
    assert f"optimizer states\t{held / 2**20:.0f} MiB" in lines
    assert page.locator("#result svg rect.mark").count() > 4


def test_command_is_the_planners(page: Any) -> None:
    planned(page)
    command = page.locator("#command").inner_text()
    assert command.startswith("torchrun --nproc 2 -m launcher.train --model gpt2")
    assert "--strategy ddp" in command
    assert "--micro-batch 4" in command
    question = page.locator("#question").inner_text()
    assert question.startswith("shardscale plan --gpu A100-80GB --gpus 2 --model gpt2")


def test_fields_by_keyboard_change_answer_and_link(page: Any) -> None:
    ask(page)
    before = page.locator(".verdict").inner_text()
    page.locator("#micro_batch").focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("8")
    page.keyboard.press("Enter")
    page.locator(".verdict .figures", has_text="micro-batch 8").wait_for()
    planned(page)
    assert "micro_batch=8" in page.evaluate("location.hash")
    assert page.locator(".verdict").inner_text() != before


def test_a_link_holds_dimensions_of_your_own(page: Any) -> None:
    ask(page, model="llama-3.2-1b", layers="6", d_model="1024", train="lora", lora_rank="4")
    assert page.locator("#layers").input_value() == "6"
    assert page.locator("#lora_rank").is_visible()
    command = page.locator("#command").inner_text()
    assert "--model llama-3.2-1b --layers 6 --d-model 1024" in command
    assert "--lora-rank 4" in command
    assert "of them trained" in page.locator("#result .lede").first.inner_text()


def test_search_shows_every_way_and_one_can_be_picked(page: Any) -> None:
    ask(page, sharding="", gpu="H100")  # 1 choice of each sharding
    rows = page.locator("#rows tbody tr")
    assert rows.count() > 5
    best = page.locator(".verdict .winner").last.inner_text()
    pick = page.locator("#rows .pick", has_text="zero3").first
    pick.focus()
    page.keyboard.press("Enter")
    assert page.locator(".verdict .winner").last.inner_text() != best
    assert "--zero 3" in page.locator("#command").inner_text()
    chosen = page.locator(".verdict").inner_text()
    link = page.evaluate("location.hash")
    ask(page)
    page.evaluate(MOVE, link.removeprefix("#"))  # a link holds what was picked, too
    planned(page)
    assert page.locator(".verdict").inner_text() == chosen


def test_what_does_not_fit_has_no_command(page: Any) -> None:
    ask(page, model="13b", gpu="T4", precision="fp32")
    assert "It does not fit" in page.locator(".verdict").inner_text()
    assert page.locator("#command").count() == 0


def test_refusals_are_the_planners_sentence(page: Any) -> None:
    follow(page, gpus="0")
    alert = page.locator(".refused")
    alert.get_by_text("--gpus 0 must be at least 1").wait_for()
    follow(page, model=HOSTILE)
    alert.get_by_text("is unknown: the nearest names are").wait_for()
    assert HOSTILE in alert.inner_text()
    assert page.title() != "pwned"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_fits_the_screen(page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 850})
    page.emulate_media(color_scheme=scheme)
    ask(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = page.evaluate(
        "['color', 'backgroundColor'].map((name) => "
        "Number(getComputedStyle(document.body)[name].match(/[0-9]+/)[0]))"
    )
    assert (ink < paper) == (scheme == "light")


def test_it_answers_before_its_python_has_started(
    address: str, page: Any, complaints: list[str]
) -> None:
    tab = page.context.new_page()
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.add_init_script("window.Worker = class { postMessage() {} };")
    tab.goto(address)
    assert tab.locator("#starting").is_visible()
    assert "It fits" in tab.locator(".verdict").inner_text()
    assert "--model gpt2-xl" in tab.locator("#command").inner_text()
    assert tab.locator("#rows tbody tr").count() >= 10
    tab.locator("#rows .pick", has_text="zero3").first.click()
    assert "--zero 3" in tab.locator("#command").inner_text()
    tab.close()
    assert not page.locator("#starting").is_visible()
