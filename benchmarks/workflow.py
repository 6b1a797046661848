"""Times of the workflow: a run in which nothing is to be done, and the plan of a comparison of many runs.

    python benchmarks/workflow.py [RUNS]

The first needs results (`make report`). Seconds are printed, not judged; the goals are 10 s and, for 500 runs, 30 s.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from working_copy import WorkingCopy  # noqa: E402


def timed(copy: Path, *words: str) -> tuple[float, str]:
    """Wall time of Snakemake, s, and what it printed."""
    began = time.monotonic()
    command = [sys.executable, "-m", "snakemake", "--profile", "profiles/local", *words]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.monotonic() - began, done.stdout + done.stderr


def main(runs: int) -> None:
    """Prints both times."""
    if (ROOT / "results/laptop/verdict.txt").exists():
        seconds, out = timed(ROOT, "--dry-run")
        print(
            f"nothing to be done: {seconds:.1f} s{'' if 'Nothing to be done' in out else ' (but there is something)'}"
        )
    with tempfile.TemporaryDirectory() as folder:
        copy = WorkingCopy(Path(folder), {f"{('ds', 'mg', 'tt')[i % 3]}{i}": 2 for i in range(runs)})
        seconds, _ = timed(copy.folder, "--dry-run", "--quiet", "all")
        print(f"plan of {runs} runs: {seconds:.1f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
