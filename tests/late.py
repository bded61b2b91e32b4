"""The late device: one thread runs the queued work of all streams, as late or as early as may be.

A real device runs its streams whenever it likes. Here the test says when: a stream in ``eager``
does its work as soon as its own waits allow, any other only when somebody waits for it. So a
missing wait is not a race that is lost now and then; some choice of ``eager`` loses it every time.
Device memory starts as 0xFF, and a buffer that is being written is 0xFF first, with a step between:
what reads too early or too late reads NaN. The compute stream is a queue, too: the host runs ahead
of it, as on an accelerator.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlo_core.collective import all_gather_bytes, release_group
from dlo_core.cpu import CpuBackend
from dlo_core.interface import Capabilities, Check, Collective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup

__all__ = ["LateBackend", "LateToy"]


class Ticket:
    """One recording of an event."""

    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self.reached = False

    def reach(self) -> None:
        """All work before it is done."""
        self.reached = True


class LateEvent:
    """An event; one that was never recorded counts as reached."""

    def __init__(self, backend: LateBackend) -> None:
        self.ticket: Ticket | None = None
        self._backend = backend

    def record(self, stream: Any = None) -> None:
        """Record on ``stream`` or the current one."""
        (stream or self._backend.current_stream()).record_event(self)

    def query(self) -> bool:
        """Return whether it is reached."""
        return self.ticket is None or self.ticket.reached

    def synchronize(self) -> None:
        """Run what it takes to reach it."""
        self._backend.calls["event.synchronize"] += 1
        if self.ticket is not None:
            self._backend.drive(self.ticket)

    def elapsed_time(self, end_event: Any) -> float:
        """Return 0: there is no time here."""
        return 0.0


class LateStream:
    """A queue of work and waits."""

    def __init__(self, backend: LateBackend, role: str) -> None:
        self.role = role
        self.items: deque[Ticket | Callable[[], object]] = deque()
        self._backend = backend

    def run(self, work: Callable[[], object]) -> None:
        """Queue ``work``."""
        self.items.append(work)
        self._backend.queued()

    def wait_event(self, event: LateEvent) -> None:
        """Queue a wait for ``event`` as it is recorded now."""
        self._backend.log.append((self.role, "wait"))
        if event.ticket is not None:
            self.items.append(event.ticket)
            self._backend.queued()

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        """Queue the recording of ``event``."""
        event = event or LateEvent(self._backend)
        event.ticket = Ticket(self)
        self.run(event.ticket.reach)
        return event

    def synchronize(self) -> None:
        """Run all that is queued, and what it waits for."""
        self._backend.calls["stream.synchronize"] += 1
        self._backend.finish(self)

    @property
    def ready(self) -> bool:
        """Whether its next item can run now."""
        return bool(self.items) and (not isinstance(self.items[0], Ticket) or self.items[0].reached)

    def step(self) -> None:
        """Run the next item."""
        item = self.items.popleft()
        if not isinstance(item, Ticket):
            item()


class LateCheck(Check):
    """Compares when its stream comes to it."""

    def __init__(self, backend: LateBackend) -> None:
        self._backend = backend
        self._failed = False

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Queue the comparison."""
        self._backend.current_stream().run(partial(self._compare, actual, expected))

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        self._failed = self._failed or not torch.equal(actual, expected)

    def failed(self) -> bool:
        """Return whether a difference was found so far."""
        return self._failed


