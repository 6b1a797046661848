"""The workflow's own parts, without Snakemake: pins, plan, site, locks, what Slurm says."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from train_ledger import cli
from train_ledger.spec.errors import ConfigError, LaunchError
from train_ledger.workflow import envs, resume, slurm, twins
from train_ledger.workflow.plan import Plan, load_plan
from train_ledger.workflow.site import load_site
from train_ledger.workflow.state import known_jobs, states, table

ROOT = Path(__file__).parents[2]


def plan(**config: object) -> Plan:
    """The project's own plan, with changes."""
    return load_plan({"comparison": "laptop", "paper_comparison": "paper", **config}, ROOT / "config")


def test_plan_holds_both_comparisons() -> None:
    """Runs of the measured and of the predicted comparison, by name."""
    made = plan()
    assert {of for of, _ in made.runs} == {"laptop", "paper"}
    assert {run.world for (of, _), run in made.runs.items() if of == "laptop"} == {"cpu"}
    run = next(iter(made.comparison.runs.values()))
    assert (made.nodes(run), made.ranks_per_node(run)) == (1, 8)
    assert (plan(gpus_per_node=4).nodes(run), plan(gpus_per_node=4).ranks_per_node(run)) == (2, 4)


def test_plan_takes_another_world() -> None:
    """`--config world=…` goes before the comparison's."""
    assert {run.world for run in plan(world="fake").comparison.runs.values()} == {"fake"}


@pytest.mark.parametrize(
    ("config", "key"),
    [({"colour": 1}, "colour"), ({"comparison": "../x"}, "comparison"), ({"gpus_per_node": 3}, "gpus_per_node"),
     ({"launch_timeout_s": 0}, "launch_timeout_s"), ({"world": "moon"}, "world")],
)  # fmt: skip
def test_plan_refuses(config: dict[str, object], key: str) -> None:
    """A wrong key or value is named, and that it is not config.yaml's."""
    with pytest.raises(ConfigError) as e:
        plan(**config)
    assert e.value.key == key
    assert str(e.value).startswith(f"command line: {key}: ")
    assert "None" not in str(e.value)


def test_plan_refuses_what_the_file_says(tmp_path: Path) -> None:
    """The same value in config.yaml: the file is named."""
    (tmp_path / "config.yaml").write_text("world: moon\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: world: 'moon' is none of cpu, fake, shared, nccl$"):
        load_plan({"world": "moon"}, tmp_path)


def environment(folder: Path, text: str) -> Path:
    """An environment file."""
    file = folder / "env.yaml"
    file.write_text(text)
    return file


def test_identity_is_that_of_the_pins(tmp_path: Path) -> None:
    """Order and comments do not matter, a version does."""
    one = envs.identity(environment(tmp_path, "dependencies: [python=3.12, pip, {pip: [a==1, b==2]}]"))
    two = envs.identity(environment(tmp_path, "# x\ndependencies: [{pip: [b==2, a==1]}, python=3.12]"))
    assert one == two
    assert one != envs.identity(environment(tmp_path, "dependencies: [python=3.12, {pip: [a==1, b==3]}]"))


@pytest.mark.parametrize("pin", ["a", "a>=1", "a~=1.0", "a!=1", "a==1.*", "3"])
def test_pins_must_be_exact(tmp_path: Path, pin: str) -> None:
    """Anything that could mean two versions is refused."""
    with pytest.raises(ConfigError, match="exact pin"):
        envs.pins(environment(tmp_path, f"dependencies: [{{pip: ['{pin}']}}]"))


def test_no_pins(tmp_path: Path) -> None:
    """An environment that pins nothing is none."""
    with pytest.raises(ConfigError, match="pins nothing"):
        envs.pins(environment(tmp_path, "channels: [x]"))


