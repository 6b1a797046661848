"""probe: what the ranks wrote, checked and made one tidy table a run."""


rule probe:
    input:
        begun,
        launch="results/{comparison}/launch/{run}/run.json",
    output:
        "results/{comparison}/probe/{run}.parquet",
    log:
        "logs/{comparison}/probe/{run}.log",
    benchmark:
        "logs/{comparison}/probe/{run}.tsv"
    conda:
        "../../envs/workflow.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        code=CODE["probe"],
        # A launch that was kept after its workflow had died has no record with Snakemake; this one has.
        request=lambda w: [run_of(w).sha256(), ENVIRONMENTS[run_of(w).framework]],
        damaged=lambda w: resume.damaged(f"results/{w.comparison}/launch/{w.run}"),
    message:
        "Checking what the ranks of {wildcards.run} wrote"
    script:
        "../scripts/probe.py"
