"""Results of made-up runs that conform to the schemas, for tests of the stages after launch. No framework runs here."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train_ledger.reconcile.compare import file_entry, reconcile_files, write
from train_ledger.reconcile.tidy import write_tidy
from train_ledger.spec.dtypes import ELEMENT_BYTES
from train_ledger.spec.launched import read_launch
from train_ledger.spec.registry import FRAMEWORKS

CONFIG_SHA256 = "c0ffee" + "0" * 58
EVENTS = ("before_forward", "forward", "after_forward", "before_backward", "backward", "after_backward")

#: Per framework: containers as (name, owner, dtype, numel, pad_numel), on every rank.
CONTAINERS: dict[str, list[tuple[str, str, str, int, int]]] = {
    "megatron": [
        ("param", "framework", "bfloat16", 46230, 362),
        ("grad", "framework", "float32", 46230, 362),
        ("main_param", "framework", "float32", 23115, 0),
        ("exp_avg", "optimizer", "float32", 23115, 0),
        ("exp_avg_sq", "optimizer", "float32", 23115, 0),
        ("step", "optimizer", "float32", 21, 0),
        ("global_memory_buffer", "framework", "bfloat16", 1920, 0),
        ("rope_cache", "model", "float32", 320, 0),
        ("batch", "script", "int64", 528, 0),
    ],
    "deepspeed": [
        ("param", "framework", "bfloat16", 26440, 17),
        ("main_param", "framework", "float32", 26440, 17),
        ("exp_avg", "optimizer", "float32", 26440, 17),
        ("exp_avg_sq", "optimizer", "float32", 26440, 17),
        ("grad", "framework", "bfloat16", 26440, 17),
        ("reduce_bucket", "framework", "bfloat16", 20000, 0),
        ("persisted_param", "framework", "bfloat16", 576, 0),
        ("step", "optimizer", "float32", 3, 0),
    ],
    "torchtitan": [
        ("param", "framework", "float32", 26440, 55),
        ("grad", "framework", "float32", 26440, 55),
        ("exp_avg", "optimizer", "float32", 26440, 0),
        ("exp_avg_sq", "optimizer", "float32", 26440, 0),
        ("step", "optimizer", "float32", 31, 0),
        ("rope_cache", "model", "complex64", 640, 0),
    ],
}

#: Per framework: calls as (op, group, dtype, in_numel, out_numel, count, component, phase).
CALLS: dict[str, list[tuple[str, str, str, int, int, int, str, str]]] = {
    "megatron": [
        ("all_gather", "tp", "bfloat16", 960, 1920, 104, "tensor parallel", "forward"),
        ("reduce_scatter", "tp", "bfloat16", 1920, 960, 72, "tensor parallel", "backward"),
        ("send", "pp", "bfloat16", 960, 0, 8, "pipeline", "forward"),
        ("recv", "pp", "bfloat16", 0, 960, 8, "pipeline", "backward"),
        ("reduce_scatter", "dp", "float32", 46592, 23296, 1, "data parallel", "backward"),
        ("all_gather", "dp", "bfloat16", 23296, 46592, 1, "data parallel", "forward"),
        ("all_reduce", "world", "float32", 1, 1, 1, "clipping", "optimizer"),
    ],
    "deepspeed": [
        ("all_gather", "dp", "bfloat16", 2500, 20000, 60, "fetch", "forward"),
        ("reduce_scatter", "dp", "bfloat16", 20000, 2500, 24, "reduce bucket", "backward"),
        ("all_reduce", "dp", "float64", 1, 1, 1, "clipping", "optimizer"),
    ],
    "torchtitan": [
        ("all_gather", "fsdp", "bfloat16", 4000, 16000, 13, "unshard", "forward"),
        ("reduce_scatter", "fsdp", "float32", 16000, 4000, 7, "reshard", "backward"),
        ("all_gather", "tp", "bfloat16", 1920, 3840, 18, "tensor parallel", "forward"),
        ("all_reduce", "fsdp", "float32", 31, 31, 1, "clipping", "optimizer"),
    ],
}

_GRIDS = {"megatron": {"tp": 2, "dp": 2, "pp": 2}, "deepspeed": {"dp": 8}, "torchtitan": {"tp": 2, "fsdp": 4}}

Change = Callable[[dict[str, Any], list[dict[str, Any]]], None]


def made_run(run: str, framework: str, world_size: int = 8) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A prediction and its rank files, in full agreement."""
    grid = _GRIDS[framework]
    coords = [_coords(r, grid) for r in range(world_size)]
    groups = [{"name": "world", "ranks": list(range(world_size))}]
    for name in grid:
        others = [tuple(v for k, v in c.items() if k != name) for c in coords]
        for key in sorted(set(others)):
            groups.append({"name": name, "ranks": [r for r in range(world_size) if others[r] == key]})
    prediction = {
        "schema": "train-ledger/predict/1",
        "run": run,
        "framework": framework,
        "world_size": world_size,
        "step": "steady",
        "config_sha256": CONFIG_SHA256,
        "groups": groups,
        "ranks": [_ledger(r, coords[r], framework) for r in range(world_size)],
    }
    return prediction, [_measured(prediction, r) for r in range(world_size)]