def test_site_without_a_file_and_with_one(tmp_path: Path) -> None:
    """Nothing is asked for that was not set."""
    assert load_site(tmp_path / "none.yaml").resources == {}
    (tmp_path / "site.yaml").write_text("account: a1\npartition: gpu\ngpu: gpu:h200\n")
    site = load_site(tmp_path / "site.yaml")
    assert site.resources == {"slurm_account": "a1", "slurm_partition": "gpu"}
    assert site.gpu == "gpu:h200"
    (tmp_path / "site.yaml").write_text("account: 'a; rm -rf /'\n")
    with pytest.raises(ConfigError, match="account"):
        load_site(tmp_path / "site.yaml")


def test_the_example_site_is_valid() -> None:
    """What users copy must be accepted."""
    assert load_site(ROOT / "profiles/slurm/site.example.yaml").partition == "gpu"


def test_what_the_readme_makes_is_ignored_by_git() -> None:
    """`snakemake --report FILE`, as the README writes it."""
    (file,) = set(re.findall(r"snakemake --report (\S+?)`", (ROOT / "README.md").read_text()))
    assert f"/{file}" in (ROOT / ".gitignore").read_text().splitlines()


def test_damaged(tmp_path: Path) -> None:
    """Files that are gone or newer than run.json are named; a launch that is not there is not damaged."""
    assert resume.damaged(tmp_path) == []
    for name in ("rank0.json", "rank1.json", "rank2.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "run.json").write_text(json.dumps({"ranks": [{"file": f"rank{r}.json"} for r in range(3)]}))
    now = time.time()
    for name in ("rank0.json", "rank1.json", "rank2.json"):
        os.utime(tmp_path / name, (now - 10, now - 10))
    assert resume.damaged(tmp_path) == []
    (tmp_path / "rank1.json").unlink()
    os.utime(tmp_path / "rank2.json", (now + 10, now + 10))
    assert resume.damaged(tmp_path) == ["rank1.json", "rank2.json"]
    (tmp_path / "run.json").write_text("{")
    assert resume.damaged(tmp_path) == []


def test_one_launch_at_a_time(tmp_path: Path) -> None:
    """The second waits; it takes the first one's result only if that was the same request."""
    folder = tmp_path / "launch" / "run"
    assert twins.held(folder) is None
    with twins.alone(folder, "c", "e") as done:
        assert not done
        assert twins.same(twins.asked(folder), twins.request("c", "e"))
        assert f"process {os.getpid()}" in (twins.held(folder) or "")
        with open(folder.parent / ".run.lock") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert twins.held(folder) is None


@pytest.mark.parametrize(("config_sha256", "measured"), [("c", True), ("other", False)])
def test_a_launch_that_was_waited_for(tmp_path: Path, config_sha256: str, measured: bool) -> None:
    """Another process holds the folder, finishes, and lets go."""
    folder = tmp_path / "launch" / "run"
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        with twins.alone(folder, "c", "e"):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            (folder / "run.json").write_text("{}")
        os._exit(0)
    os.read(ready[0], 1)
    # The other one lets go only when this one waits already.
    threading.Timer(0.5, os.write, (go[1], b"x")).start()
    with twins.alone(folder, config_sha256, "e") as done:
        assert done == measured
        assert (folder / "run.json").exists() == measured
    os.waitpid(child, 0)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """One error that says where."""
    (tmp_path / "launch").write_text("a file")
    with pytest.raises(LaunchError, match="cannot be written"), twins.alone(tmp_path / "launch" / "run", "c", "e"):
        raise AssertionError("not reached")


def test_refusals_are_slurms_words() -> None:
    """Each reason once, on one line."""
    log = (
        "x\nSLURM sbatch failed. The error message was 'sbatch: error: invalid partition\nsbatch: error: failed'.\n"
        "SLURM sbatch failed. The error message was 'sbatch: error: invalid partition\nsbatch: error: failed'.\n"
    )
    assert slurm.refusals(log) == ["sbatch: error: invalid partition sbatch: error: failed"]


@pytest.mark.parametrize(
    ("state", "words"),
    [("TIMEOUT", "time limit of 10:00"), ("OUT_OF_MEMORY", "more memory than its 5G"), ("NODE_FAIL", "lost its host"),
     ("CANCELLED", "was cancelled"), ("FAILED", "failed (FAILED)"), ("BOOT_FAIL", "did not boot")],
)  # fmt: skip
def test_why_a_job_ended(state: str, words: str) -> None:
    """One line with the job, the run and the reason."""
    line = slurm.Ended("7", state, slurm.comment("launch", "laptop", "run"), "5G", "10:00").why()
    assert line.startswith("Slurm job 7 (laptop_run) ")
    assert words in line
    assert "\n" not in line


def test_prefix_is_a_working_copys_own(tmp_path: Path) -> None:
    """The same folder by any path, no other folder, and a name that Slurm's plugin takes."""
    (tmp_path / "link").symlink_to(tmp_path)
    assert slurm.prefix(tmp_path) == slurm.prefix(tmp_path / "link") != slurm.prefix(tmp_path / "other")
    assert len(slurm.prefix(tmp_path)) <= 50
    assert slurm.prefix(tmp_path).replace("-", "").isalnum()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts small programs on PATH that answer as Slurm's own would: no database for accounting can be started here."""
    room = tmp_path / "bin"
    room.mkdir()
    monkeypatch.setenv("PATH", f"{room}:/usr/bin:/bin")

    def make(**answers: tuple[int, str]) -> None:
        for name, (code, text) in answers.items():
            (room / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
            (room / name).chmod(0o755)

    return make


def settings() -> SimpleNamespace:
    """What the executor plugin's settings have."""
    return SimpleNamespace(jobname_prefix="", reservation=None, status_command="sacct")


def test_sacct_is_used_where_it_answers(commands: Callable[..., None]) -> None:
    """With accounting, and the user's own account or none."""
    commands(sbatch=(0, ""), squeue=(0, ""), sacct=(0, ""), sacctmgr=(0, "mine\nours"))
    for account in ("mine", None):
        chosen = settings()
        slurm.configure(chosen, account, "r1")
        assert (chosen.status_command, chosen.reservation) == ("sacct", "r1")
    with pytest.raises(LaunchError, match="'theirs' is none of yours; Slurm knows: mine, ours"):
        slurm.configure(settings(), "theirs", None)


@pytest.mark.parametrize(("age", "fine"), [("3600 sec", True), ("300 sec", True), ("10 sec", False)])
def test_squeue_is_used_where_it_remembers(commands: Callable[..., None], age: str, fine: bool) -> None:
    """Without accounting, only if finished jobs are kept for long enough."""
    commands(
        sbatch=(0, ""), squeue=(0, ""), sacct=(1, "disabled"), scontrol=(0, f"X = 1\nMinJobAge               = {age}")
    )
    chosen = settings()
    if fine:
        slurm.configure(chosen, None, None)
        assert chosen.status_command == "squeue"
    else:
        with pytest.raises(LaunchError, match="MinJobAge"):
            slurm.configure(chosen, None, None)


def test_slurm_that_does_not_answer(commands: Callable[..., None]) -> None:
    """What the command says is the message."""
    commands(sbatch=(0, ""), squeue=(1, ""))
    with pytest.raises(LaunchError, match="squeue: exit code 1"):
        slurm.ours()


def test_status_where_no_cluster_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commands: Callable[..., None], tmp_path: Path
) -> None:
    """A Slurm client without a cluster: the state of the files is printed, and one line about Slurm."""
    commands(sbatch=(0, ""), squeue=(1, ""))
    for part in ("config", "envs"):
        (tmp_path / part).symlink_to(Path(__file__).parents[2] / part)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["status", "--comparison", "laptop"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("not started" in line for line in lines) == 4
    assert lines[-1] == "Slurm does not answer: squeue: exit code 1"


def test_status_of_what_was_never_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Callable[..., None]
) -> None:
    """Every launch is named; then one waits on Slurm, one failed with its reason, one is done, one is out of date."""
    made = plan()
    names = list(made.comparison.runs)
    environments = dict.fromkeys(("megatron", "deepspeed", "torchtitan"), "e")
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr(slurm, "available", lambda: False)
    assert [s.state for s in states(made, environments, [])] == ["not started"] * 4 + ["open"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path / "copy")
    job = f"9|{slurm.prefix()}_x|PENDING|Priority|0:00|{slurm.comment('launch', 'laptop', names[0])}"
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    commands(sbatch=(0, ""), squeue=(0, job))
    log = Path("logs/laptop/launch") / f"{names[1]}.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\ntrain-ledger launch: rank 3 died\n")
    for name, sha256 in ((names[2], made.comparison.runs[names[2]].sha256()), (names[3], "old")):
        folder = Path("results/laptop/launch") / name
        folder.mkdir(parents=True)
        (folder / "request.json").write_text(json.dumps(twins.request(sha256, "e")))
        (folder / "run.json").write_text(json.dumps({"ranks": [], "wall_s": 3.2}))
    found = states(made, environments, known_jobs()[0])
    assert [s.state for s in found] == ["waiting", "failed", "done", "out of date", "open"]
    assert found[0].detail == "Slurm job 9: Priority, 0:00"
    assert found[1].detail == "rank 3 died"
    assert len(table(found).splitlines()) == 5


