"""Faults planted into real processes: each ends in one clear error and no process, and a following launch completes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from toy_program import WEIGHT

from train_ledger.launch.launcher import Attempt, launch
from train_ledger.launch.worlds.nccl import start_torchrun
from train_ledger.spec import registry
from train_ledger.spec.config import load_model
from train_ledger.spec.errors import ConfigError, DataError, LaunchError
from train_ledger.spec.registry import Framework
from train_ledger.spec.run import Optimizer, Parallel, Probe, Run

ROOT = Path(__file__).parents[2]
TOY = Framework("toy", "Toy", "torch", "toy_program", torch.__version__.split("+")[0], "none", "toy_program")


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FRAMEWORKS, "toy", TOY)


def toy(world: str = "cpu", ranks: int = 2, steps: int = 3, **settings: object) -> Run:
    """A run of the toy program."""
    return Run(
        name="toy-run",
        framework="toy",
        model=load_model("laptop", ROOT / "config"),
        world=world,
        world_size=ranks,
        parallel=Parallel(data_parallel=ranks),
        seq_length=32,
        micro_batch=1,
        global_batch=ranks,
        steps=steps,
        seed=1,
        optimizer=Optimizer(),
        probe=Probe((steps,), WEIGHT),
        settings=settings,
    )


def children() -> set[int]:
    """Processes that this one started and that still run, by number."""
    out = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if lines["PPid"].strip() == str(os.getpid()):
            out.add(int(lines["Pid"]))
    return out


def good(directory: Path, ranks: int = 2) -> dict:
    """What a launch left behind, after a look at the names."""
    names = {p.name for p in directory.iterdir()}
    wanted = {f"rank{r}.{kind}" for r in range(ranks) for kind in ("json", "log")}
    assert names == wanted | {"run.json", ".launch-id"}
    run = json.loads((directory / "run.json").read_text())
    assert [r["exit"] for r in run["ranks"]] == [0] * ranks
    return json.loads((directory / "rank0.json").read_text())


def fails(run: Run, directory: Path, error: type[Exception], *words: str, timeout_s: float = 60) -> str:
    """The launch fails with those words, on one line, and leaves no process and no half file."""
    before = children()
    with pytest.raises(error) as caught:
        launch(run, directory, timeout_s)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
    assert children() <= before
    assert not (directory / "run.json").exists()
    assert not list(directory.glob(".attempt-*"))
    assert not list(directory.glob("rank*.json"))
    return text


def test_a_good_launch(tmp_path: Path) -> None:
    launch(toy(), tmp_path, 60)
    data = good(tmp_path)
    assert [s["step"] for s in data["steps"]] == [1, 2, 3]
    assert data["steps"][0]["loss"] > data["steps"][2]["loss"] > 0
    assert {c["name"] for c in data["census"]["containers"]} == {"param", "exp_avg", "exp_avg_sq", "step"}
    calls = {(c["op"], c["in_numel"], c["phase"]): c["count"] for c in data["collectives"]}
    assert calls == {
        ("all_reduce", 7200, "step"): 2,
        ("all_reduce", 120, "step"): 1,
        ("all_reduce", 60, "step"): 1,
        ("all_reduce", 1, "step"): 1,
    }
    assert {c["site"] for c in data["collectives"]} == {"toy_program.py:step"}
    assert {e["state"] for e in data["lifeline"]["events"]} == {"full"}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("kill", ["rank 1", "was killed by signal 9 (SIGKILL)", "in step 2"]),
        ("raise", ["rank 1", "failed in step 2", "ValueError: a planted fault"]),
        ("nan", ["failed in step 2", "the loss is nan"]),
    ],
)
def test_a_rank_dies_and_the_next_launch_completes(
    kind: str, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = toy(fault={"kind": kind, "rank": 1, "step": 2})
    text = fails(run, tmp_path, LaunchError, *words)
    assert text.startswith(str(tmp_path / "rank"))  # the log is named where it now lies
    shown = capfd.readouterr().err
    assert "the last lines of" in shown
    assert ("Traceback" in shown) == (kind == "raise")  # an error of ours says all in its line
    if kind != "nan":
        assert f"planting {kind}" in (tmp_path / "rank1.log").read_text()
    launch(toy(), tmp_path, 60)
    good(tmp_path)


def test_a_rank_never_answers(tmp_path: Path) -> None:
    began = time.monotonic()
    run = toy(fault={"kind": "hang", "rank": 1, "step": 2})
    fails(run, tmp_path, LaunchError, "not done after 10 s", "rank 1 has not answered in step 2", timeout_s=10)
    assert time.monotonic() - began < 30
    assert "in _fault" in (tmp_path / "rank1.log").read_text()  # its stack
    launch(toy(), tmp_path, 60)
    good(tmp_path)


def test_a_rank_that_the_program_refuses_is_the_users_error(tmp_path: Path) -> None:
    run = replace(toy(refuse=True), source="runs/toy.yaml")
    assert fails(run, tmp_path, ConfigError) == "runs/toy.yaml: toy.refuse: is refused by the toy"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "9.9.9"}, ["torch", "is installed, but 9.9.9"]),
        ({"distribution": "no-such-thing"}, ["no-such-thing", "is not installed"]),
    ],
)
def test_a_wrong_version(change: dict, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FRAMEWORKS, "toy", replace(TOY, **change))
    fails(toy(), tmp_path, LaunchError, *words)


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.safetensors"):
        launch(toy(), tmp_path / "out", 60, tmp_path / "no.safetensors")


def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be written"):
        launch(toy(), tmp_path / "file" / "out", 60)


def test_the_fake_world_runs_single_ranks_of_a_large_world(tmp_path: Path) -> None:
    launch(toy("fake", ranks=1000), tmp_path, 60, ranks=[0, 999])
    run = json.loads((tmp_path / "run.json").read_text())
    assert [r["rank"] for r in run["ranks"]] == [0, 999]
    data = json.loads((tmp_path / "rank999.json").read_text())
    assert {tuple(c["ranks"]) for c in data["collectives"]} == {tuple(range(1000))}
    assert {s["loss"] for s in data["steps"]} == {None}


def test_single_ranks_of_a_world_that_needs_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="world cpu needs all its ranks"):
        launch(toy(), tmp_path, 60, ranks=[1])
    with pytest.raises(ConfigError, match="not ranks of a world of 4"):
        launch(toy("fake", ranks=4), tmp_path, 60, ranks=[4])


@pytest.mark.parametrize("limit", [{"timeout_s": t} for t in (0, -1, float("nan"), float("inf"))] + [{"at_once": 0}])
def test_a_limit_under_which_nothing_could_end(limit: dict, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"timeout: |at-once: "):
        launch(toy("fake"), tmp_path, **limit)


def test_a_name_that_would_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'\.\./x' is not a name"):
        launch(replace(toy(), name="../x"), tmp_path, 60)


def test_a_late_twin_does_not_overwrite(tmp_path: Path) -> None:
    """An older launch that ends after a newer one began may not publish."""
    run = toy()
    older = Attempt.begin(run, tmp_path)
    launch(run, tmp_path, 60)
    kept = (tmp_path / "rank0.json").read_bytes()
    older.directory.mkdir()
    for rank in (0, 1):
        other = json.loads(kept) | {"rank": rank}
        (older.directory / f"rank{rank}.json").write_text(json.dumps(other))
    with pytest.raises(LaunchError, match="a later launch of the same run has taken this folder"):
        older.publish([0, 1], 1.0)
    older.discard()
    assert (tmp_path / "rank0.json").read_bytes() == kept
    good(tmp_path)


def test_only_what_a_launch_left_is_removed(tmp_path: Path) -> None:
    """What a person keeps in the same folder stays; a rank of the older launch that is no more goes, whole."""
    mine = ("weights.safetensors", "weights.safetensors.json", "rank-notes.log", "rank0.json.bak", "rank99.json")
    older = ("rank7.json", "rank7.log", "weights0.safetensors", "weights7.safetensors")
    launch(toy(), tmp_path, 60)
    run_file = tmp_path / "run.json"
    finished = json.loads(run_file.read_text())
    finished["ranks"].append(finished["ranks"][0] | {"rank": 7, "file": "rank7.json"})
    run_file.write_text(json.dumps(finished))
    for name in mine + older:
        (tmp_path / name).write_text(name)
    launch(toy(), tmp_path, 60)
    assert [(tmp_path / name).read_text() for name in mine] == list(mine)
    assert not [name for name in older if (tmp_path / name).exists()]
    assert len(json.loads(run_file.read_text())["ranks"]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_launch_is_published_comes_after_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel hands the signal to another thread, as libraries have them."""
    replace_file, launching, over = os.replace, os.getpid(), threading.Event()

    def replace_and_be_told_to_end(source: Path, target: Path) -> None:
        if os.getpid() == launching and Path(target).name == "rank1.json":
            os.kill(launching, number)
        replace_file(source, target)

    monkeypatch.setattr("train_ledger.launch.launcher.os.replace", replace_and_be_told_to_end)
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(toy(), tmp_path, 60)
    finally:
        over.set()
        other.join()
    good(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_any_rank_has_started(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_ledger.launch.worlds.cpu.rendezvous", lambda _: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt):
        launch(toy(), tmp_path, 60)
    assert not list(tmp_path.glob(".attempt-*"))


def test_a_full_disk_at_the_end_leaves_the_older_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(toy(), tmp_path, 60)
    kept = {p.name: p.read_bytes() for p in tmp_path.glob("*.json")}

    def full(path: Path, _: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("train_ledger.launch.launcher.write_json", full)
    with pytest.raises(LaunchError, match="No space left on device"):
        launch(replace(toy(), seed=2), tmp_path, 60)
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.json")} == kept


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "may be truncated"),
        ('{"schema": "train-ledger/rank/1", "run": "toy-run"', "may be truncated"),
        ('{"schema": "train-ledger/rank/1", "run": "toy-run"}', "is missing"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_rank_file_is_not_published(text: str | None, words: str, tmp_path: Path) -> None:
    attempt = Attempt.begin(toy(), tmp_path)
    if text is not None:
        (attempt.directory / "rank0.json").write_text(text)
    with pytest.raises(LaunchError, match=words) as caught:
        attempt.publish([0], 1.0)
    assert "rank0.json" in str(caught.value)
    assert not (tmp_path / "run.json").exists()


def test_a_rank_file_of_another_run_is_not_published(tmp_path: Path) -> None:
    launch(toy(), tmp_path / "a", 60)
    attempt = Attempt.begin(replace(toy(), seed=2), tmp_path / "b")
    for rank in (0, 1):
        (attempt.directory / f"rank{rank}.json").write_bytes((tmp_path / "a" / f"rank{rank}.json").read_bytes())
    with pytest.raises(LaunchError, match="config_sha256"):
        attempt.publish([0, 1], 1.0)


STARTER = """
import sys
sys.path[:0] = [{tests!r}, {here!r}]
import test_launch_faults as t
t.registry.FRAMEWORKS["toy"] = t.TOY
t.launch(t.toy(fault={{"kind": "hang", "rank": 1, "step": 2}}), {out!r}, 300)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_launch(how: signal.Signals, tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = STARTER.format(tests=str(here.parent), here=str(here), out=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(lambda: "planting hang" in "".join(p.read_text() for p in tmp_path.glob(".attempt-*/rank1.log")))
        ranks = ranks_of(process.pid)
        assert len(ranks) == 3  # two ranks, and the store at which they meet
        process.send_signal(how)
        process.wait(20)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() and not zombie(pid) for pid in ranks))
        if how != signal.SIGKILL:
            assert "planting hang" in (tmp_path / "rank1.log").read_text()
    finally:
        process.kill()
        process.wait()
    launch(toy(), tmp_path, 60)
    assert json.loads((tmp_path / "run.json").read_text())["run"] == "toy-run"


def ranks_of(parent: int) -> list[int]:
    children_file = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in children_file.read_text().split()]


def zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def wait_for(condition: object, timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.1)


@pytest.fixture
def toy_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes that are started from here know the toy too."""
    folder = tmp_path / "site"
    folder.mkdir()
    tests = str(Path(__file__).parent.parent)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({tests!r})\n"
        "from train_ledger.spec.registry import FRAMEWORKS, Framework\n"
        f"FRAMEWORKS['toy'] = Framework('toy', 'Toy', 'torch', 'toy_program', {TOY.version!r}, 'none', 'toy_program')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.usefixtures("toy_everywhere")
def test_under_torchrun_by_hand(tmp_path: Path) -> None:
    """World `cpu` the way a Slurm job runs it: torchrun starts the ranks, rank 0 publishes, also after a failure."""
    resolved, out = tmp_path / "toy.json", tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "train_ledger.launch", str(resolved), str(out), "--timeout", "60"]
    resolved.write_text(json.dumps(toy(fault={"kind": "raise", "rank": 0, "step": 2}).to_dict()))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert not (out / "run.json").exists()
    assert "a planted fault" in (out / "rank0.log").read_text()
    resolved.write_text(json.dumps(toy().to_dict()))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    good(out)


@pytest.mark.usefixtures("toy_everywhere")
def test_faults_under_torchrun_that_launch_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """World `nccl` as `launch` runs it on one machine, here with the `cpu` run that needs no GPU."""
    monkeypatch.setattr("train_ledger.launch.launcher.world", lambda name: SimpleNamespace(run_ranks=start_torchrun))
    out = tmp_path / "out"
    killed = toy(fault={"kind": "kill", "rank": 1, "step": 2})
    fails(killed, out, LaunchError, "rank 1 was killed by signal 9 (SIGKILL)", "rank1.log")
    hung = toy(fault={"kind": "hang", "rank": 1, "step": 2})
    fails(hung, out, LaunchError, "not done after 15 s", timeout_s=15)
    launch(toy(), out, 60)
    good(out)


def test_more_gpus_than_there_are(tmp_path: Path) -> None:
    fails(toy("nccl", ranks=9), tmp_path, LaunchError, "world nccl needs 9 GPUs, this machine shows")
