"""A likely cause for a residual that is not 0, in one line. A hint for the reader, never part of a verdict."""

from __future__ import annotations

from train_ledger.spec.dtypes import ELEMENT_BYTES

#: What decides the size of a container, for those whose size is a setting rather than the sum of the parameters.
DECIDED_BY = {
    "reduce_bucket": "reduce_bucket_size and communication_data_type decide it, and whether a backward has run",
    "persisted_param": "stage3_param_persistence_threshold decides which parameters stay whole on every rank",
    "global_memory_buffer": "its size follows the largest sequence-parallel gather: sequence x micro-batch x hidden",
    "rope_cache": "its length follows the sequence, its count the layers or modules that keep one",
    "grad": "the type of gradients, and whether they are freed after the step, decide it",
    "main_param": "the fp32 master is there only with a mixed-precision optimizer, one shard a data-parallel rank",
    "step": "one scalar a parameter (or a flat group) that the optimizer steps on this rank",
    "exp_avg": "moments exist only for the elements that this rank's optimizer owns",
    "exp_avg_sq": "moments exist only for the elements that this rank's optimizer owns",
}


def resident_cause(
    name: str, dtype: str, predicted: int, pad_numel: int, measured: int, other_dtypes: list[str]
) -> str:
    """Likely cause of a difference between predicted and measured bytes of a container.

    Args:
        name, dtype: of the container.
        predicted, measured: bytes; 0 where that side has none.
        pad_numel: predicted elements of padding.
        other_dtypes: types under which the opposite side knows the same name.
    """
    if other_dtypes and (not predicted or not measured):
        side = "measured" if predicted else "predicted"
        return f"type: {side} as {', '.join(other_dtypes)}, here {dtype}"
    size = ELEMENT_BYTES.get(dtype, 1)
    residual = measured - predicted
    hint = DECIDED_BY.get(name, "")
    if not predicted:
        return hint or "no rule predicts this container; its name or its owner may be new in this framework version"
    if not measured:
        return hint or "the framework did not allocate it, has freed it, or keeps it under another name"
    if pad_numel and -residual == pad_numel * size:
        return "padding: the predicted padding is not in the storage"
    if measured == 2 * predicted:
        return "held twice, or in a type of twice the size"
    if 2 * measured == predicted:
        return "held once where two copies were predicted, or in a type of half the size"
    if abs(residual) < 65536 * size and residual % size == 0:
        return f"padding or alignment: {residual // size:+,} elements of {dtype}" + (f"; {hint}" if hint else "")
    return hint or f"{residual / size:+,.0f} elements of {dtype}: another split of the parameters over the ranks"


def collective_cause(
    op: str, predicted_count: int, measured_count: int, predicted: int, measured: int, other_dtypes: list[str]
) -> str:
    """Likely cause of a difference between predicted and measured calls of one op, group and dtype."""
    if other_dtypes and (not predicted_count or not measured_count):
        side = "measured" if predicted_count else "predicted"
        return f"type of reduction or gathering: {side} as {', '.join(other_dtypes)}"
    if not predicted_count:
        return "calls that no rule predicts, or made on another group than the rule says"
    if not measured_count:
        return "not called in the recorded step, or called on another group"
    if predicted_count == measured_count:
        if predicted == measured:
            return "same total, other sizes of the single calls: bucket boundaries"
        return "same number of calls, other sizes: padding, bucket boundaries or the type of the payload"
    if predicted == measured:
        return "same bytes in another number of calls: bucket count or coalescing"
    low, high = sorted((predicted_count, measured_count))
    if high % low == 0:
        return f"{high // low} times the calls: micro-batches (gradient accumulation), recomputation or resharding"
    delta = measured_count - predicted_count
    where = {
        "all_gather": "resharding, prefetching, recomputation or persisted parameters",
        "reduce_scatter": "bucket flushes or gradient accumulation",
        "all_reduce": "norms, clipping, loss or logging",
    }.get(op, "the schedule of the step")
    return f"{delta:+,} calls: {where}"
