"""What the page says: of agreement and differences, hostile names, one run and many, stages that did not run."""

from __future__ import annotations

import csv
import html
import itertools
import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_results import RUNS, make_paper, make_parity, make_results, on_gpu, restamp

from train_ledger.cli import main
from train_ledger.plot.data import read_results
from train_ledger.plot.make import make_figures
from train_ledger.report.answers import verdict
from train_ledger.report.build import build_report
from train_ledger.report.gpu_tables import evidence_table
from train_ledger.report.tables import Column, Table, latex, raw, show, to_csv, to_latex
from train_ledger.spec.errors import DataError

HOSTILE = (
    '<script>alert("x")</script> & \' " $100% \\input{x} `rm -rf ~` {{ 7*7 }} --> ]]> \u202e \x07' + "very-long" * 40
)


class Page(HTMLParser):
    """Text of the page and the elements in it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def build(results: Path, paper: Path | None = None, *, figures: bool = True) -> Page:
    if figures:
        make_figures(results, paper)
    return Page(build_report(results, paper).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    folder = make_results(tmp_path_factory.mktemp("whole") / "laptop")
    make_parity(folder)
    return folder, build(folder, make_paper(folder.parent / "paper"))


def test_verdict_and_answer(whole):
    text = whole[1].text
    assert "✓ all 4 runs, 32 ranks: 0 bytes, 0 calls unexplained" in text
    assert "✗" not in text
    held = "whole, in bfloat16, in a buffer that stays allocated: on ranks 0-3. They hold equal copies."
    assert held in text
    assert "its bfloat16 shard (1/8 of the matrix) stays in the flat param container on each rank" in text
    assert "1/8 of the matrix each on ranks 0-7, in that order (main_param, float32)" in text
    assert "1/4 of the matrix each on ranks 0, 2, 4, 6 and again on ranks 1, 3, 5, 7, in that order" in text
    assert "(param, float32, the weight itself)" in text
    assert "torchtitan-fsdp4-tp2, torchtitan-fsdp4-tp2-matched" in text  # runs of one answer share a row
    assert text.index(held) < text.index("Figure 1.")  # the answer comes before all else


def test_parity_is_told(whole):
    text = whole[1].text
    assert "Verdict over 3 steps: equal" in text
    assert "differ by at most 2.00e-05 of themselves" in text
    assert "what is below 1e-07 is drawn there" in text
    assert "All began with the same weights" in text


def test_every_figure_is_there_with_words_for_those_who_cannot_see(whole):
    folder, page = whole
    listed = json.loads((folder / "figures" / "figures.json").read_text())["figures"]
    drawings = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(listed) == len(drawings) >= 6
    for figure, drawing in zip(
        sorted(listed, key=lambda f: f["alt"]), sorted(drawings, key=lambda d: d["aria-label"] or ""), strict=True
    ):
        assert drawing["role"] == "img"
        assert drawing["aria-label"] == figure["alt"]
        assert len(figure["alt"]) > 60
        assert "Source" in figure["caption"]
        assert (folder / "figures" / f"{figure['name']}.pdf").read_bytes().startswith(b"%PDF")


def test_figures_are_numbered_as_they_stand(whole):
    numbers = [int(n) for n in re.findall(r"Figure (\d+)\. ", whole[1].text)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_ids_are_unique_and_links_lead_somewhere(whole):
    ids = [attrs["id"] for _, attrs in whole[1].tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [str(attrs["href"])[1:] for tag, attrs in whole[1].tags if tag == "a"]
    assert set(links) <= set(ids)
    uses = [str(a.get("xlink:href") or a.get("href"))[1:] for tag, a in whole[1].tags if tag == "use"]
    assert set(uses) <= set(ids)


def test_headings_go_down_one_at_a_time(whole):
    levels = [int(tag[1]) for tag, _ in whole[1].tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_numbers_are_the_same_in_page_csv_and_latex(whole):
    folder, page = whole
    with (folder / "tables" / "memory.csv").open(encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    tex = (folder / "tables" / "memory.tex").read_text(encoding="utf-8")
    assert len(rows) > 20
    for row in rows:
        printed = f"{int(row['predicted_bytes']):,}"
        assert printed in page.text
        assert printed in tex
    with (folder / "tables" / "expectation.csv").open(encoding="utf-8") as f:
        for row in csv.DictReader(f):
            assert f"{float(row['predicted']):,.3f}" in page.text


def test_every_latex_table_is_well_formed(whole, tmp_path):
    files = sorted(whole[0].glob("tables/*.tex"))
    assert len(files) >= 10
    for file in files:
        check_latex(file.read_text(encoding="utf-8"))
    if shutil.which("pdflatex"):  # TeX is too large to ask for; where it is at hand, it has the last word
        compile_latex(files, tmp_path)


def compile_latex(files: list[Path], folder: Path) -> None:
    """All tables in one minimal document."""
    packages = r"\usepackage[T1]{fontenc}\usepackage{array,booktabs,longtable,textcomp}"
    inputs = "".join(rf"\input{{{f}}}" + "\n" for f in files)
    document = rf"\documentclass{{article}}{packages}\begin{{document}}\tiny {inputs}\end{{document}}"
    (folder / "tables.tex").write_text(document, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "tables.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (folder / "tables.pdf").is_file()


def check_latex(text: str) -> None:
    """Braces pair, every row has a cell a column, and no command is left but those that the writer uses."""
    assert text.isascii()
    depth = 0
    for c in re.sub(r"\\[{}%&$#_\\]", "", text):
        depth += {"{": 1, "}": -1}.get(c, 0)
        assert depth >= 0
    assert depth == 0
    assert text.count(r"\begin{longtable}") == text.count(r"\end{longtable}") == 1
    first = next(line for line in text.splitlines() if line.startswith(r"\begin{longtable}"))
    paragraph = r">\{\\raggedright\\arraybackslash\}p\{[0-9.]+\\linewidth\}"
    align = re.fullmatch(rf"\\begin\{{longtable\}}\{{((?:l|r|{paragraph})+)\}}", first)
    assert align
    columns = re.sub(paragraph, "p", align[1])
    body = text[text.index(r"\endfoot") :]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert rows
    for line in rows:
        assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1
        assert not re.search(r"(?<!\\)[%#]", line)
    known = {
        *("begin", "end", "caption", "label", "toprule", "midrule", "bottomrule", "endfirsthead", "endhead", "endfoot"),
        *("textbf", "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar"),
        *("textquotedbl", "textquotesingle", "textasciigrave", "allowbreak", "ldots"),
        *("raggedright", "arraybackslash", "linewidth", "times", "approx", "rightarrow", "frac", "cdot", "infty"),
    }
    assert set(re.findall(r"\\([a-zA-Z]+)", text)) <= known


def test_differences_are_red_with_their_cause(tmp_path):
    def spoil(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        if prediction["framework"] == "deepspeed":
            ranks[3]["census"]["containers"][5]["bytes"] *= 2
            ranks[4]["collectives"][0]["count"] *= 2

    folder = make_results(tmp_path / "laptop", change=spoil)
    page = build(folder, figures=False)
    assert "✗ all 4 runs, 32 ranks: 40,000 bytes, 60 calls unexplained" in page.text
    assert "held twice" in page.text
    assert "micro-batches (gradient accumulation)" in page.text
    reds = [attrs for _, attrs in page.tags if "off" in (attrs.get("class") or "").split()]
    assert len(reds) == 2  # the row, and the sum of its run


def test_hostile_names_are_shown_and_do_nothing(tmp_path):
    def spoil(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        prediction["groups"][0]["name"] = HOSTILE
        for ledger in prediction["ranks"]:
            ledger["containers"][0]["name"] = HOSTILE
            ledger["containers"][0]["rule"] = HOSTILE
            ledger["collectives"][-1]["group"] = HOSTILE
            ledger["collectives"][-1]["component"] = HOSTILE
        for r in ranks:
            r["census"]["containers"][0]["name"] = HOSTILE
            r["groups"][0]["name"] = HOSTILE
            r["collectives"][0]["site"] = HOSTILE
            r["versions"]["python"] = HOSTILE
            r["host"]["machine"] = HOSTILE
            if r["lifeline"]:
                r["lifeline"]["weight"] = HOSTILE
                for e in r["lifeline"]["events"]:
                    e["master"]["name"] = HOSTILE

    runs = {"megatron-tp2-pp2-dp2": "megatron", HOSTILE: "deepspeed"}

    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        if prediction["framework"] == "megatron":
            spoil(prediction, ranks)

    folder = make_results(tmp_path / "hostile", runs, change)
    page = build(folder)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [attrs for _, attrs in page.tags if any(k.startswith("on") for k in attrs)]
    assert '<script>alert("x")</script>' in page.text  # as words
    assert "49" not in re.findall(r"`rm -rf ~` (\S+)", page.text)
    for file in folder.glob("tables/*.tex"):
        check_latex(file.read_text(encoding="utf-8"))


def test_a_comparison_of_one_run(tmp_path):
    folder = make_results(tmp_path / "one", {"deepspeed-zero3-dp8": "deepspeed"})
    assert main(["report", str(folder), "--strict"]) == 0
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert "✓ 1 run, 8 ranks: 0 bytes, 0 calls unexplained" in page.text


def test_strict_fails_after_the_page_is_made(tmp_path):
    def spoil(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        ranks[0]["coords"]["dp"] = 5

    folder = make_results(tmp_path / "one", {"run": "deepspeed"}, spoil)
    assert main(["report", str(folder), "--strict"]) == 1
    assert "1 coordinate or group differ" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_comparison_of_sixty_runs(tmp_path):
    names = list(RUNS.values())
    folder = make_results(tmp_path / "many", {f"run-{i:02d}": names[i % 4] for i in range(60)})
    began = time.process_time()
    page = build(folder)
    assert time.process_time() - began < 60
    assert "✓ all 60 runs, 480 ranks: 0 bytes, 0 calls unexplained" in page.text
    assert "run-59" in page.text
    with (folder / "tables" / "ledger.csv").open(encoding="utf-8") as f:
        assert sum(1 for _ in f) > 8000  # the file keeps every rank, though the page tells ranks that are alike once


def test_only_a_prediction(tmp_path):
    folder = make_results(tmp_path / "laptop")
    for file in sorted(folder.glob("reconcile/*")):
        file.unlink()
    page = build(folder)
    assert "4 runs predicted, nothing measured" in page.text
    assert "Not done yet, and so not shown: reconcile" in page.text
    assert "93,184" in page.text


def test_no_figures(tmp_path):
    folder = make_results(tmp_path / "laptop")
    page = Page(build_report(folder).read_text(encoding="utf-8"))
    assert "svg" not in {tag for tag, _ in page.tags}


def test_losses_that_are_not_there(tmp_path):
    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        for r in ranks:
            for s in r["steps"]:
                s["loss"] = s["grad_norm"] = None

    page = build(make_results(tmp_path / "laptop", {"run": "deepspeed"}, change))
    assert "Loss of every step" not in page.text


def test_nan_in_a_table_is_a_dash(tmp_path):
    folder = make_results(tmp_path / "laptop", {"run": "deepspeed"})
    steps = folder / "reconcile" / "steps.csv"
    steps.write_text(steps.read_text().replace("6.4,", "nan,"))
    restamp(folder / "reconcile")
    page = build(folder)
    assert "6.300000" in page.text
    assert "nan" not in page.text.lower().split()


@pytest.mark.parametrize("name", ["resident.csv", "collectives.csv", "steps.csv", "runs.json"])
def test_damaged_files_are_one_clear_error(tmp_path, name, capsys):
    folder = make_results(tmp_path / "laptop")
    file = folder / "reconcile" / name
    file.write_bytes(file.read_bytes()[: 30 if name.endswith("csv") else 100])
    with pytest.raises(DataError) as e:
        read_results(folder)
    assert Path(str(e.value.file)).name == name
    assert main(["report", str(folder)]) == 2
    assert name in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("name", ["resident.csv", "layout.csv", "peaks.csv"])
def test_a_table_that_is_not_the_one_that_was_written(tmp_path, name, capsys):
    folder = make_results(tmp_path / "one", {"run": "deepspeed"}, on_gpu)
    file = folder / "reconcile" / name
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))  # whole rows are gone: complete CSV, and all that is left is exact
    assert main(["report", str(folder), "--strict"]) == 2
    assert f"{file}: has {len(lines) - 2} rows, runs.json says {len(lines) - 1}" in capsys.readouterr().err
    file.write_text("".join(lines).replace("0", "1"))
    with pytest.raises(DataError, match="other bytes than were written") as e:
        read_results(folder)
    assert e.value.file == file


def test_tables_that_runs_json_does_not_know(tmp_path):
    folder = make_results(tmp_path / "one", {"run": "deepspeed"})
    file = folder / "reconcile" / "runs.json"
    data = json.loads(file.read_text())
    del data["files"]
    file.write_text(json.dumps(data))
    with pytest.raises(DataError) as e:
        read_results(folder)
    assert (e.value.file, e.value.key) == (file, "files")


def test_strict_wants_a_measurement(tmp_path, capsys):
    folder = make_paper(tmp_path / "paper")
    assert main(["report", str(folder), "--strict"]) == 1
    assert "4 runs predicted, nothing measured" in (folder / "report.html").read_text(encoding="utf-8")
    assert "nothing was measured" in capsys.readouterr().err


def test_an_empty_folder_is_no_report(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path}: holds no results" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_bytes_left_over_are_in_the_verdict(tmp_path):
    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        on_gpu(prediction, ranks)
        ranks[3]["census"]["other"] = [{"dtype": "int64", "shape": [3], "bytes": 24, "count": 1, "device": "cuda:0"}]

    results = read_results(make_results(tmp_path / "x", {"run": "deepspeed"}, change))
    found = {r["ranks"]: (r["left_bytes"], r["verdict"]) for r in evidence_table([results]).rows}
    assert found == {"0-2, 4-7": (0, "exact"), "3": (24, "exact but for 24 B that are not the framework's")}


def test_verdict_counts_what_is_missing(tmp_path):
    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        ranks[0]["collectives"] = ranks[0]["collectives"][1:]

    results = read_results(make_results(tmp_path / "x", {"r": "megatron"}, change))
    assert verdict(results).text == "1 run, 8 ranks: 0 bytes, 104 calls unexplained"


def test_cells():
    assert show("bytes", 1234567) == "1,234,567"
    assert raw("bytes", 1234567) == "1234567"
    assert show("gb", 4.4956) == raw("gb", 4.4956) == "4.496"
    assert show("loss", float("nan")) == "–"
    assert raw("loss", float("nan")) == ""
    assert show("percent", -0.04) == "-0.0"
    assert show("ratio", float("inf")) == "∞"
    table = Table(
        "t", "c", [Column("a", "a"), Column("n", "n", "bytes")], [{"a": "=1+1", "n": 5}, {"a": "[x]", "n": None}]
    )
    assert to_csv(table) == "a,n\n'=1+1,5\n[x],\n"
    check_latex(to_latex(table))
    assert latex("a_b[1]") == r"a\_\allowbreak{}b{[}1]"
    assert html.escape(HOSTILE) != HOSTILE
