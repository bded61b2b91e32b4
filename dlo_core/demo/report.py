"""The report: the numbers of a demo as a table, or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dlo_core.demo.result import StreamedRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dlo_core.demo.job import Job
    from dlo_core.demo.proof import Difference
    from dlo_core.demo.result import RankResult

__all__ = ["Report"]

NONE = "–"
UNREPORTED = frozenset({"mode", "images", "spans"})


@dataclass(frozen=True, slots=True)
class Unit:
    """How a number is shown.

    Attributes:
        name: Printed after the number.
        size: What one of the unit is.
        digits: Format of the number.
    """

    name: str
    size: float = 1.0
    digits: str = ",.0f"


COUNT = Unit("")
KILOBYTES = Unit(" kB", 1000.0)
MILLISECONDS = Unit(" ms", digits=".1f")
PERCENT = Unit(" %", 0.01)


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
        table.add_column("", no_wrap=True)
        table.add_column("resident", justify="right")
        for mode in self.job.streamed_modes:
            table.add_column(mode, justify="right")
        nbytes = spread((result.model_nbytes for result in self.results), KILOBYTES)
        table.add_row("whole model", nbytes, *[nbytes for _ in self.job.streamed_modes])
        for label, resident, name, unit in (
            ("device weights, predicted", nbytes, "predicted_device_nbytes", KILOBYTES),
            ("device weights, measured", nbytes, "measured_device_nbytes", KILOBYTES),
            ("host weights, each rank", NONE, "host_nbytes", KILOBYTES),
            ("passes", str(self._resident_passes()), "passes", COUNT),
            ("fills", NONE, "fills", COUNT),
            ("copied to the device", NONE, "copied_nbytes", KILOBYTES),
            ("gathered between ranks", NONE, "gathered_nbytes", KILOBYTES),
            ("time of a pass", self._resident_pass(), "pass_ms", MILLISECONDS),
            ("exposed, last timed pass", NONE, "exposed_ms", MILLISECONDS),
            ("overlap, last timed pass", NONE, "overlap", PERCENT),
        ):
            table.add_row(label, resident, *self._cells(name, unit))
        table.add_section()
        verdicts = [self._verdict(mode) for mode in self.job.streamed_modes]
        table.add_row("bit-identical", NONE, *verdicts)
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

    def _cells(self, name: str, unit: Unit) -> list[str]:
        return [
            spread((getattr(run, name) for run in self._runs(mode)), unit)
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
        return spread((result.resident_pass_ms for result in self.results), MILLISECONDS)

    def _title(self) -> str:
        job = self.job
        return (
            f"{job.ranks} rank{'s' if job.ranks > 1 else ''}, depth {job.depth}, "
            f"{job.num_images} digits a rank in {job.num_steps} steps, {self.seconds:.1f} s"
        )


def spread(values: Iterable[float | None], unit: Unit) -> str:
    """Return the one value that all ranks share, or the least and the greatest, with the unit."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return NONE
    least, most = (format(value / unit.size, unit.digits) for value in (found[0], found[-1]))
    return f"{least if least == most else f'{least} … {most}'}{unit.name}"
