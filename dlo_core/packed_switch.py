"""The switch between raw and packed weights: all shards change where they lie, between two passes.

[Note: the parts of a raw shard]
Ranks that gather may change the form if their raw shards are whole chunks. So the part that a rank
packs is what its raw shard holds, but for the 16 bytes that its trailer displaces. The last rank
has these in its spill (see [Note: trailer and spill] in ``shard.py``) and tells the others before
they pack; after they decode, they tell the last rank. So nothing is gathered for the switch.

Nothing is changed until every rank has said that its shards get smaller and that it has the memory.
What fails later leaves some shards in the one form and some in the other. For a rank alone that is
a form like any other; where ranks gather it closes the offload on all of them.

[Note: memory for a change]
A rank alone codes in its own slots, whose fills are forgotten, so all that a change to packed
weights takes is the buffer in which blocks are decoded from then on. See ``Engine.lend_to``.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dlo_core.agreement import Problem
from dlo_core.errors import text_of
from dlo_core.packed_cut import PackedCut, packed_tensors
from dlo_core.packed_figures import Form
from dlo_core.packed_store import PackedStore
from dlo_core.rawbytes import move_bytes
from dlo_core.residency import resident_positions
from dlo_core.shard import TRAILER_NBYTES, ShardPlan
from dlo_core.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlo_core.coder import Coder
    from dlo_core.engine import Engine
    from dlo_core.host import HostStore
    from dlo_core.interface import Backend
    from dlo_core.pass_agreement import PassAgreement

    Cuts = list[ShardPlan | PackedCut]

__all__ = ["Switch", "cut_of", "more_residents", "what_is_missing"]

_WHAT = "changing between raw and packed weights"


def cut_of(shard: ShardPlan, alignment: int) -> PackedCut:
    """Return how the block of a raw ``shard`` is cut when it is packed, not measured yet."""
    cut = PackedCut.cut(shard.run_nbytes, shard.size, alignment)
    # See [Note: the parts of a raw shard].
    return cut if shard.size == 1 else replace(cut, part_nbytes=shard.nbytes)


def more_residents(
    staying: Sequence[int], streamed: Sequence[int], nbytes: Mapping[int, int], room: int
) -> tuple[int, ...]:
    """Return which of the ``streamed`` blocks can stay, too, evenly spread.

    Args:
        staying: Blocks that stay anyway.
        streamed: The others.
        nbytes: Of each block, while it stays.
        room: Bytes for all that stay.
    """
    room -= sum(nbytes[number] for number in staying)
    for count in range(len(streamed), 0, -1):
        chosen = tuple(streamed[at] for at in sorted(resident_positions(len(streamed), count)))
        if sum(nbytes[number] for number in chosen) <= room:
            return chosen
    return ()


class Switch:
    """Changes the form of one offload's weights; see the module."""

    def __init__(
        self, engine: Engine, coder: Coder, backend: Backend, ranks: PassAgreement
    ) -> None:
        """Take raw weights.

        Args:
            engine: Whose weights they are; each call is given it again.
            coder: Packs and decodes.
            backend: Of the device.
            ranks: Those that gather together, or this one alone.
        """
        self._coder = coder
        self._backend = backend
        self._ranks = ranks
        self._store = engine.store
        self._shards = tuple(cut for cut in engine.shards if isinstance(cut, ShardPlan))
        self._staying = tuple(streamer.residents.numbers for streamer in engine.streamers)
        self._orders: list[tuple[int, ...]] = []
        # Blocks that a change has decoded, and the one that it is writing, with its bytes.
        self._decoded: list[int] = []
        self._torn: tuple[int, torch.Tensor] | None = None
        self.form = Form.RAW

    @property
    def store(self) -> HostStore:
        """The raw shards, while they are raw."""
        return self._store

    @property
    def staying(self) -> frozenset[int]:
        """The blocks that stay while the weights are raw."""
        return frozenset(number for numbers in self._staying for number in numbers)

    def cut(self, number: int) -> PackedCut:
        """Return how block ``number`` is cut when it is packed, not measured yet."""
        return cut_of(self._shards[number], self._backend.capabilities.alignment)

    def to(self, form: Form, engine: Engine) -> str | None:
        """Change the form; all ranks alike, and nothing is under way.

        Returns:
            Why it cannot be, the same on every rank, and nothing was changed; or, on a rank alone,
            why it stopped half-way, and ``form`` says whether any block is packed now.

        Raises:
            DloError: It failed half-way where ranks gather; the offload is closed.
        """
        packed = {n for n, cut in enumerate(engine.shards) if isinstance(cut, PackedCut)}
        numbers = range(len(self._shards))
        wanted = {n for n in numbers if form is Form.ALL or n not in self.staying}
        wanted = set() if form is Form.RAW else wanted
        more, less = sorted(wanted - packed), sorted(packed - wanted)
        if not more and not less:
            # No block stays, so these two forms are one.
            self.form = form
            return None
        cuts: Cuts = [self._shards[n] if n in less else engine.shards[n] for n in numbers]
        displaced = self._tell_displaced(more)
        why_not = self._measure(engine, more, displaced, cuts)
        if why_not is not None:
            return why_not
        home: list[Slot | None] = [engine.pool.decoded if wanted else None]
        why_not = self._take(home, more or less, engine, cuts, packs=bool(more))
        if why_not is not None:
            return why_not
        store = self._stored(engine, cuts)
        if self.form is not Form.ALL:
            self._orders = [streamer.tape.order for streamer in engine.streamers]
        self._decoded, self._torn = [], None
        in_place = False
        try:
            self._in_place(engine, store, more, less, displaced)
            in_place = True
            orders = self._orders
            if form is Form.ALL:
                orders = self._without_residents(engine, cuts)
            engine.change_form(store, cuts, home[0], orders)
        # An interrupt, too: some shards are in the one form and some in the other.
        except BaseException as error:
            if self._ranks.size > 1:
                engine.mixed = True
            elif in_place:
                # What travels may be known in one place and not in another; the shards are known.
                engine.store, engine.shards = store, list(cuts)
            elif self._settle(engine, store, cuts, home[0] or engine.pool.decoded):
                if not isinstance(error, Exception):
                    raise
                return f"{_WHAT} stopped half-way: {text_of(error)}"
            engine.pool.fail(error)
            raise
        self.form = form
        return None

    def _stored(self, engine: Engine, cuts: Cuts) -> HostStore:
        """Return the store of shards that are cut like this."""
        if not any(isinstance(cut, PackedCut) for cut in cuts):
            return self._store
        return PackedStore(
            self._store,
            self._coder,
            engine.layouts,
            cuts,
            backend=self._backend,
            rank=self._ranks.rank,
        )

    def _settle(self, engine: Engine, store: HostStore, cuts: Cuts, home: Slot | None) -> bool:
        """After a change that stopped half-way: let each block be in the form that it has.

        Returns:
            Whether the weights can be used. Where they cannot, ``engine.mixed`` says whether it is
            known in which form they lie.
        """
        known: Cuts = []
        try:
            with suppress(Exception):
                # What coding has queued writes the slots, too; a lost device writes nothing.
                self._backend.synchronize()
            changed = set(store.settle()) if isinstance(store, PackedStore) else set()
            torn, self._torn = self._torn, None
            if torn is not None:
                self._store.write(torn[0], 0, torn[1])
                changed.add(torn[0])
            changed.update(self._decoded)
            known = [cuts[n] if n in changed else cut for n, cut in enumerate(engine.shards)]
            packed = any(isinstance(cut, PackedCut) for cut in known)
            # Those that came to stay stream again: decoded they have no room.
            engine.change_form(
                self._stored(engine, known), known, home if packed else None, self._orders
            )
        # The device may be lost, or a second interrupt come.
        except BaseException:
            engine.mixed = not known
            if known:
                engine.store, engine.shards = self._stored(engine, known), known
            return False
        self.form = Form.PACKED if packed else Form.RAW
        return True

    # --- before anything is changed ---------------------------------------------------------------

    def _tell_displaced(self, numbers: Sequence[int]) -> list[bytes]:
        """Return the bytes that this rank's trailers displace, of each block; all ranks alike."""
        rank, size = self._ranks.rank, self._ranks.size
        if size == 1 or not numbers:
            return [b""] * len(numbers)
        spill = b""
        if rank == size - 1:
            for number in numbers:
                end = self._store.whole(number)[-TRAILER_NBYTES * size : -TRAILER_NBYTES]
                spill += _bytes(end)
        told = self._ranks.exchange(spill, _WHAT)[-1]
        row = TRAILER_NBYTES * (size - 1)
        first = TRAILER_NBYTES * rank
        return [
            told[at * row + first : at * row + first + TRAILER_NBYTES] if rank < size - 1 else b""
            for at in range(len(numbers))
        ]

    def _run(self, number: int, displaced: bytes) -> torch.Tensor:
        """Return this rank's part of the run of a raw block."""
        shard = self._shards[number]
        whole = self._store.whole(number)
        if shard.size == 1:
            return whole
        run = self._coder.host_run(shard.nbytes)
        move_bytes(run, whole)
        if displaced:
            run[-TRAILER_NBYTES:] = torch.frombuffer(bytearray(displaced), dtype=torch.uint8)
        run[max(shard.run_nbytes - self._ranks.rank * shard.nbytes, 0) :].zero_()
        return run

    def _measure(
        self, engine: Engine, numbers: Sequence[int], displaced: Sequence[bytes], cuts: Cuts
    ) -> str | None:
        """Put the measured cuts of the blocks that are to be packed into ``cuts``."""
        sizes: list[int] = []
        problem: str | None = None
        try:
            for number, ends in zip(numbers, displaced, strict=True):
                cut, run = self.cut(number), self._run(number, ends)
                tensors = packed_tensors(engine.layouts[number], cut, self._ranks.rank)
                sizes.append(self._coder.measure(run, tensors))
                if sizes[-1] > self._shards[number].nbytes - cut.trailer_nbytes:
                    problem = f"block {engine.layouts[number].name!r} does not get smaller"
                    break
        # As for the trial; every rank must hear of it.
        except Exception as error:
            problem = what_is_missing("pack the blocks", error)
        answers = self._ranks.exchange((problem, sizes), _WHAT)
        if (why_not := self._first([answer[0] for answer in answers])) is not None:
            return why_not
        for number, *taken in zip(numbers, *(answer[1] for answer in answers), strict=True):
            cut = self.cut(number).measured(max(taken))
            cuts[number] = replace(cut, nbytes=min(cut.nbytes, self._shards[number].nbytes))
        return None

    def _take(
        self,
        home: list[Slot | None],
        numbers: Sequence[int],
        engine: Engine,
        cuts: Cuts,
        *,
        packs: bool,
    ) -> str | None:
        """Take all the memory that the change needs; ``home`` gets the decoded block's slot."""
        problem: str | None = None
        rows = [cuts[n] if packs else engine.shards[n] for n in numbers]
        try:
            largest = max(self._shards[n].nbytes for n in numbers)
            if packs and home[0] is None:
                nbytes = max(shard.padded_nbytes for shard in self._shards)
                made = home[0] = Slot.new(self._backend, -1, self._backend.empty(nbytes))
                if self._ranks.size == 1:
                    # As the slots: nothing is decoded there before the change is over.
                    self._coder.lend(made.buffer)
            self._coder.reserve(largest, max(row.nbytes for row in rows), packs=packs)
            if not packs:
                # Pinned, so that the device copies into it fast.
                self._coder.host_run(largest)
        # As for the trial; every rank must hear of it.
        except Exception as error:
            problem = what_is_missing(
                "pack the blocks" if packs else "decode all blocks back", error
            )
        return self._first(self._ranks.exchange(problem, _WHAT))

    def _first(self, problems: Sequence[str | None]) -> str | None:
        """Return the first rank's problem, and which rank it is."""
        for rank, problem in enumerate(problems):
            if problem is not None:
                return problem if len(problems) == 1 else f"{problem} (rank {rank})"
        return None

    # --- the change -------------------------------------------------------------------------------

    def _in_place(
        self,
        engine: Engine,
        store: HostStore,
        more: Sequence[int],
        less: Sequence[int],
        displaced: Sequence[bytes],
    ) -> None:
        """Pack ``more`` blocks and decode ``less``; what fails on one rank raises on all."""
        problem: BaseException | None = None
        ends: list[bytes] = []
        try:
            self._pack(store, more, displaced)
            ends = self._decode(engine, less)
        # Every rank must hear of it, whatever it is.
        except BaseException as error:
            problem = error
        told = None if problem is None else Problem.of(problem)
        answers = self._ranks.exchange((told, ends), _WHAT)
        if problem is not None:
            raise problem
        for rank, (theirs, _) in enumerate(answers):
            if theirs is not None:
                raise theirs.error(f"{_WHAT} failed on rank {rank}: ")
        self._put_displaced(less, [answer[1] for answer in answers])

    def _pack(self, store: HostStore, numbers: Sequence[int], displaced: Sequence[bytes]) -> None:
        for number, ends in zip(numbers, displaced, strict=True):
            assert isinstance(store, PackedStore)
            run = self._run(number, ends)
            trailer = _bytes(self._store.whole(number)[-TRAILER_NBYTES:])
            store.pack(number, run)
            if self._shards[number].size > 1:
                store.seal(number, trailer)

    def _decode(self, engine: Engine, numbers: Sequence[int]) -> list[bytes]:
        """Decode blocks where they lie; return what this rank's trailers displace."""
        displaced: list[bytes] = []
        if not numbers:
            return displaced
        into = self._coder.host_run(max(self._shards[number].nbytes for number in numbers))
        for number in numbers:
            shard, stop = self._shards[number], engine.shards[number].nbytes
            trailer = self._store.whole(number)[stop - TRAILER_NBYTES : stop].clone()
            assert isinstance(engine.store, PackedStore)
            run = engine.store.decoded(number, into)[: shard.nbytes]
            displaced.append(_bytes(run[-TRAILER_NBYTES:]))
            self._torn = number, run
            self._store.write(number, 0, run)
            if shard.size > 1:
                self._store.write(number, shard.nbytes - TRAILER_NBYTES, trailer)
            self._decoded.append(number)
            self._torn = None
        return displaced

    def _put_displaced(self, numbers: Sequence[int], told: Sequence[Sequence[bytes]]) -> None:
        """Let the last rank have in its spill what the others' trailers displace."""
        size = self._ranks.size
        if self._ranks.rank < size - 1 or size == 1:
            return
        for at, number in enumerate(numbers):
            spill = bytearray(b"".join(theirs[at] for theirs in told[:-1]))
            start = self._shards[number].nbytes - TRAILER_NBYTES * size
            self._store.write(number, start, torch.frombuffer(spill, dtype=torch.uint8))

    def _without_residents(self, engine: Engine, cuts: Cuts) -> list[tuple[int, ...]]:
        """Return the ring orders without the blocks that come to stay when all are packed."""
        nbytes = {number: cut.padded_nbytes for number, cut in enumerate(cuts)}
        orders = []
        for streamer, staying, order in zip(
            engine.streamers, self._staying, self._orders, strict=True
        ):
            streamed = list(dict.fromkeys(order))
            room = streamer.residents.run_nbytes
            stay = more_residents(staying, streamed, nbytes, room)
            orders.append(tuple(number for number in order if number not in stay))
        return orders


def what_is_missing(what: str, error: Exception) -> str:
    """Say that the device has no room, or what else is missing."""
    # Not every device's allocator has the error of its own.
    if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error):
        return f"there is no room on the device to {what}: {error}"
    return f"what it takes to {what} is missing: {text_of(error)}"


def _bytes(part: torch.Tensor) -> bytes:
    return part.numpy().tobytes()
