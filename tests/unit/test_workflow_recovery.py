"""What the workflow does with what is damaged, made over by hand, or cannot be written; where it refuses to begin."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from train_ledger.spec.errors import DataError, LaunchError
from train_ledger.spec.io import write_json, write_text
from train_ledger.workflow import machine, resume, seal, twins
from train_ledger.workflow.aside import set_aside
from train_ledger.workflow.plan import Plan, load_plan

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

import stage  # noqa: E402
import verdict  # noqa: E402


def plan(**config: object) -> Plan:
    """The project's own plan, with changes."""
    return load_plan({"comparison": "laptop", "paper_comparison": "paper", **config}, ROOT / "config")


def test_set_aside_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets a number of its own, in the comparison's own folder."""
    monkeypatch.chdir(tmp_path)
    for n in (1, 2):
        folder = Path("results/laptop/launch/run")
        folder.mkdir(parents=True)
        (folder / "rank0.json").write_text(str(n))
        assert set_aside(folder) == Path(f"results/laptop/unusable/launch/run.{n}")
        assert not folder.exists()
    assert Path("results/laptop/unusable/launch/run.1/rank0.json").read_text() == "1"
    Path("results/laptop/report.html").write_text("x")
    assert set_aside("results/laptop/report.html") == Path("results/laptop/unusable/report.html.1")


def test_two_stages_set_the_same_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them moves it; both tell the same place."""
    monkeypatch.chdir(tmp_path)
    for n in range(1, 31):
        folder = Path("results/laptop/launch/run")
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        together = threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            told = list(pool.map(lambda _: together.wait() >= 0 and set_aside(folder), range(4)))  # noqa: B023
        assert told == [Path(f"results/laptop/unusable/launch/run.{n}")] * 4
    assert len(list(Path("results/laptop/unusable/launch").iterdir())) == 30


def test_what_cannot_be_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error that names it, for what is not there and where there is no room."""
    monkeypatch.chdir(tmp_path)
    Path("results/laptop").mkdir(parents=True)
    with pytest.raises(DataError, match=r"^results/laptop/x: cannot be set aside in .*: No such file"):
        set_aside("results/laptop/x")
    Path("results/paper").mkdir()
    for name in ("unusable", "x"):
        Path("results/paper", name).write_text("a file")
    with pytest.raises(DataError, match=r"^results/paper/x: cannot be set aside in .*: File exists"):
        set_aside("results/paper/x")


def job(**parts: Any) -> SimpleNamespace:
    """What a stage's script gets from Snakemake, as far as `stage.run` looks at it."""
    return SimpleNamespace(**{"rule": "plot", "log": ["log"], "input": [], "output": [], **parts})


def fail(error: Exception) -> Callable[..., Any]:
    """A stage that cannot use what it got."""

    def main() -> Any:
        raise error

    return main


def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the screen, and the last one in the log, after the traceback; also where it is the log that cannot be kept."""
    monkeypatch.chdir(tmp_path)

    def main() -> None:
        write_text("folder/out.json", "{}")

    Path("folder").write_text("a file")
    for log in ("log", "/dev/full"):
        with pytest.raises(SystemExit) as end:
            stage.run(main, job(log=[log]), lambda _: ())
        assert end.value.code == 1
        assert capsys.readouterr().err.splitlines()[0] == "train-ledger plot: folder/out.json: File exists"
    lines = Path("log").read_text().splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "train-ledger plot: folder/out.json: File exists"


def test_a_launch_without_room_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for the rule that has a process of its own."""
    with pytest.raises(SystemExit), stage.kept(tmp_path / "run.log"):
        Path("/dev/full").write_text("x")
    said = "train-ledger launch: run: No space left on device"
    assert capsys.readouterr().err.splitlines() == [said]
    assert (tmp_path / "run.log").read_text().splitlines()[-1] == said


@pytest.mark.parametrize(
    ("file", "moved"),
    [("reconcile/resident.csv", "reconcile/resident.csv"), ("launch/run/rank0.json", "launch/run"),
     ("figures/figures.json", "figures"), ("elsewhere.json", None)],
)  # fmt: skip
def test_what_a_stage_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, moved: str | None
) -> None:
    """The input that it belongs to is set aside; a second stage that finds it gone says so in the same words."""
    monkeypatch.chdir(tmp_path)
    results = Path("results/laptop")
    inputs = ["reconcile/resident.csv", "launch/run/run.json", "figures/x.svg"]
    for name in (file, *inputs):
        write_text(results / name, "x")
    given = [str(results / name) for name in (*inputs[:2], "figures")]
    for _ in range(2):
        with pytest.raises(SystemExit):
            stage.run(fail(DataError("is truncated", file=results / file)), job(input=given), lambda _: ())
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == f"train-ledger plot: results/laptop/{file}: is truncated"
        aside = f"train-ledger plot: set aside as results/laptop/unusable/{moved}.1; the next run makes it anew"
        assert lines[1:] == ([aside] if moved else [])
    assert not moved or not (results / moved).exists()


