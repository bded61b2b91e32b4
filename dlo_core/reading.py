"""Reading: a list of work, sorted as the files lie, done by a few threads.

[Note: reading]
Each file is read once, from its beginning to its end: pieces are sorted by file and offset, those
that follow each other in a file become one call, and threads take the calls in this order. A call
is no larger than ``CALL_NBYTES`` and ends at a multiple of it in the file, so that no two threads
want the same page. The bytes go straight into their final memory wherever they are wanted as they
are (pieces.py).

The caller's thread reports, and so hears of an interrupt at once; whatever ends the work early, the
threads end before the error goes on, each after the call that it is in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dlo_core.crew import run_in_threads
from dlo_core.file_reads import MAX_OUTS, Scratch
from dlo_core.pieces import Extent, Laid
from dlo_core.rawbytes import move_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dlo_core.checkpoint import Checkpoint
    from dlo_core.crew import Job, Listener
    from dlo_core.layout import TensorSpec
    from dlo_core.safetensors_header import CheckpointTensor

__all__ = [
    "CALL_NBYTES",
    "Computed",
    "Moved",
    "Piece",
    "Work",
    "default_threads",
    "memory_of",
]

CALL_NBYTES = 8 << 20
# Less than this is read before a thread has started.
_ALONE_NBYTES = 4 << 20
_MOST_THREADS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """Bytes that lie in memory already.

    Attributes:
        source: The bytes.
        out: Where they go.
    """

    source: torch.Tensor
    out: memoryview

    @classmethod
    def cut(cls, source: torch.Tensor, out: memoryview) -> Iterator[Moved]:
        """Yield copies of bounded size."""
        for start in range(0, len(source), CALL_NBYTES):
            end = min(start + CALL_NBYTES, len(source))
            yield cls(source[start:end], out[start:end])

    @property
    def done_nbytes(self) -> int:
        """Bytes of the model that are done with it."""
        return self.out.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Bytes that a function of a whole tensor makes.

    Attributes:
        stored: The first tensor that it reads.
        compute: Reads, computes and writes.
        done_nbytes: Bytes of the model that are done with it.
    """

    stored: CheckpointTensor
    compute: Callable[[], None]
    done_nbytes: int


Piece = Extent | Laid | Moved | Computed


class _Source(Protocol):
    @property
    def checkpoint(self) -> Checkpoint | None: ...

    def pieces(
        self, spec: TensorSpec, start: int, stop: int, out: memoryview
    ) -> Iterator[Piece]: ...


