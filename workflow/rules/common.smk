"""What the rules share: the plan (every run, resolved and checked) and what each rule may see of it."""

import functools
import json
import re
import sys
import time
from pathlib import Path

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT / "src"))

from train_ledger.spec.errors import LedgerError
from train_ledger.workflow import envs, resume, slurm
from train_ledger.workflow.plan import load_plan
from train_ledger.workflow.site import load_site

envs.use_this_python()
try:
    PLAN = load_plan(config)
    SITE = load_site(ROOT / "profiles/slurm/site.yaml")
    ENVIRONMENTS = {
        run.framework: envs.identity(ROOT / f"envs/{run.framework}.yaml")
        for run in PLAN.runs.values()
    }
except LedgerError as e:
    sys.exit(f"train-ledger: {e}")

CODE = {stage: envs.code(stage, ROOT / "src/train_ledger") for stage in envs.CODE_OF}
STARTED = time.time()
RUNS = PLAN.runs
COMPARISON = PLAN.comparison.name
PAPER = PLAN.paper.name if PLAN.paper else None


wildcard_constraints:
    comparison=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    run=r"[A-Za-z0-9][A-Za-z0-9._-]*",


def run_of(wildcards):
    """The resolved run that a job is about."""
    return RUNS[wildcards.comparison, wildcards.run]


def run_json(wildcards):
    """All that a job may know of the configuration: its own run. Editing another run, or a comment, changes nothing here."""
    return json.dumps(run_of(wildcards).to_dict(), sort_keys=True)


def one_of(names):
    """A wildcard's pattern for these names and no other."""
    return "|".join(re.escape(name) for name in names) or "(?!)"


def of_runs(pattern, comparison=COMPARISON):
    """One file for each run of a comparison."""
    return [
        pattern.format(comparison=of, run=run) for of, run in RUNS if of == comparison
    ]


@functools.cache
def start():
    """Once, before the first job: see train_ledger.workflow.resume. Not for a dry run, and not in a job's own Snakemake."""
    plugin = workflow.executor_plugin
    if plugin is None or not workflow.is_main_process or workflow.touch:
        return
    sealed = [f"results/{COMPARISON}/{name}" for name in ("figures", "report.html")]
    if workflow.dryrun:
        resume.foretell(EVIDENCE + sealed)
        return
    try:
        if plugin.name == "slurm":
            slurm.configure(workflow.executor_settings, SITE.account, SITE.reservation)
            # A job may meet a bad host or ask for too little; a stage on this machine fails alike again.
            for name in ("launch", "launch_hosts"):
                workflow.get_rule(name).restart_times = 1
        deployed = {str(d) for d in workflow.deployment_settings.deployment_method}
        resume.begin(
            PLAN,
            ENVIRONMENTS,
            plugin.name,
            EVIDENCE + sealed,
            own_python="conda" not in deployed,
        )
    except LedgerError as e:
        sys.exit(f"train-ledger: {e}")


def failures(snakemake_logs):
    """What each failed job of this workflow said, once more, as the last thing that is seen."""
    for log in sorted(Path("logs").glob(f"{COMPARISON}/**/*.log")):
        if log.stat().st_mtime >= STARTED:
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("train-ledger "):
                    print(line, file=sys.stderr)
    if workflow.executor_plugin and workflow.executor_plugin.name == "slurm":
        slurm.say_why(STARTED, snakemake_logs)


def begun(wildcards):
    """No input, but `start`. First of the inputs of what can be a target by name: before Snakemake has looked at a file."""
    start()
    return []


def launch_input(wildcards):
    """What a launch starts from."""
    start()
    return canonical_weights(wildcards)


def targets(wildcards):
    """What `snakemake` makes. The verdict comes after the report: what does not reconcile is shown before it fails.

    Each stage's files by name: Snakemake passes over one that is gone as long as the page is there and asks for no more.
    Not the weights, from which every launch would start again.
    """
    start()
    each = ("launch/{run}/run.json", "probe/{run}.parquet", "predict/{run}.json")
    return [
        *(f for name in each for f in of_runs(f"results/{{comparison}}/{name}")),
        *of_runs("results/{comparison}/predict/{run}.json", PAPER),
        *RECONCILED,
        *REFERENCE,
        *PARITY,
        *EVIDENCE,
        *(
            f"results/{COMPARISON}/{name}"
            for name in ("figures", "tables", "report.html", "verdict.txt")
        ),
    ]


def canonical_weights(wildcards):
    """Canonical initial weights of a launch; none unless a stage that makes them says otherwise."""
    return []


def figure_words():
    """Words of the figures that are drawn already: for `snakemake --report`, whose captions see the config and no files."""
    try:
        listing = Path(f"results/{COMPARISON}/figures/figures.json")
        listed = json.loads(listing.read_text(encoding="utf-8"))["figures"]
        words = {f["name"]: {k: f[k] for k in ("title", "caption")} for f in listed}
        narrow = {
            f"{name}_column": said | {"title": f"{said['title']}, for one column"}
            for name, said in words.items()
        }
        return words | narrow
    except (OSError, ValueError, KeyError, TypeError):
        return {}


config["figures"] = figure_words()
