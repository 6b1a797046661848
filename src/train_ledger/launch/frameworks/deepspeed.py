"""Training program for DeepSpeed: one rank, from the process group to a step. The same on CPU and CUDA."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from train_ledger.launch import tokens
from train_ledger.launch.llama import Llama
from train_ledger.launch.schedule import lr_at
from train_ledger.launch.session import Owned, Rank, StepResult, Weight
from train_ledger.spec.ds_config import ds_config
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.model import canonical_tensors
from train_ledger.spec.run import Run

from . import deepspeed_state as state

TIMEOUT = timedelta(minutes=10)


def warm_up() -> None:
    """Imports DeepSpeed. It picks its accelerator then, and asks CUDA itself unless told: that would spoil the fork."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.device_count() else "cpu")
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # DeepSpeed calls torch's collectives by their old names; one warning a call would bury what a log has to say.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def build(run: Run, rank: Rank) -> Session:
    """Model, engine and data of one rank.

    Raises:
        ConfigError: a setting that DeepSpeed refuses, in DeepSpeed's words.
    """
    warm_up()
    import deepspeed

    _prepare(rank)
    rank.init_process_group(TIMEOUT)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    config = ds_config(run)
    torch.manual_seed(run.seed)
    try:
        with _model_context(run, config):
            model = Llama(run.model, checkpoint_layers=run.settings["activation_checkpointing"])
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=param_groups(model, run), config=config, dist_init_required=False
        )
    except (AssertionError, ValueError, NotImplementedError) as e:
        raise ConfigError(f"cannot be built: {e}", file=run.source or None, key="deepspeed") from e
    return Session(run, rank, engine)


def param_groups(model: nn.Module, run: Run) -> list[Any]:
    """DeepSpeed's default is one group in which everything decays; without `decay_norms` a second one holds what
    does not.
    """
    params = list(model.parameters())
    if run.optimizer.decay_norms:
        return params
    flat = [p for p in params if len(getattr(p, "ds_shape", p.shape)) < 2]
    matrices = [p for p in params if len(getattr(p, "ds_shape", p.shape)) >= 2]
    return [{"params": matrices}, {"params": flat, "weight_decay": 0.0}]


