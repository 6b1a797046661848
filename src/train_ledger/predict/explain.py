"""Answers to questions that people ask in public trackers, from the numbers of one run, in a line or two each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from train_ledger.predict import predict
from train_ledger.predict.difference import heaviest
from train_ledger.predict.distinct import predict_distinct
from train_ledger.predict.frameworks import torchtitan_layout
from train_ledger.predict.owner import fused, slices, weight
from train_ledger.spec.dtypes import element_bytes
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.ledger import STATE_CONTAINERS, Collective, RankLedger
from train_ledger.spec.placement import copies, equal_copies, masters, rank_words
from train_ledger.spec.registry import FRAMEWORKS
from train_ledger.spec.run import Run, check_layout
from train_ledger.spec.units import fmt_auto


@dataclass(frozen=True)
class Case:
    """A run with the prediction of one rank: `rank`, or the one that keeps most."""

    run: Run
    rank: int | None = None

    @cached_property
    def ledger(self) -> RankLedger:
        """That rank's side of the prediction."""
        if self.rank is not None:
            return predict(self.run, [self.rank]).ranks[0]
        return heaviest(predict_distinct(self.run)[0])

    def held(self, *names: str) -> int:
        """Bytes of the containers of these names."""
        return sum(c.bytes for c in self.ledger.containers if c.name in names)

    def calls(self, op: str) -> list[Collective]:
        """Calls of that kind over data parallel."""
        return [c for c in self.ledger.collectives if c.op == op and c.group in DATA_GROUPS]

    def changed(self, **changes: Any) -> Case:
        """The same run with other fields; ConfigError where it cannot be."""
        run = replace(self.run, **changes)
        check_layout(run)
        return Case(run)

    def with_settings(self, **changes: Any) -> Case:
        """The same run with other settings of its framework."""
        return self.changed(settings={**self.run.settings, **changes})

    def with_data_parallel(self, degree: int) -> Case:
        """The same run on another number of data-parallel ranks, with the same work for each."""
        run, p = self.run, self.run.parallel
        before = p.data_parallel
        shard = degree // p.data_parallel_replicate if run.framework == "torchtitan" else p.data_parallel_shard
        return self.changed(
            world_size=run.world_size // before * degree,
            global_batch=run.global_batch // before * degree,
            parallel=replace(p, data_parallel=degree, data_parallel_shard=shard),
        )

    def with_micro_batches(self, count: int) -> Case:
        """The same run with another number of micro-batches in a step."""
        return self.changed(global_batch=self.run.micro_batch * self.run.parallel.data_parallel * count)


#: Groups along which the frameworks gather parameters and reduce gradients.
DATA_GROUPS = frozenset(
    {"dp", "dp_cp", "intra_dist_opt", "world", "data_parallel", "dp_shard", "dp_shard_cp", "fsdp", "dp_replicate"}
)


def payload(calls: list[Collective]) -> int:
    """Bytes of all the calls together."""
    return sum(c.bytes for c in calls)


def _count(calls: list[Collective]) -> int:
    return sum(c.count for c in calls)


def where(case: Case) -> str:
    """Where does one bf16 parameter live, when is it gathered, when released, and which GPU holds its fp32 master?"""
    run, w, parts = case.run, weight(case.run), slices(case.run)
    if case.rank is None:
        case = Case(run, parts[0].ranks[0])
    gathers = case.calls("all_gather")
    n = f"all-gathers a step: {_count(gathers):,}, {fmt_auto(payload(gathers))}"
    size = fmt_auto(case.held("param"))
    # With overlap_param_gather Megatron gathers before the next forward, bucket by bucket, else at the step's end.
    phases = {c.phase for c in gathers}
    refreshed = "no other rank updates any of it"
    if run.parallel.data_parallel * run.parallel.context_parallel > 1:
        when = "in the next forward" if "forward" in phases else "after the step"
        refreshed = f"updated values are gathered {when} ({n})" if gathers else "every rank updates all of it itself"
    if run.framework == "torchtitan":
        life = f"an fp32 shard ({size} a rank), gathered as bf16 "
        life += (
            "around each unit's forward and backward, then freed"
            if _reshards(run)
            else "before its forward and kept until its backward is done, then freed"
        )
        life = f"{life} ({n})" if gathers else f"whole in fp32 on each rank ({size}), cast to bf16 where it is used"
    elif run.framework == "deepspeed" and run.settings["zero_optimization"]["stage"] == 3:
        kept = fmt_auto(case.held("persisted_param"))
        life = f"a bf16 shard ({size} a rank), whole from its forward or backward on, then freed unless the prefetcher "
        life += f"has already come to its next use ({n}); small ones stay whole ({kept})"
    else:
        flat = run.framework == "megatron" or run.settings["zero_optimization"]["stage"] > 0
        life = f"whole in bf16 all the step{', in flat buffers' if flat else ''} ({size} a rank); {refreshed}"
    s = parts[0]
    held = f"{w.name}{f' (in {own})' if (own := fused(run)) else ''}: {copies(parts)}" + (
        f", {s.numel:,} elements each" if s.count > 1 else f", {s.numel:,} elements"
    )
    if run.framework == "megatron" and equal_copies(parts):
        held += f". {equal_copies(parts)[:-1]}"
    others = sorted(set(range(run.world_size)) - {r for p in parts for r in p.ranks})
    held += f"; not on {rank_words(others)} (other pipeline stages)" if others else ""
    return f"{life}.\n{held}. Its fp32 master: {masters(parts)}."