def test_a_seal_is_broken_by_what_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents, not times; nothing is said of what has no record or is gone anyway."""
    monkeypatch.chdir(tmp_path)
    page, table = Path("results/laptop/report.html"), Path("results/laptop/tables/answer.csv")
    for file in (page, table):
        write_text(file, "as made")
    assert seal.broken(page) == []
    stage.run(lambda: None, job(), lambda _: (), lambda _: (str(page), [str(page), str(table.parent)]))
    assert seal.broken(page) == []
    os.utime(page)
    write_text(table.parent / ".snakemake_timestamp", "")
    assert seal.broken(page) == []
    write_text(table, "by hand")
    assert seal.broken(page) == [str(table)]
    table.unlink()
    assert seal.broken(page) == [str(table)]
    page.unlink()
    assert seal.broken(page) == []


def test_what_was_written_over_is_set_aside_before_the_first_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run foretells it and moves nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resume, "_held", [])
    page = "results/laptop/report.html"
    write_text(page, "as made")
    seal.write(page, [page])
    write_text(page, "by hand")
    resume.foretell([page, "results/laptop/figures"])
    assert capsys.readouterr().err.count("is not as the workflow wrote it") == 1
    assert Path(page).read_text() == "by hand"
    resume.begin(plan(), dict.fromkeys(("megatron", "deepspeed", "torchtitan"), "e"), "local", [page])
    assert not Path(page).exists()
    assert Path("results/laptop/unusable/report.html.1").read_text() == "by hand"


@pytest.mark.parametrize(("world", "found", "fine"), [
    ("nccl", 0, False), ("nccl", 7, False), ("nccl", 8, True), ("nccl", None, True),
    ("shared", 0, False), ("shared", 1, True), ("cpu", 0, True), ("fake", 0, True),
])  # fmt: skip
def test_a_machine_without_enough_gpus(world: str, found: int | None, fine: bool) -> None:
    """Refused by name of the run; no GPU is looked for where none is needed."""
    asked: list[None] = []
    made = plan(world=world)

    def count() -> int | None:
        asked.append(None)
        return found

    if fine:
        machine.check(made, made.comparison.runs.values(), count)
    else:
        needs = "8 GPUs" if world == "nccl" else "1 GPU"
        with pytest.raises(LaunchError, match=f"world {world} needs {needs}, this machine shows {found};"):
            machine.check(made, made.comparison.runs.values(), count)
    assert bool(asked) == (world in ("nccl", "shared"))
    machine.check(made, [], count)
    assert len(asked) <= 1


def test_what_is_measured_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report can be made anew on a machine without one; one launch that is missing, and GPUs are looked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "gpus", fail(LaunchError("a GPU was looked for")))
    environments = dict.fromkeys(("megatron", "deepspeed", "torchtitan"), "e")
    made = plan(world="nccl")
    for name, run in made.comparison.runs.items():
        write_json(f"results/laptop/launch/{name}/request.json", twins.request(run.sha256(), "e"))
        write_json(f"results/laptop/launch/{name}/run.json", {"ranks": []})
    monkeypatch.setattr(resume, "_held", [])
    resume.begin(made, environments, "local")
    resume.LOCK.unlink()
    Path(f"results/laptop/launch/{name}/run.json").unlink()
    monkeypatch.setattr(resume, "_held", [])
    with pytest.raises(LaunchError, match="looked for"):
        resume.begin(made, environments, "local")
    assert not resume.LOCK.exists()
    resume.begin(made, environments, "local", own_python=False)


@pytest.mark.parametrize("text", ["", "\n"])
def test_a_verdict_from_a_truncated_file(tmp_path: Path, text: str) -> None:
    """Is none; the file is named, so that it is set aside."""
    (tmp_path / "differences.txt").write_text(text)
    with pytest.raises(DataError, match=r"differences.txt: holds no verdict"):
        verdict.main(str(tmp_path / "verdict.txt"), str(tmp_path / "differences.txt"))
    assert not (tmp_path / "verdict.txt").exists()
