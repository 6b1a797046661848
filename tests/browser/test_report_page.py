"""The report in real headless Chromium: no requests, every figure seen, sorting, filtering, printing, accessibility."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

pytestmark = pytest.mark.browser

Show = Callable[[Path, int], webdriver.Chrome]


def requests(browser: webdriver.Chrome) -> list[str]:
    """Addresses that the page asked for, from the browser's own log."""
    found = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
    return found


def test_no_request_and_no_console_message(show: Show, report: Path) -> None:
    browser = show(report, 1280)
    assert browser.execute_script("return document.querySelectorAll('div.dt-container').length") > 3  # scripts ran
    outside = [url for url in requests(browser) if url != report.as_uri() and not url.startswith(("data:", "about:"))]
    assert outside == []
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_can_be_seen(show: Show, report: Path, width: int) -> None:
    browser = show(report, width)
    listed = json.loads((report.parent / "figures" / "figures.json").read_text())["figures"]
    assert len(listed) >= 6
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width  # the page does not run over
    for figure in listed:
        element = browser.find_element(By.CSS_SELECTOR, f"#figure-{figure['name']} svg")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        box = element.rect
        assert box["width"] >= min(width - 60, 500)
        assert box["height"] >= 100
        assert element.is_displayed()
        # A blank drawing compresses to next to nothing.
        script = "const b = arguments[0].getBoundingClientRect(); return [b.left + scrollX, b.top + scrollY]"
        left, top = browser.execute_script(script, element)
        clip = {"x": left, "y": top, "width": min(box["width"], width), "height": box["height"], "scale": 1}
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        assert colours(base64.b64decode(shot["data"])) > 8


def test_the_first_screen_answers_the_question(show: Show, report: Path) -> None:
    """Without scrolling: the question, both verdicts, and for each framework where, when and whose master."""
    browser = show(report, 1280)
    script = "return arguments[0].getBoundingClientRect().bottom"
    rows = browser.find_elements(By.CSS_SELECTOR, "#table-answer tbody tr")
    assert len(rows) == 3
    for element in (*browser.find_elements(By.CSS_SELECTOR, "h1, .verdict-line"), *rows):
        assert browser.execute_script(script, element) <= 900, element.text
    heads_seen = heads(browser, "answer")
    assert {"made whole (of its tensor-parallel part)", "released", "its fp32 master"} <= set(heads_seen)


def test_no_table_is_wider_than_the_page(show: Show, report: Path) -> None:
    browser = show(report, 1280)
    script = (
        "return [...document.querySelectorAll('table.data')]"
        ".filter(t => t.offsetWidth > t.closest('.scroll').clientWidth).map(t => t.id)"
    )
    assert browser.execute_script(script) == []


def test_on_a_phone_the_answer_is_read_without_scrolling_sideways(show: Show, report: Path) -> None:
    browser = show(report, 390)
    script = (
        "return [...document.querySelectorAll('table.prose td')]"
        ".map(d => [d.dataset.label, d.getBoundingClientRect().left, d.getBoundingClientRect().right])"
    )
    cells = browser.execute_script(script)
    assert len(cells) > 20
    for label, left, right in cells:
        assert label
        assert 0 <= left < right <= 390


def colours(data: bytes) -> int:
    """How many different bytes the rows of a PNG hold: few if it is blank."""
    at, packed = 8, b""
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += size + 12
    return len(set(zlib.decompress(packed)))


def rows(browser: webdriver.Chrome, table: str, column: int) -> list[str]:
    """What a column of a table shows at the moment, read in one call."""
    script = (
        "return [...document.querySelectorAll(`#table-${arguments[0]} tbody tr`)]"
        ".map(r => r.cells[arguments[1]].innerText.trim())"
    )
    return list(browser.execute_script(script, table, column))


def heads(browser: webdriver.Chrome, table: str) -> list[str]:
    script = "return [...document.querySelectorAll(`#table-${arguments[0]} thead th`)].map(h => h.innerText.trim())"
    return list(browser.execute_script(script, table))


