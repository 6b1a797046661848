"""A run as the files that its framework's own users write, and the command that reads them back."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import yaml

from train_ledger.spec.ds_config import ds_config
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.io import file_mode, write_text
from train_ledger.spec.run import Run


def export(run: Run, directory: str | Path) -> list[Path]:
    """Writes the native files of `run` into `directory`, and `predict.sh` with the command that reads them back.

    Raises:
        ConfigError: the run has something that the framework's own users cannot write down; the directory cannot be
            written.
    """
    directory = Path(directory)
    files, options = _FILES[run.framework](run)
    command = shlex.join(["train-ledger", "predict", *options, "--world-size", str(run.world_size)])
    files["predict.sh"] = (
        f'#!/bin/sh\n# What {run.name} keeps and sends, from the files beside this one.\n{command} "$@"\n'
    )
    try:
        for name, text in files.items():
            write_text(directory / name, text)
            if name.endswith(".sh"):
                (directory / name).chmod(file_mode(0o777))
    except OSError as e:
        raise ConfigError(f"cannot be written: {e.strerror or e}", file=directory) from e
    return [directory / name for name in files]


def _megatron(run: Run) -> tuple[dict[str, str], list[str]]:
    from .megatron_export import script

    return {"run.sh": script(run)}, ["--megatron-args", "run.sh"]


def _deepspeed(run: Run) -> tuple[dict[str, str], list[str]]:
    from .deepspeed import hf_config

    whole = {"train_batch_size": run.global_batch, **ds_config(run), "steps_per_print": 1}
    files = {"ds_config.json": json.dumps(whole, indent=2) + "\n"}
    options = ["--deepspeed", "ds_config.json", "--seq-length", str(run.seq_length)]
    try:
        files["config.json"] = json.dumps(hf_config(run.model, run.source or None), indent=2) + "\n"
        options += ["--hf-config", "config.json"]
    except ConfigError:  # a shape that no family has: as a model file of ours, whatever the training script builds
        shape = {key: value for key, value in run.model.to_dict().items() if key != "name"}
        files["model.yaml"] = yaml.safe_dump(shape, sort_keys=False)
        options += ["--model", "model.yaml"]
    # What a training script decides, not ds_config.json.
    for key, value, default in (
        ("deepspeed.zero_init", run.settings["zero_init"], True),
        ("deepspeed.activation_checkpointing", run.settings["activation_checkpointing"], False),
        ("optimizer.decay_norms", run.optimizer.decay_norms, True),
    ):
        if value != default:
            options += ["--set", f"{key}={str(value).lower()}"]
    return files, options


def _torchtitan(run: Run) -> tuple[dict[str, str], list[str]]:
    from .torchtitan_export import module_name, module_text

    name = module_name(run)
    return {f"{name}.py": module_text(run)}, ["--torchtitan", f"{name}:{name}"]


_FILES = {"megatron": _megatron, "deepspeed": _deepspeed, "torchtitan": _torchtitan}