def _reshards(run: Run) -> bool:
    """Whether FSDP frees a unit after its forward: distributed/fsdp.py:get_fsdp_reshard_after_forward_policy."""
    policy = run.settings["fsdp_reshard_after_forward"]
    return bool(policy == "always" or (policy == "default" and run.parallel.pipeline_parallel == 1))


def stages(case: Case) -> str:
    """Why do ZeRO-2 and ZeRO-3 use more than ZeRO-1 on a small model?"""
    if case.run.framework != "deepspeed":
        rest = fmt_auto(case.ledger.resident_bytes - case.ledger.state_bytes)
        title = FRAMEWORKS[case.run.framework].title
        return f"{title} has no such stages; beside its state it keeps {rest} here. Ask with a DeepSpeed run."
    zero = case.run.settings["zero_optimization"]
    found = {z: case.with_settings(zero_optimization={**zero, "stage": z}) for z in (1, 2, 3)}
    sizes = ", ".join(f"stage {z} {fmt_auto(x.ledger.resident_bytes)}" for z, x in found.items())
    kept = found[3].ledger.resident_bytes - found[3].ledger.state_bytes
    saved = found[1].ledger.state_bytes - found[3].ledger.state_bytes
    buffers = fmt_auto(2 * int(zero["reduce_bucket_size"]))
    return (
        f"Resident: {sizes}. Stage 3 shards {fmt_auto(saved)} away and keeps {fmt_auto(kept)} of buffers, as large as "
        f"reduce_bucket_size whatever the model.\n"
        f"Stages 1 and 2 take such a buffer, {buffers}, at the start of backward (contiguous_gradients; two with "
        "overlap_comm)."
    )


def twice(case: Case) -> str:
    """Why are the reduce-scatter bytes twice the all-gather bytes?"""
    gathers, scatters = case.calls("all_gather"), case.calls("reduce_scatter")
    if not gathers or not scatters:
        ops = sorted({c.op for c in case.ledger.collectives if c.group in DATA_GROUPS})
        sent = ", ".join(f"{op} {fmt_auto(payload(case.calls(op)))}" for op in ops) or "nothing"
        return f"Not both are in this run: over data parallel ({case.run.parallel.data_parallel}) it sends {sent}."
    a, b = gathers[0].dtype, scatters[0].dtype
    why = (
        "Gradients are reduced in fp32 (4 bytes), parameters gathered in bf16 (2 bytes): twice for each pass over them"
        if (a, b) == ("bfloat16", "float32")
        else f"Gradients are reduced in {b}, parameters gathered in {a}"
    )
    return (
        f"Reduce-scatter {fmt_auto(payload(scatters))} in {_count(scatters):,} calls, all-gather "
        f"{fmt_auto(payload(gathers))} in {_count(gathers):,}: {payload(scatters) / payload(gathers):.2f} times.\n"
        f"{why}; the rest is how often each is done."
    )


def per_parameter(case: Case) -> str:
    """Why 18 and not 16 bytes a parameter?"""
    held = case.ledger.containers
    width = {n: next((element_bytes(c.dtype) for c in held if c.name == n and c.bytes), 0) for n in STATE_CONTAINERS}
    total = sum(width.values())
    if not width["main_param"]:
        why = "the fp32 parameter is its own master, so there is no bf16 copy beside it"
    elif not width["grad"]:
        why = "no gradients are kept between steps"
    else:
        other = {4: "in bf16 (2 bytes) it would be 2 less", 2: "in fp32 (4 bytes) it would be 2 more"}
        why = f"gradients are kept in {width['grad']} bytes; {other.get(width['grad'], '')}"
    share = case.ledger.state_bytes / case.run.model.num_parameters
    parts = " + ".join(f"{size} {name}" for name, size in width.items() if size)
    return (
        f"{total} bytes an element: {parts}; {why}.\nSharded: {share:.2f} bytes a parameter on rank {case.ledger.rank}."
    )


