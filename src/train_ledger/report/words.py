"""The glossary."""

from __future__ import annotations

GLOSSARY: tuple[tuple[str, str], ...] = (
    ("all-gather", "Every rank of a group gives its part and receives the parts of all."),
    ("all-reduce", "Every rank of a group gives a tensor and receives the sum (or maximum) over all."),
    ("boundary", "The moment between two optimizer steps: activations are gone, what is resident remains."),
    ("bucket", "Gradients or parameters that are laid side by side so that one call moves them together."),
    (
        "container",
        "Storage of one kind on a rank: param, grad, main_param (the fp32 master copy), exp_avg and exp_avg_sq (Adam's "
        "moments), step counters, then what a framework adds, such as reduce_bucket or persisted_param.",
    ),
    ("data parallel", "Ranks that hold the same part of the model and train on different sequences."),
    (
        "FSDP, ZeRO-3",
        "Parameters, gradients and optimizer state are split over data-parallel ranks; parameters are "
        "gathered when they are used.",
    ),
    ("GB, GiB", "10^9 and 2^30 bytes. Data files hold bytes only."),
    ("lifeline", "What one weight is at each event of a step: empty, a shard, whole, or a view of a larger buffer."),
    ("master copy", "The fp32 values that the optimizer updates; bf16 parameters are made from them."),
    ("micro-batch", "The sequences of one forward; several of them may make one optimizer step."),
    ("payload", "The larger of input and output of a call on one rank, in bytes."),
    ("pipeline parallel", "Ranks (stages) that hold consecutive layers and pass activations on."),
    ("1F1B", "The pipeline schedule in which each stage, once warmed up, does one forward and one backward in turn."),
    ("rank", "One process of a run, with one GPU where there are GPUs."),
    ("reduce-scatter", "The sum over all ranks of a group, of which each receives one part."),
    ("resident", "Allocated at a boundary."),
    ("residual", "Measured minus predicted. Anything but 0 is shown in red with its likely cause."),
    ("sequence parallel", "Between tensor-parallel matrices, activations are split along the sequence."),
    ("tensor parallel", "Ranks that each hold a slice of every matrix."),
    (
        "verdict",
        "exact: predicted and measured are equal. differs: they are not. missing: predicted, not measured. "
        "unpredicted: measured, not predicted, were it one byte that nobody claims. sizes differ: same number of calls "
        "and bytes, other single calls. not the framework's: of a library or the allocator, where the prediction was "
        "made for no device.",
    ),
    (
        "wire bytes",
        "What one rank sends if a ring carries the call over n ranks: (n-1)/n of the payload for all-gather and "
        "reduce-scatter, twice that for all-reduce, the payload for a send.",
    ),
    (
        "world",
        "How ranks are started. cpu: processes that talk through gloo. fake: one process that stands for one rank of "
        "any world; its loss means nothing. shared: all ranks on one GPU. nccl: a GPU a rank.",
    ),
)
