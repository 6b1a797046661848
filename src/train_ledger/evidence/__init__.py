"""Measurements that were taken on real GPUs and are kept: packed small, and judged by today's rules."""