def test_sorting_by_number_and_back(show: Show, report: Path) -> None:
    browser = show(report, 1280)
    column = heads(browser, "memory").index("predicted [B]")
    head = browser.find_elements(By.CSS_SELECTOR, "#table-memory thead th")[column]
    before = rows(browser, "memory", column)
    browser.execute_script("arguments[0].click()", head)
    up = [int(cell.replace(",", "")) for cell in rows(browser, "memory", column)]
    assert up == sorted(up)
    browser.execute_script("arguments[0].click()", head)
    down = [int(cell.replace(",", "")) for cell in rows(browser, "memory", column)]
    assert down == sorted(down, reverse=True)
    assert down != [int(cell.replace(",", "")) for cell in before]


def test_searching_and_filtering_go_down_to_one_container(show: Show, report: Path) -> None:
    browser = show(report, 1280)
    names = heads(browser, "ledger")
    choices = {label.text.split("\n")[0]: label for label in browser.find_elements(By.CSS_SELECTOR, "#filters label")}
    assert {"run", "rank", "what", "name", "type", "verdict"} <= set(choices)

    def choose(name: str, value: str) -> None:
        Select(choices[name].find_element(By.TAG_NAME, "select")).select_by_visible_text(value)

    choose("run", "deepspeed-zero3-dp8")
    choose("rank", "5")
    choose("what", "container")
    assert set(rows(browser, "ledger", names.index("run"))) == {"deepspeed-zero3-dp8"}
    assert set(rows(browser, "ledger", names.index("rank"))) == {"5"}
    choose("name", "reduce_bucket")
    assert rows(browser, "ledger", names.index("predicted [B]")) == ["40,000"]
    choose("name", "all")
    choose("what", "call site")
    sites = rows(browser, "ledger", names.index("rule, ranks or call site"))
    assert sites
    assert all(site.startswith("deepspeed/") for site in sites)
    box = browser.find_element(By.CSS_SELECTOR, "#table-memory_wrapper .dt-search input")
    box.send_keys("exp_avg_sq")
    found = rows(browser, "memory", heads(browser, "memory").index("container"))
    assert set(found) == {"exp_avg_sq"}


def test_the_pointer_tells_what_a_bar_is(show: Show, report: Path) -> None:
    browser = show(report, 1280)
    tips = browser.execute_script(
        "return [...document.querySelectorAll('#figure-resident g > title')].map(t => t.textContent)"
    )
    assert "measured: reduce_bucket, rank 5, 40,000 B" in tips
    assert len(tips) > 200


def test_without_scripts_every_row_is_in_the_page(show: Show, report: Path) -> None:
    browser = show(report, 1280)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(report.as_uri())
        n_rows = len(browser.find_elements(By.CSS_SELECTOR, "#table-ledger tbody tr"))
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    with (report.parent / "tables" / "ledger.csv").open(encoding="utf-8") as f:
        assert n_rows == sum(1 for _ in f) - 1


def test_printing_gives_whole_figures_on_pages(show: Show, report: Path) -> None:
    browser = show(report, 1280)
    printed = base64.b64decode(
        browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True})["data"]
    )
    assert printed.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", printed))
    assert 5 <= pages <= 40
    # On paper each figure is no taller than a page and is not broken over two.
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        script = (
            "return [...document.querySelectorAll('figure')].map(f => "
            "[f.id, f.querySelector('svg').getBoundingClientRect().height, getComputedStyle(f).breakInside])"
        )
        page_px = (297 - 2 * 14) / 25.4 * 96
        for name, height, inside in browser.execute_script(script):
            assert height <= page_px, name
            assert inside == "avoid", name
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.parametrize("width", [1280, 390])
def test_accessibility(show: Show, report: Path, axe: str, width: int) -> None:
    browser = show(report, width)
    browser.execute_script(axe)
    result = browser.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "const failed = e => done({violations: [{id: String(e), nodes: []}]});"
        "axe.run(document, {resultTypes: ['violations']}).then(done, failed)"
    )
    problems = [
        f"{v['id']}: {v.get('help', '')}: {[n['html'][:160] for n in v['nodes'][:3]]}" for v in result["violations"]
    ]
    assert problems == []
