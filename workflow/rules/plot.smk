"""plot: figures as SVG and PDF, from the tables and the predictions."""


rule plot:
    input:
        begun,
        f"results/{COMPARISON}/reconcile/runs.json",
        [f"results/{COMPARISON}/reconcile/{table}.csv" for table in TABLES],
        of_runs("results/{comparison}/predict/{run}.json"),
        of_runs("results/{comparison}/predict/{run}.json", PAPER),
        PARITY,
        EVIDENCE,
    output:
        report(
            directory(f"results/{COMPARISON}/figures"),
            patterns=["{figure}.svg"],
            caption="../report/figure.rst",
            category="Figures",
            labels=lambda wildcards: {
                "figure": config["figures"]
                .get(wildcards.figure, {})
                .get("title", wildcards.figure)
            },
        ),
    log:
        f"logs/{COMPARISON}/plot.log",
    benchmark:
        f"logs/{COMPARISON}/plot.tsv"
    conda:
        "../../envs/workflow.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        paper=PAPER,
        evidence=EVIDENCE,
        code=CODE["plot"],
    message:
        f"Drawing the figures of {COMPARISON}"
    script:
        "../scripts/plot.py"
