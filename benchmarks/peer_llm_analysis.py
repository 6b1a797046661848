"""llm-analysis 0.2.2 on cases from stdin, in an environment of its own. Run by peers.py.

Reads a JSON list of {"model": …, "parallel": …, "zero_stage": …, "seq_length": …}, prints a JSON list of
{"state_bytes": bytes of weights, gradients and optimizer state a GPU, "seconds": one call} or {"error": …}.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from llm_analysis.analysis import DSZeRO, LLMAnalysis
from llm_analysis.config import ModelConfig, ParallelismConfig, get_gpu_config_by_name

logging.disable(logging.CRITICAL)


def estimate(case: dict[str, Any]) -> float:
    """Its training summary's sum of weights, gradients and optimizer state, bytes."""
    m, p = case["model"], case["parallel"]
    analysis = LLMAnalysis(
        ModelConfig(
            name=m["name"],
            num_layers=m["num_layers"],
            n_head=m["num_attention_heads"],
            hidden_dim=m["hidden_size"],
            vocab_size=m["vocab_size"],
            max_seq_len=case["seq_length"],
            num_key_value_heads=m["num_query_groups"],
            ffn_embed_dim=m["ffn_hidden_size"],
            expansion_ratio=m["ffn_hidden_size"] / m["hidden_size"],
            model_type="llama" if m["gated_mlp"] else "gpt2",
        ),
        get_gpu_config_by_name("a100-sxm-80gb"),
        parallelism_config=ParallelismConfig(tp_size=p["tensor"], pp_size=p["pipeline"], dp_size=p["data"]),
    )
    summary = analysis.training(
        batch_size_per_gpu=1,
        seq_len=case["seq_length"],
        ds_zero=DSZeRO(case["zero_stage"]),
        mlp_gated_linear_units=m["gated_mlp"],
    )
    return float(summary["(weight+op_state+grad)_memory_per_gpu"])


def main() -> None:
    """One answer a case."""
    out = []
    for case in json.load(sys.stdin):
        try:
            estimate(case)
            start = time.perf_counter()
            state = estimate(case)
            out.append({"state_bytes": state, "seconds": time.perf_counter() - start})
        except Exception as e:  # whatever it raises is a row of the table
            out.append({"error": f"{type(e).__name__}: {e}"})
    sys.stdout.write("\nANSWER " + json.dumps(out))


if __name__ == "__main__":
    main()
