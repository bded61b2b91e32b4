"""The resident blocks of one model: a slot of its own for each, loaded and dropped together.

They stay from one pass to the next, so they take no part in the tape. In gather mode a load is a
collective of each block, so it happens where every rank is: at the start, when all ranks ask for
it, and when a pass begins and they are not there, for all ranks dropped them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dlo_core.errors import DloError, UseError
from dlo_core.feed import FeedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dlo_core.agreement import Agreement
    from dlo_core.binding import BlockBinding
    from dlo_core.interface import Backend
    from dlo_core.slots import Pool, Slot
    from dlo_core.transfer import Transfer

__all__ = ["MIXED", "ResidentBlocks"]

MIXED = "another block's bytes: the ranks' gathers were mixed up"


class ResidentBlocks:
    """Loads and drops them; see the module.

    Attributes:
        loaded: Whether all of them are there, or on the way.
        on_the_way: Whether a load was queued that the host did not wait for.
        num_drops: How often they were dropped; after each they lie elsewhere.
    """

    loaded = False
    on_the_way = False
    num_drops = 0

    def __init__(
        self,
        backend: Backend,
        transfer: Transfer,
        pool: Pool,
        *,
        bindings: Mapping[int, BlockBinding],
        agreement: Agreement,
        timeout_s: float,
    ) -> None:
        """Take the parts; nothing is loaded.

        Args:
            backend: Allocates their memory.
            transfer: Queues the loads.
            pool: Has their slots.
            bindings: Of those blocks of the model that stay, by block number.
            agreement: The ranks that gather together.
            timeout_s: How long they wait for each other.
        """
        self._backend = backend
        self._transfer = transfer
        self._pool = pool
        self._bindings = dict(bindings)
        self._agreement = agreement
        self._timeout_s = timeout_s
        self._nbytes = {number: pool.residents[number].buffer.nbytes for number in bindings}

    @property
    def numbers(self) -> tuple[int, ...]:
        """Their block numbers."""
        return tuple(self._bindings)

    @property
    def state(self) -> str:
        """Whether they are there, in words."""
        if not self._bindings:
            return "none"
        return "loaded" if self.loaded else "not loaded"

    def load(self) -> None:
        """Load what is not there; between two passes, all ranks alike.

        Raises:
            UseError: A rank has not the memory; on every rank, and nothing was loaded.
            AgreementError: A rank did not come.
            FeedError: A load could not be queued; the pool is closed.
        """
        if self.loaded or not self._bindings:
            return
        self._allocate()
        self._queue(self.numbers)
        self.loaded = True

    def _queue(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            try:
                self._transfer.load(self._pool.residents[number], number)
            except BaseException as error:
                # An interrupt, too: the other ranks go on, so this one's collectives are over.
                self._pool.fail(error)
                if isinstance(error, Exception) and not isinstance(error, DloError | FeedError):
                    raise FeedError(f"{type(error).__name__}: {error}", number) from error
                raise
            self.on_the_way = True

    def renew(self, numbers: Iterable[int]) -> None:
        """Load those of ``numbers`` anew that are there: their values changed; all ranks alike.

        Raises:
            FeedError: A load could not be queued; the pool is closed.
        """
        if self.loaded:
            self._queue(number for number in numbers if number in self._bindings)

    def finish(self) -> None:
        """Block the host until they are there, and check them.

        Raises:
            FeedError: One holds another block's bytes.
        """
        self._transfer.settle()
        for number in self._bindings:
            if self._pool.residents[number].check.failed():
                raise FeedError(f"it holds {MIXED}", number)
        self.on_the_way = False

    def drop(self) -> None:
        """Let their memory go, once nobody reads or writes it; between two passes."""
        if not self.loaded:
            return
        self._transfer.settle()
        self._transfer.stand_still()
        self.loaded = False
        self.num_drops += 1
        for number, binding in self._bindings.items():
            slot = self._pool.residents[number]
            binding.forget(slot)
            slot.buffer = torch.empty(0, dtype=torch.uint8, device="meta")

    def _allocate(self) -> None:
        made: list[tuple[Slot, torch.Tensor]] = []
        problem: BaseException | None = None
        try:
            for number, nbytes in self._nbytes.items():
                slot = self._pool.residents[number]
                if slot.buffer.nbytes != nbytes:
                    made.append((slot, self._backend.empty(nbytes)))
        # Every rank must hear of it, whatever it is.
        except BaseException as error:
            problem = error
        told = None if problem is None else f"{type(problem).__name__}: {problem}"
        answers = self._agreement.exchange(told, "loading the resident layers", self._timeout_s)
        if problem is not None and not isinstance(problem, Exception):
            raise problem
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(answers) if text is not None]
        if failed:
            # Who catches the error would hold what was had.
            made.clear()
            raise UseError(
                f"the resident layers need {sum(self._nbytes.values()):,} bytes, which cannot be "
                f"had on {'; '.join(failed)}; free device memory and call again"
            ) from problem
        for slot, buffer in made:
            slot.buffer = buffer

    def __repr__(self) -> str:
        """Show how many there are, and whether they are there."""
        return f"ResidentBlocks({len(self._bindings)}, {self.state})"
