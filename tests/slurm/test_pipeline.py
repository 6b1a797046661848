"""The whole workflow on a real Slurm: three frameworks, eight ranks and eight GPUs each; and a run over two hosts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from cluster import Cluster, sh
from jobs import OnCluster
from working_copy import ROOT

#: The laptop comparison without the run that differs from another one only in its batch.
THREE = ("megatron-tp2-pp2-dp2", "deepspeed-zero3-dp8", "torchtitan-fsdp4-tp2")


def jobs_of(copy: OnCluster) -> list[dict[str, str]]:
    """What scontrol knows of a copy's jobs."""
    records = (
        dict(re.findall(r"(\S+?)=(\S*)", line)) for line in sh("scontrol", "show", "job", "--oneliner").splitlines()
    )
    return [r for r in records if r.get("JobName", "").startswith(copy.prefix())]


def test_three_frameworks_with_eight_gpus_each(cluster: Cluster, tmp_path: Path) -> None:
    """Three jobs, the report, everything reconciled; then what an edit and a changed pin would make again."""
    copy = OnCluster(cluster, tmp_path / "copy", {})
    shutil.rmtree(copy.folder / "config")
    shutil.copytree(ROOT / "config", copy.folder / "config")
    copy.edit("config/config.yaml", "^comparison: .*", "comparison: small")
    copy.edit("config/config.yaml", "^paper_comparison: .*", "paper_comparison: null")
    laptop = (copy.folder / "config/comparisons/laptop.yaml").read_text()
    copy.write("config/comparisons/small.yaml", laptop.replace("  torchtitan-fsdp4-tp2-matched:\n", ""))
    code, out = copy.run("all")
    assert code == 0, out
    copy.check(THREE)
    assert "</html>" in copy.path("report.html").read_text()
    assert "3 runs, 24 ranks: 0 bytes, 0 calls unexplained" in copy.path("verdict.txt").read_text()
    jobs = jobs_of(copy)
    assert sorted(j["Comment"] for j in jobs) == sorted(f"rule_launch_wildcards_small_{run}" for run in THREE)
    assert {(j["TresPerNode"].replace("gres:", "gres/"), j["NumNodes"]) for j in jobs} == {("gres/gpu:8", "1")}
    assert copy.ended() == ["COMPLETED"] * 3
    assert len(list((copy.folder / "logs/slurm").glob("rule_launch/*/*.log"))) == 3

    copy.edit("config/runs/deepspeed-zero3-dp8.yaml", "^world_size", "steps: 3\nworld_size")
    trained = {p for p in copy.planned() if p.startswith("Training")} - {"Training the plain reference of small"}
    assert trained == {"Training deepspeed-zero3-dp8 (small)"}
    copy.edit("config/runs/deepspeed-zero3-dp8.yaml", "^steps: 3\n", "")
    copy.edit("envs/torchtitan.yaml", "torchtitan==.*", "torchtitan==0.0.0")
    trained = {p for p in copy.planned() if p.startswith("Training")}
    assert trained == {"Training torchtitan-fsdp4-tp2 (small)"}


def test_one_run_over_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    """Four ranks on each of two hosts, one torchrun a host."""
    copy = OnCluster(cluster, tmp_path / "copy", {"ds": 8})
    copy.edit("config/config.yaml", "$", "\ngpus_per_node: 4\n")
    code, out = copy.run()
    assert code == 0, out
    copy.check()
    (job,) = jobs_of(copy)
    assert job["NumNodes"] == "2"
    assert job["NodeList"] == "n[1-2]"
    assert job["TresPerNode"].endswith("gpu:4")
    assert copy.ended() == ["COMPLETED"]
