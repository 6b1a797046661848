"""A working copy of the project with small runs of the real frameworks, for tests of the workflow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: A shape that two layers of every framework take, small enough that imports are most of a launch.
TINY = """num_layers: 2
hidden_size: 32
num_attention_heads: 4
num_query_groups: 2
ffn_hidden_size: 64
vocab_size: 128
seq_length: 16
"""
RUNS = {
    "ds": "framework: deepspeed\nworld_size: {ranks}\nglobal_batch: {ranks}\nparallel: {{data_parallel: {ranks}}}\n"
    "deepspeed:\n  zero_optimization: {{stage: 1}}\n",
    "mg": "framework: megatron\nworld_size: {ranks}\nglobal_batch: {ranks}\nparallel: {{data_parallel: {ranks}}}\n",
    "tt": "framework: torchtitan\nworld_size: {ranks}\nglobal_batch: {ranks}\n"
    "parallel: {{data_parallel_shard: {ranks}}}\n",
}


class WorkingCopy:
    """The workflow's files copied, the package linked, `config/` with one comparison, `small`."""

    def __init__(self, folder: Path, runs: dict[str, int], steps: int = 2) -> None:
        """`runs`: names of `RUNS`, or of a file whose framework is told by its first two letters, with their ranks."""
        self.folder = folder
        for name in ("workflow", "profiles", "envs"):
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
        shutil.copy(ROOT / "Snakefile", folder)
        (folder / "profiles/slurm/site.yaml").unlink(missing_ok=True)
        (folder / "src").symlink_to(ROOT / "src")
        self.write("config/config.yaml", "comparison: small\npaper_comparison: null\nlaunch_timeout_s: 240\n")
        self.write("config/models/tiny.yaml", TINY)
        for name, ranks in runs.items():
            self.write(f"config/runs/{name}.yaml", RUNS[name[:2]].format(ranks=ranks))
        entries = "".join(f"  {name}:\n" for name in runs)
        self.write("config/comparisons/small.yaml", f"model: tiny\nsteps: {steps}\nruns:\n{entries}")

    def write(self, name: str, text: str) -> None:
        """A file of the copy."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def edit(self, name: str, pattern: str, new: str) -> None:
        """Replaces what a pattern matches, once, in a file of the copy."""
        old = (self.folder / name).read_text(encoding="utf-8")
        text, n = re.subn(pattern, new, old, count=1, flags=re.MULTILINE)
        assert n == 1, f"{pattern!r} is not in {name}"
        self.write(name, text)

    def path(self, name: str) -> Path:
        """A file of the results."""
        return self.folder / "results/small" / name

    def start(self, *words: str, profile: str = "local", env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Snakemake in the copy, in a process group of its own; its output is read with `communicate`."""
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", "--profile", f"profiles/{profile}", *words],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **(env or {})},
            start_new_session=True,
        )

    def snakemake(self, *words: str, profile: str = "local", timeout_s: float = 300, **env: str) -> tuple[int, str]:
        """Exit code and output of a whole run of Snakemake."""
        process = self.start(*words, profile=profile, env=env)
        out, _ = process.communicate(timeout=timeout_s)
        return process.returncode, out

    def planned(self) -> set[str]:
        """What a dry run would do, in the words of the rules' messages, without the last one, that all is made."""
        code, out = self.snakemake("--dry-run", "--quiet", "host", "reason", "progress")
        assert code == 0, out
        return set(re.findall(r"^Job \d+: (.*)$", out, re.MULTILINE)) - {"All of small is made"}


def clear_errors(out: str) -> list[str]:
    """The lines of ours in what a workflow printed."""
    return [line for line in out.splitlines() if line.startswith("train-ledger")]
