"""launch: the real framework, its ranks and the probes in them. The one rule that is a job on a cluster."""


rule launch:
    input:
        weights=launch_input,
    output:
        "results/{comparison}/launch/{run}/run.json",
    log:
        "logs/{comparison}/launch/{run}.log",
    benchmark:
        "logs/{comparison}/launch/{run}.tsv"
    wildcard_constraints:
        run=one_of(
            name for name, run in PLAN.comparison.runs.items() if PLAN.nodes(run) == 1
        ),
    conda:
        lambda w: f"../../envs/{run_of(w).framework}.yaml"
    # All cores: never two launches at once on one machine. A cluster's job takes `cpus_per_task`.
    threads: 4096
    resources:
        **SITE.resources,
        cpus_per_task=SITE.cpus_per_task,
        # MB and minutes; a second attempt gets more of both.
        mem_mb=lambda w, attempt: attempt * SITE.mem_mb,
        runtime=lambda w, attempt: attempt
        * (SITE.runtime_min or PLAN.launch_timeout_s // 60 + 5),
        timeout_s=PLAN.launch_timeout_s,
        nodes=1,
        gres=lambda w: f"{SITE.gpu}:{PLAN.ranks_per_node(run_of(w))}",
    params:
        run=run_json,
        env=lambda w: ENVIRONMENTS[run_of(w).framework],
    message:
        "Training {wildcards.run} ({wildcards.comparison})"
    script:
        "../scripts/launch.py"


# A run with more ranks than a host has GPUs: srun starts one torchrun a host (train_ledger.workflow.hosts).
use rule launch as launch_hosts with:
    wildcard_constraints:
        run=one_of(
            name for name, run in PLAN.comparison.runs.items() if PLAN.nodes(run) > 1
        ),
    resources:
        **SITE.resources,
        cpus_per_task=SITE.cpus_per_task,
        mem_mb=lambda w, attempt: attempt * SITE.mem_mb,
        runtime=lambda w, attempt: attempt
        * (SITE.runtime_min or PLAN.launch_timeout_s // 60 + 5),
        timeout_s=PLAN.launch_timeout_s,
        nodes=lambda w: PLAN.nodes(run_of(w)),
        gres=lambda w: f"{SITE.gpu}:{PLAN.ranks_per_node(run_of(w))}",
        mpi="srun",
        tasks=lambda w: PLAN.nodes(run_of(w)),
        tasks_per_gpu=0,
        slurm_extra="--ntasks-per-node=1",
