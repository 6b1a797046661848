"""Training in torchtitan: its own `Trainer` with the run's configuration, one `train_step` a step of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from train_ledger.launch.session import Owned, Rank, StepResult, Weight
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.model import canonical_tensors
from train_ledger.spec.run import Run

from .torchtitan_device import import_torchtitan, use_device


def warm_up() -> None:
    """Imports torchtitan. Touches no CUDA."""
    import_torchtitan()
    from . import torchtitan_config, torchtitan_pipeline, torchtitan_weights  # noqa: F401


def build(run: Run, rank: Rank) -> TorchtitanSession:
    """One rank of `run`, ready to step.

    Raises:
        ConfigError: torchtitan refuses the settings.
    """
    warm_up()
    from .torchtitan_config import TIMEOUT_S, trainer_config
    from .torchtitan_pipeline import stand_in

    use_device(rank.device)
    # distributed/utils.py:init_distributed does this before it starts the group, and leaves a group alone that is
    # there: backward must run on the calling thread, whose thread-local device mesh the recomputed collectives need.
    torch.autograd.set_multithreading_enabled(False)
    rank.init_process_group(timedelta(seconds=TIMEOUT_S))
    try:
        config = trainer_config(run)
        if rank.world != "nccl":
            _reduce_by_sums(config)
        trainer = config.build()
    except (ValueError, NotImplementedError, AssertionError) as e:
        raise ConfigError(f"torchtitan refuses the run: {e}", file=run.source or None, key="torchtitan") from e
    if rank.world == "fake":
        stand_in(trainer, run)
    return TorchtitanSession(run, trainer)


def _reduce_by_sums(config: Any) -> None:
    """FSDP2 divides by 1.0 through PREMUL_SUM, an operation of NCCL alone; it has a switch for backends without it."""
    from torch.distributed.fsdp import FSDPModule

    parallelize = config.model_spec.parallelize_fn

    def with_sums(model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        model = parallelize(model, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec.parallelize_fn = with_sums


class TorchtitanSession:
    """`launch.session.Session` around a `Trainer`. A step is what the loop of `trainer.py:Trainer.train` does once."""

    def __init__(self, run: Run, trainer: Any) -> None:
        self.run, self.trainer = run, trainer
        self.batches = trainer.batch_generator(trainer.dataloader)
        self.last_loss = 0.0
        self._keep_losses()
        dims = trainer.parallel_dims
        self.coords = _coordinates(dims, dist.get_rank())
        self.groups: list[tuple[str, Sequence[int]]] = [("world", range(dist.get_world_size()))]
        for name, mesh in dims.get_all_one_dimensional_meshes().items():
            self.groups.append((name, dist.get_process_group_ranks(mesh.get_group())))
        #: One model, or the parts of it that this rank's pipeline stages hold.
        self.parts: list[torch.nn.Module] = trainer.model_parts
        if dims.cp_enabled:
            self.groups.append(self._shard_group())
        self.parameters = {_canonical(name): p for part in self.parts for name, p in part.named_parameters()}

    def _keep_losses(self) -> None:
        """Adds up the loss of this rank's micro-batches: torchtitan averages over ranks only in steps that log."""
        inner: Callable[..., torch.Tensor] = self.trainer.forward_backward_step

        def forward_backward_step(**kwargs: Any) -> torch.Tensor:
            loss = inner(**kwargs)
            local = loss.detach()
            self.last_loss += float(local.to_local() if hasattr(local, "to_local") else local)
            return loss

        self.trainer.forward_backward_step = forward_backward_step

    def step(self, step: int) -> StepResult:
        """One optimizer step, `step` from 1.

        The loss is torchtitan's own mean over all tokens in steps that log; in others the mean of this rank's tokens,
        which the mean over data-parallel (and context-parallel) ranks turns into the same figure. The norm is known in
        steps that log. Of a pipeline's ranks only those of the last stage know the loss.
        """
        from torchtitan.distributed.utils import set_pg_timeouts

        trainer = self.trainer
        trainer.step = step
        self.last_loss = 0.0
        trainer.gc_handler.run(step)
        trainer.train_step(self.batches)
        if step == 1:
            seconds = trainer.config.comm.train_timeout_seconds
            set_pg_timeouts(timeout=timedelta(seconds=seconds), parallel_dims=trainer.parallel_dims)
        # trainer.py:pp_forward_backward_step makes -1 the loss of every other stage.
        knows_loss = not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage
        logged = trainer.metrics_processor.last
        if logged is not None and logged[0] == step:
            return StepResult(loss=logged[1] if knows_loss else None, grad_norm=logged[2])
        # The local sum is divided by the tokens of all ranks already (trainer.py:_forward_backward_body).
        ranks = self.run.parallel.data_parallel * self.run.parallel.context_parallel
        return StepResult(loss=self.last_loss * ranks if knows_loss else None, grad_norm=None)

    def owners(self) -> Iterator[Owned]:
        """Parameters and gradients of FSDP2, the optimizer's state, RoPE caches, and the batch that is still held."""
        for parameter in self.parameters.values():
            yield Owned("param", "framework", parameter)
            if parameter.grad is not None:
                yield Owned("grad", "framework", parameter.grad)
        if self.run.model.tie_embeddings:
            yield from self._tied_copies()
        for optimizer in self.trainer.optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield Owned(name, "optimizer", value)
        for name, buffer in (named for part in self.parts for named in part.named_buffers()):
            yield Owned("rope_cache" if name.endswith("rope.cache") else _canonical(name), "model", buffer)
        if self.trainer.parallel_dims.pp_enabled:
            from .torchtitan_pipeline import received

            yield from received(self.trainer)
        yield Owned("device_mesh", "framework", self.trainer.parallel_dims.world_mesh._rank_map)
        for held in self.trainer.dataloader.held:
            for tensor in held.values() if isinstance(held, dict) else [held]:
                yield Owned("batch", "script", tensor)

    def _tied_copies(self) -> Iterator[Owned]:
        """What FSDP2 gathers from, where that is not the parameter: a tied weight whose shard it padded twice.

        torchtitan ties again after `fully_shard`, so that two of FSDP2's parameters share one shard; the first to pad
        it keeps a copy that the optimizer never sees (`_fsdp_param.py:FSDPParam.reset_sharded_param`).
        """
        known = {_local(parameter).untyped_storage().data_ptr() for parameter in self.parameters.values()}
        for group in self._parameter_groups():
            for held in (parameter._sharded_param_data for parameter in group.fsdp_params):
                if held.untyped_storage().data_ptr() not in known:
                    yield Owned("tied_param_copy", "framework", held)

    def _parameter_groups(self) -> Iterator[Any]:
        """FSDP2's groups of parameters, each once."""
        from torch.distributed.fsdp import FSDPModule

        states = dict.fromkeys(
            m._get_fsdp_state() for part in self.parts for m in part.modules() if isinstance(m, FSDPModule)
        )
        for state in states:
            yield from state._fsdp_param_groups

    def _shard_group(self) -> tuple[str, Sequence[int]]:
        """The group that FSDP2 shards over, with its name. With context parallelism FSDP2 may make it of two axes
        itself (_fsdp_init.py:_get_mesh_info_from_named_dims), so that torchtitan does not know it.
        """
        info = next(self._parameter_groups()).mesh_info
        name: str = info.mesh.mesh_dim_names[info.shard_mesh_dim]
        return name, dist.get_process_group_ranks(info.shard_process_group)

    def optimizer_steps(self) -> tuple[object, str]:
        """torchtitan's container of optimizers, and its step."""
        return self.trainer.optimizers, "step"

    def weight(self, name: str) -> Weight | None:
        """The weight of that Hugging Face Llama name. torchtitan's query, key and value are one weight.

        None on a rank whose pipeline stages do not hold it.
        """
        from .torchtitan_weights import tensor_parallel_dim, torchtitan_name

        fqn = torchtitan_name(name)
        elsewhere = self.run.parallel.pipeline_parallel > 1 and fqn not in self.parameters
        if elsewhere and name in {tensor.name for tensor in canonical_tensors(self.run.model)}:
            return None
        if fqn not in self.parameters:
            raise ConfigError(
                f"{name!r} is no weight of model {self.run.model.name}",
                file=self.run.source or None,
                key="probe.lifeline_weight",
            )
        sharded = self.parameters[fqn]
        path, attribute = fqn.rsplit(".", 1)
        module = next(m for part in self.parts for n, m in part.named_modules() if _canonical(n) == path)
        whole = sharded.numel() // (
            self.run.parallel.tensor_parallel if tensor_parallel_dim(sharded) is not None else 1
        )
        return Weight(
            name=name,
            module=module,
            full_numel=whole,
            current=lambda: _local(getattr(module, attribute)),
            # FSDP2's shard is in fp32 and the optimizer steps it: parameter and master are one.
            master=lambda: ("param", _local(sharded)),
        )

    def load_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """Copies this rank's part of every canonical weight into its fp32 shard."""
        from .torchtitan_weights import load

        load(self.trainer, self.run.model, self.parameters, self.coords, read)

    def export_weights(self) -> dict[str, torch.Tensor]:
        """The fp32 weights under canonical names, all of them on rank 0."""
        from .torchtitan_weights import export

        return export(self.trainer, self.run.model, self.parameters, self.coords)

    def close(self) -> None:
        """Ends torchtitan's helpers and the process group."""
        self.batches.close()
        self.trainer.close()
        dist.destroy_process_group()


def _coordinates(dims: Any, rank: int) -> dict[str, int]:
    """Place on torchtitan's mesh: (pp, dp_replicate, dp_shard, cp, tp), the last varies fastest
    (parallel_dims.py:build_mesh). `pp` only where there are stages, `cp` where sequences are split.
    """
    inner = dims.cp * dims.tp
    place = {
        "pp": rank // (dims.dp_replicate * dims.dp_shard * inner),
        "dp_replicate": rank // (dims.dp_shard * inner) % dims.dp_replicate,
        "dp_shard": rank // inner % dims.dp_shard,
        "cp": rank // dims.tp % dims.cp,
        "tp": rank % dims.tp,
    }
    absent = {name for name, there in (("pp", dims.pp_enabled), ("cp", dims.cp_enabled)) if not there}
    return {name: at for name, at in place.items() if name not in absent}


def _canonical(name: str) -> str:
    """A module path without what activation checkpointing puts in between."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("._checkpoint_wrapped_module", "")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.detach()
    return local.to_local() if hasattr(local, "to_local") else local
