"""The report: the numbers of a demo as a table, or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dlo_core.demo.result import StreamedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dlo_core.demo.job import Job
    from dlo_core.demo.proof import Difference
    from dlo_core.demo.result import RankResult

__all__ = ["Report"]

NONE = "–"
UNREPORTED = frozenset({"mode", "images", "spans"})


@dataclass(frozen=True, slots=True)
class Report:
    """What a demo measured.

    Attributes:
        job: What was run.
        results: What each rank measured, by rank.
        differences: Where bits differ; empty when all is well.
        files: Names of the pictures that were written.
        seconds: Wall time of all ranks together, their start included.
    """

    job: Job
    results: Sequence[RankResult]
    differences: Sequence[Difference]
    files: Sequence[str]
    seconds: float

    def table(self) -> Table:
        """Return the table for people; of several ranks' numbers it shows the range."""
        table = Table(title=self._title(), title_justify="left", title_style="bold")
        table.add_column("")
        table.add_column("resident", justify="right")
        for mode in self.job.streamed_modes:
            table.add_column(mode, justify="right")
        nbytes = spread((result.model_nbytes for result in self.results), kilobytes)
        table.add_row("model bytes", nbytes, *[nbytes for _ in self.job.streamed_modes])
        for label, resident, name, show in (
            ("device weight bytes, predicted", nbytes, "predicted_device_nbytes", kilobytes),
            ("device weight bytes, measured", nbytes, "measured_device_nbytes", kilobytes),
            ("host weight bytes, each rank", NONE, "host_nbytes", kilobytes),
            ("passes", str(self._resident_passes()), "passes", str),
            ("fills", NONE, "fills", str),
            ("copied host to device", NONE, "copied_nbytes", kilobytes),
            ("gathered between ranks", NONE, "gathered_nbytes", kilobytes),
            ("time of a pass", self._resident_pass(), "pass_ms", milliseconds),
            ("exposed in the last pass", NONE, "exposed_ms", milliseconds),
            ("overlap in the last pass", NONE, "overlap", percent),
        ):
            table.add_row(label, resident, *self._cells(name, show))
        table.add_section()
        verdicts = [self._verdict(mode) for mode in self.job.streamed_modes]
        table.add_row("bit-identical to resident", NONE, *verdicts)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold."""
        return {
            "job": asdict(self.job),
            "bit_identical": not self.differences,
            "seconds": self.seconds,
            "model_nbytes": self.results[0].model_nbytes,
            "resident": [
                {"rank": result.rank, "pass_ms": result.resident_pass_ms} for result in self.results
            ],
            "streamed": {mode: self._runs_dict(mode) for mode in self.job.streamed_modes},
            "differences": [asdict(difference) for difference in self.differences],
            "files": list(self.files),
        }

    def _runs_dict(self, mode: str) -> dict[str, Any]:
        names = [field.name for field in fields(StreamedRun) if field.name not in UNREPORTED]
        ranks = [
            {"rank": rank} | {name: getattr(run, name) for name in names}
            for rank, run in enumerate(self._runs(mode))
        ]
        wrong = [difference for difference in self.differences if difference.mode == mode]
        return {"bit_identical": not wrong, "ranks": ranks}

    def _runs(self, mode: str) -> list[StreamedRun]:
        return [run for result in self.results for run in result.streamed if run.mode == mode]

    def _cells(self, name: str, show: Callable[[Any], str]) -> list[str]:
        return [
            spread((getattr(run, name) for run in self._runs(mode)), show)
            for mode in self.job.streamed_modes
        ]

    def _verdict(self, mode: str) -> str:
        wrong = [difference.rank for difference in self.differences if difference.mode == mode]
        if wrong:
            return f"[bold red]no[/] (rank {', '.join(map(str, wrong))})"
        return "[bold green]yes[/]"

    def _resident_passes(self) -> int:
        return 2 * self.job.num_steps

    def _resident_pass(self) -> str:
        return spread((result.resident_pass_ms for result in self.results), milliseconds)

    def _title(self) -> str:
        job = self.job
        return (
            f"{job.ranks} rank{'s' if job.ranks > 1 else ''}, depth {job.depth}, "
            f"{job.num_images} digits a rank in {job.num_steps} steps, {self.seconds:.1f} s"
        )


def spread(values: Iterable[Any], show: Callable[[Any], str]) -> str:
    """Return the one value that all ranks share, or the least and the greatest."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return NONE
    least, most = show(found[0]), show(found[-1])
    return least if least == most else f"{least} … {most}"


def kilobytes(nbytes: int) -> str:
    """Return ``nbytes`` in decimal kilobytes."""
    return f"{nbytes / 1000:,.0f} kB"


def milliseconds(value: float) -> str:
    """Return ``value`` with its unit."""
    return f"{value:.1f} ms"


def percent(share: float) -> str:
    """Return ``share`` in percent."""
    return f"{share:.0%}"
