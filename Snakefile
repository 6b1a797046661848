"""Train the same model in Megatron Core, DeepSpeed and torchtitan; predict, measure and reconcile what each GPU keeps and sends.

predict: what must be there, from the configuration alone      launch: the real frameworks, with probes around them
probe: tidy tables from what the ranks wrote                   reconcile: predicted against measured, to the byte and to the call
plot, report: figures, tables, one page                        verdict: fails when anything is left unexplained
"""

from snakemake.utils import min_version

min_version("9.27")


configfile: "config/config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/predict.smk"
include: "workflow/rules/launch.smk"
include: "workflow/rules/parity.smk"
include: "workflow/rules/probe.smk"
include: "workflow/rules/reconcile.smk"
include: "workflow/rules/evidence.smk"
include: "workflow/rules/plot.smk"
include: "workflow/rules/report.smk"


# Only launch trains; on a cluster only launch is a job.
localrules:
    all,
    predict,
    probe,
    reconcile,
    plot,
    report,
    verdict,


rule all:
    default_target: True
    input:
        targets,
    message:
        f"All of {COMPARISON} is made"


onerror:
    failures(log)