def _coords(rank: int, grid: dict[str, int]) -> dict[str, int]:
    out = {}
    for name, size in grid.items():
        out[name] = rank % size
        rank //= size
    return out


def _ledger(rank: int, coords: dict[str, int], framework: str) -> dict[str, Any]:
    containers = [
        {
            "name": name,
            "owner": owner,
            "dtype": dtype,
            "numel": numel + 12 * coords.get("pp", 0),
            "pad_numel": pad,
            "bytes": (numel + 12 * coords.get("pp", 0) + pad) * ELEMENT_BYTES[dtype],
            "device": "cpu",
            "rule": "framework/file.py:function",
            "blocks": [],
        }
        for name, owner, dtype, numel, pad in CONTAINERS[framework]
    ]
    keys = ("op", "group", "dtype", "in_numel", "out_numel", "count", "component", "phase")
    return {
        "rank": rank,
        "coords": coords,
        "resident_bytes": sum(c["bytes"] for c in containers),
        "containers": containers,
        "collectives": [{**dict(zip(keys, c, strict=True)), "rule": "file.py:function"} for c in CALLS[framework]],
    }


def _measured(prediction: dict[str, Any], rank: int) -> dict[str, Any]:
    ledger = prediction["ranks"][rank]
    mine = {g["name"]: g["ranks"] for g in prediction["groups"] if rank in g["ranks"]}
    framework = FRAMEWORKS[prediction["framework"]]
    census = [
        {
            **{k: c[k] for k in ("name", "owner", "dtype", "bytes")},
            "device": "cpu",
            "numel": c["numel"] + c["pad_numel"],
            "storages": 2,
            "blocks": [],
        }
        for c in ledger["containers"]
    ]
    calls = [
        {
            "step": 4,
            **{k: c[k] for k in ("op", "dtype", "in_numel", "out_numel", "count", "phase")},
            "ranks": list(mine[c["group"]]),
            "group": c["group"],
            "site": f"{framework.package}/core/place.py:call_{c['component'].replace(' ', '_')}",
        }
        for c in ledger["collectives"]
    ]
    stage0 = ledger["coords"].get("pp", 0) == 0
    return {
        "schema": "train-ledger/rank/1",
        "run": prediction["run"],
        "framework": framework.name,
        "world": "cpu",
        "world_size": prediction["world_size"],
        "rank": rank,
        "coords": dict(ledger["coords"]),
        "config_sha256": CONFIG_SHA256,
        "versions": {"python": "3.12.0", "torch": "2.14.1+cpu", framework.distribution: framework.version},
        "host": {"machine": "x86_64", "cpus": 2, "memory_bytes": 8 << 30},
        "device": {"type": "cpu"},
        "groups": [{"name": name, "ranks": list(ranks)} for name, ranks in mine.items()],
        "steps": [
            {"step": s, "loss": 6.5 - 0.1 * s, "grad_norm": 2.0 / s, "time_s": 0.1 + rank, "memory": None}
            for s in range(1, 5)
        ],
        "census": {
            "step": 4,
            "containers": census,
            "other": [],
        },
        "collectives": calls,
        "lifeline": _lifeline(framework.name) if stage0 else None,
    }


