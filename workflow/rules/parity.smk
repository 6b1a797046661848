"""parity: do the frameworks train the same model? One set of initial weights, a plain reference, and every pair compared."""

from train_ledger.parity.problem import select

# Worlds that compute on a GPU train the reference there too; a comparison in world `fake` has no losses to compare.
REAL = {
    name: run
    for name, run in PLAN.comparison.runs.items()
    if config.get("parity", True) and run.world != "fake"
}
PROBLEM = select(REAL).problem if REAL else None
ON_GPU = any(run.world in ("shared", "nccl") for run in REAL.values())
PARITY = (
    [
        f"results/{COMPARISON}/parity/{table}.csv"
        for table in ("curves", "losses", "grad_norms", "weights")
    ]
    + [
        f"results/{COMPARISON}/parity/parity.json",
        f"results/{COMPARISON}/parity/differences.txt",
    ]
    if REAL
    else []
)
REFERENCE = (
    [
        f"results/{COMPARISON}/reference/{file}"
        for file in ("fp32.safetensors", "bf16.safetensors", "reference.json")
    ]
    if REAL
    else []
)


WEIGHTS = f"results/{COMPARISON}/weights/seed{{seed}}.safetensors"

# What a launch starts from (rule `launch`); the framework's own initial weights where nothing is compared.
canonical_weights = lambda w: (
    WEIGHTS.format(seed=run_of(w).seed)
    if w.comparison == COMPARISON and w.run in REAL
    else []
)


localrules:
    weights,
    parity,


rule weights:
    output:
        weights=WEIGHTS,
        record=f"{WEIGHTS}.json",
    log:
        f"logs/{COMPARISON}/weights/seed{{seed}}.log",
    benchmark:
        f"logs/{COMPARISON}/weights/seed{{seed}}.tsv"
    wildcard_constraints:
        seed=r"\d+",
    conda:
        "../../envs/deepspeed.yaml"
    threads: 1
    resources:
        mem_mb=4000,
    params:
        model=lambda w: json.dumps(PLAN.comparison.model.to_dict(), sort_keys=True),
    message:
        f"Making the initial weights of {COMPARISON}"
    script:
        "../scripts/weights.py"


if REAL:

    if not ON_GPU:

        localrules:
            reference,

    rule reference:
        input:
            weights=WEIGHTS.format(seed=PROBLEM.seed),
        output:
            REFERENCE,
        log:
            f"logs/{COMPARISON}/reference.log",
        benchmark:
            f"logs/{COMPARISON}/reference.tsv"
        conda:
            "../../envs/deepspeed.yaml"
        threads: 1
        resources:
            mem_mb=4000 if not ON_GPU else 100000,
            runtime=180,
            gres="gpu:1" if ON_GPU else "",
        params:
            problem=json.dumps(PROBLEM.to_dict(), sort_keys=True),
            device="cuda" if ON_GPU else "cpu",
        message:
            f"Training the plain reference of {COMPARISON}"
        script:
            "../scripts/reference.py"

    rule parity:
        input:
            begun,
            launches=[f"results/{COMPARISON}/launch/{run}/run.json" for run in REAL],
            reference=f"results/{COMPARISON}/reference/reference.json",
            weights=WEIGHTS.format(seed=PROBLEM.seed),
        output:
            PARITY,
        log:
            f"logs/{COMPARISON}/parity.log",
        benchmark:
            f"logs/{COMPARISON}/parity.tsv"
        conda:
            "../../envs/workflow.yaml"
        threads: 1
        resources:
            mem_mb=4000,
        params:
            code=CODE["parity"],
            runs=json.dumps([run.to_dict() for run in REAL.values()], sort_keys=True),
        message:
            f"Comparing what the runs of {COMPARISON} trained"
        script:
            "../scripts/parity.py"
