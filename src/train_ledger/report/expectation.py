"""What one expects of the paper's three runs before running them, what is true, and why the two differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from train_ledger.plot.data import Results, framework_title
from train_ledger.plot.expected import HAND_ESTIMATE, group_sizes, payload_bytes, predicted_figures
from train_ledger.spec.groups import rank_ranges
from train_ledger.spec.ledger import STATE_CONTAINERS, ring_wire_bytes
from train_ledger.spec.model import ModelShape
from train_ledger.spec.units import fmt, fmt_auto

from .tables import Column, Table

MEGATRON, DEEPSPEED, TORCHTITAN = "megatron-tp2-pp2-dp2", "deepspeed-zero3-dp8", "torchtitan-fsdp4-tp2"

_QUANTITIES = (
    ("params_bytes", "parameters, resident"),
    ("grads_bytes", "gradients, resident"),
    ("optimizer_bytes", "fp32 master and moments, resident"),
    ("resident_bytes", "resident in all"),
    ("data_wire_bytes", "sent in a step, data parallel"),
    ("tensor_wire_bytes", "sent in a step, tensor parallel"),
    ("pipeline_wire_bytes", "sent in a step, pipeline"),
)

#: Which explanation accounts for a difference of more than one unit of the estimate's last digit.
_WHY = {
    (MEGATRON, "tensor_wire_bytes"): "A",
    (MEGATRON, "pipeline_wire_bytes"): "B",
    (DEEPSPEED, "resident_bytes"): "C",
    (DEEPSPEED, "data_wire_bytes"): "D, E",
    (TORCHTITAN, "data_wire_bytes"): "G",
    (TORCHTITAN, "tensor_wire_bytes"): "F",
    (TORCHTITAN, "resident_bytes"): "H",
    (MEGATRON, "resident_bytes"): "H",
}


@dataclass(frozen=True)
class Explanation:
    """`letter` is what the table refers to."""

    letter: str
    title: str
    text: str


def expectation_table(paper: Results) -> Table:
    """A row a run and quantity: estimated by hand, predicted, the difference, and the letter of its explanation."""
    rows: list[dict[str, Any]] = []
    for run, expected in HAND_ESTIMATE.items():
        if run not in paper.predictions:
            continue
        predicted = predicted_figures(paper.predictions[run])
        for key, words in _QUANTITIES:
            a, b = getattr(expected, key), getattr(predicted, key)
            if not a and not b:
                continue
            rows.append(
                {
                    "run": run,
                    "framework": framework_title(paper.framework(run)),
                    "quantity": words,
                    "expected": a / 1e9,
                    "predicted": b / 1e9,
                    "predicted_bytes": b,
                    "difference": 100 * (b - a) / a if a else None,
                    "why": _WHY.get((run, key)) or ("rounding" if _is_rounding(a, b) else ""),
                }
            )
    return Table(
        "expectation",
        "Rank 0 at the paper's shape: what one estimates by hand, what the ledger predicts, and which note says why.",
        [
            Column("run", "run", "code"),
            Column("framework", "framework"),
            Column("quantity", "quantity"),
            Column("expected", "estimate [GB]", "gb"),
            Column("predicted", "predicted [GB]", "gb"),
            Column("predicted_bytes", "predicted [B]", "bytes"),
            Column("difference", "difference [%]", "percent"),
            Column("why", "note"),
        ],
        rows,
    )


def _is_rounding(estimate_bytes: int, predicted_bytes: int) -> bool:
    """Whether the two are less than one apart in the last digit in which the estimate is stated (GB)."""
    digits = len(f"{estimate_bytes / 1e9:.3f}".rstrip("0").partition(".")[2])
    return abs(predicted_bytes - estimate_bytes) < 10 ** (9 - digits)


def prediction_table(paper: Results) -> Table:
    """A row a run and kind of rank: what is predicted to be resident at the paper's shape."""
    rows = []
    for run, p in paper.predictions.items():
        kinds: dict[tuple[int, int, int, int], list[int]] = {}
        for index, ledger in enumerate(p["ranks"]):
            f = predicted_figures(p, index)
            key = (f.params_bytes, f.grads_bytes, f.optimizer_bytes, f.other_bytes)
            kinds.setdefault(key, []).append(ledger["rank"])
        for key, ranks in kinds.items():
            names = ("params_bytes", "grads_bytes", "optimizer_bytes", "other_bytes")
            row: dict[str, Any] = dict(zip(names, key, strict=True))
            rows.append({"run": run, "ranks": rank_ranges(ranks), **row, "resident_bytes": sum(key)})
    return Table(
        "paper_prediction",
        "Predicted resident bytes of one rank at the paper's shape; ranks that agree share a row.",
        [
            Column("run", "run", "code"),
            Column("ranks", "ranks"),
            Column("params_bytes", "parameters [B]", "bytes"),
            Column("grads_bytes", "gradients [B]", "bytes"),
            Column("optimizer_bytes", "fp32 master and moments [B]", "bytes"),
            Column("other_bytes", "buffers, caches, scalars [B]", "bytes"),
            Column("resident_bytes", "resident [B]", "bytes"),
        ],
        rows,
    )


