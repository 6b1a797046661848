"""Subcommands of `train-ledger`, one module each: `HELP`, `add_arguments(parser)`, `main(args) -> exit code`.

What several commands share is here: how a run is named on the command line, and how it becomes a `Run`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train_ledger.spec.run import Run

#: Worlds by name, for `--world`; what each is stands in README, what starts it in launch/worlds.
WORLDS = ("cpu", "fake", "shared", "nccl")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN.yaml with what goes before it, or a configuration that a framework's own users have."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run file (.yaml), or a resolved run (.json)")
    parser.add_argument("--model", metavar="M", help="a model's name in config/models, or a .yaml file with one")
    parser.add_argument("--comparison", metavar="NAME", help="take RUN as this comparison of config/comparisons has it")
    parser.add_argument("--seq-length", metavar="S", help="tokens of a sequence")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="any key of a run file, dotted")
    native = parser.add_argument_group("in place of RUN, what you already have")
    native.add_argument("--megatron-args", metavar="FILE", help="launch script, list of flags, or YAML of flags")
    native.add_argument("--deepspeed", metavar="FILE", help="ds_config.json; needs --hf-config or --model")
    native.add_argument("--hf-config", metavar="FILE", help="a model's Hugging Face config.json")
    native.add_argument("--torchtitan", metavar="MODULE:FUNCTION", help="function that returns a Trainer.Config")
    native.add_argument("--world-size", metavar="N", help="ranks, one a GPU")
    native.add_argument(
        "--without", metavar="NAME", action="append", default=[], help="leave out this flag or key though not modelled"
    )


def run_from(args: argparse.Namespace) -> Run:
    """The run that the command line names, resolved.

    Raises:
        ConfigError: names the file or the option, and the key.
    """
    from train_ledger.spec.config import holds, override
    from train_ledger.spec.errors import ConfigError

    overrides = override(args.set)
    for key in ("model", "seq_length"):
        value = getattr(args, key)
        if value is not None:
            option = f"--{key.replace('_', '-')}"
            if key in overrides:
                raise ConfigError(f"is given twice, by {option} and by --set {key}=…", key=option)
            overrides |= override([f"{key}={value}"], option=option) if key == "seq_length" else {key: value}
    ways = [w for w in ("run", "megatron_args", "deepspeed", "torchtitan") if getattr(args, w) is not None]
    if len(ways) != 1:
        raise ConfigError("give RUN.yaml, or one of --megatron-args, --deepspeed, --torchtitan", key="RUN")
    try:
        return _own(args, overrides) if ways == ["run"] else _native(args, ways[0], overrides)
    except ConfigError as e:
        if holds(overrides, e.key) and e.key:
            by_option = e.key in ("model", "seq_length") and getattr(args, e.key) is not None
            option = f"--{e.key.replace('_', '-')}" if by_option else "--set"
            raise ConfigError(e.message, file=option, key=e.key) from e
        raise


def _own(args: argparse.Namespace, overrides: dict[str, Any]) -> Run:
    from train_ledger.spec.config import load_compared_run, load_run
    from train_ledger.spec.errors import ConfigError
    from train_ledger.spec.resolved import read_resolved

    for option in ("hf_config", "world_size", "without"):
        if getattr(args, option):
            raise ConfigError("does not go with a run file; --set changes one", key=f"--{option.replace('_', '-')}")
    path = Path(args.run)
    if path.suffix == ".json":
        if args.comparison or overrides:
            raise ConfigError("is resolved and takes no further settings; give the .yaml file", file=path)
        return read_resolved(path)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        path = Path("config/runs") / f"{path.name}.yaml"
    if args.comparison:
        return load_compared_run(path, args.comparison, overrides=overrides)
    return load_run(path, overrides=overrides)


def _native(args: argparse.Namespace, way: str, overrides: dict[str, Any]) -> Run:
    from train_ledger import interop
    from train_ledger.spec.errors import ConfigError

    if args.comparison:
        raise ConfigError("goes with a run file only", key="--comparison")
    found = interop.read(
        way,
        getattr(args, way),
        world_size=args.world_size,
        hf_config=args.hf_config,
        overrides=overrides,
        without=args.without,
    )
    for name in args.without:
        print(f"left out as asked, so the prediction may be wrong: {name}", file=sys.stderr)
    if found.ignored:
        print(f"ignored, since they change neither bytes nor calls: {', '.join(found.ignored)}", file=sys.stderr)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    return found.run


def is_rank(word: str, world_size: int) -> bool:
    """Whether a word of the command line is a rank of a world of that size."""
    return word.isascii() and word.isdigit() and len(word) <= 18 and int(word) < world_size


def print_json(data: Any) -> None:
    """JSON on stdout, as the pipeline's files have it."""
    import json

    print(json.dumps(data, indent=1, allow_nan=False))
