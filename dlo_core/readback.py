"""Reading back: the values of the streamed blocks on the host, one block at a time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dlo_core.errors import UseError
from dlo_core.restore import empty_host_run, tensor_from

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from dlo_core.host import HostStore
    from dlo_core.interface import Backend
    from dlo_core.layout import BlockLayout
    from dlo_core.slots import Pool, Slot
    from dlo_core.streamer import Streamer
    from dlo_core.transfer import Transfer

    Step = tuple[int, Slot]
    Values = tuple[int, list[torch.Tensor]]

__all__ = ["ReadBack"]


class ReadBack:
    """Reads the blocks of one model: off the host store, or off one turn of the tape."""

    def __init__(
        self,
        streamer: Streamer,
        layouts: Sequence[BlockLayout],
        *,
        store: HostStore,
        transfer: Transfer,
        backend: Backend,
        pool: Pool,
    ) -> None:
        """Put the parts together.

        Args:
            streamer: Of the model.
            layouts: Of the model's blocks.
            store: This rank's shards.
            transfer: Queues the fills.
            backend: Of the device.
            pool: The slots.
        """
        self._streamer = streamer
        self._first = streamer.first_block
        self._layouts = tuple(layouts)
        self._store = store
        self._transfer = transfer
        self._backend = backend
        self._pool = pool
        # The block that ``tensor`` read last: whole, for packed or in parts that takes long.
        self._read: tuple[int, torch.Tensor] | None = None

    def use(self, store: HostStore) -> None:
        """Read from another store from now on, which holds the same values."""
        self.rest()
        self._store = store

    def rest(self) -> None:
        """Let go of what ``tensor`` has read: that was all, or the values change."""
        self._read = None

    @property
    def gathers(self) -> bool:
        """Whether the values are spread over the ranks, so that all of them must read alike."""
        return self._transfer.gathers

    def layout(self, number: int) -> BlockLayout:
        """Return the layout of block ``number``, counted over all models."""
        return self._layouts[number - self._first]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Keep every other thread out, between two calls of blocks.

        Raises:
            UseError: A block computes now, or the offload is closed.
        """
        self._streamer.enter()
        try:
            if self._pool.busy:
                raise UseError(
                    "busy: the weights cannot be read while a block computes (or while an "
                    "iterator of named_tensors() is not at its end); read them between passes"
                )
            yield
        finally:
            self._streamer.leave()

    def facts(self) -> dict[str, str]:
        """Return where this rank's model is on its tape: all must be at the same place to gather.

        Nothing where nothing is gathered.
        """
        tape = self._streamer.tape
        if not self.gathers:
            return {}
        return {
            "place on the tape": f"fill {tape.base}",
            "open pass": str(tape.open),
            "resident layers": self._streamer.residents.state,
        }

    def tensor(self, number: int, index: int) -> torch.Tensor:
        """Return one tensor of a block in memory of its own; where nothing is gathered.

        The block is read once for several of its tensors, one after the other, until ``rest``.
        """
        spec = self.layout(number).tensors[index]
        if self._read is None or self._read[0] != number:
            # The old one first: both at once take memory.
            self._read = None
            self._read = number, self._store.whole(number)
        return tensor_from(spec, self._read[1])

    def blocks(self, *, receive: bool = True) -> Generator[Values, None, None]:
        """Yield every block's number and the values of its tensors, in memory of their own.

        Where ranks gather, each yields its own turn of the tape: all of them must come to the end,
        and one that ends early makes the fills that are left. Between two blocks the model is busy.

        Args:
            receive: False: serve the other ranks and yield nothing.

        Raises:
            FillError: A block could not be gathered; the offload is closed.
            UseError: A block computes now, or the offload is closed.
        """
        if self.gathers:
            yield from self._gathered(receive)
        elif receive:
            for number in range(self._first, self._first + len(self._layouts)):
                with self.entered():
                    values = self._tensors(number, self._store.whole(number))
                yield number, values

    def _gathered(self, receive: bool) -> Generator[Values, None, None]:
        turn = self._streamer.tape.turn()
        seen: set[int] = set()
        try:
            while True:
                self._streamer.enter()
                try:
                    step = self._streamer.step(turn)
                    if step is None:
                        break
                    number, slot = step
                    again = number in seen
                    seen.add(number)
                    with torch.inference_mode(False), torch.no_grad():
                        values = None if again else self._take(number, slot, receive)
                finally:
                    self._streamer.leave()
                if values is not None:
                    yield number, values
        finally:
            self._end(turn)
        yield from self._staying(receive)

    def _staying(self, receive: bool) -> Generator[Values, None, None]:
        """Yield the blocks that stay, which the turn has loaded if they were not there."""
        for number in self._streamer.residents.numbers if receive else ():
            with self.entered(), torch.inference_mode(False), torch.no_grad():
                values = self._take(number, self._pool.residents[number], receive)
            assert values is not None
            yield number, values

    def _take(self, number: int, slot: Slot, receive: bool) -> list[torch.Tensor] | None:
        """Copy a block out of its slot, or only wait for it."""
        block = number - self._first
        self._streamer.wait_for(slot, block)
        run = None
        if receive:
            run = empty_host_run(self.layout(number).nbytes)
            self._backend.copy(run, self._transfer.home(slot).buffer[: run.nbytes])
            self._backend.current_stream().synchronize()
        # Where the rank waited, the comparison of the trailers is done by now.
        self._streamer.check(slot, block)
        self._transfer.release(slot, number)
        return None if run is None else self._tensors(number, run)

    def _end(self, turn: Generator[Step, None, None]) -> None:
        with self._pool.lock:
            self._streamer.end(turn)

    def _tensors(self, number: int, run: torch.Tensor) -> list[torch.Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            return [tensor_from(spec, run) for spec in self.layout(number).tensors]
