"""train-ledger.

Predict, launch, probe and reconcile where a model's parameters live in Megatron Core, DeepSpeed and torchtitan.
"""

__version__ = "0.1.0"
