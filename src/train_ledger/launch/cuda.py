"""A CUDA device for a rank, or one clear line why there is none."""

from __future__ import annotations

import torch

from train_ledger.spec.errors import LaunchError


def cuda_device(index: int) -> torch.device:
    """Device `index`, made current.

    Raises:
        LaunchError: torch was built without CUDA, the driver is missing or too old, there are not so many GPUs, or a
            library does not load.
    """
    if not torch.backends.cuda.is_built():
        raise LaunchError(f"torch {torch.__version__} was built without CUDA")
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        if index >= count:
            raise LaunchError(f"GPU {index} was asked for, but this machine shows {count}")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        # One attention kernel for all three frameworks: torch prefers cuDNN's where it is new enough, else flash.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.zeros(1, device=device)  # a context that cannot be made, or a kernel image that does not fit, shows here
    except (RuntimeError, AssertionError, OSError) as e:
        raise LaunchError(f"CUDA cannot be used here: {' '.join(str(e).split())[:300]}") from e
    return device
