"""The tape: which fill comes next, whatever a forward skips, repeats, reorders or cuts short.

[Note: the tape]
A model's blocks in ring order, for ever: fill number ``k`` loads block ``order[k % n]`` into slot
``k % D``. A forward moves a cursor, ``pos``, along the tape. Where ranks gather, every rank makes
*every* fill in order, whatever its own forward does, so no rank can put the collectives out of
order; where nothing is gathered, skipped fills are not made. The end of a pass makes the fills
that this rank's forward did not ask for, so a skipped tail or an exception strands nobody.

[Note: the first pass]
A model whose run order is not the order of registration goes round several turns in its first
pass, and how many depends on what this rank skips. A rank that is through sits in the exchange of
run lists; a rank that still computes may need its fills of a later turn. So who needs a fill beyond
the first turn announces it, and who waits in the exchange serves what was announced. Then all
ranks take the same place: fill 0 of a new tape, or the farthest turn of the old one.

Always ``base <= pos <= issued``: the pass began at ``base``, the cursor is at ``pos``, the fills
below
``issued`` are queued. The rules survived random programs with skips, repeats, reorders, exceptions
and
two models on one to three ranks (``tests/test_tape_random.py``); change them only with that test.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dlo_core.errors import UseError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from dlo_core.slots import Pool, Slot

__all__ = ["Agree", "Filler", "FirstPass", "Tape", "agreed", "agreed_order"]

# A first pass longer than so many turns teaches no order.
_MOST_TURNS = 64


class Filler(Protocol):
    """What the tape asks of a transfer."""

    gathers: bool

    def fill(self, slot: Slot, block: int, fill: int) -> None:
        """Queue the fill."""

    def copy_ahead(self, block: int, fill: int) -> None:
        """Queue the copy of the fill after the last one queued."""

    def forget_staged(self) -> None:
        """Forget copies that wait for their gather."""


@dataclass(frozen=True, slots=True)
class FirstPass:
    """How a first pass went on one rank, or what all ranks take from it.

    Attributes:
        calls: The blocks as they ran, the ring order from now on; empty: not all of them ran, no
            order was agreed.
        base: Fill at which the next pass begins on the old tape.
        issued: Fills queued.
    """

    calls: tuple[int, ...]
    base: int
    issued: int


class Agree(Protocol):
    """The exchange at the end of the first pass, and what leads up to it."""

    def __call__(self, mine: FirstPass, serve: Callable[[int], None]) -> FirstPass:
        """Return what all ranks take; see [Note: the first pass].

        Args:
            mine: How this rank's first pass went.
            serve: Queues this rank's fills up to a number; called while the others are awaited.
        """

    def announce(self, wanted: int) -> None:
        """Tell the other ranks that this one needs their fills below ``wanted``."""


def agreed(passes: Sequence[FirstPass]) -> FirstPass:
    """Return what all ranks take from their first passes: an order, and the farthest place."""
    return FirstPass(
        agreed_order([one.calls for one in passes]) or (),
        max(one.base for one in passes),
        max(one.issued for one in passes),
    )


def agreed_order(runs: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the first rank's run list of which all the others are subsequences.

    Args:
        runs: Each rank's list of blocks as they ran; empty where it did not see every block.
    """
    for candidate in runs:
        if candidate and all(_is_subsequence(other, candidate) for other in runs):
            return candidate
    return None


def _is_subsequence(part: Sequence[int], whole: Sequence[int]) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)