def default_threads() -> int:
    """Return how many threads read at once where nobody says: one a CPU, at most 16."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def memory_of(run: torch.Tensor) -> memoryview:
    """Return the memory of a one-dimensional ``uint8`` host tensor."""
    array: Any = run.numpy()
    return memoryview(array)


class Work:
    """What is to be read, and where to."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._moved: list[Job] = []
        self._stored: list[_Row] = []

    def add(self, source: _Source, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Add the bytes of a tensor from ``start`` on for which ``out`` is the memory."""
        checkpoint = source.checkpoint
        for piece in source.pieces(spec, start, start + out.nbytes, out):
            if isinstance(piece, Moved):
                self._moved.append(_MoveJob(piece))
                continue
            assert checkpoint is not None
            stored = piece.stored
            offset = stored.offset if isinstance(piece, Computed) else piece.offset
            place = (str(stored.path), offset)
            self._stored.append((place, checkpoint, piece))

    def add_extent(
        self, checkpoint: Checkpoint, stored: CheckpointTensor, offset: int, out: memoryview
    ) -> None:
        """Add bytes of a file as they lie there, from ``offset`` on."""
        place = (str(stored.path), offset)
        self._stored.append((place, checkpoint, Extent(stored, offset, out)))

    def take_part(self, part: tuple[int, int]) -> None:
        """Keep the ``part[0]``-th of ``part[1]`` nearly equal parts, in the order of the files."""
        index, count = part
        if count == 1:
            return
        ordered = sorted(self._stored, key=lambda row: row[0])
        rows = [part for row in ordered for part in _cut(row)]
        every: list[tuple[int, Any]] = [(job.done_nbytes, job) for job in self._moved]
        every += [(row[2].done_nbytes, row) for row in rows]
        total = sum(nbytes for nbytes, _ in every)
        mine, done = [], 0
        for nbytes, row in every:
            middle = done + nbytes / 2
            done += nbytes
            if min(int(middle * count / max(total, 1)), count - 1) == index:
                mine.append(row)
        self._moved = [row for row in mine if isinstance(row, _MoveJob)]
        self._stored = [row for row in mine if not isinstance(row, _MoveJob)]

    def join(self, other: Work) -> None:
        """Add the work of another list."""
        self._moved += other._moved
        self._stored += other._stored

    def jobs(self) -> list[Job]:
        """Return the calls in order."""
        return self._moved + list(_calls(sorted(self._stored, key=lambda row: row[0])))

    def run(
        self,
        report: Listener | None = None,
        *,
        threads: int = 1,
    ) -> None:
        """Read everything.

        Args:
            report: Is told the bytes, in the calling thread.
            threads: How many read at once.

        Raises:
            CheckpointError: The bytes cannot be read, or a file was written to meanwhile.
        """
        jobs = self.jobs()
        checkpoints = {id(row[1]): row[1] for row in self._stored}.values()
        total = sum(job.done_nbytes for job in jobs)
        listener = _Silence() if report is None else report
        listener.expect(total)
        threads = min(threads, len(jobs))
        if threads <= 1 or total <= _ALONE_NBYTES:
            scratch = Scratch()
            for job in jobs:
                job.run(scratch)
                listener.add(job.done_nbytes)
        else:
            run_in_threads(jobs, listener, threads)
        for checkpoint in checkpoints:
            checkpoint.check_unchanged()


# Path and offset, by which the work is sorted; the checkpoint; what to read.
_Row = tuple[tuple[str, int], "Checkpoint", Extent | Laid | Computed]


class _Silence:
    def expect(self, nbytes: int) -> None:
        pass

    def add(self, nbytes: int) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class _MoveJob:
    piece: Moved

    @property
    def done_nbytes(self) -> int:
        return self.piece.done_nbytes

    def announce(self) -> None:
        pass

    def run(self, scratch: Scratch) -> None:
        move_bytes(torch.frombuffer(self.piece.out, dtype=torch.uint8), self.piece.source)


@dataclass(frozen=True, slots=True, eq=False)
class _ReadJob:
    checkpoint: Checkpoint
    offset: int
    outs: list[tuple[str, memoryview]]
    done_nbytes: int

    def announce(self) -> None:
        self.checkpoint.announce(self.outs[0][0], self.offset, self.done_nbytes)

    def run(self, scratch: Scratch) -> None:
        self.checkpoint.fill(self.outs, self.offset, scratch)


@dataclass(frozen=True, slots=True, eq=False)
class _LayJob:
    checkpoint: Checkpoint
    piece: Laid

    @property
    def done_nbytes(self) -> int:
        return self.piece.done_nbytes

    def announce(self) -> None:
        self.checkpoint.announce(self.piece.stored.name, self.piece.offset, self.piece.nbytes)

    def run(self, scratch: Scratch) -> None:
        raw = scratch.take(self.piece.nbytes)
        self.checkpoint.fill([(self.piece.stored.name, raw)], self.piece.offset, scratch)
        self.piece.lay(raw)


@dataclass(frozen=True, slots=True, eq=False)
class _ComputeJob:
    piece: Computed

    @property
    def done_nbytes(self) -> int:
        return self.piece.done_nbytes

    def announce(self) -> None:
        pass

    def run(self, scratch: Scratch) -> None:
        self.piece.compute()


class _Call:
    """Gathers extents that follow each other in a file into one call."""

    def __init__(self) -> None:
        self._outs: list[tuple[str, memoryview]] = []
        self._key: tuple[int, str] = (0, "")
        self._checkpoint: Checkpoint | None = None
        self._start = self._end = 0

    def add(self, checkpoint: Checkpoint, piece: Extent) -> Iterator[Job]:
        offset, out = piece.offset, piece.out
        key = (id(checkpoint), str(piece.stored.path))
        while len(out):
            full = len(self._outs) == MAX_OUTS or self._end % CALL_NBYTES == 0
            if self._outs and (key != self._key or offset != self._end or full):
                yield from self.end()
            if not self._outs:
                self._key, self._checkpoint = key, checkpoint
                self._start = self._end = offset
            room = CALL_NBYTES - self._end % CALL_NBYTES
            part, out = out[:room], out[room:]
            self._outs.append((piece.stored.name, part))
            self._end += len(part)
            offset += len(part)

    def end(self) -> Iterator[Job]:
        if self._outs:
            assert self._checkpoint is not None
            yield _ReadJob(self._checkpoint, self._start, self._outs, self._end - self._start)
            self._outs = []


def _cut(row: _Row) -> Iterator[_Row]:
    """Yield a row in parts that end where calls end."""
    (path, offset), checkpoint, piece = row
    if not isinstance(piece, Extent):
        yield row
        return
    out = piece.out
    while len(out):
        room = CALL_NBYTES - offset % CALL_NBYTES
        yield (path, offset), checkpoint, Extent(piece.stored, offset, out[:room])
        out, offset = out[room:], offset + room


def _calls(rows: Iterable[_Row]) -> Iterator[Job]:
    call = _Call()
    for _, checkpoint, piece in rows:
        if isinstance(piece, Extent):
            yield from call.add(checkpoint, piece)
            continue
        yield from call.end()
        yield _LayJob(checkpoint, piece) if isinstance(piece, Laid) else _ComputeJob(piece)
    yield from call.end()
