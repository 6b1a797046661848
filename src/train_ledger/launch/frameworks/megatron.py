"""Training with Megatron Core: one rank, from process groups to optimizer step, the same program on CPU and CUDA.

`megatron.training.pretrain` refuses to run without CUDA and its `pretrain_gpt.py` is not part of the wheel, so this
loop calls megatron.core as `megatron/training/training.py` does: get_model, train, train_step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from train_ledger.launch.schedule import lr_at
from train_ledger.launch.session import Owned, Rank, StepResult, Weight
from train_ledger.launch.tokens import sample, step_samples
from train_ledger.spec.run import Run

#: Process groups that are told, by the names of megatron.core.process_groups_config.ProcessGroupCollection.
GROUPS = (
    *("dp_cp", "dp", "cp", "mp", "tp", "pp", "embd", "pos_embd", "tp_dp_cp", "tp_cp"),
    *("ep", "expt_tp", "tp_ep", "tp_ep_pp", "expt_dp", "intra_dist_opt"),
)

Batch = tuple[torch.Tensor | None, torch.Tensor | None]


def warm_up() -> None:
    """Megatron's imports, most of a small run's time.

    Before Blackwell, Megatron trains with tensor parallelism only if kernels run in the order they are launched in
    (megatron/training/arguments.py:validate_args). CUDA reads this variable when it starts, so under torchrun it must
    be in the environment already; it changes times, not bytes or calls.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Apex and Transformer Engine are not installed, and need not be
        from . import megatron_model, megatron_shim  # noqa: F401


def build(run: Run, rank: Rank) -> MegatronSession:
    """Process groups, model, buffers, optimizer of one rank."""
    warm_up()
    return MegatronSession(run, rank)


