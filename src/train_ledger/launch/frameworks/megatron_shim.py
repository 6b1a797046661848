"""What Megatron Core 0.18.0 takes from CUDA without a flag to turn it off, given by the CPU where a run has no GPU.

Everything that has a flag is set in megatron_model.py instead. Nothing here changes what is allocated, computed or
sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: Names that `Tensor.type()` gives on CUDA. The optimizers tell bf16 from fp32 parameters by them.
CUDA_TYPE_NAMES = {
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.float32: "torch.cuda.FloatTensor",
}


class CpuForCuda(TorchFunctionMode):
    """Literals in Megatron Core's source.

    - `device="cuda"` in factory calls (pipeline_parallel/schedules.py, optimizer/optimizer.py, optimizer/clip_grads.py)
    - `Tensor.cuda()` (models/common/language_module/language_module.py, tied embeddings)
    - `pin_memory=True` (models/common/embeddings/rope_utils.py, context parallelism)
    - `param.type() == "torch.cuda.BFloat16Tensor"` (optimizer/distrib_optimizer.py, optimizer/optimizer.py)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        elif func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


def install(device: torch.device) -> None:
    """For the rest of this process. Does nothing where the run has a GPU."""
    if device.type == "cuda":
        return
    from megatron.core.tensor_parallel import random

    # `device=torch.cuda.current_device()` all over the library.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    # Activation recomputation saves and restores the GPU generator; there is none, and the CPU's is saved beside it.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    CpuForCuda().__enter__()
