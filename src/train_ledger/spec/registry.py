"""The frameworks. To add one.

A module in predict/frameworks, one in launch/frameworks, a schema, a conda yaml, a line here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """Where a framework's parts are.

    `distribution` is its name on the package index, `version` the one that was verified.

    `package` is the import name, by which the probe recognises the framework's own frames in a stack.
    """

    name: str
    title: str
    distribution: str
    package: str
    version: str
    predict: str
    launch: str


FRAMEWORKS: dict[str, Framework] = {
    f.name: f
    for f in (
        Framework(
            "megatron",
            "Megatron Core",
            "megatron-core",
            "megatron",
            "0.18.0",
            "train_ledger.predict.frameworks.megatron",
            "train_ledger.launch.frameworks.megatron",
        ),
        Framework(
            "deepspeed",
            "DeepSpeed",
            "deepspeed",
            "deepspeed",
            "0.19.2",
            "train_ledger.predict.frameworks.deepspeed",
            "train_ledger.launch.frameworks.deepspeed",
        ),
        Framework(
            "torchtitan",
            "torchtitan",
            "torchtitan",
            "torchtitan",
            "0.3.0",
            "train_ledger.predict.frameworks.torchtitan",
            "train_ledger.launch.frameworks.torchtitan",
        ),
    )
}
