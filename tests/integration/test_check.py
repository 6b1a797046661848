"""`train-ledger check` on real framework code in the fake world: exact when it is, and 1 when it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import train_ledger.predict
from train_ledger.cli import main
from train_ledger.spec.ledger import Prediction

ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "config/runs/deepspeed-zero3-dp8.yaml")
CHECK = ["check", RUN, "--comparison", "laptop"]

pytestmark = pytest.mark.launch


def test_exact(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*CHECK, "--rank", "0", "--rank", "7", "--out", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert "rank 0: " in out
    assert "rank 7: " in out
    assert "DIFFERS" not in out
    assert "0 bytes, 0 calls unexplained" in out
    assert (tmp_path / "run.json").exists()


def test_the_first_step(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*CHECK, "--rank", "3", "--step", "first", "--steps", "1"]) == 0
    assert "0 bytes, 0 calls unexplained" in capfd.readouterr().out


def test_a_difference_is_named_and_ends_with_1(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = train_ledger.predict.predict

    def wrong(*args: object) -> Prediction:
        found = right(*args)  # type: ignore[arg-type]
        (rank,) = found.ranks
        fewer = tuple(replace(c, numel=c.numel - 1) if c.name == "main_param" else c for c in rank.containers)
        return replace(found, ranks=(replace(rank, containers=fewer),))

    monkeypatch.setattr(train_ledger.predict, "predict", wrong)
    assert main([*CHECK, "--rank", "0"]) == 1
    out, err = capfd.readouterr()
    assert "rank 0: " in out
    assert "DIFFERS" in out
    assert "residual +4 B" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank", "8"], "'8' is not a rank of a world of 8, `all` or `distinct`"),
        (["--rank", "x"], "'x' is not a rank"),
        (["--steps", "0"], "--steps: 0 is not between 1 and 100,000,000"),
        (["--steps", "9" * 30], "--steps: 99"),
        (["--timeout", "nan"], "timeout: nan is not between 0 and"),
        (["--timeout", "0"], "timeout: 0.0 is not between 0 and"),
        (["--device", "cuda", "--world", "cpu"], "--device: goes with world fake only"),
        (["--set", "world_size=7"], "world_size: is 7"),
    ],
)
def test_bad_options_end_with_2(options: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*CHECK, *options]) == 2
    err = capfd.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