class LateCollective(Collective):
    """Gathers over gloo when the stream comes to it; all ranks must come to it alike."""

    def __init__(self, backend: LateBackend, group: ProcessGroup) -> None:
        self._backend = backend
        self._group: ProcessGroup | None = group
        self.rank, self.size = group.rank(), group.size()

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Queue poison for all that is gathered into, and the gather."""
        stream = self._backend.current_stream()
        self._backend.log.append((stream.role, "gather"))
        low, high = 0, 0
        if shard.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            low = self.rank * shard.nbytes
            high = low + shard.nbytes
        stream.run(partial(out[:low].fill_, 0xFF))
        stream.run(partial(out[high:].fill_, 0xFF))
        stream.run(partial(_gather, out, shard, self._group))

    def close(self) -> None:
        """Destroy the group."""
        group, self._group = self._group, None
        release_group(group)


def _gather(out: torch.Tensor, shard: torch.Tensor, group: ProcessGroup | None) -> None:
    all_gather_bytes(out, shard, group=group)


class LateBackend(CpuBackend):
    """The CPU, its work queued on a compute stream and side streams that one thread runs.

    Attributes:
        calls: How often the host waited, by the name of the call.
        log: (role of the stream, what) of every copy, gather and wait as it was queued.
    """

    capabilities = Capabilities(alignment=256)

    def __init__(self, eager: Sequence[str] = (), seed: int | None = None) -> None:
        """Choose when the streams run.

        Args:
            eager: Roles of streams that run as early as their waits allow: ``"copy"``, ``"comm"``,
                ``"compute"``; the others run when they are waited for.
            seed: Also run some of the streams now and then, drawn at random; the same on all ranks.
        """
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[str, str]] = []
        self._eager = frozenset(eager)
        self._random = None if seed is None else random.Random(seed)
        self._roles = iter(("copy", "comm"))
        self._compute = LateStream(self, "compute")
        self._all = [self._compute]
        self._current = self._compute

    def new_stream(self, priority: int = 0) -> LateStream:  # type: ignore[override]
        """Return the copy stream, then the comm stream."""
        self._all.append(LateStream(self, next(self._roles)))
        return self._all[-1]

    def current_stream(self) -> LateStream:  # type: ignore[override]
        """Return the current stream."""
        return self._current

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        """Make ``stream`` current."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def new_event(self, *, timing: bool = False) -> LateEvent:  # type: ignore[override]
        """Return a new event."""
        return LateEvent(self)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return bytes that are 0xFF."""
        return super().empty(nbytes).fill_(0xFF)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue poison and the copy."""
        self.log.append((self._current.role, "copy"))
        self._current.run(partial(dst.fill_, 0xFF))
        self._current.run(partial(dst.copy_, src))

    def new_check(self) -> LateCheck:  # type: ignore[override]
        """Return a new comparison."""
        return LateCheck(self)

    def collective(self, group: ProcessGroup) -> LateCollective:  # type: ignore[override]
        """Return the gather over ``group``."""
        return LateCollective(self, group)

    def launch(self, kernel: Callable[[], torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """Queue ``kernel`` on the current stream; return its result, which is NaN until then."""
        out = torch.full(shape, torch.nan)
        self._current.run(lambda: out.copy_(kernel()))
        return out

    def synchronize(self) -> None:
        """Run everything."""
        self.calls["backend.synchronize"] += 1
        for stream in self._all:
            self.finish(stream)

    def finish(self, stream: LateStream) -> None:
        """Run all that is queued on ``stream``."""
        while stream.items:
            self._advance(stream)

    def drive(self, ticket: Ticket) -> None:
        """Run what it takes to reach ``ticket`` and nothing else."""
        while not ticket.reached:
            self._advance(ticket.stream)

    def queued(self) -> None:
        """Run what may run already, now that something was queued or done."""
        while True:
            ready = [s for s in self._all if s.role in self._eager and s.ready]
            if self._random is not None and self._random.random() < 0.5:
                ready += [stream for stream in self._all if stream.ready]
            if not ready:
                return
            (self._random.choice(ready) if self._random else ready[0]).step()

    def _advance(self, stream: LateStream) -> None:
        head = stream.items[0]
        if isinstance(head, Ticket) and not head.reached:
            self.drive(head)
        else:
            stream.step()
            self.queued()


class LateBlock(nn.Module):
    """One kernel that reads two weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor, backend: LateBackend | None) -> torch.Tensor:
        """Launch the kernel, or run it now where there is no backend."""
        weight, bias = self.weight, self.bias

        def kernel() -> torch.Tensor:
            return torch.tanh(x @ weight + bias)

        return kernel() if backend is None else backend.launch(kernel, x.shape)


class LateToy(nn.Module):
    """Blocks whose kernels read the weights when the device comes to them, and not before."""

    dlo_blocks = ("blocks",)

    def __init__(self, n: int, seed: int = 0, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(LateBlock(width) for _ in range(n))
        self.scale = nn.Parameter(torch.rand(width))
        self.requires_grad_(False)

    def forward(
        self,
        x: torch.Tensor,
        backend: LateBackend | None = None,
        calls: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the blocks of ``calls``, all by default; a negative number raises."""
        for number in range(len(self.blocks)) if calls is None else calls:
            if number < 0:
                raise ArithmeticError("the program says so")
            x = self.blocks[number](x, backend)
        scale, last = self.scale, x
        if backend is None:
            return last * scale
        return backend.launch(lambda: last * scale, last.shape)
