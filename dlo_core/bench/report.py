"""The report of a bench: each length against what no offload can beat, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dlo_core.planner import Simulation, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.bench.job import BenchJob
    from dlo_core.bench.measure import Run, StreamedRank
    from dlo_core.bench.probe import Rates

__all__ = ["BenchReport", "Row", "probe_table"]

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Row:
    """One length; of several ranks the slowest counts, and the largest.

    Attributes:
        tokens: The length; 0 for a model with arguments of its own.
        compute_ms: A step with all weights resident: T_c.
        copy_ms: The link's time for the bytes of a step: T_x.
        simulated_ms: What the planner predicts from the rates measured in this run.
        step_ms: A step with streamed weights.
        exposed_ms: What of it computation waited for weights.
        allocated_nbytes: Device bytes in tensors.
        reserved_nbytes: Device bytes that the allocator holds.
        resident_reserved_nbytes: The same with all weights resident.
        bit_identical: Whether every pass on every rank gave the resident run's bits.
        decode_ms: What of it packed weights were decoded, beside the blocks' computation.
    """

    tokens: int
    compute_ms: float
    copy_ms: float
    simulated_ms: float
    step_ms: float
    exposed_ms: float
    allocated_nbytes: int
    reserved_nbytes: int
    resident_reserved_nbytes: int
    bit_identical: bool
    decode_ms: float = 0.0

    @property
    def bound_ms(self) -> float:
        """What no order of copies and computation can beat."""
        return max(self.compute_ms + self.decode_ms, self.copy_ms)


class BenchReport:
    """What a bench measured on all ranks."""

    def __init__(
        self,
        job: BenchJob,
        resident: Sequence[tuple[Run, ...]],
        streamed: Sequence[StreamedRank],
    ) -> None:
        """Put the rows together.

        Args:
            job: What was run.
            resident: Each rank's runs with resident weights.
            streamed: Each rank's runs with streamed weights.
        """
        self.job = job
        self.streamed = tuple(streamed)
        self.rows = tuple(
            self._row(number, [runs[number] for runs in resident])
            for number in range(len(job.runs))
        )

    @property
    def bit_identical(self) -> bool:
        """Whether every bit of every row is right."""
        return all(row.bit_identical for row in self.rows)

    def _row(self, number: int, resident: Sequence[Run]) -> Row:
        runs = [each.runs[number] for each in self.streamed]
        same = [
            set(run.digests) == set(other.digests) and len(set(other.digests)) == 1
            for run, other in zip(runs, resident, strict=True)
        ]
        copied = max(each.copied_nbytes / each.link_gb_s / 1e6 for each in self.streamed)
        return Row(
            tokens=runs[0].tokens,
            compute_ms=max(run.step_ms for run in resident),
            copy_ms=copied,
            simulated_ms=max(
                self._simulate(each, run).step_ms
                for each, run in zip(self.streamed, resident, strict=True)
            ),
            step_ms=max(run.step_ms for run in runs),
            exposed_ms=max(run.exposed_ms for run in runs),
            allocated_nbytes=max(run.allocated_nbytes for run in runs),
            reserved_nbytes=max(run.reserved_nbytes for run in runs),
            resident_reserved_nbytes=max(run.reserved_nbytes for run in resident),
            bit_identical=all(same),
            decode_ms=max(each.decode_ms for each in self.streamed),
        )

    def _simulate(self, rank: StreamedRank, resident: Run) -> Simulation:
        """Predict a step from the blocks' times, of which the rest of the model takes its share."""
        blocks = list(resident.block_ms)
        share = resident.step_ms / sum(blocks) if sum(blocks) else 0.0
        settings = self.job.settings
        ratio = 1.0 if rank.packed_ratio is None else rank.packed_ratio
        return simulate(
            [round(nbytes * ratio) for nbytes in rank.blocks_nbytes],
            [ms * share for ms in blocks],
            rank.link_gb_s,
            rank.gather_gb_s,
            depth=settings.get("depth", 2),
            stages=settings.get("stages", 2),
            residents=rank.num_residents,
            placement=settings.get("resident_placement", "spread"),
            size=len(self.streamed) if rank.gather_gb_s is not None else 1,
            host_blocks=rank.host_blocks,
            t_decode=None if rank.packed_ratio is None else rank.blocks_decode_ms,
        )

    def lines(self) -> tuple[str, ...]:
        """Return what holds for all rows, in words."""
        blocks, first = self.streamed[0].blocks_nbytes, self.streamed[0]
        host = max(each.host_nbytes for each in self.streamed)
        pinned = max(each.pinned_nbytes for each in self.streamed)
        enable = max(each.enable_s for each in self.streamed)
        device = max(each.device_nbytes for each in self.streamed)
        mode = "gather mode" if first.gather_gb_s is not None else "rank-local mode"
        rates = f"link {min(each.link_gb_s for each in self.streamed):.2f} GB/s"
        if first.gather_gb_s is not None:
            rates += f", gather {first.gather_gb_s:.2f} GB/s"
        lines = (
            f"{len(blocks)} blocks, {sum(blocks) / _GB:.3f} GB in all; {len(self.streamed)} "
            f"rank{'s' if len(self.streamed) > 1 else ''}, {mode}; {rates}",
            f"enabled in {enable:.2f} s, {host / enable / _GB:.2f} GB/s; host {host / _GB:.3f} GB, "
            f"pinned {pinned / _GB:.3f} GB; device weights {device / _GB:.3f} GB, of it "
            f"{first.residents_nbytes / _GB:.3f} GB of blocks that stay",
        )
        return lines if first.packed_ratio is None else (*lines, _packed_line(first))

    def tables(self) -> tuple[Table, Table]:
        """Return the times and the bytes of all rows as tables."""
        times = Table(title="milliseconds a step", title_justify="left", box=SIMPLE_HEAD)
        for column in (
            "tokens", "T_c", "T_x", "sim.", "step", "× bound", "× sim.", "exposed", "bits"
        ):  # fmt: skip
            times.add_column(column, justify="right", no_wrap=True)
        memory = Table(title="GB on the device", title_justify="left", box=SIMPLE_HEAD)
        for column in ("tokens", "allocated", "reserved", "reserved, resident"):
            memory.add_column(column, justify="right")
        for row in self.rows:
            tokens = str(row.tokens or "own")
            parts = (row.compute_ms, row.copy_ms, row.simulated_ms, row.step_ms)
            times.add_row(
                tokens,
                *(f"{ms:.2f}" for ms in parts),
                f"{row.step_ms / row.bound_ms:.3f}",
                f"{row.step_ms / row.simulated_ms:.3f}",
                f"{row.exposed_ms:.2f}",
                "[green]same[/]" if row.bit_identical else "[bold red]differ[/]",
            )
            sizes = (row.allocated_nbytes, row.reserved_nbytes, row.resident_reserved_nbytes)
            memory.add_row(tokens, *(f"{nbytes / _GB:.3f}" for nbytes in sizes))
        return times, memory

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold."""
        return {
            "job": asdict(self.job),
            "bit_identical": self.bit_identical,
            "rows": [asdict(row) | {"bound_ms": row.bound_ms} for row in self.rows],
            "ranks": [asdict(each) | {"decode_ms": each.decode_ms} for each in self.streamed],
        }


def _packed_line(rank: StreamedRank) -> str:
    assert rank.packed_ratio is not None
    text = (
        f"packed in {rank.packed_ratio:.3f} of the bytes: the link carries "
        f"{rank.link_gb_s / rank.packed_ratio:.2f} GB/s of weights"
    )
    if not rank.decode_ms:
        return text
    rate = sum(rank.blocks_nbytes) / rank.decode_ms / 1e6
    return f"{text}; decoded in {rank.decode_ms:.2f} ms a pass, {rate:,.1f} GB/s"


def probe_table(rates: Sequence[Rates]) -> Table:
    """Return what the ranks measured as a table, one column a rank."""
    table = Table(title="rates", title_justify="left")
    table.add_column("")
    for each in rates:
        table.add_column(f"rank {each.rank}, {each.device}", justify="right")
    pinned = "pinning" if rates[0].pinned else "making host pages (not pinned)"
    size, dtype = rates[0].gemm_size, rates[0].gemm_dtype
    for label, name, unit in (
        (pinned, "pin_gb_s", "GB/s"),
        ("host to device, alone", "link_gb_s", "GB/s"),
        ("host to device, all ranks", "link_all_gb_s", "GB/s"),
        ("all-gather, bytes written", "gather_gb_s", "GB/s"),
        ("within the device, read + written", "device_gb_s", "GB/s"),
        (f"{size} × {size} {dtype} product", "gemm_tflop_s", "TFLOP/s"),
        ("packing of bf16 weights", "encode_gb_s", "GB/s"),
        ("decoding, bytes of weights", "decode_gb_s", "GB/s"),
        ("packed bytes to bytes", "packed_ratio", ""),
    ):
        values = [getattr(each, name) for each in rates]
        table.add_row(label, *("–" if v is None else f"{v:,.2f} {unit}" for v in values))
    return table
