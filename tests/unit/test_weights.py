"""Canonical weights: one rule, any order, and files that are refused by the name of the tensor that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from train_ledger.cli import main
from train_ledger.launch.weights import check_hash, generate, open_weights, write_initial, write_record, write_weights
from train_ledger.spec.errors import DataError
from train_ledger.spec.model import ModelShape, canonical_tensors
from train_ledger.spec.tensorfile import Entry, TensorFile, file_sha256, write

TINY = ModelShape(
    name="tiny",
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=40,
    vocab_size=50,
    seq_length=8,
    head_dim=6,
    max_position_embeddings=8,
)
GPT = replace(
    TINY,
    position_embedding="learned",
    normalization="layernorm",
    gated_mlp=False,
    activation="gelu",
    tie_embeddings=True,
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_initial(TINY, 5, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


@pytest.mark.parametrize("model", [TINY, GPT], ids=["llama", "gpt"])
def test_file_and_generator_agree_in_any_order(model: ModelShape, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_initial(model, 5, path)
    by_file, by_rule, by_library = open_weights(path, model), generate(model, 5), load_file(path)
    names = [t.name for t in canonical_tensors(model)]
    assert set(by_library) == set(names)
    for name in reversed(names):
        assert torch.equal(by_file(name), by_rule(name))
        assert torch.equal(by_file(name), by_library[name])
        assert by_file(name).dtype == torch.float32


def test_values_depend_on_seed_and_name_only() -> None:
    one, other = generate(TINY, 5), generate(TINY, 6)
    assert torch.equal(one(O_PROJ), generate(replace(TINY, name="x"), 5)(O_PROJ))
    assert not torch.equal(one(O_PROJ), other(O_PROJ))
    assert not torch.equal(one(O_PROJ), one(O_PROJ.replace("layers.1", "layers.0")))


def test_scales() -> None:
    """1/sqrt(columns) for matrices, less for what writes to the residual stream, 1 for embeddings alone."""
    wide = replace(TINY, hidden_size=256, head_dim=64, ffn_hidden_size=512, vocab_size=400)
    read = generate(wide, 1)
    assert read("model.layers.0.self_attn.q_proj.weight").std() == pytest.approx(256**-0.5, rel=0.02)
    assert read("model.layers.0.mlp.down_proj.weight").std() == pytest.approx(512**-0.5 / 2, rel=0.02)
    assert read("model.embed_tokens.weight").std() == pytest.approx(1, rel=0.02)
    tied = generate(replace(wide, tie_embeddings=True), 1)
    assert tied("model.embed_tokens.weight").std() == pytest.approx(256**-0.5, rel=0.02)
    norm = read("model.layers.0.input_layernorm.weight")
    assert norm.mean() == pytest.approx(1, abs=0.03)
    assert norm.std() > 0.05


def test_hash_is_recorded_and_checked(file: Path) -> None:
    record = json.loads(Path(f"{file}.json").read_text())
    assert record["sha256"] == file_sha256(file)
    check_hash(file, record["sha256"])
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DataError, match="sha256"):
        check_hash(file, record["sha256"])


def test_record_alone_stands_for_the_file(tmp_path: Path) -> None:
    record = write_record(TINY, 5, tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()
    assert torch.equal(open_weights(record, TINY)(O_PROJ), generate(TINY, 5)(O_PROJ))
    with pytest.raises(DataError, match="model tiny"):
        open_weights(record, replace(TINY, num_layers=3))


def _rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(path)
    for name, value in change.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({O_PROJ: None}, "is missing"),
        ({O_PROJ: torch.zeros(24, 23)}, r"shape \[24, 23\], expected \[24, 24\]"),
        ({O_PROJ: torch.zeros(24, 24, dtype=torch.bfloat16)}, "BF16, expected F32"),
    ],
    ids=["missing", "other shape", "other type"],
)
def test_wrong_tensor_is_named(file: Path, change: dict[str, torch.Tensor | None], words: str) -> None:
    _rewrite(file, change)
    with pytest.raises(DataError, match=words) as e:
        open_weights(file, TINY)
    assert str(file) in str(e.value)
    assert O_PROJ in str(e.value)


def test_tensor_of_another_model_is_named(file: Path) -> None:
    _rewrite(file, {"model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(DataError, match=r"model\.layers\.2\.mlp\.up_proj\.weight: is no weight of model tiny"):
        open_weights(file, TINY)
    with pytest.raises(DataError, match="nonsense"):
        generate(TINY, 5)("nonsense")


@pytest.mark.parametrize("lost", [1, 24 * 50 * 4 + 1])
def test_truncated_file_names_the_first_tensor_that_is_cut(file: Path, lost: int) -> None:
    file.write_bytes(file.read_bytes()[:-lost])
    cut = "lm_head.weight" if lost == 1 else "model.norm.weight"
    with pytest.raises(DataError, match="truncated") as e:
        open_weights(file, TINY)
    assert e.value.key == cut


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", b"\xff" * 64, b"\x04" + b"\0" * 7 + b"[1] ", b"\x0b" + b"\0" * 7 + b'{"a": [1]}  '],
)
def test_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"safetensors header|cannot be read") as e:
        open_weights(path, TINY)
    assert str(path) in str(e.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        open_weights(tmp_path / "none.safetensors", TINY)


def test_write_refuses_doubles_and_leaves_no_half_file(tmp_path: Path) -> None:
    one = Entry("a", "F32", (2,), lambda: bytes(8))
    with pytest.raises(DataError, match="a: comes twice"):
        write(tmp_path / "w", [one, one])
    with pytest.raises(DataError, match="4 bytes of data for shape"):
        write(tmp_path / "w", [Entry("a", "F32", (2,), lambda: bytes(4))])
    assert list(tmp_path.iterdir()) == []


def test_write_weights_rounds_trip(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.tensor([1.5], dtype=torch.bfloat16)}
    digest = write_weights(tmp_path / "w", tensors)
    back = load_file(tmp_path / "w")
    assert digest == file_sha256(tmp_path / "w")
    assert torch.equal(back["a"], tensors["a"])
    assert back["b"].dtype == torch.float32
    assert TensorFile(tmp_path / "w").shape("a") == (3, 2)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "w.safetensors"
    assert main(["weights", "--model", "laptop", "--seed", "3", "--out", str(out)]) == 0
    assert capsys.readouterr().out.split()[0] == file_sha256(out)
    assert main(["weights", "--model", "nothing", "--out", str(out)]) == 2
    assert "there is no model 'nothing'" in capsys.readouterr().err
