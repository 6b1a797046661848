"""The workflow on this machine with real frameworks, two ranks each: what is made again when, what a fault costs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from working_copy import WorkingCopy, clear_errors

pytestmark = pytest.mark.launch

LATER = {
    "Comparing what the runs of small trained",
    "Reconciling the runs of small",
    "Drawing the figures of small",
    "Writing the report of small",
    "Is every byte and every call of small explained?",
}
#: The stages after launch up to the verdict's tables; what tests of recovery ask for.
TABLES = "results/small/reconcile/differences.txt"


def chain(run: str) -> set[str]:
    """All that is made again when a run has changed."""
    return {
        f"Predicting {run} (small)",
        f"Training {run} (small)",
        f"Checking what the ranks of {run} wrote",
        *LATER,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> WorkingCopy:
    """A copy in which everything is made; tests that change it take a `copy`."""
    copy = WorkingCopy(tmp_path_factory.mktemp("workflow"), {"ds": 2, "mg": 2})
    code, out = copy.snakemake()
    assert code == 0, out
    return copy


@pytest.fixture
def copy(finished: WorkingCopy, tmp_path: Path) -> WorkingCopy:
    """A twin of the finished copy, times and Snakemake's records included."""
    shutil.copytree(finished.folder, tmp_path / "copy", symlinks=True)
    twin = object.__new__(WorkingCopy)
    twin.folder = tmp_path / "copy"
    return twin


def test_everything_is_made_and_reconciles(finished: WorkingCopy) -> None:
    """Report, verdict, and the raw data of both runs; nothing temporary is left."""
    assert "0 bytes, 0 calls unexplained" in finished.path("verdict.txt").read_text()
    assert finished.path("report.html").stat().st_size > 100_000
    for run in ("ds", "mg"):
        ranks = json.loads(finished.path(f"launch/{run}/run.json").read_text())["ranks"]
        assert [r["exit"] for r in ranks] == [0, 0]
    left = [p for p in finished.path("").rglob("*") if p.suffix == ".tmp" or p.name.startswith(".attempt")]
    assert not left


def test_snakemakes_own_report_has_each_figure_with_its_caption(finished: WorkingCopy, tmp_path: Path) -> None:
    """`snakemake --report`: figures under their titles, in a category, each with the caption of the page."""
    code, out = finished.snakemake("--report", str(tmp_path / "report.zip"))
    assert code == 0, out
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        names = archive.namelist()
        (page,) = [archive.read(n).decode() for n in names if n.endswith("/report.html") and "/data/" not in n]
    listed = json.loads(finished.path("figures/figures.json").read_text())["figures"]
    assert len(listed) >= 5
    for figure in listed:
        assert any(n.endswith(f"/{figure['name']}.svg") for n in names)
        for words in (figure["title"], figure["caption"]):
            # What is quoted or marked up is escaped in the page: the longest stretch without.
            assert max(re.split(r"[^A-Za-z ,.]", words), key=len).strip() in page, figure["name"]
    assert '"Figures"' in page
    assert any(n.endswith("/report.html") and "/data/" in n for n in names)


def test_the_same_again_does_nothing(finished: WorkingCopy) -> None:
    """Nor does a comment, or a file that was only touched."""
    began = time.monotonic()
    code, out = finished.snakemake()
    print(f"no-change run: {time.monotonic() - began:.1f} s")
    assert code == 0
    assert "Nothing to be done" in out
    run = finished.folder / "config/runs/ds.yaml"
    run.write_text(run.read_text() + "# a comment\n")
    os.utime(finished.folder / "config/comparisons/small.yaml")
    assert finished.planned() == set()


def test_editing_one_run_makes_its_chain_again(copy: WorkingCopy) -> None:
    """And not the other run's; the old measurement is set aside, not lost."""
    copy.edit("config/comparisons/small.yaml", r"^  ds:$", "  ds: {steps: 3}")
    assert copy.planned() - {"Training the plain reference of small"} == chain("ds")
    before = copy.path("launch/mg/run.json").stat().st_mtime_ns
    old = copy.path("launch/ds/rank0.json").read_text()
    code, out = copy.snakemake()
    assert code == 0, out
    assert copy.path("launch/mg/run.json").stat().st_mtime_ns == before
    assert len(json.loads(copy.path("launch/ds/rank0.json").read_text())["steps"]) == 3
    assert copy.path("unusable/launch/ds.1/rank0.json").read_text() == old


