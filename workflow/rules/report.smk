"""report: one page that opens anywhere, and every table of it as CSV and LaTeX."""


rule report:
    input:
        begun,
        f"results/{COMPARISON}/figures",
        f"results/{COMPARISON}/reconcile/runs.json",
        [f"results/{COMPARISON}/reconcile/{table}.csv" for table in TABLES],
        of_runs("results/{comparison}/predict/{run}.json"),
        of_runs("results/{comparison}/predict/{run}.json", PAPER),
        PARITY,
        EVIDENCE,
    output:
        page=report(
            f"results/{COMPARISON}/report.html",
            caption="../report/page.rst",
            category="Report",
        ),
        tables=directory(f"results/{COMPARISON}/tables"),
    log:
        f"logs/{COMPARISON}/report.log",
    benchmark:
        f"logs/{COMPARISON}/report.tsv"
    conda:
        "../../envs/workflow.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        paper=PAPER,
        evidence=EVIDENCE,
        code=CODE["report"],
    message:
        f"Writing the report of {COMPARISON}"
    script:
        "../scripts/report.py"
