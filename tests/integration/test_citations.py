"""What is said to be somewhere in a framework's code is there: every `path/file.py:name`, in the versions installed."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from train_ledger.predict import predict
from train_ledger.spec.config import load_run

ROOT = Path(__file__).parents[2]
PACKAGES = ("megatron", "deepspeed", "torchtitan", "torch", "spmd_types")
#: What else is cited in prose, beside Python's own library.
OTHERS = ("matplotlib", "snakemake", "snakemake_executor_plugin_slurm")
#: A rule of the ledger: a file by its import path, and a function or class in it, by its whole name or its own.
RULE = re.compile(r"((?:megatron/core|deepspeed|torchtitan|torch)/[\w/]+\.py):([A-Za-z_][\w.]*)")
#: In prose: `file.py:name`, more names after commas or slashes; a line may break between.
PROSE = re.compile(r"((?:\w+/)*\w+\.py):\s*`?([A-Za-z_]\w*(?:\.\w+)*)((?:/[A-Za-z_]\w*)*)")
#: Settings that bring out rules which the run files as they stand do not use.
VARIANTS: dict[str, list[dict]] = {
    "deepspeed-zero1-dp2": [
        {"deepspeed": {"zero_optimization": {"stage": 0}}},
        {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}},
    ],
    "deepspeed-zero2-dp2": [{"deepspeed": {"zero_optimization": {"contiguous_gradients": False}}}],
    "megatron-dp2": [{"megatron": {"use_distributed_optimizer": False, "overlap_param_gather": False}}],
    "megatron-tp2": [{"parallel": {"sequence_parallel": False}}],
    "torchtitan-fsdp2": [
        {
            "seq_length": 256,
            "parallel": {"context_parallel": 2, "data_parallel_shard": 1},
            "torchtitan": {"spmd_backend": b},
        }
        for b in ("spmd_types", "partial_dtensor")
    ],
    "torchtitan-tp2": [{"parallel": {"sequence_parallel": False}}, {"torchtitan": {"spmd_backend": "partial_dtensor"}}],
}


def _roots(packages: Sequence[str] = PACKAGES) -> Iterator[Path]:
    for package in packages:
        spec = importlib.util.find_spec(package)
        assert spec is not None, package
        yield from (Path(place) for place in spec.submodule_search_locations or ())


@functools.cache
def sources() -> dict[str, list[Path]]:
    """Every Python file of the frameworks, of Python and of ours, by its name."""
    found: dict[str, list[Path]] = {}
    ours = [ROOT / name for name in ("src/train_ledger", "tests", "benchmarks", "workflow")]
    for root in [*_roots((*PACKAGES, *OTHERS)), Path(sysconfig.get_path("stdlib")), *ours]:
        for file in root.rglob("*.py"):
            found.setdefault(file.name, []).append(file)
    return found


@functools.cache
def defined(file: Path) -> frozenset[str]:
    """Functions, classes and assigned names of a file, by their own and by their qualified names."""
    names: set[str] = set()

    def walk(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.update((child.name, f"{inside}{child.name}"))
                walk(child, f"{inside}{child.name}.")
                continue
            targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
            for target in targets:
                if isinstance(target, (ast.Name, ast.Attribute)):
                    name = target.id if isinstance(target, ast.Name) else target.attr
                    names.update((name, f"{inside}{name}"))
            walk(child, inside)

    walk(ast.parse(file.read_text(encoding="utf-8")), "")
    return frozenset(names)


def rules() -> dict[str, str]:
    """Every rule of the run files' predictions, and of their variants, with one run that has it."""
    found: dict[str, str] = {}
    for file in sorted((ROOT / "config" / "runs").glob("*.yaml")):
        for overrides in [{}, *VARIANTS.get(file.stem, [])]:
            run = load_run(file, overrides={"model": "laptop", **overrides})
            for step in ("first", "steady", "log"):
                for ledger in predict(run, step=step).ranks:
                    for item in (*ledger.containers, *ledger.collectives):
                        found.setdefault(item.rule, file.stem)
    return found


def test_every_rule_of_the_ledger_is_a_place_in_a_framework() -> None:
    wrong = []
    every = rules()
    for rule, run in every.items():
        match = RULE.fullmatch(rule)
        places = [root.parent / match[1] for root in _roots()] if match else []
        file = next((place for place in places if place.is_file()), None)
        if match is None or file is None or match[2] not in defined(file):
            wrong.append(f"{run}: {rule}")
    assert not wrong
    assert len(every) > 50


def _texts() -> Iterator[tuple[Path, str]]:
    patterns = ("README.md", "docs/*.md", "config/*.md", "src/**/*.py", "src/**/*.yaml", "src/**/*.j2", "examples/*")
    for pattern in patterns:
        for file in sorted(ROOT.glob(pattern)):
            text = file.read_text(encoding="utf-8")
            # A string or a comment that goes on in the next line.
            text = re.sub(r'"\s*\n\s*f?"', "", text)
            yield file, re.sub(r"\s*\n\s*(?:#:? ?)?", " ", text)


def test_every_place_that_prose_names_is_there() -> None:
    wrong, found = [], 0
    for file, text in _texts():
        for match in PROSE.finditer(text):
            places = [p for p in sources().get(Path(match[1]).name, []) if p.as_posix().endswith(f"/{match[1]}")]
            for name in [match[2], *filter(None, match[3].split("/"))]:
                found += 1
                if not any(name in defined(place) for place in places):
                    wrong.append(f"{file.relative_to(ROOT)}: {match[1]}:{name}")
    assert not wrong, "\n".join(wrong)
    assert found > 200


@pytest.mark.parametrize("name", ["torch/optim/adam.py:nothing", "torch/optim/none.py:Adam", "adam.py:Adam"])
def test_a_rule_that_is_no_place_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "rules", lambda: {name: "a run"})
    with pytest.raises(AssertionError):
        test_every_rule_of_the_ledger_is_a_place_in_a_framework()
