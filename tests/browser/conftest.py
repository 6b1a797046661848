"""Tests in real headless Chromium. In CI its absence fails; on a person's machine the tests are named as not run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tests" / "unit"))

IN_CI = bool(os.environ.get("CI") or os.environ.get("TRAIN_LEDGER_CI"))
PROGRAMS = ("chromium", "chromedriver")
AXE = "4.14.1"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    *("--disable-default-apps", "--disable-extensions", "--force-device-scale-factor=1", "--lang=en"),
)

NOT_RUN: list[str] = []


def missing(programs: tuple[str, ...]) -> list[str]:
    """Programs that are not on PATH."""
    return [p for p in programs if shutil.which(p) is None]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Outside of CI, tests whose programs are not installed are taken out and named at the end."""
    if IN_CI:
        return
    gone, kept = [], []
    for item in items:
        needs = ()
        if HERE in Path(item.path).parents:
            needs = (*PROGRAMS, "npm") if "axe" in getattr(item, "fixturenames", ()) else PROGRAMS
        (gone if missing(needs) else kept).append(item)
    if gone:
        NOT_RUN.extend(item.nodeid for item in gone)
        config.hook.pytest_deselected(items=gone)
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names what was not run, and what it takes to run it."""
    if NOT_RUN:
        terminalreporter.section("not run: needs chromium, chromedriver and npm")
        for name in NOT_RUN:
            terminalreporter.line(name)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Chromium with its own empty profile; performance and console logs are kept."""
    gone = missing(PROGRAMS)
    assert not gone, f"{', '.join(gone)} must be installed in CI"
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    driver.set_page_load_timeout(120)
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture
def show(browser: webdriver.Chrome) -> Callable[[Path, int], webdriver.Chrome]:
    """Opens a page at a width in CSS pixels, as a phone does below 600, with empty logs."""

    def open_page(page: Path, width: int) -> webdriver.Chrome:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get("about:blank")
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.get(page.as_uri())
        return browser

    return open_page


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of four runs with all sections that made-up data can fill."""
    from made_results import make_paper, make_parity, make_results, on_gpu

    from train_ledger.plot.make import make_figures
    from train_ledger.report.build import build_report

    folder = make_results(tmp_path_factory.mktemp("results") / "laptop")
    make_parity(folder)
    paper = make_paper(folder.parent / "paper")
    evidence = [make_results(folder.parent / "llama_8xh200", change=on_gpu)]
    make_figures(folder, paper, evidence)
    return build_report(folder, paper, evidence_dirs=evidence)


@pytest.fixture(scope="session")
def axe() -> str:
    """The accessibility checker axe-core, from npm, kept under build/."""
    folder = ROOT / "build" / "browser"
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file() or f"v{AXE}" not in script.read_text(encoding="utf-8")[:200]:
        folder.mkdir(parents=True, exist_ok=True)
        npm = shutil.which("npm")
        assert npm, "npm must be installed in CI"
        subprocess.run(
            [npm, "install", "--prefix", str(folder), "--no-save", "--no-audit", "--no-fund", f"axe-core@{AXE}"],
            check=True,
            capture_output=True,
            timeout=300,
        )
    return script.read_text(encoding="utf-8")
