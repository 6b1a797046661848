"""evidence: measurements from real GPUs that the repository keeps, unpacked and reconciled with today's prediction."""

KEPT = sorted(str(f) for f in Path("reference").rglob("*") if f.is_file())
EVIDENCE = ["results/evidence/verdict.txt"] if KEPT else []


localrules:
    evidence,


rule evidence:
    input:
        KEPT,
    output:
        EVIDENCE,
    log:
        "logs/evidence.log",
    benchmark:
        "logs/evidence.tsv"
    conda:
        "../../envs/workflow.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        code=CODE["evidence"],
    message:
        "Reconciling the measurements from real GPUs"
    script:
        "../scripts/evidence.py"