def test_strangers_are_what_no_run_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions and tables of runs that left the plan, which the report would show."""
    monkeypatch.chdir(tmp_path)
    made = plan()
    keep = next(iter(made.comparison.runs))
    for name in (keep, "gone"):
        for file in (f"results/laptop/predict/{name}.json", f"results/laptop/probe/{name}.parquet"):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text("x")
    assert [str(f) for f in resume.strangers(made)] == [
        "results/laptop/predict/gone.json",
        "results/laptop/probe/gone.parquet",
    ]


@pytest.mark.parametrize(
    ("executable", "given"),
    [
        ("/a/.venv/bin/python3.12", "/a/.venv/bin/python3.12"),
        ("/a b/.venv/bin/python", "python"),
        ("/ü/it's/.venv/bin/python", "python"),
    ],
)
def test_snakemake_gets_a_python_that_a_shell_can_read(monkeypatch, executable, given):
    """It does not quote the path; PATH has the folder first."""
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setenv("PATH", "/usr/bin")
    envs.use_this_python()
    assert sys.executable == given
    assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(executable).parent)


def test_caches_without_a_home(tmp_path):
    """A home that can be written keeps them; without one they lie in the working copy."""
    script = ROOT / "envs/cache.sh"
    command = ["sh", "-euc", f'. {shlex.quote(str(script))}; echo "${{XDG_CACHE_HOME:-}}"']
    for home, wanted in ((tmp_path / "home", ""), ("/proc/none", f"{tmp_path}/.cache"), (None, f"{tmp_path}/.cache")):
        env = {"PATH": os.environ["PATH"]} | ({"HOME": str(home)} if home else {})
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, wanted, "")


def test_code_of_a_stage_is_that_of_its_packages(tmp_path):
    for package in ("spec", "predict", "plot"):
        (tmp_path / package / "more").mkdir(parents=True)
        (tmp_path / package / "more" / "rule.py").write_text(package)
    before = {stage: envs.code(stage, tmp_path) for stage in envs.CODE_OF}
    (tmp_path / "predict" / "more" / "rule.py").write_text("another")
    (tmp_path / "plot" / "__pycache__").mkdir()
    (tmp_path / "plot" / "__pycache__" / "rule.pyc").write_text("compiled")
    after = {stage: envs.code(stage, tmp_path) for stage in envs.CODE_OF}
    assert {stage for stage in before if before[stage] != after[stage]} == {"predict", "evidence"}
    (tmp_path / "plot" / "more" / "rule.py").rename(tmp_path / "plot" / "rule.py")
    assert envs.code("plot", tmp_path) != after["plot"]
