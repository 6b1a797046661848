"""The census: each storage once, under its owner; what nobody claims is seen too."""

from __future__ import annotations

import gc
import weakref

import torch

from train_ledger.probe.census import census, parts


def row(found: dict, name: str) -> dict:
    (one,) = [c for c in found["containers"] if c["name"] == name]
    return one


def test_views_of_one_buffer_are_one_storage() -> None:
    buffer = torch.zeros(100, dtype=torch.bfloat16)
    views = [buffer[0:30], buffer[20:50], buffer[90:100]]
    found = row(census(("param", "framework", v) for v in views), "param")
    assert found == {
        "name": "param",
        "owner": "framework",
        "dtype": "bfloat16",
        "numel": 60,  # 0-49 and 90-99, the overlap once
        "bytes": 200,
        "storages": 1,
        "device": "cpu",
        "blocks": [[200, 1]],
    }


def test_the_first_claim_of_a_storage_names_it() -> None:
    tensor = torch.zeros(10)
    found = census([("main_param", "framework", tensor), ("param", "framework", tensor)])
    assert [c["name"] for c in found["containers"]] == ["main_param"]


def test_rows_are_split_by_dtype_and_list_their_blocks() -> None:
    tensors = [torch.zeros(4), torch.zeros(4), torch.zeros(6), torch.zeros(4, dtype=torch.int64)]
    found = census(("exp_avg", "optimizer", t) for t in tensors)["containers"]
    assert [(c["dtype"], c["bytes"], c["storages"], c["blocks"]) for c in found] == [
        ("float32", 56, 3, [[24, 1], [16, 2]]),
        ("int64", 32, 1, [[32, 1]]),
    ]


def test_what_nobody_claims_is_listed_by_dtype_and_shape() -> None:
    kept = [torch.zeros(7, 11, 13) for _ in range(2)]
    mine = torch.zeros(17, 19)
    found = census([("param", "framework", mine)])["other"]
    rows = [o for o in found if o["shape"] == [7, 11, 13]]
    assert rows == [{"dtype": "float32", "shape": [7, 11, 13], "bytes": 2 * 4004, "count": 2, "device": "cpu"}]
    assert not [o for o in found if o["shape"] == [17, 19]]
    assert len(kept) == 2


def test_a_gradient_that_only_its_parameter_holds_is_seen() -> None:
    weight = torch.nn.Parameter(torch.zeros(23, 29))
    (weight * 2).sum().backward()
    found = census([("param", "framework", weight)])["other"]
    assert [o["bytes"] for o in found if o["shape"] == [23, 29]] == [23 * 29 * 4]


def test_a_larger_tensor_names_an_unclaimed_storage() -> None:
    whole = torch.zeros(31, 37)
    views = [whole[0], whole[:3]]
    found = census([])["other"]
    assert [o["count"] for o in found if o["shape"] == [31, 37]] == [1]
    assert not [o for o in found if o["shape"] in ([37], [3, 37])]
    assert len(views) == 2


def test_nothing_is_kept_alive() -> None:
    tensor = torch.zeros(41, 43)
    gone = weakref.ref(tensor)
    census([("param", "framework", tensor)])
    del tensor
    gc.collect()
    assert gone() is None


def test_meta_and_empty_tensors_take_no_memory() -> None:
    found = census([("param", "framework", torch.empty(5, device="meta")), ("param", "framework", torch.empty(0))])
    assert found["containers"] == []


def test_a_resized_storage_counts_as_it_is_now() -> None:
    tensor = torch.zeros(50)
    tensor.untyped_storage().resize_(0)
    assert census([("param", "framework", tensor)])["containers"] == []


def test_objects_that_raise_on_inspection_are_passed_over() -> None:
    class Hostile:
        @property
        def __class__(self) -> type:
            raise RuntimeError("not now")

    thing = Hostile()
    census([])
    assert thing is not None


def test_plain_tensors_are_their_own_parts() -> None:
    plain = torch.zeros(2)
    assert parts(plain) == [plain]


def test_fake_tensors_count_as_what_they_stand_for() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        whole = torch.empty(1000, 1000, device="cuda")
        found = row(census([("param", "framework", whole[:10])]), "param")
    assert (found["device"], found["bytes"], found["numel"]) == ("cuda", 4_000_000, 10_000)
