"""The resident blocks of one model: a slot of its own for each, loaded and dropped together.

They stay from one pass to the next, so they take no part in the tape. In gather mode a load is a
collective of each block, so it happens where every rank is: at the start, when all ranks ask for
it, and when a pass begins and they are not there, for all ranks dropped them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from dlo_core.errors import DloError, UseError
from dlo_core.feed import FeedError
from dlo_core.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlo_core.agreement import Agreement
    from dlo_core.binding import BlockBinding
    from dlo_core.interface import Backend
    from dlo_core.slots import Pool
    from dlo_core.transfer import Transfer

__all__ = ["MIXED", "ResidentBlocks"]

MIXED = "another block's bytes: the ranks' gathers were mixed up"


class ResidentBlocks:
    """Loads and drops them; see the module.

    Attributes:
        loaded: Whether all of them are there, or on the way.
        on_the_way: Whether a load was queued that the host did not wait for.
        unseen: Whether a load was queued since the last pass.
        num_drops: How often they were dropped; after each they lie elsewhere.
    """

    loaded = False
    on_the_way = False
    unseen = False
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
        run_nbytes: Mapping[int, int] | None = None,
    ) -> None:
        """Take the parts; nothing is loaded.

        Args:
            backend: Allocates their memory.
            transfer: Queues the loads.
            pool: Has their slots.
            bindings: Of those blocks of the model that stay, by block number.
            agreement: The ranks that gather together.
            timeout_s: How long they wait for each other.
            run_nbytes: Bytes of each block, which get one run of memory together, for others may
                stay there later; None: the slots have their memory, and keep its sizes.
        """
        self._backend = backend
        self._transfer = transfer
        self._pool = pool
        self._bindings = dict(bindings)
        self._agreement = agreement
        self._timeout_s = timeout_s
        self._nbytes = {number: pool.residents[number].buffer.nbytes for number in bindings}
        self._run: torch.Tensor | None = None
        self._run_nbytes = 0
        if run_nbytes is not None:
            self._nbytes = {number: run_nbytes[number] for number in bindings}
            self._run_nbytes = sum(self._nbytes.values())

    @property
    def numbers(self) -> tuple[int, ...]:
        """Their block numbers."""
        return tuple(self._bindings)

    @property
    def run_nbytes(self) -> int:
        """Bytes of the run that they share; 0: each has its own memory."""
        return self._run_nbytes

    @property
    def spare_nbytes(self) -> int:
        """Bytes of that run on the device that none of them has."""
        return 0 if self._run is None else self._run.nbytes - sum(self._nbytes.values())

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
        transfer = self._transfer
        for number in numbers:
            before = transfer.timed
            # What a pass waits for them is to be seen.
            transfer.timed = self.unseen = True
            try:
                transfer.load(self._pool.residents[number], number)
            except BaseException as error:
                # An interrupt, too: the other ranks go on, so this one's collectives are over.
                self._pool.fail(error)
                if isinstance(error, Exception) and not isinstance(error, DloError | FeedError):
                    raise FeedError(f"{type(error).__name__}: {error}", number) from error
                raise
            finally:
                transfer.timed = before
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
            slot.buffer = _no_bytes()
        self._run = None

    def close(self) -> None:
        """Let go of the run of memory; nobody loads any more."""
        self._run = None

    def restock(self, bindings: Mapping[int, BlockBinding], nbytes: Mapping[int, int]) -> None:
        """Let other blocks stay from now on in the run of memory that there is; all ranks alike.

        Args:
            bindings: Theirs, by block number; nothing is under way, and no tape has them.
            nbytes: Bytes of each; together at most those of the run.

        Raises:
            UseError: A rank has not the memory.
            FeedError: A load could not be queued; the pool is closed.
        """
        was_loaded, run = self.loaded, self._run
        self.drop()
        self._run = run
        kept = {n: slot for n, slot in self._pool.residents.items() if n not in self._bindings}
        first = len(self._pool.slots)
        made = {n: Slot.new(self._backend, first + n, _no_bytes(), stays=True) for n in bindings}
        # Other threads read it.
        self._pool.residents = kept | made
        self._bindings, self._nbytes = dict(bindings), dict(nbytes)
        if was_loaded:
            self.load()

    def _allocate(self) -> None:
        made: list[tuple[Slot, torch.Tensor]] = []
        problem: BaseException | None = None
        try:
            for number, nbytes in self._nbytes.items():
                slot = self._pool.residents[number]
                if self._run_nbytes:
                    made.append((slot, self._carve(nbytes, after=made)))
                elif slot.buffer.nbytes != nbytes:
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
            self._run = None
            raise UseError(
                f"the resident layers need {sum(self._nbytes.values()):,} bytes, which cannot be "
                f"had on {'; '.join(failed)}; free device memory and call again"
            ) from problem
        for slot, buffer in made:
            slot.buffer = buffer

    def _carve(self, nbytes: int, *, after: Sequence[tuple[Slot, torch.Tensor]]) -> torch.Tensor:
        """Return the next bytes of the run, which is allocated if it is not there."""
        if self._run is None:
            self._run = self._backend.empty(self._run_nbytes)
        start = sum(buffer.nbytes for _, buffer in after)
        return _apart(self._run[start : start + nbytes])

    def __repr__(self) -> str:
        """Show how many there are, and whether they are there."""
        return f"ResidentBlocks({len(self._bindings)}, {self.state})"


def _apart(part: torch.Tensor) -> torch.Tensor:
    """Return the same bytes with a storage of their own.

    Whether a forward writes or keeps weights is told by its storage; that of all blocks that stay
    changes when another one is loaded, or bound for the first time.
    """
    if part.device.type == torch._C._get_privateuse1_backend_name():
        # The operators of such a device want storages that are its own, which these are not. What
        # is bound for the first time is told apart all the same; a write counts for all of them.
        return part
    # Like all that a backend allocates, also where the pass that loads is one of inference mode.
    with torch.inference_mode(False):
        made: torch.Tensor = from_dlpack(to_dlpack(part))
    return made


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="meta")
