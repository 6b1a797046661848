"""plot: figures as SVG and PDF, from the tables and the predictions."""


def figure_words():
    """Title, caption and section of each figure that is drawn already: for `snakemake --report`, which knows files alone."""
    try:
        listed = json.loads(
            Path(f"results/{COMPARISON}/figures/figures.json").read_text(
                encoding="utf-8"
            )
        )["figures"]
        return {
            f["name"]: {k: f[k] for k in ("title", "caption", "alt")} for f in listed
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


# The caption's template sees the config and no files.
config["figures"] = figure_words()


rule plot:
    input:
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
    message:
        f"Drawing the figures of {COMPARISON}"
    script:
        "../scripts/plot.py"