def same(case: Case) -> str:
    """Why is the usage the same on 2 and on 4 GPUs?"""
    try:
        two, four = (case.with_data_parallel(n).ledger for n in (2, 4))
    except ConfigError as e:
        return f"This run cannot be had on 2 and on 4 data-parallel ranks: {e.message}."
    less = two.resident_bytes - four.resident_bytes
    return (
        f"On 2 data-parallel ranks {fmt_auto(two.resident_bytes)}, on 4 {fmt_auto(four.resident_bytes)}: "
        + (f"{fmt_auto(less)} less, what is sharded.\n" if less > 0 else "nothing is sharded.\n")
        + "nvidia-smi shows what the allocator reserved, mostly for activations: they follow the micro-batch "
        f"({case.run.micro_batch}) and the sequence ({case.run.seq_length}), not the number of GPUs."
    )


def accumulation(case: Case) -> str:
    """Why does gradient accumulation add traffic in ZeRO-3 and FSDP2?"""
    run = case.run
    # torch's schedules want as many micro-batches as stages: a pipeline of torchtitan starts from the run's own.
    fewest = run.num_micro_batches if run.framework == "torchtitan" and run.parallel.pipeline_parallel > 1 else 1
    one, two = case.with_micro_batches(fewest), case.with_micro_batches(2 * fewest)
    ops = ("all_gather", "reduce_scatter", "all_reduce")
    sent = {op: (payload(one.calls(op)), payload(two.calls(op))) for op in ops}
    total = sum(b for _, b in sent.values())
    text = [f"{op} {fmt_auto(a)} -> {fmt_auto(b)}" for op, (a, b) in sent.items() if b > total / 100]
    counts = f"From {fewest} to {2 * fewest} micro-batches, over data parallel"
    if not text:
        return f"{counts}: nothing is sent."
    (gather, gathers), (scatter, scatters), (reduce, reduces) = sent.values()
    again = gathers > 1.2 * gather
    parameters = "are gathered once a step" if gathers else "stay whole on every rank"
    # DeepSpeed's prefetcher keeps some of them for the next micro-batch.
    anew = "the parameters anew" if gathers > 1.95 * gather else "many of the parameters anew"
    if scatters + reduces > 1.2 * (scatter + reduce):
        why = "each micro-batch reduces its gradients"
        why += f" and gathers {anew}, as no rank keeps whole ones" if again else f"; parameters {parameters}"
    elif again:
        why = f"each micro-batch gathers {anew}; gradients are reduced once a step"
    else:
        why = f"each rank keeps whole gradients until the last micro-batch, and parameters {parameters}"
    return f"{counts}: {', '.join(text)}.\nHere {why}."


def pipeline(case: Case) -> str:
    """Why does pipeline parallelism turn resharding off?"""
    run = case.run
    if run.framework != "torchtitan":
        title = FRAMEWORKS[run.framework].title
        return (
            f"{title} has no resharding to turn off. With it, each of the {run.num_micro_batches} micro-batches of a "
            "step would gather a stage's parameters again."
        )
    always, never = (
        payload(case.with_settings(fsdp_reshard_after_forward=w).calls("all_gather")) for w in ("always", "never")
    )
    whole = 2 * sum(x.numel for x in case.ledger.containers if x.name == "param") * torchtitan_layout.shards(run)
    return (
        f"A schedule puts other micro-batches between a forward and its backward; resharding gathers for each: "
        f"{fmt_auto(always)} a step here, {fmt_auto(never)} without.\n"
        f"Not resharding keeps the stage whole, {fmt_auto(whole)} in bf16 here; `default` does so only with stages."
    )


def tied(case: Case) -> str:
    """Why are tied embeddings counted twice by zero.Init?"""
    m, title = case.run.model, FRAMEWORKS[case.run.framework].title
    if case.run.framework != "deepspeed":
        return f"{title} has no zero.Init; it builds what it trains, {m.num_parameters:,} parameters here."
    once, both = (replace(m, tie_embeddings=t).num_parameters for t in (True, False))
    return (
        f"zero.Init counts and cuts each matrix as its module is built; head and embedding are tied afterwards: "
        f"{both:,} counted, {once:,} trained.\n"
        f"The difference is {both - once:,} elements, {fmt_auto(2 * (both - once))} in bf16; {m.name} "
        + ("ties them." if m.tie_embeddings else "does not tie them.")
    )


QUESTIONS: dict[str, Callable[[Case], str]] = {
    "where": where,
    "stages": stages,
    "twice": twice,
    "per-parameter": per_parameter,
    "same": same,
    "accumulation": accumulation,
    "pipeline": pipeline,
    "tied": tied,
}


def explain(question: str, run: Run) -> str:
    """The answer to one of `QUESTIONS`, from the numbers of `run`.

    Raises:
        ConfigError: no such question; the framework refuses the run.
    """
    if question not in QUESTIONS:
        raise ConfigError(f"{question[:60]!r} is not a question; known: {', '.join(QUESTIONS)}", key="QUESTION")
    return QUESTIONS[question](Case(run))
