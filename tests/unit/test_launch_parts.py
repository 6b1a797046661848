"""Parts of the engine that need no processes: progress, resolved runs, worlds, failures in words."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from train_ledger import cli
from train_ledger.launch import failures, launcher, loop, processes, progress
from train_ledger.launch.launcher import launch
from train_ledger.launch.signals import interruptible
from train_ledger.launch.worlds import WORLDS, Job, world
from train_ledger.spec.config import load_comparison
from train_ledger.spec.errors import ConfigError, DataError, LaunchError
from train_ledger.spec.resolved import read_resolved
from train_ledger.spec.run import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run() -> Run:
    return load_comparison("laptop", ROOT / "config").runs["megatron-tp2-pp2-dp2"]


class Clock:
    """time.monotonic, by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_progress_in_a_log_is_a_line_a_step_and_no_more(clock: Clock) -> None:
    stream = io.StringIO()
    shown = progress.Progress("r", 4, 2, stream)
    for step in range(5):
        for rank in (0, 1):
            clock.now += 3
            shown.tick()
            shown.step(rank, step)
    shown.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "r: step 0/4 on 2 ranks, 6 s"
    assert lines[-1] == "r: step 4/4 on 2 ranks, 30 s"
    assert len(lines) == 5
    assert lines[2] == "r: step 2/4 on 2 ranks, 18 s, about 15 s to go"


def test_progress_on_a_terminal_rewrites_one_line(clock: Clock) -> None:
    stream = Terminal()
    shown = progress.Progress("r", 2, 1, stream)
    shown.tick()
    assert stream.getvalue() == "r: starting 1 ranks (0 ready), 0 s"
    shown.step(0, 0)
    shown.close()
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r" + " " * len("r: step 0/2 on 1 ranks, 0 s") + "\r")


def test_a_resolved_run_comes_back(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run.to_dict()))
    again = read_resolved(file)
    assert again.to_dict() == run.to_dict()
    assert again.sha256() == run.sha256()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.clear(), "is not a resolved run"),
        (lambda d: d.update(name="../x"), "'../x' is not a name"),
        (lambda d: d.update(framework="jax"), "'jax' is not a framework"),
        (lambda d: d.update(world_size=9), "world_size: is 9"),
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d.update(model=None), "model: is not a resolved run: must hold a mapping"),
        (lambda d: d["parallel"].pop("tensor_parallel"), "parallel.tensor_parallel: is not a resolved run: is missing"),
        (lambda d: d["settings"].pop("bucket_size"), "settings.bucket_size: is not a resolved run: is missing"),
        (lambda d: d.pop("probe"), "run.json: probe: is not a resolved run: is missing"),
        (lambda d: d["model"].update(num_attention_heads=0), "model.num_attention_heads: 0 is less than"),
        (lambda d: d["settings"].update(bucket_sise=1), "settings.bucket_sise: unknown key"),
        (lambda d: d["optimizer"].update(lr=float("nan")), "optimizer.lr: nan"),
        (lambda d: d.update(world_size="8"), "world_size"),
    ],
)
def test_a_resolved_run_that_is_none(run: Run, change: object, words: str, tmp_path: Path) -> None:
    data = json.loads(json.dumps(run.to_dict()))
    change(data)  # type: ignore[operator]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"run\.json") as caught:
        read_resolved(file)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "[]", "[1", "nan", '"x"', "\xff"])
