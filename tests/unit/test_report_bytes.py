"""The same input gives the same bytes, on another day, in another folder, with another locale and thread count."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_results import make_paper, make_results

HERE = Path(__file__).parent
SUFFIXES = {".html", ".svg", ".pdf", ".csv", ".tex", ".json"}


def build(results: Path, paper: Path, cwd: Path, epoch_s: int, **environment: str) -> None:
    subprocess.run(
        [sys.executable, str(HERE / "build_elsewhere.py"), str(results), str(paper), str(epoch_s)],
        cwd=cwd,
        env={**os.environ, **environment},
        check=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    one = tmp_path_factory.mktemp("one") / "laptop"
    other = tmp_path_factory.mktemp("another folder, deeper") / "down" / "laptop"
    make_results(one)
    paper = make_paper(one.parent / "paper")
    shutil.copytree(one, other)
    build(one, paper, one.parent, 946684800, LC_ALL="C.UTF-8", OMP_NUM_THREADS="1", TZ="UTC", PYTHONHASHSEED="1")
    elsewhere = {"LC_ALL": "de_DE.UTF-8" if _has_german() else "C", "TZ": "Pacific/Kiritimati"}
    build(other, paper, other, 4102444800, OMP_NUM_THREADS="3", PYTHONHASHSEED="77", **elsewhere)
    return one, other


def _has_german() -> bool:
    done = subprocess.run(["locale", "-a"], capture_output=True, text=True, check=False)
    return "de_DE.utf8" in done.stdout


def made(folder: Path) -> dict[str, bytes]:
    files = [folder / "report.html", *folder.glob("figures/*"), *folder.glob("tables/*")]
    assert {f.suffix for f in files} == SUFFIXES
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


def test_bytes_do_not_depend_on_day_place_locale_or_threads(twice):
    one, other = (made(folder) for folder in twice)
    assert sorted(one) == sorted(other)
    assert [name for name in one if one[name] != other[name]] == []


def test_no_date_and_no_path_is_in_it(twice):
    for folder in twice:
        for name, content in made(folder).items():
            assert str(folder).encode() not in content, name
            assert str(folder.parent).encode() not in content, name
            for year in (b"2000-01", b"2100-01", b"D:2000", b"D:2100"):
                assert year not in content, name


def test_page_asks_for_nothing_and_is_small(twice):
    page = (twice[0] / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) <= 3_000_000
    body = page[page.index("<body") : page.index('<script type="module">')]
    assert not re.findall(r"""(?:src|href|srcset|action)\s*=\s*["'](?!#)[^"']""", body)
    assert "@import" not in page[: page.index("<body")]
    assert "default-src 'none'" in page
