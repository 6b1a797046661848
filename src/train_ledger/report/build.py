"""Builds `report.html` and `tables/` of a results folder. Equal input gives equal bytes on any day in any place."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from train_ledger import __version__
from train_ledger.plot.data import Results, read_results
from train_ledger.plot.make import FIGURES_SCHEMA
from train_ledger.spec.errors import DataError
from train_ledger.spec.io import read_json, write_text

from . import answers, expectation, gpu_tables, ledger_tables, provenance, run_tables
from .svg import inline_svg
from .tables import Table, show, to_csv, to_latex
from .words import GLOSSARY

TEMPLATES = Path(__file__).parent / "templates"

#: More rows than this in the big table, and ranks that are alike share a row on the page (the CSV has them all).
MAX_LEDGER_ROWS = 6000


def build_report(
    results_dir: str | Path,
    paper_dir: str | Path | None = None,
    source: provenance.Source | None = None,
    evidence_dirs: Sequence[str | Path] = (),
) -> Path:
    """Writes `<results_dir>/report.html`, and every table of it to `<results_dir>/tables` as CSV and LaTeX.

    Args:
        results_dir: `results/<comparison>`; figures are those that the plot stage left there.
        paper_dir: results folder of the comparison of which only the prediction is shown beside it.
        source: the checkout, for the provenance section.
        evidence_dirs: results folders of reconciled measurements on GPUs that are shown beside it.

    Returns:
        The page.

    Raises:
        DataError: a file of a results folder is not as its stage writes it.
    """
    folder = Path(results_dir)
    results = read_results(folder)
    paper = read_results(paper_dir) if paper_dir else None
    evidence = [read_results(each) for each in evidence_dirs]
    tables = all_tables(results, paper, evidence)
    for table in tables.values():
        write_text(folder / "tables" / f"{table.name}.csv", to_csv(table))
        if table.name != "ledger":  # a table of thousands of rows is no table of a paper
            write_text(folder / "tables" / f"{table.name}.tex", to_latex(table))
    page = render(results, paper, evidence, tables, read_figures(folder / "figures"), source or provenance.Source())
    write_text(folder / "report.html", page)
    return folder / "report.html"


def all_tables(results: Results, paper: Results | None, evidence: Sequence[Results] = ()) -> dict[str, Table]:
    """Every table that has rows, by name."""
    sources = [results, *evidence]
    made = [
        answers.answer_table(results),
        answers.gpu_answer_table(evidence),
        answers.summary_table(results),
        ledger_tables.memory_table(results),
        ledger_tables.foreign_table(results),
        ledger_tables.traffic_table(results),
        run_tables.lifeline_table(results),
        run_tables.group_table(results),
        run_tables.schedule_table(results),
        run_tables.loss_table(results),
        run_tables.parity_table(results),
        ledger_tables.ledger_table(results),
        provenance.provenance_table(sources),
        gpu_tables.evidence_table(sources),
        gpu_tables.peak_table(sources),
        gpu_tables.time_table(sources),
        gpu_tables.nccl_table(sources),
    ]
    if paper is not None:
        made += [expectation.prediction_table(paper), expectation.expectation_table(paper)]
    return {t.name: t for t in made if t.rows}


def read_figures(folder: Path) -> dict[str, dict[str, Any]]:
    """The figures that the plot stage listed, by name, each with its SVG; none where the stage did not run."""
    listing = folder / "figures.json"
    if not listing.is_file():
        return {}
    data = read_json(listing, FIGURES_SCHEMA)
    out = {}
    for number, f in enumerate(data.get("figures", []), start=1):  # the number of the entry, for the errors
        if not isinstance(f, dict) or not {"name", "section", "title", "alt", "caption"} <= set(f):
            raise DataError("lacks its words", file=listing, key=f"figures[{number - 1}]")
        if not re.fullmatch(r"[a-z][a-z_]{0,40}", str(f["name"])):
            raise DataError(f"{str(f['name'])[:60]!r} is not a name", file=listing, key=f"figures[{number - 1}].name")
        svg = inline_svg(folder / f"{f['name']}.svg", f["name"], f["alt"], f.get("tips"))
        out[f["name"]] = {**f, "svg": svg}
    # Numbers follow the page, whatever the order of the list: the template is the one place that knows it.
    template = (TEMPLATES / "report.html.j2").read_text(encoding="utf-8")
    order = {name: at for at, name in enumerate(re.findall(r"figure\(figures, \"([a-z_]+)\"\)", template))}
    ordered = sorted(out, key=lambda name: order.get(name, len(order)))
    return {name: {**out[name], "number": number} for number, name in enumerate(ordered, start=1)}


def render(
    results: Results,
    paper: Results | None,
    evidence: Sequence[Results],
    tables: Mapping[str, Table],
    figures: Mapping[str, Mapping[str, Any]],
    source: provenance.Source,
) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda value, column: show(column.kind, value)
    script = f"{datatables_script()}\n{(TEMPLATES / 'page.js').read_text(encoding='utf-8')}"
    style = f"{package_file('dt_bundle.css')}\n{(TEMPLATES / 'style.css').read_text(encoding='utf-8')}"
    return environment.get_template("report.html.j2").render(
        results=results,
        paper=paper,
        tables={name: page_table(table) for name, table in tables.items()},
        figures=figures,
        question=answers.QUESTION,
        verdict=answers.verdict(results),
        explanations=expectation.explanations(paper) if paper else [],
        parity=results.parity.summary if results.parity else None,
        gpu_verdict=answers.gpu_verdict(evidence),
        evidence=evidence_sets(evidence),
        facts=provenance.facts([results, *evidence], source),
        glossary=GLOSSARY,
        version=__version__,
        commit=source.commit,
        style=Markup(style.replace("</", "<\\/")),
        script=Markup(f"\n{script}\n"),
        script_hash=base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode(),
    )


def evidence_sets(evidence: Sequence[Results]) -> list[dict[str, Any]]:
    """Measurements on GPUs by the set that they were kept in: what it says of itself, and verdicts of its folders."""
    sets: list[dict[str, Any]] = []
    for each in evidence:
        entry = next((s for s in sets if each.provenance and s["provenance"] == each.provenance), None)
        if entry is None:
            entry = {"provenance": each.provenance, "found": []}
            sets.append(entry)
        parity = each.parity.summary if each.parity else None
        entry["found"].append({"name": each.name, "verdict": answers.verdict(each), "parity": parity})
    return sets


def page_table(table: Table) -> Table:
    """The table as the page shows it: no column of causes where there are none; a very long ledger by kind of rank."""
    if table.name == "ledger" and len(table.rows) > MAX_LEDGER_ROWS:
        table = ledger_tables.merged_ledger(table)
    if table.name == "peaks":
        table = gpu_tables.large_peaks(table)
    return table.printed()


def package_file(name: str) -> str:
    """A file of DataTables as the package itables ships it."""
    import itables

    return (Path(itables.__file__).parent / "html" / name).read_text(encoding="utf-8")


def datatables_script() -> str:
    """DataTables as a module whose exports are constants of the page's own script.

    Raises:
        DataError: the bundle is not built as expected.
    """
    bundle = package_file("dt_bundle.js")
    exports = re.findall(r"export\{([^}]*)\};?", bundle)
    names = dict(reversed(pair.split(" as ")) for pair in exports[0].split(",")) if len(exports) == 1 else {}
    if "default" not in names:
        raise DataError("does not export DataTables once", file="itables/html/dt_bundle.js", key="export")
    bundle = re.sub(r"export\{[^}]*\};?", lambda _: f"const DataTable={names['default']};", bundle)
    # Nothing in a script element may look like its end or like a comment's beginning.
    return re.sub(r"<(?=!--|/?script)", r"\\x3C", bundle, flags=re.IGNORECASE)