Select = Callable[[Mapping[str, Any]], bool]


def _calls(prediction: Mapping[str, Any], select: Select) -> tuple[int, int]:
    """Calls and payload bytes of rank 0 that `select` takes."""
    found = [c for c in prediction["ranks"][0]["collectives"] if select(c)]
    return sum(c["count"] for c in found), sum(map(payload_bytes, found))


def _wire(prediction: Mapping[str, Any], select: Select) -> int:
    """Bytes that rank 0 sends in the calls that `select` takes, as the table counts them."""
    sizes = group_sizes(prediction, 0)
    found = [c for c in prediction["ranks"][0]["collectives"] if select(c)]
    return round(sum(ring_wire_bytes(c["op"], sizes[c["group"]], payload_bytes(c)) for c in found))


def _model_bytes(prediction: Mapping[str, Any]) -> int:
    """Bytes of the whole model in bf16."""
    return 2 * ModelShape(**prediction["config"]["model"]).num_parameters


def _container(prediction: Mapping[str, Any], name: str) -> int:
    return sum(c["bytes"] for c in prediction["ranks"][0]["containers"] if c["name"] == name)


def _others(prediction: Mapping[str, Any]) -> str:
    """Names of the containers that are no model state, largest first; those below a kilobyte together."""
    sizes: dict[str, int] = {}
    for c in prediction["ranks"][0]["containers"]:
        if c["name"] not in STATE_CONTAINERS:
            sizes[c["name"]] = sizes.get(c["name"], 0) + c["bytes"]
    large = sorted((n for n in sizes if sizes[n] >= 1000), key=lambda n: -sizes[n])
    few = sum(sizes[n] for n in sizes if sizes[n] < 1000)
    return ", ".join([*large, f"{few} B of small ones"] if few else large)


def explanations(paper: Results) -> list[Explanation]:
    """Why the estimate and the truth differ, each with the figures of the predictions at hand."""
    return [*_megatron(paper), *_deepspeed(paper), *_torchtitan(paper), *_general(paper)]


def _megatron(paper: Results) -> Iterator[Explanation]:
    p = paper.predictions.get(MEGATRON)
    if p is None:
        return
    gathers, _ = _calls(p, lambda c: c["op"] == "all_gather" and c["group"] == "tp")
    scatters, _ = _calls(p, lambda c: c["op"] == "reduce_scatter" and c["group"] == "tp")
    embedding, _ = _calls(p, lambda c: c["component"] == "embedding" and c["group"] == "tp")
    yield Explanation(
        "A",
        "Megatron Core gathers six times a layer, not four",
        "With sequence parallelism one expects two all-gathers and two reduce-scatters a layer in each direction. The "
        "backward of a column-parallel layer needs its whole input once more for the weight gradient, and gathers it "
        "again instead of keeping it: six all-gathers and four reduce-scatters a layer and micro-batch. The embedding "
        f"on the first stage adds one of each a micro-batch, {embedding:,} calls in all. Rank 0 makes {gathers:,} "
        f"all-gathers and {scatters:,} reduce-scatters on its tensor-parallel group in a step "
        "(megatron core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.backward).",
    )
    _, sent = _calls(p, lambda c: c["op"] == "send")
    yield Explanation(
        "B",
        "A pipeline stage sends shards, not whole activations",
        "Under sequence parallelism the activation between two stages is split over the tensor-parallel ranks, and "
        f"each sends its own part: {fmt(sent)} a rank and step, half of what whole activations would be. The estimate "
        "has twice that: whole activations, or what is sent and what is received together (megatron "
        "core/pipeline_parallel/schedules.py, get_tensor_shapes).",
    )


