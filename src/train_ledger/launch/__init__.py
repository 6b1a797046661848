"""Launching: how ranks start (worlds/), the loop that steps them (loop.py), a program a framework (frameworks/)."""
