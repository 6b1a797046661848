"""What the documents say: the commands that they show are run or read, the figures that they print are recomputed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from test_cases_deepspeed import GIB, zero3_after_initialisation
from test_cases_megatron import CASES, WORKSPACE_BYTES, unnamed_bytes

from train_ledger import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "docs/predict.md", "docs/parity.md"]
#: Placeholders of the documents. A file that a reader has and we do not makes a command that is read and not run.
NAMES = {
    "RUN.yaml": "config/runs/megatron-tp2-pp2-dp2.yaml",
    "A.yaml": "config/runs/megatron-tp2-pp2-dp2.yaml",
    "B.yaml": "config/runs/torchtitan-fsdp4-tp2.yaml",
}
RUN = {"predict", "groups", "diff", "explain", "sweep", "export"}
THEIRS = {"--megatron-args", "--deepspeed", "--torchtitan"}


def commands() -> list[list[str]]:
    """The arguments of every `train-ledger` command that stands alone on a line."""
    shown = []
    for name in DOCUMENTS:
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            words = shlex.split(line, comments=True) if re.match(r"\s*(\.venv/bin/)?train-ledger ", line) else []
            if words:
                shown.append([NAMES.get(w, w) for w in words[1:]])
    return shown


@pytest.mark.parametrize("argv", commands(), ids=lambda a: " ".join(a)[:60])
def test_a_command_that_is_shown_works(argv, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    argv = [str(tmp_path) if word == "DIR" else word for word in argv]
    args = cli.parse(argv)
    if argv[0] not in RUN or THEIRS & set(argv):
        assert args.command == argv[0]
        return
    assert cli.main(argv) == 0
    assert capsys.readouterr().out


def test_the_documents_show_commands():
    assert {argv[0] for argv in commands()} >= {"check", "evidence", "launch", *RUN}


def _row(word: str) -> str:
    [row] = [line for line in (ROOT / "docs/cases.md").read_text(encoding="utf-8").splitlines() if word in line]
    return row


@pytest.mark.parametrize(
    ("case", "word"),
    [*zip(CASES, ["7B, TP4 DP2", "Engine | 581", "--transformer-impl local", "TP2 PP2 DP2, no dist"], strict=True)],
)
def test_figures_of_megatrons_ci_in_the_table(case, word):
    _, published, predicted, residual, *_ = [cell.strip() for cell in _row(word).strip("|").split("|")]
    unnamed = unnamed_bytes(case)
    assert published == f"{case.published_bytes:,} B"
    assert predicted == f"{case.published_bytes - unnamed:,} B"
    amount, percent = residual.split(", ")[0], residual.rsplit(", ", 1)[1]
    assert amount == f"+{unnamed:,} B"
    digits = len(percent.partition(".")[2]) - 1
    assert percent == f"{100 * unnamed / case.published_bytes:.{digits}f}%"
    containers = case.published_bytes - unnamed - case.workspaces * WORKSPACE_BYTES
    assert case.name.endswith("local") or f"{containers:,} B of containers" in _row(word)


def test_figures_of_zero3_in_the_table():
    explained, left_over = zero3_after_initialisation()
    assert f"| {explained / GIB:.2f} GiB | +{left_over / 1e6:.1f} MB, {100 * left_over / explained:.2f}% |" in _row(
        "6,858,007,633"
    )
