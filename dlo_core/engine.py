"""The engine: everything that runs between one ``enable`` and its end."""

from __future__ import annotations

import itertools
import logging
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from dlo_core.agreement import LoneAgreement
from dlo_core.attributes import find_attributes
from dlo_core.binding import BlockBinding
from dlo_core.borrowing import spare_buffers
from dlo_core.coder import codec_of
from dlo_core.decoded_home import DecodedHome
from dlo_core.errors import UseError
from dlo_core.footprint import decoded_nbytes, plan_ring, resident_numbers
from dlo_core.gather_transfer import InPlaceTransfer, StagedTransfer
from dlo_core.hooks import Hooks
from dlo_core.layout import BlockLayout
from dlo_core.loader import count_shard_nbytes, load_packed, load_shards
from dlo_core.packed_store import PackedStore
from dlo_core.progress import LoadProgress, reporting
from dlo_core.readback import ReadBack
from dlo_core.refresh import new_tensors, spec_of
from dlo_core.remainder import Remainder, remainder_run
from dlo_core.residents import ResidentBlocks
from dlo_core.restore import let_go
from dlo_core.ring_agreement import AgreeAlone, AgreeOver
from dlo_core.salvage import Salvage, fingerprint, keep_remainders
from dlo_core.shard import ShardPlan, trailers_nbytes
from dlo_core.slots import Pool
from dlo_core.source import ModuleTensor
from dlo_core.state import ModelState
from dlo_core.streamer import Streamer
from dlo_core.tape import Tape
from dlo_core.transfer import LocalTransfer, Transfer
from dlo_core.travelling import BlockTimes, TravellingBlock, expected_trailers
from dlo_core.unpack import PackedUnpack, RawUnpack, UnpackEach
from dlo_core.values import fetch_gathered, fetch_stored, give_back_blocks, tensors_in
from dlo_core.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from dlo_core.agreement import Agreement
    from dlo_core.borrowing import Borrower
    from dlo_core.config import OffloadConfig
    from dlo_core.host import HostStore
    from dlo_core.interface import Backend, Collective
    from dlo_core.packed_cut import PackedCut
    from dlo_core.plan import ModelPlan
    from dlo_core.slots import Slot
    from dlo_core.tape import Agree
    from dlo_core.unpack import Unpack

__all__ = ["Engine"]

_logger = logging.getLogger("dlo")
# What stuck gathers touch, until the process ends.
_KEPT: list[object] = []


