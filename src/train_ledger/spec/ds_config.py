"""ds_config.json, the one file that DeepSpeed reads: what is launched is what is exported."""

from __future__ import annotations

from typing import Any

from .run import Run


def ds_config(run: Run) -> dict[str, Any]:
    """The run's batch and optimizer, and its own DeepSpeed settings, under DeepSpeed's keys.

    The global batch is not among them: DeepSpeed multiplies it out, and the export writes it for people.
    """
    o, s = run.optimizer, run.settings
    zero = {key: int(value) if isinstance(value, float) else value for key, value in s["zero_optimization"].items()}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.num_micro_batches,
        "gradient_clipping": o.clip_grad,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            # torch_adam: DeepSpeed's FusedAdam is compiled when first used (minutes, and a compiler); torch's is the
            # same AdamW.
            "params": {
                "lr": o.lr,
                "betas": [o.beta1, o.beta2],
                "eps": o.eps,
                "weight_decay": o.weight_decay,
                "torch_adam": True,
            },
        },
    }
    if s["communication_data_type"]:
        config["communication_data_type"] = s["communication_data_type"]
    if s["data_types"]["grad_accum_dtype"]:
        config["data_types"] = {"grad_accum_dtype": s["data_types"]["grad_accum_dtype"]}
    return config