def _lifeline(framework: str) -> dict[str, Any]:
    full = 3600
    shapes = {
        "megatron": dict.fromkeys(EVENTS, ("view", "bfloat16", full)),
        "deepspeed": {
            e: (("full", "bfloat16", full) if "after" not in e else ("empty", "bfloat16", 0)) for e in EVENTS
        },
        "torchtitan": {
            e: (("full", "bfloat16", full) if "after" not in e else ("shard", "float32", full // 4)) for e in EVENTS
        },
    }[framework]
    rest = {"megatron": ("view", "bfloat16", full), "deepspeed": ("empty", "bfloat16", 0)}.get(
        framework, ("shard", "float32", full // 4)
    )
    master = {
        "name": "param" if framework == "torchtitan" else "main_param",
        "dtype": "float32",
        "numel": full // {"megatron": 2, "deepspeed": 8, "torchtitan": 4}[framework],
        "device": "cpu",
        "same_storage": framework == "torchtitan",
    }

    def event(name: str, micro_batch: int, what: tuple[str, str, int]) -> dict[str, Any]:
        state, dtype, numel = what
        size = 93184 if state == "view" else numel * ELEMENT_BYTES[dtype]
        return {
            "step": 4,
            "micro_batch": micro_batch,
            "event": name,
            "state": state,
            "dtype": dtype,
            "numel": numel,
            "storage_bytes": size,
            "master": master,
        }

    events = [event("step_begin", -1, rest)]
    for m in range({"megatron": 8, "deepspeed": 2, "torchtitan": 1}[framework]):
        events += [event(e, m, shapes[e]) for e in EVENTS]
    events += [event(e, -1, rest) for e in ("before_optimizer", "after_optimizer", "step_end")]
    return {
        "weight": "model.layers.1.self_attn.o_proj.weight",
        "module": "o_proj",
        "full_numel": full,
        "events": events,
    }


def write_launch(folder: Path, prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> Path:
    """The files that a launch leaves behind."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for r in ranks:
        file = folder / f"rank{r['rank']}.json"
        file.write_text(json.dumps(r))
        entries.append(
            {"rank": r["rank"], "exit": 0, "file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        )
    meta = {
        "schema": "train-ledger/launch/1",
        "wall_s": 12.5,
        **{k: ranks[0][k] for k in ("run", "framework", "world", "world_size", "config_sha256")},
        "ranks": entries,
    }
    (folder / "run.json").write_text(json.dumps(meta))
    return folder


RUNS = {
    "megatron-tp2-pp2-dp2": "megatron",
    "deepspeed-zero3-dp8": "deepspeed",
    "torchtitan-fsdp4-tp2": "torchtitan",
    "torchtitan-fsdp4-tp2-matched": "torchtitan",
}


def make_results(folder: Path, runs: dict[str, str] | None = None, change: Change | None = None) -> Path:
    """A results folder up to the reconciliation. `change(prediction, ranks)` may alter either side of each run."""
    predicts, probes = [], []
    for i, (run, framework) in enumerate((RUNS if runs is None else runs).items()):
        prediction, ranks = copy.deepcopy(made_run(run, framework))
        if change:
            change(prediction, ranks)
        predicts.append(folder / "predict" / f"run{i}.json")
        predicts[-1].parent.mkdir(parents=True, exist_ok=True)
        predicts[-1].write_text(json.dumps(prediction))
        launch = write_launch(folder / "launch" / f"run{i}", prediction, ranks)
        probes.append(folder / "probe" / f"run{i}.parquet")
        write_tidy(read_launch(launch), probes[-1])
    write(reconcile_files(predicts, probes), folder / "reconcile")
    return folder


def restamp(reconciled: Path) -> None:
    """runs.json says of the CSV files what they are now: for a test that changes a cell and means it."""
    data = json.loads((reconciled / "runs.json").read_text())
    data["files"] = {name: file_entry((reconciled / name).read_bytes()) for name in data["files"]}
    (reconciled / "runs.json").write_text(json.dumps(data))


def make_paper(folder: Path) -> Path:
    """Predictions of the three framework's runs at another size, as the paper's comparison has them."""
    for run, framework in RUNS.items():
        prediction, _ = copy.deepcopy(made_run(run, framework))
        for ledger in prediction["ranks"]:
            for c in ledger["containers"]:
                c["numel"] *= 10_000
                c["bytes"] = (c["numel"] + c["pad_numel"]) * ELEMENT_BYTES[c["dtype"]]
            ledger["resident_bytes"] = sum(c["bytes"] for c in ledger["containers"])
            for call in ledger["collectives"]:
                call["in_numel"] *= 10_000
                call["out_numel"] *= 10_000
        file = folder / "predict" / f"{run}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(prediction))
    return folder


def on_gpu(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """A change for `make_results`: the same run as eight GPUs and NCCL would have told it."""
    for r in ranks:
        r["world"] = "nccl"
        r["device"] = {"type": "cuda", "name": "NVIDIA H200", "memory_bytes": 150 << 30, "driver": "580.1"}
        for c in r["census"]["containers"]:
            c["device"] = "cuda"
        total = sum(c["bytes"] for c in r["census"]["containers"])
        r["census"]["other"] = []
        for s in r["steps"]:
            s["memory"] = {
                "requested_bytes.all.current": total + (64 << 20),
                "allocated_bytes.all.current": total + (64 << 20) + 5120,
                "allocated_bytes.all.peak": 10 * total + (64 << 20),
            }
        names = ["step_begin", *["forward_begin"] * 20, "backward_begin", *["backward"] * 20, "backward_end"]
        names += ["optimizer_begin", "optimizer_end", "step_end"]
        r["memory_events"] = [
            {"step": 4, "event": name, "module": f"layers.{i}", "time_s": i / 100}
            | {"allocated_bytes": total * (1 + min(i, 44 - i) // 3) + total * (i % 3) // 4}
            for i, name in enumerate(names)
        ]
        owners = [{"site": "torch/nn/functional.py:linear", "bytes": 9 * total, "blocks": 40}]
        r["peak"] = {"peak_bytes": 10 * total, "owners": [*owners, {"site": "resident", "bytes": total, "blocks": 0}]}
        r["kernels"] = [
            {"step": 4, "kind": c["op"], "dtype": c["dtype"], "count": c["count"], "time_s": 0.5}
            for c in r["collectives"]
        ]
        r["records"] = [
            {k: c[k] for k in ("step", "op", "group", "dtype", "in_numel", "out_numel", "count")}
            | {"group_size": len(c["ranks"]), "coalesced": False}
            for c in r["collectives"]
        ]
        parts = {"span_s": 1.5, "compute_s": 1.0, "communication_s": 0.6, "exposed_communication_s": 0.4}
        r["timeline"] = {"steps": [{"step": 4, **parts}], "matrix_flop_per_s": 7e14 + r["rank"] * 2e12}


def make_parity(folder: Path) -> None:
    """What the parity stage leaves in a results folder: the three runs of equal batch, and a reference."""
    runs = [r for r in RUNS if r != "torchtitan-fsdp4-tp2"]
    curves = [
        f"{run},{step},{6.5 - step / 10 + i / 1e5},1.0"
        for i, run in enumerate([*runs, "reference-bf16"])
        for step in (1, 2, 3)
    ]
    rows = [
        f"{run},reference-bf16,{step},6.4,6.4,1e-05,{i * 1e-5},0.0002,equal"
        for i, run in enumerate(runs)
        for step in (1, 2, 3)
    ]
    worst = {"worst": 1e-5, "at": 2, "bound": 2e-4}
    pair = {"right": "reference-bf16", "loss": worst, "grad_norm": worst, "update": None, "along": None}
    summary = {
        "schema": "train-ledger/parity/1",
        "verdict": "equal",
        "problem_sha256": CONFIG_SHA256,
        "steps": 3,
        "runs": [],
        "references": ["reference-bf16"],
        "bounds": [],
        "pairs": [{"left": run, **pair, "verdict": "equal", "why": ""} for run in runs],
        "failures": [],
    }
    (folder / "parity").mkdir()
    (folder / "parity" / "parity.json").write_text(json.dumps(summary))
    (folder / "parity" / "curves.csv").write_text("\n".join(["run,step,loss,grad_norm", *curves, ""]))
    head = "left,right,step,left_loss,right_loss,abs_difference,rel_difference,bound,verdict"
    (folder / "parity" / "losses.csv").write_text("\n".join([head, *rows, ""]))