def test_newer_code_makes_what_it_writes_again(copy: WorkingCopy) -> None:
    """As after `git pull`: figures and page for a plot module, all but the launches for a rule of the prediction."""
    source = (copy.folder / "src").resolve()
    (copy.folder / "src").unlink()
    shutil.copytree(source, copy.folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    assert copy.planned() == set()
    style = copy.folder / "src/train_ledger/plot/style.py"
    style.write_text(style.read_text() + "# newer\n")
    written = {"Drawing the figures of small", "Writing the report of small"}
    verdict = {"Is every byte and every call of small explained?"}
    assert copy.planned() == written | verdict
    rules = copy.folder / "src/train_ledger/predict/frameworks/deepspeed.py"
    rules.write_text(rules.read_text() + "# newer\n")
    predicted = {"Predicting ds (small)", "Predicting mg (small)", "Reconciling the runs of small"}
    assert copy.planned() == written | verdict | predicted


def test_a_changed_pin_makes_that_framework_again(copy: WorkingCopy) -> None:
    """Only launches depend on the environment; order and comments of its file do not matter."""
    copy.edit("envs/megatron.yaml", r"^      - numpy==.*$", "      - numpy==1.2.3")
    assert copy.planned() == chain("mg") - {"Predicting mg (small)"}
    copy.edit("envs/deepspeed.yaml", r"^channels:$", "# a comment\nchannels:")
    assert copy.planned() == chain("mg") - {"Predicting mg (small)"}


def damage_rank_missing(copy: WorkingCopy) -> str:
    copy.path("launch/ds/rank1.json").unlink()
    return "launch/ds/rank1.json: cannot be read"


def damage_rank_truncated(copy: WorkingCopy) -> str:
    file = copy.path("launch/ds/rank0.json")
    file.write_text(file.read_text()[:1000])
    return "launch/ds/rank0.json: is not complete JSON"


def damage_table_truncated(copy: WorkingCopy) -> str:
    file = copy.path("probe/ds.parquet")
    file.write_bytes(file.read_bytes()[:1000])
    return "probe/ds.parquet"


def damage_prediction_truncated(copy: WorkingCopy) -> str:
    file = copy.path("predict/ds.json")
    file.write_text(file.read_text()[:1000])
    return "predict/ds.json: is not complete JSON"


@pytest.mark.parametrize(
    "damage",
    [damage_rank_missing, damage_rank_truncated, damage_table_truncated, damage_prediction_truncated],
    ids=lambda d: d.__name__.removeprefix("damage_"),
)
def test_damaged_file_is_one_clear_error_and_made_again(copy: WorkingCopy, damage: object) -> None:
    """The stage that cannot use it says so and sets it aside; the next run completes."""
    expected = damage(copy)  # type: ignore[operator]
    code, out = copy.snakemake(TABLES)
    assert code != 0
    assert expected in clear_errors(out)[0]
    assert "Traceback" not in out
    assert list(copy.path("unusable").rglob("ds*"))
    code, out = copy.snakemake(TABLES)
    assert code == 0, out
    assert "0 bytes, 0 calls unexplained" in copy.path("reconcile/differences.txt").read_text()


def test_what_is_removed_is_made_again(copy: WorkingCopy) -> None:
    """Though the page and the verdict are there. Removing a launch is how to ask for another measurement."""
    written = {"Writing the report of small", "Is every byte and every call of small explained?"}
    for gone, made in {
        "launch/ds": chain("ds") - {"Predicting ds (small)"},
        "reconcile/resident.csv": LATER - {"Comparing what the runs of small trained"},
        "tables": written,
    }.items():
        if gone == "tables":  # initial weights may go to save room: no launch starts again for them
            shutil.rmtree(copy.path("weights"))
        path = copy.path(gone)
        kept = path.rename(copy.folder / "kept")
        assert copy.planned() == made, gone
        kept.rename(path)


def test_a_page_made_by_hand_gives_way(copy: WorkingCopy) -> None:
    """Nothing of it is lost. Snakemake alone would see a newer page and keep it; of a figure it would see nothing."""
    page = copy.path("report.html")
    made = page.read_bytes()
    page.write_bytes(made + b"by hand")
    code, out = copy.snakemake("--dry-run")
    assert code == 0, out
    assert any("report.html is not as the workflow wrote it; a run sets" in line for line in clear_errors(out))
    code, out = copy.snakemake()
    assert code == 0, out
    assert page.read_bytes() == made
    assert copy.path("unusable/report.html.1").read_bytes() == made + b"by hand"


def test_a_world_that_this_machine_cannot_start(finished: WorkingCopy) -> None:
    """Is refused before the launches of another world are moved for it."""
    code, out = finished.snakemake("--config", "world=nccl", CUDA_VISIBLE_DEVICES="")
    assert code == 1
    said = "train-ledger: ds: world nccl needs 2 GPUs, this machine shows 0; nothing was started or moved"
    assert clear_errors(out) == [said]
    assert not finished.path("unusable").exists()


def test_two_stages_that_find_a_launch_damaged(copy: WorkingCopy) -> None:
    """One line each, whoever was first, and the launch is set aside once."""
    copy.path("launch/ds/run.json").write_text("{}\n")
    code, out = copy.snakemake()
    assert code == 1
    assert "Traceback" not in out
    last = "set aside as results/small/unusable/launch/ds.1; the next run makes it anew"
    assert {f"train-ledger {stage}: {last}" for stage in ("probe", "parity")} <= set(clear_errors(out)), out


def test_what_does_not_reconcile_fails_after_the_report(copy: WorkingCopy) -> None:
    """A prediction that is wrong by one element is shown in the report, and the run fails."""
    file = copy.path("predict/mg.json")
    data = json.loads(file.read_text())
    rank = data["ranks"][1]
    container = next(c for c in rank["containers"] if c["name"] == "exp_avg")
    container["numel"] += 1
    container["bytes"] += 4
    rank["resident_bytes"] += 4
    file.write_text(json.dumps(data))
    made = copy.path("report.html").stat().st_mtime_ns
    code, out = copy.snakemake()
    assert code != 0
    assert any("4 bytes" in line and "unexplained" in line for line in clear_errors(out)), out
    assert copy.path("report.html").stat().st_mtime_ns > made
    assert not copy.path("verdict.txt").exists()
    code, out = copy.snakemake("--forcerun", "results/small/predict/mg.json")
    assert code == 0, out


WRONG = {
    "unknown key": ("config/runs/ds.yaml", "^framework", "colour: red\nframework", "colour: unknown key"),
    "impossible layout": ("config/runs/ds.yaml", "data_parallel: 2", "data_parallel: 3", "world_size: is 2, but"),
    "refused by the framework": ("config/runs/mg.yaml", "^global", "megatron: {overlap_param_gather: true, "
                                 "use_distributed_optimizer: false}\nglobal", "overlap_param_gather"),
    "run with a path": ("config/comparisons/small.yaml", "^  ds:$", "  ../x:", "../x"),
    "run that is not there": ("config/comparisons/small.yaml", "^  ds:$", "  nosuch:", "nosuch.yaml"),
    "unknown key of the workflow": ("config/config.yaml", "^comparison", "colour: red\ncomparison", "colour"),
    "pin that is none": ("envs/deepspeed.yaml", "numpy==.*$", "numpy>=2", "is not an exact pin"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_configuration_stops_before_anything_runs(finished: WorkingCopy, tmp_path: Path, what: str) -> None:
    """One line that names the file and the key, no traceback, nothing made."""
    file, pattern, new, expected = WRONG[what]
    bare = WorkingCopy(tmp_path / "bare", {"ds": 2, "mg": 2})
    bare.edit(file, pattern, new)
    code, out = bare.snakemake()
    assert code == 1
    assert len(clear_errors(out)) == 1, out
    assert expected in clear_errors(out)[0]
    assert "Traceback" not in out
    assert not (bare.folder / "results").exists()


def test_wrong_framework_version(copy: WorkingCopy, tmp_path: Path) -> None:
    """Another version than the one that was verified is refused by name; with the right one the next run completes."""
    info = tmp_path / "wrong" / "deepspeed-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9.9\n")
    copy.edit("config/comparisons/small.yaml", r"^  ds:$", "  ds: {seed: 7}")
    code, out = copy.snakemake(TABLES, PYTHONPATH=str(info.parent))
    assert code != 0
    assert any("deepspeed 9.9.9 is installed, but 0.19.2" in line for line in clear_errors(out)), out
    code, out = copy.snakemake(TABLES)
    assert code == 0, out


def begin(copy: WorkingCopy, timeout_s: float = 120) -> subprocess.Popen[str]:
    """Starts the workflow and waits until it launches `ds` anew."""
    request = copy.path("launch/ds/request.json")
    request.unlink()
    process = copy.start(TABLES)
    until = time.monotonic() + timeout_s
    while not request.exists():
        assert time.monotonic() < until, "nothing is launched"
        time.sleep(0.1)
    return process


def launches() -> list[int]:
    """Processes of launch scripts that run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"scripts/launch.py" in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def test_killed_workflow_loses_no_launch_and_doubles_none(copy: WorkingCopy) -> None:
    """While one works a second is refused; after SIGKILL the next waits for the launch that goes on, and keeps it."""
    copy.edit("config/comparisons/small.yaml", r"^  ds:$", "  ds: {steps: 400}")
    first = begin(copy)
    code, out = copy.snakemake(TABLES)
    assert code == 1
    assert "another snakemake" in clear_errors(out)[0]
    assert len(clear_errors(out)) == 1
    os.kill(first.pid, signal.SIGKILL)
    code, out = copy.snakemake(TABLES)
    assert code == 0, out
    assert "waiting for the launch of ds" in out or "finished after its workflow had died" in out
    assert "Training ds" not in out
    steps = json.loads(copy.path("launch/ds/rank1.json").read_text())["steps"]
    assert len(steps) == 400
    assert "Training ds (small)" not in copy.planned()


def test_interrupted_workflow_ends_its_launch(copy: WorkingCopy) -> None:
    """Ctrl-C ends the ranks too; the next run completes."""
    copy.edit("config/comparisons/small.yaml", r"^  ds:$", "  ds: {steps: 20000}")
    before = set(launches())
    first = begin(copy)
    time.sleep(2)
    os.killpg(first.pid, signal.SIGINT)
    first.communicate(timeout=60)
    until = time.monotonic() + 20
    while set(launches()) - before:
        assert time.monotonic() < until, "ranks outlive Ctrl-C"
        time.sleep(0.2)
    copy.edit("config/comparisons/small.yaml", r"steps: 20000", "steps: 2")
    code, out = copy.snakemake(TABLES)
    assert code == 0, out
