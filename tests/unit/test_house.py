"""The rules of the house: who may import whom, pins that agree, keys that are described, small and clean files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from train_ledger.workflow import envs

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "train_ledger"
STAGES = {p.parent.name for p in SOURCE.glob("*/__init__.py")}

#: What a stage may import of ours. `spec` stands below all; a measurement must not know the prediction.
MAY = {
    "spec": set(),
    "predict": {"spec"},
    "probe": {"spec"},
    "launch": {"spec", "probe"},
    "reconcile": {"spec"},
    "parity": {"spec"},
    "plot": {"spec", "reconcile", "parity"},
    "report": {"spec", "reconcile", "parity", "plot"},
    "workflow": {"spec", "predict", "launch"},
    "interop": {"spec"},
    "evidence": {"spec", "predict", "reconcile"},
}
NO_TORCH = ("spec", "predict", "reconcile", "plot", "report")


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows, or, outside of a checkout, all files."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", *patterns], capture_output=True, text=True, check=False
    )
    if done.returncode == 0 and done.stdout:
        return [f for f in (ROOT / name for name in done.stdout.split("\0") if name) if f.is_file()]
    return [f for p in patterns or ("*",) for f in ROOT.rglob(p) if not {".venv", ".uv", ".git"} & set(f.parts)]


def imports(file: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it."""
    package = ("train_ledger", *file.relative_to(SOURCE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join((*base, *([node.module] if node.module else [])))
            found |= {name} | {f"{name}.{alias.name}" for alias in node.names}
    return found


def modules(stage: str) -> list[Path]:
    """All modules of a stage."""
    return sorted((SOURCE / stage).rglob("*.py"))


@pytest.mark.parametrize("stage", MAY)
def test_import_arrows(stage: str) -> None:
    """No stage imports one that it must not know."""
    bad = []
    for file in modules(stage):
        ours = {n.split(".")[1] for n in imports(file) if n.startswith("train_ledger.") and n.split(".")[1] in STAGES}
        bad += [f"{file.relative_to(SOURCE)} imports {name}" for name in ours - MAY[stage] - {stage}]
    assert not bad
    assert modules(stage)


@pytest.mark.parametrize("stage", NO_TORCH)
def test_no_torch(stage: str) -> None:
    """Prediction, data and report stages run where no torch is installed."""
    frameworks = {"torch", "megatron", "deepspeed", "torchtitan"}
    bad = [f"{f.relative_to(SOURCE)}: {n}" for f in modules(stage) for n in imports(f) if n.split(".")[0] in frameworks]
    assert not bad


def test_predicting_loads_no_torch() -> None:
    """The whole of prediction, in a process of its own."""
    code = (
        "import sys; from train_ledger.predict import predict; from train_ledger.spec.config import load_comparison\n"
        "for run in load_comparison('laptop', 'config').runs.values(): predict(run)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["workflow", "megatron", "deepspeed", "torchtitan"])
def test_conda_pins_are_the_locked_ones(name: str) -> None:
    """Every pip pin of a conda environment stands in the hashed requirements, with the same version."""
    locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", (ROOT / "envs/requirements.txt").read_text(), re.M))
    pins = [p for p in envs.pins(ROOT / f"envs/{name}.yaml") if "==" in p]
    assert len(pins) > 5
    differ = [p for p in pins if locked.get(p.split("==")[0]) != p.split("==")[1]]
    assert not differ


def test_conda_environments_hold_the_verified_versions() -> None:
    """The registry's versions, the requirements' and the environments' are the same."""
    from train_ledger.spec.registry import FRAMEWORKS

    for f in FRAMEWORKS.values():
        assert f"{f.distribution}=={f.version}" in envs.pins(ROOT / f"envs/{f.name}.yaml")
        assert f"{f.distribution}=={f.version}\n" in (ROOT / "envs/requirements.in").read_text()


def test_requirements_are_hashed_and_name_no_host() -> None:
    """Each requirement has a hash, and none says where it comes from."""
    text = (ROOT / "envs/requirements.txt").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=[A-Za-z0-9])", text)
    assert all("--hash=sha256:" in block for block in blocks if "==" in block)
    assert "://" not in text
    assert "index-url" not in text


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the machine's business."""
    hosts = re.compile(
        "|".join(("py" + r"pi\.org", "python" + r"hosted\.org", r"registry\.npm" + "js", "conda" + r"\.anaconda"))
    )
    bad = [str(f.relative_to(ROOT)) for f in tracked() if f.suffix != ".lock" and hosts.search(_text(f))]
    assert not bad


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@pytest.mark.parametrize("file", sorted((SOURCE / "spec/schemas").glob("*.yaml")), ids=lambda f: f.stem)
def test_schemas_are_valid_and_say_what_they_are(file: Path) -> None:
    """Each schema is one, has a title and a description of itself or of its parts."""
    from jsonschema import Draft202012Validator

    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(data)
    assert data["title"]


CONFIG_SCHEMAS = ("config", "comparison", "model", "run", "megatron", "deepspeed", "torchtitan", "site")


@pytest.mark.parametrize("name", CONFIG_SCHEMAS)
def test_every_config_key_is_described(name: str) -> None:
    """Each key that a user may write has a description, and a default or must be given; other keys are errors."""
    bad: list[str] = []

    def walk(part: dict[str, object], where: str) -> None:
        properties = part.get("properties", {})
        assert isinstance(properties, dict)
        if properties and part.get("additionalProperties") is not False:
            bad.append(f"{where}: takes unknown keys")
        for key, sub in properties.items():
            at = f"{where}.{key}"
            if not sub.get("description"):
                bad.append(f"{at}: no description")
            if "default" not in sub and key not in part.get("required", []) and key not in CONFIG_SCHEMAS:
                bad.append(f"{at}: neither default nor required")
            walk(sub, at)

    walk(yaml.safe_load((SOURCE / f"spec/schemas/{name}.yaml").read_text(encoding="utf-8")), name)
    assert not bad


def test_schemas_are_reached_from_the_workflow() -> None:
    """workflow/schemas is where Snakemake's users look for them."""
    assert (ROOT / "workflow/schemas/run.yaml").samefile(SOURCE / "spec/schemas/run.yaml")


def test_no_module_is_too_long() -> None:
    """A module that is longer is two modules."""
    long = {
        str(f.relative_to(ROOT)): n
        for f in tracked("*.py", "*.smk", "Snakefile")
        if (n := len(_text(f).splitlines())) > 450
    }
    assert not long


def test_nothing_is_left_open() -> None:
    """No tests that do not run, no unfinished code."""
    words = re.compile(
        "|".join(
            (
                r"pytest\.sk" + "ip",
                r"x" + "fail",
                r"#\s*TO" + "DO",
                "raise NotImplemented" + "Error",
                r"assert Tr" + "ue",
            )
        )
    )
    bad = [str(f.relative_to(ROOT)) for f in tracked("*.py", "*.smk") if words.search(_text(f))]
    assert not bad


def test_tracked_files_are_small() -> None:
    """Evidence is compressed; nothing else is large."""
    large = {str(f.relative_to(ROOT)): f.stat().st_size for f in tracked() if f.stat().st_size > 2_000_000}
    assert not large
