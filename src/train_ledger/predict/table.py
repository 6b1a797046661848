"""The prediction as text, at most 100 columns wide. Bytes are exact; GB is 10^9 bytes and GiB 2^30, always labelled."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from train_ledger.predict.distinct import ranges
from train_ledger.spec.dtypes import element_bytes
from train_ledger.spec.groups import Group
from train_ledger.spec.ledger import STATE_CONTAINERS, Collective, Prediction, RankLedger
from train_ledger.spec.registry import FRAMEWORKS
from train_ledger.spec.run import Run
from train_ledger.spec.units import fmt_auto

WIDTH = 100

_UNITS = (("GB (10^9 bytes)", 10**9), ("MB (10^6 bytes)", 10**6), ("kB (10^3 bytes)", 10**3), ("bytes", 1))


class _Wrapper(textwrap.TextWrapper):
    """Wraps paths after a slash and before a function's name too, not only at blanks."""

    wordsep_simple_re = re.compile(r"(\s+|(?<=[/:]))")


def columns(rows: Sequence[Sequence[str]], align: str, *, indent: int = 2, last_is_prose: bool = False) -> str:
    """Rows of cells in aligned columns.

    Args:
        rows: the first row is the head.
        align: `<` or `>` for each column.
        last_is_prose: wrap the last column to the width that is left, with a hanging indent.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    lines = []
    for row in rows:
        cells = [f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)]
        if not last_is_prose:
            lines.append((" " * indent + "  ".join(cells)).rstrip())
            continue
        head = " " * indent + "  ".join(cells[:-1]) + "  "
        prose = _Wrapper(max(WIDTH - len(head), 20), break_on_hyphens=False).wrap(row[-1]) or [""]
        lines += [(head + prose[0]).rstrip(), *((" " * len(head) + more).rstrip() for more in prose[1:])]
    return "\n".join(lines)


def layout_lines(run: Run, more: str = "") -> str:
    """What is predicted: model, framework, layout, batch, and `more`."""
    p = run.parallel
    degrees = [
        f"{name} {degree}"
        for name, degree in (
            ("tensor", p.tensor_parallel),
            ("context", p.context_parallel),
            ("pipeline", p.pipeline_parallel),
            ("virtual pipeline", p.virtual_pipeline_parallel),
            ("data", p.data_parallel),
        )
        if degree > 1
    ]
    if p.data_parallel_replicate > 1:
        degrees.append(f"(replicate {p.data_parallel_replicate} x shard {p.data_parallel_shard})")
    own = FRAMEWORKS[run.framework]
    head = f"{run.name}: {own.title} {own.version}, {run.model.name}, {run.model.num_parameters:,} parameters"
    layout = " x ".join(degrees) or "no parallelism"
    if p.tensor_parallel > 1:
        layout += ", sequence parallel" if p.sequence_parallel else ", no sequence parallel"
    batch = f"micro-batch {run.micro_batch} x {run.num_micro_batches} a step"
    batch += f", {run.global_batch} sequences of {run.seq_length}"
    return "\n".join(
        line
        for text in (head, f"{run.world_size} ranks: {layout}; {batch}{more and '; '}{more}")
        for line in textwrap.wrap(text, WIDTH)
    )


#: Containers below this many bytes (step counters, loss scales) do not make two columns of ranks that are else alike.
SMALL_BYTES = 4096


@dataclass(frozen=True)
class Column:
    """Ranks whose containers of `SMALL_BYTES` and more are equal, with a ledger of each kind of rank among them."""

    ranks: tuple[int, ...]
    ledgers: tuple[RankLedger, ...]

    def bytes_of(self, name: str, dtype: str | None = None, device: str | None = None) -> list[int]:
        """Distinct sums of the containers of that name, ascending."""
        found = [
            [c for c in x.containers if c.name == name and dtype in (None, c.dtype) and device in (None, c.device)]
            for x in self.ledgers
        ]
        return sorted({sum(c.bytes for c in some) for some in found})


def _columns(prediction: Prediction, classes: Sequence[tuple[int, ...]]) -> list[Column]:
    alike: dict[tuple[object, ...], tuple[list[int], list[RankLedger]]] = {}
    for ledger, ranks in zip(prediction.ranks, classes, strict=True):
        large = tuple((c.name, c.dtype, c.bytes, c.device) for c in ledger.containers if c.bytes >= SMALL_BYTES)
        known = alike.setdefault(large, ([], []))
        known[0].extend(ranks)
        known[1].append(ledger)
    return [Column(tuple(sorted(ranks)), tuple(ledgers)) for ranks, ledgers in alike.values()]


def _spread(values: Sequence[int]) -> str:
    """One number, or the least and the largest of several."""
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _label(ranks: tuple[int, ...]) -> str:
    text = ranges(ranks)
    return text if len(text) <= 14 else f"{ranks[0]} (+{len(ranks) - 1:,})"


def state_table(cols: Sequence[Column]) -> str:
    """Model state of a rank of each kind, then its total and all that is resident."""
    rows = [["ranks", *STATE_CONTAINERS, "state, bytes", "resident, bytes", "GiB"]]
    largest_state = max(x.state_bytes for col in cols for x in col.ledgers)
    unit, scale = next((u, s) for u, s in _UNITS if largest_state >= s or s == 1)
    for col in cols:
        largest = max(col.ledgers, key=lambda x: x.resident_bytes)
        by = [col.bytes_of(name)[-1] for name in STATE_CONTAINERS]
        state, resident = f"{largest.state_bytes:,}", f"{largest.resident_bytes:,}"
        gib = f"{largest.resident_bytes / 2**30:.3f}"
        rows.append([_label(col.ranks), *(f"{b / scale:.3f}" if b else "-" for b in by), state, resident, gib])
    title = f"Model state of one rank at a step boundary, {unit}, and all that is resident with it"
    return f"{title}\n{columns(rows, '<' + '>' * 8)}"


def container_table(cols: Sequence[Column]) -> str:
    """Bytes of every container, at most four kinds of rank side by side; then the rules, once."""
    ledgers = [ledger for col in cols for ledger in col.ledgers]
    kinds = list(dict.fromkeys((c.name, c.dtype, c.device) for ledger in ledgers for c in ledger.containers))
    parts = ["Containers, bytes by rank"]
    for i in range(0, len(cols), 4):
        some = cols[i : i + 4]
        rows = [["container", "dtype", "on", *(_label(col.ranks) for col in some)]]
        for name, dtype, device in kinds:
            spans = [col.bytes_of(name, dtype, device) for col in some]
            if any(span[-1] for span in spans):
                on = "gpu" if device == "cuda" else device
                rows.append([name, dtype, on, *(_spread(span) if span[-1] else "" for span in spans)])
                if padding := [_padding(col, name, dtype) for col in some]:
                    rows += [["  of it padding", "", "", *padding]] if any(padding) else []
        rows.append(["all (largest rank)", "", "", *(f"{max(x.resident_bytes for x in c.ledgers):,}" for c in some)])
        parts.append(columns(rows, "<<<" + ">" * len(some)))
    rules: dict[tuple[str, str], list[str]] = {}
    for c in (c for ledger in ledgers for c in ledger.containers):
        names = rules.setdefault((c.owner, c.rule), [])
        if c.name not in names:
            names.append(c.name)
    listed = [[", ".join(names), owner, rule] for (owner, rule), names in rules.items()]
    parts += ["", "Whose they are, and the code that allocates them", columns(listed, "<<<", last_is_prose=True)]
    return "\n".join(parts)


def _padding(col: Column, name: str, dtype: str) -> str:
    sums = {
        sum(c.pad_numel * element_bytes(c.dtype) for c in x.containers if (c.name, c.dtype) == (name, dtype))
        for x in col.ledgers
    }
    return _spread(sorted(sums)) if any(sums) else ""


def group_sizes(groups: Iterable[Group], ranks: Iterable[int]) -> dict[tuple[int, str], int]:
    """Size of the group of each name that each of `ranks` is in, by (rank, name)."""
    wanted = set(ranks)
    return {(rank, g.name): len(g.ranks) for g in groups for rank in g.ranks if rank in wanted}


def traffic_table(ledger: RankLedger, sizes: dict[tuple[int, str], int]) -> str:
    """Calls of one rank in one step by kind and group, with payload and what goes over the wire in a ring."""
    total: dict[tuple[str, str, str], list[float]] = {}
    for c in ledger.collectives:
        n = sizes.get((ledger.rank, c.group), 1)
        row = total.setdefault((c.op, c.group, c.dtype), [0, 0, 0.0, n])
        row[0] += c.count
        row[1] += c.bytes
        row[2] += c.wire_bytes(n)
    rows = [["call", "group", "ranks", "dtype", "calls", "payload, bytes", "wire, bytes", ""]]
    for (op, group, dtype), (count, payload, wire, size) in sorted(total.items(), key=lambda item: -item[1][2]):
        numbers = [f"{count:,.0f}", f"{payload:,.0f}", f"{wire:,.0f}", fmt_auto(round(wire))]
        rows.append([op, group, f"{size:.0f}", dtype, *numbers])
    if len(rows) == 1:
        return "  nothing is sent"
    calls = sum(c.count for c in ledger.collectives)
    sent = sum(v[2] for v in total.values())
    rows.append(["all", "", "", "", f"{calls:,}", "", f"{sent:,.0f}", fmt_auto(round(sent))])
    return columns(rows, "<<><>>>>")


def table(run: Run, prediction: Prediction, classes: Sequence[tuple[int, ...]]) -> str:
    """The whole prediction. `classes` gives the ranks that each of `prediction.ranks` stands for."""
    sizes = group_sizes(prediction.groups, (ledger.rank for ledger in prediction.ranks))
    cols = _columns(prediction, classes)
    parts = [layout_lines(run, f"{prediction.step} step"), state_table(cols), container_table(cols)]
    alike: dict[str, list[int]] = {}
    for ledger, ranks in zip(prediction.ranks, classes, strict=True):
        alike.setdefault(traffic_table(ledger, sizes), []).extend(ranks)
    for text, members in alike.items():
        heading = f"Calls of one step, rank {ranges(tuple(sorted(members)))}"
        parts.append("\n".join([*textwrap.wrap(textwrap.shorten(heading, 2 * WIDTH), WIDTH), text]))
    return "\n\n".join(parts)


def collectives_by_kind(collectives: Iterable[Collective]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Calls and payload bytes by (op, group, dtype)."""
    out: dict[tuple[str, str, str], tuple[int, int]] = {}
    for c in collectives:
        calls, payload = out.get((c.op, c.group, c.dtype), (0, 0))
        out[c.op, c.group, c.dtype] = (calls + c.count, payload + c.bytes)
    return out


def groups_table(prediction_groups: Sequence[Group], rank: int | None = None) -> str:
    """Process groups by name: how many, how large, and their ranks; with `rank`, only those that it is in."""
    by_name: dict[str, list[Group]] = {}
    for g in prediction_groups:
        if rank is None or rank in g.ranks:
            by_name.setdefault(g.name, []).append(g)
    rows = [["group", "count", "ranks each", "members"]]
    for name, found in by_name.items():
        sizes = sorted({len(g.ranks) for g in found})
        shown = [f"[{ranges(g.ranks)}]" for g in found[:16]] + (
            [f"... {len(found):,} in all"] if len(found) > 16 else []
        )
        rows.append([name, f"{len(found):,}", ",".join(map(str, sizes)), " ".join(shown)])
    return columns(rows, "<>><", last_is_prose=True)
