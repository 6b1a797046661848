"""Parity: did the frameworks train the same model? Losses, gradient norms and trained weights, pair by pair.

Reads files and imports `spec` only; torch is not needed. Stands between launch and report.
"""