def test_a_file_that_is_no_run(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run\.json"):
        read_resolved(file)


def test_worlds_are_found_by_name() -> None:
    assert set(WORLDS) == {"cpu", "fake", "shared", "nccl"}
    for name in WORLDS:
        assert callable(world(name).run_ranks)
    with pytest.raises(ConfigError, match="there is no world 'tpu'; known: cpu, fake, shared, nccl"):
        world("tpu")


@pytest.mark.parametrize(
    ("step", "words"),
    [(-1, "while it was being built"), (0, "in step 1"), (3, "in step 4"), (4, "after the last step")],
)
def test_where_a_rank_was(run: Run, step: int, words: str) -> None:
    assert run.steps == 4
    assert failures.where(run, step) == words


def test_errors_travel_as_what_they_are(run: Run) -> None:
    log = Path("rank3.log")
    for error in (ConfigError("bad", file="a.yaml", key="b.c"), DataError("gone", file="w", key="t")):
        back = failures.rebuild(run, 3, 0, failures.describe(error), log)
        assert type(back) is type(error)
        assert str(back) == str(error)
    back = failures.rebuild(run, 3, 1, failures.describe(RuntimeError("line\nbreak")), log)
    assert isinstance(back, LaunchError)
    assert str(back) == f"rank3.log: {run.name}: rank 3 failed in step 2: RuntimeError: line break"
    own = failures.rebuild(run, 3, 1, failures.describe(LaunchError("the loss is nan")), log)
    assert str(own) == f"rank3.log: {run.name}: rank 3 failed in step 2: the loss is nan"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_python_drops_still_ends_the_launch(
    run: Run, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the framework is imported, inside a destructor; no rank may start after it."""

    class Deaf:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            for _ in range(1000):  # the handler runs between two of these
                pass

    def program(*_: object, **__: object) -> None:
        Deaf()

    dropped = list[object]()
    monkeypatch.setattr(loop, "program", program)
    monkeypatch.setattr(processes, "_start", lambda *_: pytest.fail("a rank was started"))
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        processes.run_forked(Job(run, (0,), tmp_path, 60, None, False, "cpu", None), lambda rank: pytest.fail("made"))
    assert dropped == [KeyboardInterrupt]
    assert signal.getsignal(number) is before


def test_a_signal_that_an_inner_part_ate_is_told_when_it_ends() -> None:
    """The outer one's check knows nothing of it: publishing would go on as if it had not come."""
    reached = list[str]()

    def parts() -> None:
        with interruptible():
            with interruptible():
                with contextlib.suppress(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGTERM)
                    for _ in range(1000):  # the handler runs between two of these
                        pass
                reached.append("the end of the inner part")
            reached.append("the outer part")

    with pytest.raises(KeyboardInterrupt):
        parts()
    assert reached == ["the end of the inner part"]


def test_weights_of_another_model_are_refused_before_a_rank_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "run_forked", lambda *_, **__: pytest.fail("ranks were started"))
    for name, what in (("nope.safetensors", "cannot be read"), ("nope.json", "cannot be read")):
        with pytest.raises(DataError, match=what):
            launch(run, tmp_path / "out", weights=tmp_path / name)
    assert not (tmp_path / "out").exists()


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as check:
            os.kill(os.getpid(), signal.SIGINT)
            check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def finished(folder: Path, run: Run, ranks: Sequence[int]) -> None:
    """What a launch leaves, as far as a later one reads it."""
    entries = [{"rank": r, "exit": 0, "file": f"rank{r}.json", "sha256": "0" * 64} for r in ranks]
    kept = {"run": run.name, "framework": run.framework, "world": "cpu", "world_size": len(ranks), "wall_s": 1.0}
    kept |= {"schema": "train-ledger/launch/1", "config_sha256": run.sha256(), "ranks": entries}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(kept))
    for r in ranks:
        for name in (f"rank{r}.json", f"rank{r}.log", f"weights{r}.safetensors"):
            (folder / name).write_text("measured")


def test_a_finished_launch_of_another_configuration_is_not_replaced(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: None)
    file = str(ROOT / "config/runs/megatron-tp2-pp2-dp2.yaml")
    argv = ["launch", file, "--comparison", "laptop", "--out", str(tmp_path / "out")]
    finished(tmp_path / "out", run, range(8))
    assert cli.main(argv) == 0
    for other in (
        [*argv, "--set", "steps=3"],
        ["launch", file.replace("megatron-tp2-pp2-dp2", "megatron-dp2"), *argv[4:]],
    ):
        assert cli.main(other) == 2
        assert f"{tmp_path / 'out'}: holds a finished launch of" in capsys.readouterr().err


def test_only_files_of_the_older_launch_make_way(run: Run, tmp_path: Path) -> None:
    finished(tmp_path, run, range(4))
    for name in ("rank99.json", "weights99.safetensors", "thesis.txt", "weights.safetensors"):
        (tmp_path / name).write_text("mine")
    attempt = launcher.Attempt.begin(run, tmp_path)
    finished(attempt.directory, run, range(2))
    attempt._move(range(2))
    left = {f.name for f in tmp_path.iterdir() if f.is_file() and f.name != launcher.CLAIM}
    ours = {f"rank{r}.{kind}" for r in range(2) for kind in ("json", "log")} | {
        f"weights{r}.safetensors" for r in range(2)
    }
    assert left == ours | {"run.json", "rank99.json", "weights99.safetensors", "thesis.txt", "weights.safetensors"}