def _deepspeed(paper: Results) -> Iterator[Explanation]:
    p = paper.predictions.get(DEEPSPEED)
    if p is None or "config" not in p:
        return
    bucket, persisted = _container(p, "reduce_bucket"), _container(p, "persisted_param")
    yield Explanation(
        "C",
        "ZeRO-3 keeps a bucket and the small parameters",
        "Sixteen bytes a parameter over the ranks is not all: the reduce bucket is allocated once and stays "
        f"({bucket:,} B), and parameters of at most stage3_param_persistence_threshold elements stay whole on every "
        f"rank ({persisted:,} B; deepspeed runtime/zero/stage3.py, _setup_for_real_optimizer, and "
        "runtime/zero/parameter_offload.py, mark_persistent_parameters).",
    )
    ranks = p["world_size"]
    gathers, gathered = _calls(p, lambda c: c["op"] == "all_gather")
    scatters, scattered = _calls(p, lambda c: c["op"] == "reduce_scatter")
    yield Explanation(
        "D",
        "Gradient accumulation doubles the reduce-scatter",
        "Gradients are partitioned, so each of the two micro-batches of a step reduces all of them: "
        f"{scatters:,} reduce-scatters with {fmt(scattered)} of payload a step. The estimate counts one pass; the "
        f"other is {fmt(_wire(p, lambda c: c['op'] == 'reduce_scatter') // 2)} on the wire "
        "(deepspeed runtime/zero/stage3.py, __reduce_and_partition_ipg_grads).",
    )
    yield Explanation(
        "E",
        "The all-gather does not double, and stage3_max_live_parameters releases nothing",
        f"{gathers:,} all-gathers carry {fmt(gathered)} a step, {gathered / _model_bytes(p):.2f} times the bf16 model "
        "and not four times (forward and backward of two micro-batches); on the wire that is "
        f"{fmt(_wire(p, lambda c: c['op'] == 'all_gather'))}, where the estimate's two passes are "
        f"{fmt(2 * _model_bytes(p) * (ranks - 1) // ranks)}. The prefetcher runs through the recorded "
        "order of uses ahead of the computation. What is still whole when it comes to its next use is passed over and "
        "kept for that use, so that a backward finds nearly all that its forward gathered; stage3_max_reuse_distance = "
        "1e9 elements keeps nothing beyond that here (deepspeed runtime/zero/partitioned_param_coordinator.py, "
        "fetch_sub_module and __params_to_release). stage3_max_live_parameters = 1e9 bounds only what is prefetched: "
        f"in the second micro-batch all {_model_bytes(p) // 2:,} parameters are live at once. The embedding stays "
        "gathered from one micro-batch to the next: its input is integer, so no backward hook releases it.",
    )


def _is_fsdp_gather(call: Mapping[str, Any]) -> bool:
    return bool(call["op"] == "all_gather" and call["dtype"] == "bfloat16" and call["group"] != "tp")


def _torchtitan(paper: Results) -> Iterator[Explanation]:
    p = paper.predictions.get(TORCHTITAN)
    if p is None:
        return
    recomputed, _ = _calls(p, lambda c: c["component"] == "recompute")
    if recomputed:
        again = fmt(_wire(p, lambda c: c["component"] == "recompute"))
        yield Explanation(
            "F",
            "Selective activation checkpointing repeats collectives",
            "In the backward a layer's forward runs again but for what was saved: attention and every other matrix "
            f"product. Its tensor-parallel gathers and scatters run again too, {recomputed:,} calls and {again} on the "
            "wire. The list of what to save names a reduce-scatter, but the one of the DTensor backends; the default "
            "backend, spmd_types, calls torch.distributed's own, which the list does not know. With the DTensor "
            "backends the gathers alone would repeat (torchtitan distributed/activation_checkpoint.py, "
            "_get_default_save_ops). What is left of the difference are the calls of the embedding and the final norm.",
        )
    gathers, _ = _calls(p, _is_fsdp_gather)
    scatters, _ = _calls(p, lambda c: c["op"] == "reduce_scatter" and c["group"] != "tp")
    third = _wire(p, lambda c: c["op"] == "all_gather" and c["component"] == "FSDP last") // 3
    yield Explanation(
        "G",
        "The last FSDP unit is gathered three times",
        "Two gathers for each of the 18 units would be 36, and as a rule torchtitan keeps its last unit, final norm "
        "and output layer, from its forward to its backward: 35. The chunked loss calls the output layer on its own "
        f"and turns resharding of that unit back on: {gathers:,} bf16 all-gathers. The third of the last unit is "
        f"{fmt(third)} on the wire. And there are {scatters:,} reduce-scatters, since the output layer's gradient is "
        "reduced apart from the norm's (torchtitan components/loss.py, lm_head.set_reshard_after_forward(True)).",
    )
    yield Explanation(
        "I",
        "torchtitan's 1B flavour ties its embeddings, and its batch is half as large",
        "As shipped, the flavour shares the embedding with the output layer (torchtitan models/llama3/__init__.py, "
        "_1b: enable_weight_tying): 1,235,814,400 parameters, not 1,498,482,688. Here weight tying is off, so that the "
        "three frameworks train the same model. Two sequences on each of four data-parallel ranks are 8 "
        "sequences a step, where the other two runs have 16: a matched run with 16 stands beside it.",
    )


def _general(paper: Results) -> Iterator[Explanation]:
    small = [
        f"{framework_title(paper.framework(run))} {fmt_auto(predicted_figures(p).other_bytes)} ({_others(p)})"
        for run, p in paper.predictions.items()
        if run in HAND_ESTIMATE
    ]
    if not small:
        return
    yield Explanation(
        "H",
        "Buffers and caches are resident too",
        f"The estimate counts model state only. On rank 0 these containers come on top: {'; '.join(small)}.",
    )
    yield Explanation(
        "J",
        "One torch for all three: 2.14.1, not 2.13.0",
        "The fully_shard of torch 2.13.0 does not take the parameters of torchtitan 0.3.0's default SPMD backend, and "
        "torch.distributed.set_timeout is missing there. Megatron Core 0.18.0 and DeepSpeed 0.19.2 give the same "
        "figures on both, so all three run on 2.14.1.",
    )
