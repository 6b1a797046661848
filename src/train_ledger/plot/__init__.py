"""Figures, drawn from what the reconciliation and the prediction wrote. No torch, no framework."""
