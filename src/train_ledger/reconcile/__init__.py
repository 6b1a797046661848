"""Reconciliation: joins what was predicted with what was measured, and names every residual. Reads files; no torch."""