def _prepare(rank: Rank) -> None:
    """What DeepSpeed reads from the environment and has no configuration key for."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator

    device_index = rank.device.index if rank.device.index is not None else rank.local_rank
    os.environ.update(RANK=str(rank.rank), WORLD_SIZE=str(rank.world_size), LOCAL_RANK=str(device_index))
    if rank.device.type == "cpu":
        if get_accelerator().device_name() != "cpu":  # a CPU world on a machine with CUDA
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            set_accelerator(CPU_Accelerator())
        # Else init_distributed() compiles a shared-memory all-reduce (comm/torch.py:build_shm_op), which takes minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        _sort_gradients_by_type()
    else:
        torch.cuda.set_device(rank.device)
        # cuDNN's attention would be picked on some machines; flash attention is what is compared.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if rank.world == "fake" and rank.rank != 0:
        _answer_as_rank_0()


def _sort_gradients_by_type() -> None:
    """Stages 1 and 2 without contiguous gradients: on the CPU DeepSpeed reduces nothing, and says nothing.

    stage_1_and_2.py:split_half_float_double looks for the type `torch.cpu.BFloat16Tensor`, which torch does not have.
    The engine's own function of the same purpose compares dtypes; on CUDA both give the same.
    """
    from deepspeed.runtime import engine
    from deepspeed.runtime.zero import stage_1_and_2

    def split(tensors: list[Tensor]) -> list[list[Tensor]]:
        return [bucket for _, bucket in engine.split_half_float_double_sparse(tensors)[1]]

    stage_1_and_2.split_half_float_double = split


def _answer_as_rank_0() -> None:
    """Lets a rank that is alone pass the check that all ranks recorded the same trace (zero/utils.py).

    Rank 0's list is broadcast and compared; the fake process group delivers nothing, so the lone rank compares its
    list with its own. The broadcasts are still called.
    """
    from deepspeed import comm
    from deepspeed.runtime.zero import utils

    class Comm:
        def __getattr__(self, name: str) -> Any:
            return (lambda *a, **k: 0) if name == "get_rank" else getattr(comm, name)

    utils.dist = Comm()


def _model_context(run: Run, config: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    import deepspeed

    if run.settings["zero_optimization"]["stage"] == 3 and run.settings["zero_init"]:
        return deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16)
    return contextlib.nullcontext()


class Session:
    """One rank of DeepSpeed, built and ready to step."""

    def __init__(self, run: Run, rank: Rank, engine: Any) -> None:
        self.run, self.rank, self.engine = run, rank, engine
        self.coords = {"dp": rank.rank}
        everyone = range(rank.world_size)
        # The engine clones the world's group for data parallel (utils/groups.py:_clone_world_group).
        self.groups = [("world", everyone), ("data_parallel", everyone)]
        self.parameters: dict[str, nn.Parameter] = dict(engine.module.named_parameters())

    def step(self, step: int) -> StepResult:
        """One optimizer step. The loss is the mean over this rank's own tokens; all ranks have equally many."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr_at(self.run.optimizer, step, self.run.steps)
        loss_sum = torch.zeros((), device=self.rank.device)
        for micro_batch in range(self.run.num_micro_batches):
            inputs, labels = self._batch(step, micro_batch)
            loss = self.engine(inputs, labels)
            self.engine.backward(loss)
            self.engine.step()
            loss_sum += loss.detach()
        norm = self.engine.get_global_grad_norm()
        return StepResult(loss_sum.item() / self.run.num_micro_batches, None if norm is None else float(norm))

    def _batch(self, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels (micro_batch, seq_length): of the step's samples, micro-batch by micro-batch, rank by
        rank.
        """
        size, run = self.run.micro_batch, self.run
        first = (micro_batch * run.parallel.data_parallel + self.rank.rank) * size
        wanted = tokens.step_samples(step, run.global_batch)[first : first + size]
        rows = [tokens.sample(run.seed, index, run.seq_length + 1, run.model.vocab_size) for index in wanted]
        batch = torch.stack([torch.from_numpy(row) for row in rows]).to(self.rank.device)
        return batch[:, :-1], batch[:, 1:]

    def owners(self) -> Iterator[Owned]:
        """What DeepSpeed and its optimizer keep between steps. This program itself keeps nothing."""
        for container, owner, tensor in state.owners(self.engine):
            yield Owned(container, owner, tensor)

    def optimizer_steps(self) -> tuple[object, str]:
        """DeepSpeed's optimizer: its step holds the norm, the update and the gathering of updated parameters."""
        return self.engine.optimizer, "step"

    def weight(self, name: str) -> Weight | None:
        """The weight of that name; every rank holds a part of every weight."""
        if name not in self.parameters:
            raise ConfigError(
                f"the model has no weight {name!r}", file=self.run.source or None, key="probe.lifeline_weight"
            )
        param = self.parameters[name]
        return Weight(
            name=name,
            module=self.engine.module.get_submodule(name.rpartition(".")[0]),
            full_numel=getattr(param, "ds_numel", param.numel()),
            current=lambda: param.data,
            master=lambda: state.master(self.engine, param),
        )

    @torch.no_grad()
    def load_weights(self, read: Callable[[str], Tensor]) -> None:
        """Puts canonical weights into the fp32 masters as they are, and rounded into the bf16 copies."""
        for tensor in canonical_tensors(self.run.model):
            state.load(self.engine, self.parameters[tensor.name], read(tensor.name))

    @torch.no_grad()
    def export_weights(self) -> dict[str, Tensor]:
        """The fp32 masters, whole, on CPU, under canonical names; they are dealt out over the ranks in turn."""
        out = {}
        for index, tensor in enumerate(canonical_tensors(self.run.model)):
            owner = index % self.rank.world_size
            whole = state.gather_master(self.engine, self.parameters[tensor.name], owner)
            if self.rank.rank == owner:
                out[tensor.name] = whole.view(tensor.shape).cpu()
        return out

    def close(self) -> None:
        """Removes the engine's hooks and ends the process group."""
        self.engine.destroy()
        torch.distributed.destroy_process_group()
