"""What people already have, as runs, and runs as what the frameworks' own users write.

Reads Megatron-LM's flags, DeepSpeed's ds_config.json with a Hugging Face config.json, torchtitan's `Trainer.Config`.
A flag or key that could change bytes or calls and is not modelled is refused by name; those that cannot are listed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from train_ledger.spec.config import load_model, merge, model_shape, resolve_run
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.model import ModelShape
from train_ledger.spec.run import Run

#: The module that reads each kind of native configuration, by the option's name.
READERS = {"megatron_args": "megatron", "deepspeed": "deepspeed", "torchtitan": "torchtitan"}


@dataclass(frozen=True)
class Native:
    """A native configuration in the words of a run file.

    `data` is what a run file would hold, `model` what a model file would (None: named elsewhere). `ignored` are the
    flags and keys that change neither bytes nor calls, `notes` what a reader must know. `called` maps our keys to the
    framework's own names, for errors.
    """

    data: Mapping[str, Any]
    model: Mapping[str, Any] | None
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    called: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Found:
    """A run that was read from a native configuration."""

    run: Run
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


def read(
    way: str,
    value: str,
    *,
    world_size: str | None,
    hf_config: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    without: Iterable[str] = (),
) -> Found:
    """A run from what `value` names.

    Args:
        way: `megatron_args` (a file), `deepspeed` (ds_config.json) or `torchtitan` (MODULE:FUNCTION).
        world_size: ranks, as typed.
        hf_config: a model's config.json; for `deepspeed`.
        overrides: keys of a run file that go before what was read; `model` names a model of config/models.
        without: flags or keys to leave out though they are not modelled.

    Raises:
        ConfigError: names the file or the option, and the flag or key.
    """
    size = _positive(world_size, "--world-size")
    overrides = dict(overrides or {})
    leave_out = {w.lstrip("-") for w in without}
    reader = importlib.import_module(f"{__name__}.{READERS[way]}")
    native: Native = reader.read_native(value, size, leave_out)
    hf = None
    if hf_config is not None and "model" in overrides:
        raise ConfigError("the model is given twice, here and by --model", key="--hf-config")
    if hf_config is not None:
        from .hf import read_config

        hf = read_config(hf_config)
        native = replace(native, ignored=native.ignored + hf.ignored, notes=native.notes + hf.notes)
    try:
        shape = _shape(value, native, hf_config, hf, overrides.get("model"))
        data = merge(native.data, {k: v for k, v in overrides.items() if k != "model"})
        run = resolve_run(file_name(value), data, value, "config", overrides, model=shape)
    except ConfigError as e:
        theirs = (native.called or {}).get(e.key or "")
        if theirs and str(e.file) == value:
            raise ConfigError(e.message, file=value, key=theirs) from e
        # A size that is wrong by itself is found in the model's file, one that does not fit another in the run.
        theirs = ((hf.called if hf else None) or {}).get((e.key or "").removeprefix("model."))
        if theirs and str(e.file) in (value, hf_config):
            raise ConfigError(e.message, file=hf_config, key=theirs) from e
        raise
    return Found(run, native.ignored, native.notes)


def _shape(value: str, native: Native, hf_config: str | None, hf: Native | None, named: Any) -> ModelShape:
    """The model that was named, else that of the Hugging Face file, else what the native configuration says."""
    if named is not None:
        return load_model(str(named), "config")
    if hf is not None and hf_config is not None:
        return model_shape(file_name(hf_config), hf.model or {}, hf_config)
    if native.model is None:
        raise ConfigError("says nothing of the model; give --hf-config FILE or --model M", file=value)
    return model_shape(file_name(value), native.model, value)


def file_name(path: str) -> str:
    """A name for what a path or a MODULE:FUNCTION holds, fit to be a file's."""
    stem = Path(path).stem if ":" not in path else path.rpartition(":")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-_")[:100] or "native"


def _positive(text: str | None, option: str) -> int:
    if text is None:
        raise ConfigError("is needed, since the file does not say how many ranks there are", key=option)
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) > 0):
        raise ConfigError(f"{text[:50]!r} is not a count of ranks", key=option)
    return int(text)
