"""What a call's Python stack says: the framework's call site, and the part of the step."""

from __future__ import annotations

import functools
import os
import re
import sys
from types import CodeType, FrameType

import torch

#: Inside torch these make calls of their own accord; all else in torch only passes calls on for somebody.
_TORCH_CALLERS = (
    "torch/distributed/fsdp/",
    "torch/distributed/pipelining/",
    "torch/distributed/optim/",
    "torch/nn/parallel/",
    "torch/nn/utils/",
    "torch/optim/",
)
#: Outside of torch these only pass calls on: DeepSpeed's wrapper of torch.distributed, wrappers, ourselves.
_PASS_ON = (
    "torch/",
    "deepspeed/comm/",
    "deepspeed/utils/",
    "train_ledger/probe/",
    "typing_extensions.py",
    "contextlib.py",
)
#: Libraries of collectives under a framework: their caller is the site, if there is one.
_LIBRARIES = ("spmd_types/",)
_WRAPPERS = ("__call__", "__torch_function__", "wrapper", "wrapped_fn", "inner", "decorate_context")
_TRANSFERS = {op: re.compile(rf"{op}_(forward|backward)") for op in ("send", "recv")}
_MODULE_CALLS = ("_call_impl", "_wrapped_call_impl")


@functools.cache
def relative(file: str) -> str:
    """A source file relative to the folder that Python imports it from (site-packages); its bare name if there is none.

    The same on every machine, and it gives away no path.
    """
    for folder in sorted({os.path.abspath(p) for p in sys.path if p}, key=len, reverse=True):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :].replace(os.sep, "/")
    return os.path.basename(file)


@functools.cache
def _passes_on(file: str) -> bool:
    name = relative(file)
    return name.startswith(_PASS_ON) and not name.startswith(_TORCH_CALLERS)


def site_of(file: str, function: str) -> str:
    """`file:function` of a frame that acts of its own accord; empty for one that only passes calls on."""
    return "" if function in _WRAPPERS or _passes_on(file) else f"{relative(file)}:{function}"


@functools.cache
def _in_module_call(code: CodeType) -> bool:
    return code.co_name in _MODULE_CALLS and relative(code.co_filename) == "torch/nn/modules/module.py"


def call_site(frame: FrameType | None, op: str = "") -> tuple[str, str]:
    """Site and phase of a call.

    Args:
        frame: the innermost frame.
        op: the ledger's word for the operation.

    Returns:
        `file:function` of the innermost frame that does not merely pass the call on, and the phase: `backward` inside
        of the autograd engine or of a function named `backward`, recomputation of activations included; `forward`
        inside of a module; else `step`. Pipeline schedules send and receive outside of both passes; there the names
        of their functions say which pass it is for (`send_forward_recv_backward`).
    """
    site, wrapper, inside = "", "", set()
    transfer = _TRANSFERS.get(op)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("backward", "_engine_run_backward"):
            inside.add("backward")
        elif _in_module_call(code):
            inside.add("forward")
        elif transfer and not inside and (said := transfer.search(code.co_name)):
            inside.add(said[1])
        if not site and (here := site_of(code.co_filename, code.co_name)):
            if not here.startswith(_LIBRARIES):
                site = here
            elif not wrapper:
                wrapper = here
        if code.co_name == "_engine_run_backward" and wrapper:
            site = site or wrapper  # below the engine nobody in Python called: the library is all that is known
        frame = frame.f_back
    site = site or wrapper
    # On CUDA the engine runs on threads of its own, where no Python frame says `backward`.
    if "backward" in inside or torch._C._current_graph_task_id() != -1:
        return site, "backward"
    return site, "forward" if "forward" in inside else "step"
