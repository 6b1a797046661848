"""The shared words of every stage: model shape, run, groups, collective, ledger, and the files that carry them.

No torch here.
"""
