"""predict: what each rank must keep and send, from the run alone. Seconds, no framework, no torch."""


rule predict:
    output:
        "results/{comparison}/predict/{run}.json",
    log:
        "logs/{comparison}/predict/{run}.log",
    benchmark:
        "logs/{comparison}/predict/{run}.tsv"
    conda:
        "../../envs/workflow.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        run=run_json,
        code=CODE["predict"],
    message:
        "Predicting {wildcards.run} ({wildcards.comparison})"
    script:
        "../scripts/predict.py"