class Tape:
    """The cursor of one model over its endless tape of fills."""

    def __init__(
        self,
        order: Sequence[int],
        pool: Pool,
        filler: Filler,
        *,
        agree: Agree,
        load: Callable[[], object] = lambda: None,
        name: str = "",
    ) -> None:
        """Start before fill 0 with nothing held.

        Args:
            order: Block numbers in ring order; a block that runs twice stands twice. Empty where
                all blocks stay.
            pool: Slots, shared with other tapes.
            filler: Queues the fills.
            agree: Exchanges the run lists when the first pass ends.
            load: Called when a pass begins: loads those blocks that stay and are not there.
            name: Of the model, for ``repr``.
        """
        self._pool = pool
        self._filler = filler
        self._agree = agree
        self._load = load
        self._name = name
        self._calls: list[int] | None = []
        self.open = False
        self.num_passes = 0
        self.num_fills = 0
        self.num_skipped = 0
        self._set_order(order)

    def _set_order(self, order: Sequence[int]) -> None:
        self.order = tuple(order)
        self._all_blocks = frozenset(order)
        self.n = len(self.order)
        self.depth = min(len(self._pool.slots), self.n)
        self.base = self.pos = self.issued = 0
        self._places: dict[int, list[int]] = {}
        for place, block in enumerate(self.order):
            self._places.setdefault(block, []).append(place)

    def slot(self, fill: int) -> Slot:
        """Return the slot of a fill."""
        return self._pool.slots[fill % self.depth]

    def block(self, fill: int) -> int:
        """Return the block that a fill loads."""
        return self.order[fill % self.n]

    def holds(self, fill: int) -> bool:
        """Return whether the fill's slot still holds it."""
        slot = self.slot(fill)
        return slot.tape is self and slot.fill == fill

    def begin_pass(self) -> None:
        """Open a pass; end an open one first, and take the slots over from another model.

        Raises:
            UseError: A block is being computed.
        """
        self._come_to_boundary()
        self.open = True

    def _come_to_boundary(self) -> None:
        if self._pool.busy:
            raise UseError(
                "busy: the model was called while one of its blocks computes (from inside a "
                "block, or "
                "while a model with the same slots is inside one); call it outside of its blocks, "
                "or "
                "offload the two models separately"
            )
        if self.open:
            self.end_pass()
        if self._pool.owner is not self:
            self._take_over()
        self._load()

    def _take_over(self) -> None:
        owner = self._pool.owner
        if owner is not None:
            if owner.open:
                owner.end_pass()
            owner.issued = owner.base
        for slot in self._pool.slots:
            slot.tape = None
        self._filler.forget_staged()
        self._pool.owner = self

    def before(self, block: int) -> Slot:
        """Return the slot that holds ``block``, its fill queued and later ones ahead of it.

        The caller waits for ``filled``, binds, and gives the slot to ``after``.
        """
        if not self.open:
            self.begin_pass()
        if self._calls is not None:
            self._note_call(self._calls, block)
        fill = self._find(block)
        if fill >= self.pos:
            self.pos = fill + 1
            if not self._filler.gathers:
                self.issued = max(self.issued, fill)
            elif self._calls is not None and fill >= self.base + self.n:
                self._agree.announce(fill + 1)
            self._issue_to(fill + self.depth)
        slot = self.slot(fill)
        if slot.fill != fill or slot.tape is not self:
            raise UseError(
                f"blocks are called inside each other {self.depth + 1} deep, but there are "
                f"{self.depth} slots; raise depth"
            )
        slot.bound += 1
        return slot

    def _note_call(self, calls: list[int], block: int) -> None:
        repeated = bool(calls) and calls[-1] == block
        # An engine that never ends its first pass must not fill the memory.
        if not repeated and len(calls) < _MOST_TURNS * self.n:
            calls.append(block)

    def after(self, slot: Slot) -> None:
        """Give a slot back that ``before`` returned."""
        slot.bound -= 1

    def _find(self, block: int) -> int:
        """Return the fill that serves a call of ``block``: prefetched, called again, or missed."""
        order, n, pos = self.order, self.n, self.pos
        last = pos - 1
        # A block called twice at once must not take its next place in a ring where it has two.
        if last >= self.base and order[last % n] == block and self.holds(last):
            return last
        for fill in range(pos, self.issued):
            if order[fill % n] == block and self.holds(fill):
                return fill
        past = [
            slot.fill
            for slot in self._pool.slots
            if slot.tape is self and slot.fill < self.pos and self.block(slot.fill) == block
        ]
        if past:
            return max(past)
        turn, place = divmod(self.pos, self.n)
        places = self._places[block]
        later = next((p for p in places if p >= place), None)
        return turn * self.n + later if later is not None else (turn + 1) * self.n + places[0]

    def end_pass(self) -> None:
        """Close the pass: make the fills that the forward did not ask for, and prefetch."""
        self.open = False
        self.num_passes += 1
        if self.n:
            self.base += self.n * max(1, -(-(self.pos - self.base) // self.n))
        if self._filler.gathers:
            self._issue_to(self.base)
        else:
            self.issued = max(self.issued, self.base)
        self.pos = self.base
        if self._calls is not None:
            self._learn(self._calls)
        self._issue_to(self.base + self.depth - 1)

    def _learn(self, calls: list[int]) -> None:
        """Take the order of the first pass, if the ranks agree on one."""
        self._calls = None
        seen_all = self._all_blocks.issubset(calls) and len(calls) < _MOST_TURNS * self.n
        mine = FirstPass(tuple(calls) if seen_all else (), self.base, self.issued)
        try:
            all_ranks = self._agree(mine, self._issue_to)
        except BaseException as error:
            # The others may have taken another order.
            self._pool.fail(error)
            raise
        if all_ranks.calls and all_ranks.calls != self.order:
            if self._filler.gathers:
                self._issue_to(all_ranks.issued)
            self.restart(all_ranks.calls)
        elif self._filler.gathers:
            self._issue_to(all_ranks.base)
            self.base = self.pos = all_ranks.base

    def restart(self, order: Sequence[int]) -> None:
        """Begin a new tape at fill 0: a pass boundary, and all ranks alike."""
        self._set_order(order)
        for slot in self._pool.slots:
            if slot.tape is self:
                slot.tape = None
        self._filler.forget_staged()

    def prefetch(self) -> None:
        """Take the slots and queue the first fills; at enable, all ranks alike."""
        if self._pool.owner is not self:
            self._take_over()
        self._issue_to(self.base + self.depth - 1)

    def ready(self) -> None:
        """Come to a pass boundary with all that a pass finds in the slots in steady state.

        Raises:
            UseError: A block is being computed.
        """
        self._come_to_boundary()
        fits = self.n <= self.depth
        self._issue_to(self.base + (self.n if fits else self.depth - 1))

    def twin(self, pool: Pool, filler: Filler) -> Tape:
        """Return a tape at its beginning over other slots, which hold what this one's hold."""
        made = Tape(self.order, pool, filler, agree=self._agree, name=self._name)
        made._calls = None
        made.issued = self.issued - self.base
        for mine, its in zip(self._pool.slots, pool.slots, strict=True):
            if mine.tape is self:
                its.tape, its.fill = made, mine.fill - self.base
        pool.owner = made
        return made

    def holds_alike(self, twin: Tape) -> bool:
        """Return whether a twin's slots hold the blocks that this one's hold."""
        return all(
            mine.tape is not self
            or (its.tape is twin and twin.block(its.fill) == self.block(mine.fill))
            for mine, its in zip(self._pool.slots, twin._pool.slots, strict=True)
        )

    def count_pass(self, num_fills: int, num_skipped: int) -> None:
        """Count a pass that went over a twin.

        Args:
            num_fills: Fills that it made.
            num_skipped: Fills that the slots held already.
        """
        self.num_passes += 1
        self.num_fills += num_fills
        self.num_skipped += num_skipped

    def turn(self) -> Generator[tuple[int, Slot], None, None]:
        """Yield the block and the slot of every fill of one whole turn; all ranks alike.

        The slot is bound until the next one is asked for. However the iteration ends, the fills of
        the turn are made, so that it strands no other rank.
        """
        self.begin_pass()
        try:
            for fill in range(self.base, self.base + self.n):
                slot = self.before(self.block(fill))
                try:
                    yield self.block(fill), slot
                finally:
                    self.after(slot)
        finally:
            self._calls = None
            # Not after a failure, nor after the slots were let go.
            if self._pool.failure is None and self._pool.owner is self:
                self.end_pass()

    def walk(self, visit: Callable[[int, Slot], None]) -> None:
        """Give every fill of one whole turn to ``visit(block, slot)``; all ranks alike."""
        with closing(self.turn()) as turn:
            for block, slot in turn:
                visit(block, slot)

    def forget(self) -> None:
        """Forget what the slots hold: the weights change. Between passes, and all ranks alike."""
        if self._pool.owner is self:
            self._take_over()

    def _issue_to(self, end: int) -> None:
        try:
            while self.issued < end and not self.slot(self.issued).bound:
                self._issue()
        except BaseException as error:
            # An interrupt, too: how much of the fill is queued is unknown, so the tape is over.
            self._pool.fail(error)
            raise

    def _issue(self) -> None:
        fill = self.issued
        self.issued += 1
        slot, block = self.slot(fill), self.block(fill)
        if self._keeps(slot, block):
            slot.fill = fill
            self.num_skipped += 1
            return
        slot.tape, slot.fill, slot.reader = self, fill, None
        slot.turn += 1
        self.num_fills += 1
        filler = self._filler
        filler.fill(slot, block, fill)
        if filler.gathers and self.n > self.depth:
            filler.copy_ahead(self.block(fill + 1), fill + 1)

    def _keeps(self, slot: Slot, block: int) -> bool:
        """Return whether the slot holds the block already, on every rank alike."""
        held = slot.tape is self and self.block(slot.fill) == block
        return held and (not self._filler.gathers or self.n <= self.depth)

    def __repr__(self) -> str:
        """Show the cursor."""
        state = "open" if self.open else "closed"
        return (
            f"Tape({self._name!r}, n={self.n}, base={self.base}, pos={self.pos}, "
            f"issued={self.issued}, {state})"
        )
