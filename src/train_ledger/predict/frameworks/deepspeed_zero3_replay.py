"""ZeRO-3: an exact replay of which parameters are gathered, kept and released when, and of the calls that follow.

It follows DeepSpeed's coordinator parameter by parameter (runtime/zero/partitioned_param_coordinator.py). Its decisions
depend on nothing but the order of modules, sizes and thresholds, and are the same on every rank.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from train_ledger.spec.ledger import Collective

from .deepspeed_model import GRAD, PRE
from .deepspeed_zero3 import PARTITION, STAGE3, Zero3, persist_function

NEVER = -(10**10)  # "not fetched yet", partitioned_param_coordinator.py:reset_step
WORLD, DATA_PARALLEL = "world", "data_parallel"
Call = tuple[str, str, str, int, int, str, str, str]  # a Collective without its count


@functools.lru_cache(maxsize=64)
def collectives(z: Zero3, step: str) -> tuple[Collective, ...]:
    """Calls of one step of any rank: of the `first` step, or of one that is `steady`.

    The trace is recorded in the first micro-batch and checked at the start of the second; from then on every step is
    alike. With one micro-batch a step, that check falls into the second step.
    """
    replay = Replay(z)
    first = replay.step()
    if step == "first":
        return _rows(first)
    for _ in range(2 if z.micro_batches == 1 else 1):
        last = replay.step()
    return _rows(last)


def _rows(calls: Counter[Call]) -> tuple[Collective, ...]:
    return tuple(Collective(*key[:5], count, *key[5:]) for key, count in calls.items())


class Replay:
    """State of the parameters of one rank over micro-batches and steps. Names follow the coordinator's."""

    def __init__(self, z: Zero3) -> None:
        self.z = z
        self.numels, self.modules = z.trace.numels, z.trace.modules
        self.shards = [z.shard(p) for p in range(len(self.numels))]
        self.persist = [z.persists(p) for p in range(len(self.numels))]
        self.mode = "invalid"
        self.available: set[int] = set()
        self.inflight: dict[int, set[int]] = {}  # parameter -> all parameters of the same call
        self.active: list[set[int]] = [set() for _ in self.numels]  # modules that use a parameter at the moment
        self.module_order: list[int] = []
        self.param_order: list[tuple[int, int]] = []
        self.releases: dict[tuple[int, int], frozenset[int]] = {}
        self.uses: list[list[int]] = []
        self.distance: list[int] = []
        self.queue: deque[tuple[int, int]] = deque()
        self.fetched_for: list[int] = []
        self.step_id = self.n_available = 0
        self.bucket: list[int] = []
        self.bucket_elements = 0
        self.calls: Counter[Call] = Counter()

    def step(self) -> Counter[Call]:
        """One optimizer step. Returns its calls."""
        self.calls = total = Counter[Call]()
        before: object = None
        for number in range(self.z.micro_batches):
            state = self._state()
            if state == before:  # as the micro-batch before, and so are all that follow
                for call, count in self.calls.items():
                    total[call] += count * (self.z.micro_batches - number)
                break
            before, self.calls = state, Counter()
            self._micro_batch()
            total += self.calls
        self.calls = total
        self._optimizer()
        return total

    def _state(self) -> object:
        """All that the next micro-batch depends on once the trace is complete; nothing comparable before."""
        if self.mode != "complete" or self.inflight:
            return object()
        return set(self.available), [set(modules) for modules in self.active]

    def _call(
        self, op: str, group: str, dtype: str, in_numel: int, out_numel: int, component: str, phase: str, rule: str
    ) -> None:
        self.calls[op, group, dtype, in_numel, out_numel, component, phase, rule] += 1

    def _micro_batch(self) -> None:
        self._reset_step()
        for kind, number in self.z.trace.forward:
            self._fetch(number, "forward") if kind == PRE else self._release(number)
        for kind, number in self.z.trace.backward:
            if kind == GRAD:
                self._gradient(number)
            elif kind == PRE:
                self._fetch(number, "backward")
            else:
                self._release(number)
        self._reduce_bucket()  # stage3.py:independent_gradient_partition_epilogue

    # partitioned_param_coordinator.py:reset_step
    def _reset_step(self) -> None:
        for param in list(self.inflight):
            self._wait(param)
            self._release_param(param)
        self.inflight.clear()
        if self.mode != "complete":
            self._check_ints(len(self.module_order))
            if self.mode == "record":
                self.param_order = [
                    (param, at)
                    for at, module in enumerate(self.module_order)
                    for param in sorted(set(self.modules[module]))
                ]
                self._check_ints(len(self.param_order))
                self._check_ints(len(self.param_order))
                self.mode = "complete"
                self._index_trace()
            else:
                self.mode = "record"
        self.queue = deque(self.param_order)
        self.fetched_for = [NEVER] * len(self.numels)
        self.step_id = self.n_available = 0

    def _check_ints(self, length: int) -> None:
        """All ranks compare a list with rank 0's: its length, then its contents (zero/utils.py)."""
        rule = "deepspeed/runtime/zero/utils.py:assert_ints_same_as_other_ranks"
        for numel in (1, length):
            self._call("broadcast", WORLD, "int64", numel, numel, "trace_check", "forward", rule)

    def _index_trace(self) -> None:
        """For `_decide_release`: where each parameter is used, and elements passed before each position of the
        trace.
        """
        self.uses = [[] for _ in self.numels]
        sizes = []
        for at, module in enumerate(self.module_order):
            sizes.append(sum(self.numels[p] for p in self.modules[module]))
            for param in self.modules[module]:
                self.uses[param].append(at)
        self.distance = [0, *accumulate(sizes)]

    # partitioned_param_coordinator.py:_fetch_sub_module_impl
    def _fetch(self, module: int, phase: str) -> None:
        wanted = self.modules[module]
        if self.mode == "record":
            self.module_order.append(module)
        if wanted:
            self._all_gather(wanted, "fetch", phase)
        for param in wanted:
            self.active[param].add(module)
            if param in self.inflight:
                self._wait(param)
        if self.mode == "complete":
            if wanted:
                self._pass_queue(wanted)
            if self.queue and self.z.prefetch_bucket_size > 0:
                self._prefetch(phase)
        self.step_id += 1

    def _pass_queue(self, wanted: Sequence[int]) -> None:
        """Takes what the module needs off the queue, unless an earlier prefetch did."""
        needed = {p for p in wanted if self.fetched_for[p] < self.step_id}
        taken: set[int] = set()
        while self.queue and len(taken) < len(needed):
            param, at = self.queue.popleft()
            self.fetched_for[param] = at
            taken.add(param)
        if taken != needed:
            raise RuntimeError("tracing error: the parameter queue does not match the module")

    def _prefetch(self, phase: str) -> None:
        limit = min(self.z.max_live_parameters - self.n_available, self.z.prefetch_bucket_size)
        chosen: list[int] = []
        numel = 0
        while self.queue and numel < limit:
            param, at = self.queue.popleft()
            self.fetched_for[param] = max(self.fetched_for[param], at)
            if param not in self.available and param not in self.inflight and param not in chosen:
                chosen.append(param)
                numel += self.numels[param]
        if numel > 0:
            self._all_gather(chosen, "prefetch", phase)

    # partition_parameters.py:all_gather_coalesced
    def _all_gather(self, params: Sequence[int], component: str, phase: str) -> None:
        missing = {p for p in params if p not in self.available and p not in self.inflight}
        if not missing:
            return
        self.n_available += sum(self.numels[p] for p in missing)
        if self.z.world_size > 1:
            numel = sum(self.shards[p] for p in missing)
            function = "_all_gather_sequential" if len(missing) == 1 else "_all_gather_dtype"
            self._call(
                "all_gather",
                WORLD,
                "bfloat16",
                numel,
                numel * self.z.world_size,
                component,
                phase,
                f"{PARTITION}:{function}",
            )
        for param in missing:
            self.inflight[param] = missing

    def _wait(self, param: int) -> None:
        """Waiting for one parameter of a call makes all of them available, but takes only this one off the registry."""
        together = self.inflight.pop(param)
        self.available |= together
        together.clear()

    # partitioned_param_coordinator.py:release_sub_module
    def _release(self, module: int) -> None:
        owned = self.modules[module]
        chosen: Iterable[int] = owned
        if self.mode == "complete":
            key = (module, self.step_id)
            if key not in self.releases:  # the framework caches its decision too (functools.lru_cache)
                self.releases[key] = self._decide_release(owned)
            chosen = self.releases[key]
        for param in owned:
            self.active[param].discard(module)
            if param in chosen:
                self._release_param(param)

    # partitioned_param_coordinator.py:__params_to_release
    def _decide_release(self, owned: Sequence[int]) -> frozenset[int]:
        """Not what persists, was passed over by a prefetch, or is used again within `max_reuse_distance` elements."""
        begin = self.distance[min(self.step_id, len(self.distance) - 1)]
        end = bisect_left(self.distance, begin + self.z.max_reuse_distance, self.step_id)
        return frozenset(
            p
            for p in owned
            if not self.persist[p]
            and self.fetched_for[p] <= self.step_id
            and not self._used_between(p, self.step_id, end)
        )

    def _used_between(self, param: int, begin: int, end: int) -> bool:
        uses = self.uses[param]
        at = bisect_left(uses, begin)
        return at < len(uses) and uses[at] < end

    def _release_param(self, param: int) -> None:
        if param in self.available and not self.active[param]:
            self.available.discard(param)
            self.n_available -= self.numels[param]

    # stage3.py:reduce_independent_p_g_buckets_and_remove_grads
    def _gradient(self, param: int) -> None:
        if self.bucket and self.bucket_elements + self.numels[param] > self.z.reduce_bucket_size:
            self._reduce_bucket()
        self.bucket.append(param)
        self.bucket_elements += self.numels[param]

    # stage3.py:__reduce_and_partition_ipg_grads
    def _reduce_bucket(self) -> None:
        if not self.bucket:
            return
        z, elements = self.z, self.bucket_elements
        if z.contiguous_gradients and not z.reduce_scatter and elements <= z.reduce_bucket_size:
            rule = f"{STAGE3}:__avg_scatter_contiguous_grads"
            self._call("all_reduce", DATA_PARALLEL, z.comm_dtype, elements, elements, "grad_reduce", "backward", rule)
        else:
            numel = sum(self.shards[p] for p in self.bucket)
            rule = f"{STAGE3}:__avg_scatter_grads"
            self._call(
                "reduce_scatter",
                DATA_PARALLEL,
                z.comm_dtype,
                numel * z.world_size,
                numel,
                "grad_reduce",
                "backward",
                rule,
            )
        self.bucket, self.bucket_elements = [], 0

    # stage3.py:step
    def _optimizer(self) -> None:
        self.inflight.clear()
        self.available.clear()
        for modules in self.active:
            modules.clear()
        for _ in self.z.sub_groups:
            rule = f"{STAGE3}:get_grad_norm_direct"
            self._call("all_reduce", DATA_PARALLEL, "float64", 1, 1, "grad_norm", "optimizer", rule)
        whole = [p for p, stays in enumerate(self.persist) if stays]
        self.available.update(whole)
        if self.z.world_size == 1 and len(whole) > 1:
            return
        for param in whole:
            n = self.shards[param]
            rule = f"{PARTITION}:{persist_function(whole)}"
            self._call("all_gather", WORLD, "bfloat16", n, n * self.z.world_size, "persist", "optimizer", rule)
