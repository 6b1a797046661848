"""torchtitan on the device that the world chose. Shims for the CPU stand here, each with its reason."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def import_torchtitan() -> None:
    """Imports torchtitan without counting GPUs, so that ranks forked afterwards can still use them.

    `tools/utils.py:get_device_info` asks torch for an accelerator while it is imported; that starts the driver, which
    does not survive a fork. The answer is given later, by `use_device`.
    """
    if "torchtitan.trainer" in sys.modules:
        return
    import torch._utils

    ask = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = lambda: "cpu"
    try:
        import torchtitan.models.llama3
        import torchtitan.models.qwen3
        import torchtitan.trainer  # noqa: F401
    finally:
        torch._utils._get_available_device_type = ask


def use_device(device: torch.device) -> None:
    """Tells every torchtitan module which device this rank trains on (`tools/utils.py:get_device_info`)."""
    module: Any = torch.cuda if device.type == "cuda" else _CpuModule("cpu")
    for name, loaded in list(sys.modules.items()):
        if name.startswith("torchtitan.") and "device_type" in vars(loaded):
            loaded.device_type = device.type  # type: ignore[attr-defined]
            if "device_module" in vars(loaded):
                loaded.device_module = module  # type: ignore[attr-defined]
    if device.type == "cuda":
        # models/common/attention.py:ScaledDotProductAttention puts cuDNN first whatever torch is told; the other two
        # frameworks run flash attention (launch/cuda.py).
        from torch.nn.attention import SDPBackend
        from torchtitan.models.common.attention import ScaledDotProductAttention

        ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION]
    else:
        from torchtitan.models.common.attention import FlexAttention

        torch.compiler.set_stance("force_eager")  # masks of FlexAttention are compiled, and there may be no compiler
        FlexAttention._compiled_flex_attn = attend
    # tools/utils.py:get_local_device takes the index from here.
    os.environ["LOCAL_RANK"] = str(device.index or 0)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_aux: Any,
    **unused: Any,
) -> tuple[torch.Tensor, Any]:
    """FlexAttention's result by PyTorch's other attention: it has no backward on a CPU
    (torch/nn/attention/flex_attention.py:_validate_device). The mask is the one that torchtitan made.
    """
    from torch.nn.attention.flex_attention import AuxOutput, create_mask

    assert not return_aux.lse, "nothing here asks for the logarithms of the sums"
    sequences, _, tokens, _ = q.shape
    mask = create_mask(block_mask.mask_mod, sequences, 1, tokens, k.shape[2], device=q.device)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, AuxOutput()


class _CpuModule(ModuleType):
    """`torch.cpu` and what torchtitan asks of a device module that `torch.cpu` lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    # components/metrics.py:DeviceMemoryMonitor reads name, size and allocator of the device; a CPU has no caching
    # allocator.
    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name="cpu", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    # distributed/utils.py:set_pg_timeouts passes it to barrier(), which wants a number; torch.cpu says "cpu".
    def current_device(self) -> int:
        return 0
