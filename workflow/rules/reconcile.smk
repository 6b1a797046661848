"""reconcile: predicted against measured, every residual named. verdict: no residual, or the workflow fails, after the report."""

from train_ledger.reconcile.facts import FACT_TABLES

TABLES = ("resident", "collectives", "layout", *FACT_TABLES)
RECONCILED = [
    f"results/{COMPARISON}/reconcile/{file}"
    for file in (
        "runs.json",
        "differences.txt",
        *(f"{table}.csv" for table in TABLES),
    )
]


rule reconcile:
    input:
        begun,
        predict=of_runs("results/{comparison}/predict/{run}.json"),
        probe=of_runs("results/{comparison}/probe/{run}.parquet"),
    output:
        RECONCILED,
    log:
        f"logs/{COMPARISON}/reconcile.log",
    benchmark:
        f"logs/{COMPARISON}/reconcile.tsv"
    conda:
        "../../envs/workflow.yaml"
    threads: 1
    resources:
        mem_mb=4000,
    params:
        code=CODE["reconcile"],
    message:
        f"Reconciling the runs of {COMPARISON}"
    script:
        "../scripts/reconcile.py"


rule verdict:
    input:
        begun,
        differences=[f"results/{COMPARISON}/reconcile/differences.txt"]
        + [f for f in PARITY if f.endswith("differences.txt")],
        report=f"results/{COMPARISON}/report.html",
    output:
        f"results/{COMPARISON}/verdict.txt",
    log:
        f"logs/{COMPARISON}/verdict.log",
    benchmark:
        f"logs/{COMPARISON}/verdict.tsv"
    conda:
        "../../envs/workflow.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    message:
        f"Is every byte and every call of {COMPARISON} explained?"
    script:
        "../scripts/verdict.py"
