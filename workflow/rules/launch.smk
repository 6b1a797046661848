"""launch: the real framework, its ranks and the probes in them. The one rule that is a job on a cluster."""


rule launch:
    input:
        weights=lambda w: canonical_weights(w),
    output:
        "results/{comparison}/launch/{run}/run.json",
    log:
        "logs/{comparison}/launch/{run}.log",
    benchmark:
        "logs/{comparison}/launch/{run}.tsv"
    conda:
        lambda w: f"../../envs/{run_of(w).framework}.yaml"
    # All cores: never two launches at once on one machine. A cluster's job takes `cpus_per_task`.
    threads: 4096
    resources:
        timeout_s=PLAN.launch_timeout_s,
        # Minutes and MB; a second attempt gets more of both.
        runtime=lambda w, attempt: attempt * (PLAN.launch_timeout_s // 60 + 5),
        mem_mb=lambda w, attempt: attempt * 64000,
        cpus_per_task=64,
        nodes=lambda w: PLAN.nodes(run_of(w)),
        gres=lambda w: f"gpu:{PLAN.ranks_per_node(run_of(w))}",
    params:
        run=run_json,
        env=lambda w: ENVIRONMENTS[run_of(w).framework],
        start=lambda w, input: (
            f"--weights {input.weights} --export" if input.weights else ""
        ),
    message:
        "Training {wildcards.run} ({wildcards.comparison})"
    shell:
        "python workflow/scripts/launch.py --run {params.run:q} --env {params.env} --out $(dirname {output:q}) --log {log:q} "
        "--timeout-s {resources.timeout_s} --nodes {resources.nodes} {params.start}"