class MegatronSession:
    """One rank, built and ready to step; see `launch.session.Session`."""

    def __init__(self, run: Run, rank: Rank) -> None:
        from megatron.core import parallel_state
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from . import megatron_model, megatron_shim

        self.run, self.rank, self.device = run, rank, rank.device
        megatron_shim.install(rank.device)
        rank.init_process_group(timedelta(minutes=30))
        p = run.parallel
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=p.tensor_parallel,
            pipeline_model_parallel_size=p.pipeline_parallel,
            virtual_pipeline_model_parallel_size=p.virtual_pipeline_parallel
            if p.virtual_pipeline_parallel > 1
            else None,
            context_parallel_size=p.context_parallel,
            # Second groups over gloo serve checkpoints only, and the fake world cannot make them.
            create_gloo_process_groups=False,
        )
        self.parallel = parallel_state
        torch.manual_seed(run.seed)
        # Dropout is 0. On a CPU the tracker that saves no CUDA generator states serves (flag of Megatron's own).
        model_parallel_cuda_manual_seed(run.seed, inference_rng_tracker=rank.device.type != "cuda")
        self.model = megatron_model.build_model(run, rank.device, random_weights=rank.world != "fake")
        self.config = self.model[0].config
        self.optimizer = get_megatron_optimizer(
            megatron_model.optimizer_config(run),
            self.model,
            # Megatron's default decays neither norms nor biases; an empty mapping decays all.
            config_overrides={} if run.optimizer.decay_norms else None,
            use_gloo_process_groups=False,
        )
        self._connect()
        self.padded_vocab = megatron_model.padded_vocab(run)
        self.forward_backward = get_forward_backward_func()
        self.coords, self.groups = self._place()

    def _connect(self) -> None:
        """Ties schedule, buffers and optimizer together (megatron/training/training.py:train)."""
        from megatron.core.distributed import finalize_model_grads

        def one_or_all(functions: list[Callable[..., Any]]) -> Any:
            return functions[0] if len(functions) == 1 else functions

        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if self.run.settings["overlap_grad_reduce"]:
            self.config.no_sync_func = one_or_all([chunk.no_sync for chunk in self.model])
            self.config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in self.model])

    def _place(self) -> tuple[dict[str, int], list[tuple[str, Sequence[int]]]]:
        """What Megatron says of this rank: its coordinates and the groups that it is in."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        state = self.parallel
        coords = {
            "tp": state.get_tensor_model_parallel_rank(),
            "cp": state.get_context_parallel_rank(),
            "dp": state.get_data_parallel_rank(),
            "pp": state.get_pipeline_model_parallel_rank(),
        }
        made = ProcessGroupCollection.use_mpu_process_groups()
        groups = [(name, getattr(made, name, None)) for name in GROUPS]
        groups.append(("tp_dp", state.get_tensor_and_data_parallel_group(with_context_parallel=False)))
        told: list[tuple[str, Sequence[int]]] = [("world", range(self.rank.world_size))]
        told += [(name, dist.get_process_group_ranks(g)) for name, g in groups if g is not None]
        return coords, told

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self, step: int) -> StepResult:
        """Zero, forward and backward of all micro-batches, reduce, clip, update
        (megatron/training/training.py:train_step).
        """
        run = self.run
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        lr = lr_at(run.optimizer, step, run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = run.optimizer.weight_decay * group["wd_mult"]
        batches = [self._batches(chunk, step) for chunk in self.model]
        reports = self.forward_backward(
            forward_step_func=self._forward,
            data_iterator=batches,
            model=self.model,
            num_microbatches=run.num_micro_batches,
            seq_length=run.seq_length,
            micro_batch_size=run.micro_batch,
            decoder_seq_length=run.seq_length,
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        return StepResult(loss=self._mean_loss(step, reports), grad_norm=float(grad_norm))

    def _batches(self, chunk: torch.nn.Module, step: int) -> Iterator[Batch]:
        """This rank's micro-batches: of each run of samples over data parallel its own, as Megatron's sampler deals
        them.

        Only what the chunk needs is made: tokens [batch, sequence] with the embedding, labels with the output head.
        """
        run, model = self.run, _inner(chunk)
        indices = step_samples(step, run.global_batch)
        width = run.micro_batch * run.parallel.data_parallel
        for i in range(run.num_micro_batches):
            first = indices.start + i * width + self.coords["dp"] * run.micro_batch
            if not (model.pre_process or model.post_process):
                yield None, None
                continue
            rows = [
                torch.from_numpy(sample(run.seed, j, run.seq_length + 1, run.model.vocab_size))
                for j in range(first, first + run.micro_batch)
            ]
            text = torch.stack(rows).to(self.device)
            yield (
                text[:, self._positions()] if model.pre_process else None,
                text[:, self._positions() + 1] if model.post_process else None,
            )

    def _positions(self) -> torch.Tensor:
        """Positions within the sequence of the tokens that this context-parallel rank holds."""
        from .megatron_model import own_positions

        ranks = self.run.parallel.context_parallel
        return own_positions(self.run.seq_length, ranks, self.coords["cp"], self.device)

    def _forward(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Forward of one micro-batch; on the last stage Megatron's loss a token, [batch, sequence]."""
        tokens, labels = next(batches)
        positions = None
        if tokens is not None and self.run.model.position_embedding == "learned":
            positions = self._positions().expand_as(tokens)
        return model(tokens, positions, None, labels=labels), _sum_of_losses

    def _mean_loss(self, step: int, reports: list[dict[str, torch.Tensor]]) -> float | None:
        """Mean loss a token over the whole global batch, on the last stage.

        Data-parallel ranks exchange their sums through the rendezvous store, so that no call is added to a step that
        megatron.core does not make itself.
        """
        if self.rank.world == "fake" or not self.parallel.is_pipeline_last_stage(ignore_virtual=True):
            return None
        total, count = torch.stack([r["loss"] for r in reports]).double().sum(0).tolist()
        peers = dict(self.groups)["dp_cp"]
        if len(peers) > 1:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"loss/{step}/{self.rank.rank}", f"{total!r} {count!r}")
            sums = [store.get(f"loss/{step}/{peer}").decode().split() for peer in peers]
            total, count = (sum(float(pair[i]) for pair in sums) for i in (0, 1))
            # Whoever wrote for this step has read the step before.
            store.delete_key(f"loss/{step - 1}/{self.rank.rank}")
        return float(total / count)

    # --- what is kept -----------------------------------------------------------------------------------------------

    def owners(self) -> Iterator[Owned]:
        """Everything that stays allocated between steps, the flat buffers first: parameters and gradients are views
        of them.
        """
        for chunk in self.model:
            for buffer in chunk.buffers:
                if buffer.param_data is not None:
                    yield Owned("param", "framework", buffer.param_data)
                yield Owned("grad", "framework", buffer.grad_data)
        for chunk in self.model:
            for param in chunk.parameters():
                yield Owned("param", "framework", param.data)
        yield from self._optimizer_owners()
        scratch = self.parallel.get_global_memory_buffer().buffer
        for (name, _), tensor in scratch.items():
            yield Owned(
                "global_memory_buffer" if name == "mpu" else f"global_memory_buffer_{name}", "framework", tensor
            )
        for chunk in self.model:
            yield from self._model_owners(_inner(chunk))

    def _optimizer_owners(self) -> Iterator[Owned]:
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        yield Owned("loss_scale", "framework", self.optimizer.get_loss_scale())
        yield Owned("mtp_loss_scale", "framework", MTPLossAutoScaler.main_loss_backward_scale)
        for param in self.optimizer.get_parameters():
            yield Owned("main_param", "framework", param)
            if param.grad is not None:
                yield Owned("main_grad", "framework", param.grad)
        for state in self.optimizer.optimizer.state.values():
            for name, tensor in state.items():
                yield Owned(name, "optimizer", tensor)

    def _model_owners(self, model: Any) -> Iterator[Owned]:
        received = model.decoder.input_tensor
        if received is not None:
            yield Owned("received_activation", "framework", received)
            if received.grad is not None:
                yield Owned("received_activation", "framework", received.grad)
        if self.run.model.position_embedding == "rope":
            rope = model.rotary_pos_emb
            yield Owned("rope_frequencies", "model", rope.inv_freq)
            # `forward` is cached by its arguments; these are the ones that GPTModel gives, so nothing is made anew.
            yield Owned("rope_cache", "model", rope(self.run.seq_length, packed_seq=False, cp_group=None))

    def optimizer_steps(self) -> tuple[object, str]:
        """Megatron's optimizer; its `step` clips, updates and, without overlap, gathers parameters."""
        return self.optimizer, "step"

    # --- weights ----------------------------------------------------------------------------------------------------

    def _params(self) -> Iterator[tuple[Any, str, torch.nn.Parameter]]:
        """(model, name without wrappers' prefixes, parameter) of every parameter of this rank."""
        for chunk in self.model:
            model = _inner(chunk)
            for name, param in model.named_parameters():
                yield model, name, param

    def _origin(self, model: Any, name: str) -> Any:
        from . import megatron_weights

        layers = model.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        return megatron_weights.origin(name, offset, self.run.model)

    def weight(self, name: str) -> Weight | None:
        """The parameter that holds canonical weight `name`: fused QKV for q, k and v, fused FC1 for gate and up."""
        for model, own_name, param in self._params():
            if name in self._origin(model, own_name).names:
                module = model.get_submodule(own_name.rpartition(".")[0])
                leaf = own_name.rpartition(".")[2]
                return Weight(
                    name=name,
                    module=module,
                    full_numel=param.numel(),
                    current=partial(getattr, module, leaf),
                    master=partial(_master, param),
                )
        return None

    def _master_slice(self, param: torch.nn.Parameter) -> slice:
        """Elements of a flattened parameter whose fp32 master this rank keeps."""
        if not self.run.settings["use_distributed_optimizer"]:
            return slice(0, param.numel())
        kept = self.optimizer.chained_optimizers[0]._get_model_param_range_map(param)["param"]
        return slice(kept.start, kept.end)

    def load_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """Canonical weights into bf16 parameters and, unrounded, into the fp32 masters. One parameter at a time."""
        from . import megatron_weights

        tp, at = self.run.parallel.tensor_parallel, self.coords["tp"]
        with torch.no_grad():
            for model, name, param in self._params():
                where = self._origin(model, name)
                part = megatron_weights.local_tensor(read, where, self.run.model, tp, at, self.padded_vocab)
                param.data.copy_(part)
                main = getattr(param, "main_param", None)
                if main is not None:
                    main.copy_(part.reshape(-1)[self._master_slice(param)].view_as(main))

    def export_weights(self) -> dict[str, torch.Tensor]:
        """fp32 masters under canonical names, on the first tensor- and data-parallel rank of the stage that holds
        them.
        """
        from . import megatron_weights

        out: dict[str, torch.Tensor] = {}
        first = not (self.coords["tp"] or self.coords["dp"] or self.coords["cp"])
        with torch.no_grad():
            for model, name, param in self._params():
                shards = self._gather_master(param)
                copy = name == "output_layer.weight" and self.run.model.tie_embeddings
                if first and not copy:
                    where = self._origin(model, name)
                    out.update(
                        (n, t.cpu()) for n, t in megatron_weights.canonical_tensors(shards, where, self.run.model)
                    )
        return out

    def _gather_master(self, param: torch.nn.Parameter) -> list[torch.Tensor]:
        """The whole fp32 master of every tensor-parallel rank. All ranks of the stage call it."""
        whole = torch.zeros(param.numel(), dtype=torch.float32, device=self.device)
        main = getattr(param, "main_param", None)
        if main is not None:
            whole[self._master_slice(param)] = main.reshape(-1)
        if self.run.settings["use_distributed_optimizer"]:
            dist.all_reduce(whole, group=self.parallel.get_data_parallel_group(with_context_parallel=True))
        shards = [torch.empty_like(whole) for _ in range(self.run.parallel.tensor_parallel)]
        dist.all_gather(shards, whole, group=self.parallel.get_tensor_model_parallel_group())
        return [shard.view(param.shape) for shard in shards]

    def close(self) -> None:
        """Ends the process groups."""
        self.parallel.destroy_model_parallel()
        dist.destroy_process_group()


def _inner(chunk: Any) -> Any:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    return chunk.module.module


def _master(param: torch.nn.Parameter) -> tuple[str, torch.Tensor] | None:
    main = getattr(param, "main_param", None)
    return None if main is None else ("main_param", main)


def _sum_of_losses(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over the tokens of a micro-batch, their number, and both for the report; Megatron divides."""
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, count, {"loss": torch.stack((total.detach().clone(), count.float()))}
