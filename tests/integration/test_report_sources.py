"""What the report's notes say of a framework's code can be found there: each file, and each name in it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from train_ledger.plot.data import Results
from train_ledger.predict import predict
from train_ledger.report.expectation import expectation_table, explanations
from train_ledger.spec.config import load_comparison

ROOT = Path(__file__).parents[2]
SOURCE = re.compile(
    r"(megatron|deepspeed|torchtitan) ([a-z_0-9]+(?:/[a-z_0-9]+)*\.py), ([A-Za-z_0-9.]+)(?: and ([A-Za-z_]+))?"
)
#: Also with a second place of one package: `…, and runtime/x.py, name`.
ALSO = re.compile(r"and ([a-z_0-9]+(?:/[a-z_0-9]+)+\.py), ([A-Za-z_]+)")


@pytest.fixture(scope="module")
def paper() -> Results:
    """Today's prediction of the paper's comparison."""
    runs = load_comparison("paper", ROOT / "config").runs
    return Results("paper", (), {}, {name: predict(run).to_dict() for name, run in runs.items()})


def test_every_note_on_a_framework_names_code_that_is_there(paper: Results) -> None:
    found = 0
    for note in explanations(paper):
        if note.letter in "HJ":  # a sum over containers, whose rules are in the ledger, and the choice of a version
            continue
        places = [(m[1], m[2], name) for m in SOURCE.finditer(note.text) for name in m.groups()[2:] if name]
        places += [(places[0][0], m[1], m[2]) for m in ALSO.finditer(note.text)]
        assert places, note.letter
        for package, file, name in places:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            text = next(Path(p) / file for p in spec.submodule_search_locations or ()).read_text(encoding="utf-8")
            for part in re.sub(r"\(.*", "", name).split("."):
                assert re.search(rf"\b{re.escape(part)}\b", text), (note.letter, file, part)
            found += 1
    assert found >= 9


def test_every_difference_has_a_note_or_is_rounding(paper: Results) -> None:
    letters = {note.letter for note in explanations(paper)}
    rows = expectation_table(paper).rows
    assert len(rows) == 18
    for row in rows:
        assert row["why"] == "rounding" or set(row["why"].split(", ")) <= letters, row
        assert row["why"], row