class Engine:
    """Host store, slots, streams and streamers of one offload."""

    def __init__(
        self,
        plans: Sequence[ModelPlan],
        config: OffloadConfig,
        *,
        residents: Sequence[frozenset[int]],
        backend: Backend,
        collective: Collective,
        store: HostStore,
        digest: bytes,
        progress: bool | Callable[[LoadProgress], None],
        shares: bool,
        restocks: bool = False,
        samples: Mapping[str, str] | None = None,
        kept: Salvage | None = None,
    ) -> None:
        """Allocate the device's memory and read all bytes into ``store``; no model is touched.

        Args:
            plans: The models.
            config: The settings.
            residents: Of each model, the numbers of the blocks that stay.
            backend: Of the device.
            collective: Of the shard group.
            store: For the shards.
            digest: Of the trailers.
            progress: As for ``enable``.
            shares: Whether any rank of the group shares host memory, on this node or another.
            restocks: Whether other blocks may come to stay, in the memory of those that do.
            samples: Of the values; see ``Salvage``.
            kept: What ``store`` came from, with the shards in it.

        Raises:
            CheckpointError: The bytes cannot be read.
        """
        self.plans = tuple(plans)
        self.collective = collective
        self._backend = backend
        self._timeout_s = config.timeout_s
        self._residents = tuple(residents)
        self.shards = [shard for plan in plans for shard in plan.shards]
        self.layouts = [layout for plan in plans for layout in plan.layouts]
        self.store = store
        self.shares = shares
        self._load_threads = config.load_threads
        self._time_every = config.time_every
        self._restocks = restocks
        hosts = [remainder_run(plan.remainder.nbytes) for plan in plans]
        self._kept = kept
        self._load(digest, progress, hosts)
        self._digest, self._samples = digest, dict(samples or {})
        self._fingerprint = fingerprint(store) if collective.size > 1 else None
        self.pool = self._make_pool(config)
        self.remainders = [
            [
                Remainder(backend, plan.inventory.remainder, plan.remainder, host),
                Remainder(backend, plan.attributes, plan.attribute_layout, _attribute_run(plan)),
            ]
            for plan, host in zip(plans, hosts, strict=True)
        ]
        self.blocks = self._make_blocks(digest)
        self.transfer = self._make_transfer(config)
        self.streamers: list[Streamer] = []
        self.states: list[ModelState] = []
        self.edited = False
        # Whether a change of the form failed half-way, so that nobody can read the shards.
        self.mixed = False
        self.choice: Choice | None = None
        self.watch: Watch | None = None
        self._hooks: list[Hooks] = []
        self._waves = itertools.count(1)

    def _load(
        self,
        digest: bytes,
        progress: bool | Callable[[LoadProgress], None],
        hosts: Sequence[torch.Tensor],
    ) -> None:
        """Read this rank's shards, or its part of those that it shares, and the remainders."""
        if self._kept is not None:
            keep_remainders(self.plans, hosts)
            return
        rank = self.collective.rank
        total = count_shard_nbytes(self.plans, rank) if self.store.reads else 0
        with reporting(progress, total) as report:
            if isinstance(self.store, PackedStore):
                load_packed(
                    self.plans,
                    self.store,
                    rank=rank,
                    digest=digest,
                    report=report,
                    remainders=hosts,
                    threads=self._load_threads,
                )
                return
            load_shards(
                self.plans,
                self.store,
                rank=rank,
                digest=digest,
                report=report,
                part=self.store.part,
                remainders=hosts,
                threads=self._load_threads,
            )

    def _make_pool(self, config: OffloadConfig) -> Pool:
        ring = plan_ring(self.plans, config, self._residents)
        return Pool.allocate(
            self._backend,
            num_slots=ring.num_slots,
            slot_nbytes=ring.slot_nbytes,
            num_stages=ring.num_stages,
            stage_nbytes=ring.stage_nbytes,
            # Where others may come to stay, they get their memory together.
            residents={
                number: 0 if self._restocks else self.shards[number].padded_nbytes
                for number in resident_numbers(self.plans, self._residents)
            },
            decoded_nbytes=decoded_nbytes(self.plans),
            landing=self.collective.memory,
        )

    def _make_blocks(self, digest: bytes) -> list[TravellingBlock]:
        made = []
        size = self.collective.size
        row = trailers_nbytes(1, size)
        trailers = self._backend.empty(trailers_nbytes(len(self.shards), size))
        self.trailers_nbytes = trailers.nbytes
        for number, shard in enumerate(self.shards):
            expected = None
            if shard.size > 1:
                rows = expected_trailers(digest, number, shard.size)
                expected = trailers[number * row : (number + 1) * row].view(rows.shape)
                self._backend.copy(expected, rows)
            parts = self.store.parts(number)
            made.append(TravellingBlock(shard, parts, expected, BlockTimes.new(self._backend)))
        self._backend.current_stream().synchronize()
        return made

    def _make_transfer(self, config: OffloadConfig) -> Transfer:
        home = self._make_home()
        feed = self.store.feed()
        if self.collective.size == 1:
            return LocalTransfer(self._backend, self.pool, self.blocks, home=home, feed=feed)
        kind = StagedTransfer if config.stages else InPlaceTransfer
        unpack: Unpack = PackedUnpack() if home is not None else RawUnpack(self._backend)
        if config.packed == "auto":
            unpack = UnpackEach(self._backend)
        return kind(
            self._backend,
            self.pool,
            self.blocks,
            collective=self.collective,
            unpack=unpack,
            home=home,
            feed=feed,
        )

    def _make_home(self) -> DecodedHome | None:
        """Return where packed blocks compute, if any is packed."""
        if self.pool.decoded is None:
            return None
        return DecodedHome(self.pool, codec_of(self._backend), self._backend)

    def prepare(self, agreement: Agreement) -> None:
        """Make streamers, placeholders and wrappers; still no model is touched."""
        first = 0
        ours: dict[int, int] = {}
        for model, plan in enumerate(self.plans):
            agree: Agree = AgreeAlone()
            if self.transfer.gathers:
                agree = AgreeOver(agreement, self._timeout_s, model, self.pool)
            count = len(plan.layouts)
            bindings = [
                BlockBinding(block.module, owned, layout, self._backend.device, ours=ours)
                for block, owned, layout in zip(
                    plan.blocks, plan.inventory.streamed, plan.layouts, strict=True
                )
            ]
            numbers = range(first, first + count)
            residents = ResidentBlocks(
                self._backend,
                self.transfer,
                self.pool,
                bindings={n: bindings[n - first] for n in numbers if n in self.pool.residents},
                agreement=agreement if self.transfer.gathers else LoneAgreement(),
                timeout_s=self._timeout_s,
                run_nbytes=(
                    {n: self.shards[n].padded_nbytes for n in numbers} if self._restocks else None
                ),
            )
            tape = Tape(
                [number for number in numbers if number not in self.pool.residents],
                self.pool,
                self.transfer,
                agree=agree,
                load=residents.load,
                name=type(plan.model).__name__,
            )
            streamer = Streamer(
                names=[block.name for block in plan.blocks],
                bindings=bindings,
                first_block=first,
                tape=tape,
                residents=residents,
                transfer=self.transfer,
                pool=self.pool,
                pass_start=self._backend.new_event(timing=True),
                rank=agreement.rank,
                time_every=self._time_every,
                before_pass=partial(_ask, weakref.ref(self)),
            )
            self.streamers.append(streamer)
            state = self._make_state(plan, streamer)
            self.states.append(state)
            self._hooks.append(
                Hooks(
                    plan.model,
                    [block.module for block in plan.blocks],
                    [
                        e.module
                        for owned in plan.inventory.streamed
                        for t in owned
                        for e in t.entries
                    ],
                    streamer=streamer,
                    state=state,
                )
            )
            first += count
        if isinstance(self.store, PackedStore):
            self.lend_to(self.store)
        board = agreement.board() if self.transfer.gathers else None
        if board is not None:
            self.watch = Watch(
                board,
                self.pool,
                self.streamers,
                self.collective,
                self.transfer,
                members=agreement.members,
                timeout_s=self._timeout_s,
                host_blocks=self._backend.capabilities.host_blocks,
            )

    def _make_state(self, plan: ModelPlan, streamer: Streamer) -> ModelState:
        readback = ReadBack(
            streamer,
            plan.layouts,
            store=self.store,
            transfer=self.transfer,
            backend=self._backend,
            pool=self.pool,
        )
        placeholders = {
            (number, index): placeholder
            for number, binding in enumerate(streamer.bindings, start=streamer.first_block)
            for index, placeholder in enumerate(binding.placeholders)
        }
        return ModelState(plan.model, placeholders, readback)

    def lend_to(self, coder: Borrower) -> None:
        """Let a coder use slots and homes between two passes; not where ranks gather.

        There a peer may still read a slot of this rank's.
        """
        if not self.transfer.gathers:
            coder.borrow_from(partial(spare_buffers, self.pool, self.transfer))

    def let_choose(self, choice: Choice) -> None:
        """Ask ``choice`` before each pass from now on."""
        self.choice = choice

    def change_form(
        self,
        store: HostStore,
        shards: Sequence[ShardPlan | PackedCut],
        decoded: Slot | None,
        orders: Sequence[Sequence[int]],
    ) -> None:
        """Let the same values travel in another form; between two passes, nothing is under way.

        All ranks that gather alike.

        Args:
            store: Has them in that form.
            shards: How the blocks are cut in it.
            decoded: Where packed blocks compute; None: none is packed.
            orders: Of each model, the ring order from now on; a block that is not in it stays, in
                the memory of those that stay now.
        """
        for home in self.pool.homes:
            for streamer in self.streamers:
                for binding in streamer.bindings:
                    binding.forget(home)
        changed = [n for n, shard in enumerate(shards) if shard != self.shards[n]]
        self.store, self.shards = store, list(shards)
        self.pool.decoded, self.pool.nested = decoded, ()
        for number, shard in enumerate(self.shards):
            # The transfer has this list.
            parts = store.parts(number)
            self.blocks[number] = replace(self.blocks[number], plan=shard, shard=parts)
        self.transfer.use(self._make_home())
        for state in self.states:
            state.readback.use(store)
        for streamer, order in zip(self.streamers, orders, strict=True):
            if tuple(order) == streamer.tape.order:
                streamer.tape.forget()
                streamer.guarded(streamer.residents.renew, changed)
            else:
                streamer.tape.restart(order)
                self._restock(streamer, frozenset(order))
        self.pool.owner.prefetch()

    def _restock(self, streamer: Streamer, streamed: frozenset[int]) -> None:
        """Let those blocks of a model stay that are not ``streamed``."""
        first = streamer.first_block
        staying = [n for n in range(first, first + len(streamer.names)) if n not in streamed]
        bindings = {n: streamer.bindings[n - first] for n in staying}
        nbytes = {n: self.shards[n].padded_nbytes for n in staying}
        streamer.guarded(streamer.residents.restock, bindings, nbytes)

    def load_residents(self) -> None:
        """Load the blocks that stay, and wait until they are there; still no model is touched.

        Raises:
            FillError: One could not be loaded.
        """
        for streamer in self.streamers:
            streamer.guarded(streamer.residents.load)
        for streamer in self.streamers:
            streamer.guarded(streamer.residents.finish)

    def commit(self, owner: object) -> None:
        """Put placeholders, device tensors and wrappers into the models; then the first fills."""
        with torch.inference_mode(False), torch.no_grad():
            for plan, streamer in zip(self.plans, self.streamers, strict=True):
                for binding in streamer.bindings:
                    binding.attach()
                for owned in plan.inventory.streamed:
                    for item in owned:
                        let_go(item)
        for remainder in (part for parts in self.remainders for part in parts):
            remainder.attach()
        for plan in self.plans:
            plan.made.attach()
        for hooks in self._hooks:
            hooks.attach(owner)
        self.streamers[0].tape.prefetch()
        if self._kept is not None:
            self._kept.hand_over()

    @property
    def remainder_nbytes(self) -> int:
        """Bytes of all resident tensors."""
        return sum(part.nbytes for parts in self.remainders for part in parts)

    @property
    def device_nbytes(self) -> int:
        """Bytes that the offload holds on the device."""
        weights = self.pool.nbytes + self.pool.residents_nbytes
        weights += sum(streamer.residents.spare_nbytes for streamer in self.streamers)
        return weights + self.remainder_nbytes + self.trailers_nbytes

    def next_wave(self) -> int:
        """Return the number of a new wave, the same on every rank."""
        return next(self._waves)

    def refresh(self) -> None:
        """Accept what changed in the models and place new tensors on the device."""
        for plan, streamer, parts in zip(self.plans, self.streamers, self.remainders, strict=True):
            streamer.enter()
            try:
                if self.pool.busy:
                    raise UseError(
                        "refresh() was called while a block computes; call it between passes"
                    )
                known = {place for part in parts for place in part.places()}
                device = self._backend.device
                fresh = new_tensors(plan.model, known, device)
                fresh += find_attributes(plan.model, fresh, device.type)[0]
                layout = BlockLayout.pack(
                    "", map(spec_of, fresh), self._backend.capabilities.alignment
                )
                sources = {item.name: ModuleTensor(item.tensor) for item in fresh}
                host = remainder_run(layout.nbytes)
                for spec in layout.tensors:
                    part = host[spec.offset : spec.offset + spec.nbytes]
                    sources[spec.name].read(spec, 0, spec.nbytes, part)
                added = Remainder(self._backend, fresh, layout, host)
                added.attach()
                parts.append(added)
                for binding in streamer.bindings:
                    binding.refresh()
            finally:
                streamer.leave()

    def restore(self, to: str) -> None:
        """Give every tensor back on the host, or on meta, and take the wrappers off.

        Raises:
            UseError: A forward is under way.
            DloError: The values cannot be had; the models stay as they are.
        """
        with self._between_passes():
            if to != "meta":
                self.streamers[0].check_whole()
            with torch.inference_mode(False), torch.no_grad():
                self._restore(to)

    @contextmanager
    def _between_passes(self) -> Iterator[None]:
        if not self.pool.lock.acquire(blocking=False):
            raise UseError("busy: another thread is inside the model; wait for its forward to end")
        try:
            if self.pool.busy:
                raise UseError("busy: a block computes now; call disable() between passes")
            yield
        finally:
            self.pool.lock.release()

    def _restore(self, to: str, *, remainder_to: str = "") -> None:
        values = {} if to == "meta" else self._fetch()
        for index, (plan, streamer) in enumerate(zip(self.plans, self.streamers, strict=True)):
            give_back_blocks(plan, streamer, values, to)
            for remainder in self.remainders[index]:
                remainder.detach(remainder_to or to)
            self._hooks[index].detach()

    def _fetch(self) -> dict[int, list[torch.Tensor]]:
        """Return the values of every block's tensors in host memory of their own."""
        if not self.transfer.gathers and self.store.reads and not self.mixed:
            self._settle()
            return {
                number: tensors_in(layout, self.store.whole(number))
                for number, layout in enumerate(self.layouts)
            }
        if not self.edited and all(plan.checkpoint is not None for plan in self.plans):
            return fetch_stored(self.plans, self._load_threads)
        return fetch_gathered(self.streamers, self.pool, self.transfer, self._backend, self.layouts)

    def _settle(self) -> None:
        """Wait for copies under way; a failed stream has nothing under way."""
        if self.pool.failure is None:
            self.transfer.settle()

    def salvage(self, reason: str, host: tuple[str | None, int | None]) -> Salvage:
        """Take the models off, release everything but the host shards, and return these.

        The models keep what stayed on the device, with its values; the blocks' tensors are on meta.

        Args:
            reason: For who calls the models' blocks now.
            host: The tier and the budget that were asked for.

        Raises:
            UseError: A forward is under way.
        """
        with self._between_passes(), torch.inference_mode(False), torch.no_grad():
            self._restore("meta", remainder_to="cpu")
        lost = ""
        if self.edited:
            lost = (
                "the weights were updated since they were read, and ranks that read them anew "
                "would not have that; offload() without reuse=, then update_weights() again"
            )
        place = (self.collective.rank, self.collective.size)
        kept = Salvage(
            self.store,
            self._fingerprint,
            digest=self._digest,
            samples=self._samples,
            place=place,
            host=host,
            lost=lost,
        )
        self.release(reason, keep_store=True)
        return kept

    def release(self, reason: str, *, keep_store: bool = False) -> None:
        """Let all memory, streams and groups go without a collective; idempotent."""
        for streamer in self.streamers:
            streamer.close(reason)
        if self.watch is not None:
            self.watch.close("closed", reason)
        if self.pool.lock.acquire(blocking=False):
            self.pool.lock.release()
        else:
            # Another thread is inside, and may wait for a peer for long.
            self.collective.abort(UseError(reason))
        stuck = self.collective.stuck()
        if not stuck:
            # Memory that is freed here may still be read by compute that was queued before.
            self._backend.current_stream().synchronize()
        for remainder in (part for parts in self.remainders for part in parts):
            remainder.release(reason)
        for plan in self.plans:
            if plan.checkpoint is not None:
                plan.checkpoint.close()
        self._let_go(keep_store=keep_store, stuck=stuck)
        self.blocks = []

    def discard(self) -> None:
        """Let everything go before ``commit``; the models were not touched."""
        for streamer in self.streamers:
            streamer.close("loading failed")
        if self.watch is not None:
            self.watch.close("closed", "loading failed")
        self._let_go(keep_store=self._kept is not None, stuck=self.collective.stuck())

    def _let_go(self, *, keep_store: bool, stuck: bool) -> None:
        """Let collective, streams and memory go; where a gather is stuck, wait for nothing."""
        # The collective first: gathers that wait for a peer are given up, so nobody waits for it.
        self.collective.close()
        if stuck:
            # Giving any of it back would wait for the device, which waits for a peer for ever.
            _KEPT.append((self.transfer, self.store, self.blocks, replace(self.pool)))
            _logger.error(
                "rank %d: a gather waits for a peer and cannot be given up; its memory stays "
                "taken: end this process",
                self.collective.rank,
            )
        else:
            self.transfer.close()
            for streamer in self.streamers:
                streamer.residents.close()
        self.pool.release()
        if not keep_store and not stuck:
            self.store.release()

    def detach(self) -> None:
        """Take the wrappers off and put tensors without values in; after ``release``."""
        self.restore("meta")


def _attribute_run(plan: ModelPlan) -> torch.Tensor:
    """Return the plain attributes' bytes, in host memory of their own."""
    layout = plan.attribute_layout
    run = remainder_run(layout.nbytes)
    for spec in layout.tensors:
        part = run[spec.offset : spec.offset + spec.nbytes]
        plan.sources[spec.name].read(spec, 0, spec.nbytes, part)
    return run


class Choice(Protocol):
    """The choice of the form in which weights travel."""

    reason: str
    by_default: bool

    def before_pass(self, streamer: Streamer) -> None:
        """Change the form, if it is time; between two passes."""

    def make_way(self, why: str) -> bool:
        """Let the weights be raw for now; return whether they are."""

    def held(self) -> AbstractContextManager[None]:
        """Keep the form meanwhile."""

    def stop(self, why: str) -> None:
        """Leave the form as it is from now on."""


def _ask(engine: weakref.ref[Engine], streamer: Streamer) -> None:
    """Ask the choice, if there is one; weakly, so that an engine ends with its last user."""
    alive = engine()
    if alive is not None and alive.choice is not None:
        alive.choice.before_pass(streamer)
