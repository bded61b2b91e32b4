"""The start: plan, agree, allocate, read and vote, all before a model is touched."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from dlo_core._version import __version__
from dlo_core.agreement import LoneAgreement, agree_on
from dlo_core.binding import Placeholder
from dlo_core.coder import Coder
from dlo_core.collective import LoneCollective
from dlo_core.compatibility import check_parallel
from dlo_core.engine import Engine
from dlo_core.errors import ConfigError, DloWarning
from dlo_core.footprint import Footprint, plan_residents, predict, resident_numbers
from dlo_core.gathering import check_means, check_one_node, make_collective
from dlo_core.hooks import offload_of
from dlo_core.ledger import Allotment, Wish, settle
from dlo_core.loader import measure_packed
from dlo_core.machine import Machine
from dlo_core.packed_choice import PackedChoice
from dlo_core.packed_cut import PackedCut
from dlo_core.packed_default import OWN_TIERS, may_choose, ready_to_pack
from dlo_core.pass_agreement import PassAgreement
from dlo_core.plan import ModelPlan, plan_model
from dlo_core.samples import files_of, own_values, sample_stored, sample_values
from dlo_core.segment import Segment, SegmentMaker, receive
from dlo_core.tiers import make_store, make_wish
from dlo_core.together import do_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.agreement import Agreement
    from dlo_core.config import OffloadConfig
    from dlo_core.host import HostStore
    from dlo_core.interface import Backend, Collective
    from dlo_core.request import Progress, Request
    from dlo_core.salvage import Salvage

__all__ = ["Startup"]

_logger = logging.getLogger("dlo")

# Settings in which ranks may differ: the bytes that are gathered are the same.
_OWN_SETTINGS = ("host", "pin_budget_bytes", "time_every", "load_threads", "direct_io")
_FILES = "files of model {}"


@dataclass(frozen=True, slots=True)
class _Decision:
    """What one rank plans.

    Attributes:
        digest: Of the layouts.
        residents: The numbers of the blocks that stay, of each model.
        footprint: The bytes that it takes.
        wish: The host memory that it wants.
        samples: Facts about the values; none in rank-local mode.
        kept: Shards that are used again instead of being read.
    """

    digest: bytes
    residents: tuple[frozenset[int], ...]
    footprint: Footprint
    wish: Wish
    samples: dict[str, str]
    kept: Salvage | None


class Startup:
    """Brings an engine up, on every rank or on none."""

    def __init__(
        self,
        config: OffloadConfig,
        *,
        backend: Backend,
        agreement: Agreement,
    ) -> None:
        """Take the parts that the offload has already."""
        self._config = config
        self._backend = backend
        self._agreement = agreement
        # See [Note: by default] in packed_default.py.
        self._by_default = may_choose(config, backend, gathers=self.gathers)
        if config.packed is None:
            self._config = replace(config, packed=False)

    @property
    def gathers(self) -> bool:
        """Whether the weights are sharded over the group."""
        return self._config.use_allgather and self._agreement.size > 1

    @property
    def _by_copies(self) -> bool:
        return self.gathers and self._config.gather_by == "copies"

    def run(self, request: Request, problem: BaseException | None) -> tuple[Engine, Footprint]:
        """Return an engine that is ready to commit, and its footprint.

        Args:
            request: What to offload.
            problem: What this rank knows already to be wrong; every rank then raises.

        Raises:
            DloError: On every rank, when anything is wrong on any; nothing is left behind.
        """
        plans: list[ModelPlan] = []
        decision: _Decision | None = None
        made: _Made | None = None
        facts: dict[str, str] = {}
        samples: dict[str, str] = {}
        files: list[str] = []
        try:
            if problem is None:
                check_means(self._config, self._backend, gathers=self.gathers)
                self._plan(request, plans)
                if self._by_default:
                    self._get_ready_to_pack(plans)
                facts, samples = self._facts(plans, request.salvage)
                files = [samples[name] for name in _files(plans)] if self.gathers else []
                if self._config.packed is not True:
                    decision = self._decide(plans, request.salvage, samples)
                elif request.salvage is not None:
                    _drop(plans, "packed shards are not passed on")
                made = _Made()
        # Every rank must hear of it, whatever it is.
        except BaseException as error:
            problem = error
        try:
            self._agreement.vote(problem, "offload()")
            assert made is not None
            agree_on(self._agreement, facts, "offload()")
            self._compare_files(plans, files)
            if decision is None:
                # Their sizes are in the weights, so all ranks must have the same weights by now.
                plans[:] = self._measure(plans)
                decide = partial(self._decide, plans, None, samples)
                decision = do_together(self._agreement, "offload()", decide)
            return self._build(made, plans, decision, request.progress)
        except BaseException:
            for plan in plans:
                if plan.checkpoint is not None:
                    plan.checkpoint.close()
            raise

    @property
    def _host_config(self) -> OffloadConfig:
        """The settings that decide on host memory: a default takes no tier away."""
        return replace(self._config, packed=False) if self._by_default else self._config

    def _get_ready_to_pack(self, plans: list[ModelPlan]) -> None:
        """Choose by default, where there is something to choose."""
        ready = ready_to_pack(plans, self._backend.capabilities.alignment)
        if ready is None:
            self._by_default = False
        else:
            plans[:] = ready
            self._config = replace(self._config, packed="auto")

    def _compare_files(self, plans: Sequence[ModelPlan], mine: list[str]) -> None:
        """Refuse ranks that would read other values: by the files, or else by a sample of them.

        Raises:
            AgreementError: They would.
        """
        if not self.gathers:
            return
        everyone = self._agreement.exchange(mine, "offload()")
        if all(theirs == mine for theirs in everyone):
            return

        def sample() -> dict[str, str]:
            return {
                f"values of model {number} (a sample)": sample_stored(plan).hex()[:12]
                for number, plan in enumerate(plans)
                if plan.checkpoint is not None
            }

        agree_on(self._agreement, do_together(self._agreement, "offload()", sample), "offload()")

    def _plan(self, request: Request, plans: list[ModelPlan]) -> None:
        """Append a plan for every model."""
        models, progress = request.models, request.progress
        if not (isinstance(progress, bool) or callable(progress)):
            raise ConfigError(f"progress must be True, False or a function; got {progress!r}")
        if not models:
            raise ConfigError("enable() needs at least one model")
        for model in models:
            _check_model(model)
            _check_layouts(model, self._backend)
        if len({id(model) for model in models}) < len(models):
            raise ConfigError("the same model was given twice")
        _check_disjoint(models)
        for model, loading in zip(models, request.loadings(), strict=True):
            slicing = check_parallel(
                model,
                members=self._agreement.members if self.gathers else (),
                stored=loading.checkpoint is not None,
                tp_plan=request.tp_plan,
                tp=request.tp,
            )
            plans.append(
                plan_model(
                    model,
                    self._config,
                    blocks=request.blocks,
                    loading=loading,
                    size=self._agreement.size if self.gathers else 1,
                    alignment=self._backend.capabilities.alignment,
                    device_type=self._backend.name,
                    slicing=slicing,
                )
            )

    def _facts(
        self, plans: Sequence[ModelPlan], salvage: Salvage | None
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return what must be the same on every rank, and facts about the values.

        In rank-local mode it is the mode alone.
        """
        facts = {"dlo": __version__, "use_allgather": str(self._config.use_allgather)}
        samples: dict[str, str] = {}
        if self.gathers:
            facts["device"] = self._backend.name
            facts |= {
                name: str(value)
                for name, value in self._config.to_dict().items()
                if name not in _OWN_SETTINGS
            }
            for number, plan in enumerate(plans):
                facts |= _facts_of(number, plan)
            samples = _samples(plans, salvage)
            facts |= {name: value for name, value in samples.items() if name not in _files(plans)}
        return facts, samples

    def _measure(self, plans: Sequence[ModelPlan]) -> list[ModelPlan]:
        """Return the plans with the packed sizes, which the ranks tell each other."""
        if self._backend.codec() is None:
            warnings.warn(
                f"packed=True: the backend {self._backend.name!r} has no codec of its own, so "
                "weights are decoded by torch's operations, which is slow and lets the host wait",
                DloWarning,
                stacklevel=2,
            )
        coder = Coder(self._backend, verify=False)
        rank = self._agreement.rank if self.gathers else 0
        count = partial(measure_packed, plans, coder, rank=rank, threads=self._config.load_threads)
        try:
            mine = do_together(self._agreement, "packing", count)
        finally:
            coder.release()
        told = self._agreement.exchange(mine, "the packed sizes") if self.gathers else [mine]
        sizes = iter([max(each) for each in zip(*told, strict=True)])
        return [
            replace(
                plan,
                shards=tuple(
                    cut.measured(next(sizes)) for cut in plan.shards if isinstance(cut, PackedCut)
                ),
            )
            for plan in plans
        ]

    def _decide(
        self, plans: Sequence[ModelPlan], salvage: Salvage | None, samples: dict[str, str]
    ) -> _Decision:
        """Return what the plans come to."""
        residents = plan_residents(plans, self._config)
        digest = hashlib.sha256()
        for plan in plans:
            digest.update(plan.digest())
        wish = make_wish(
            self._host_config,
            self._backend,
            plans,
            rank=self._agreement.rank,
            members=self._agreement.members,
            size=self._agreement.size,
            gathers=self.gathers,
            machine=Machine(),
            staying=resident_numbers(plans, residents),
        )
        kept = self._kept(plans, salvage, digest.digest(), samples)
        if kept is not None:
            # It has them already.
            wish = replace(wish, bounds=(), lock=None)
        footprint = predict(plans, self._config, residents)
        return _Decision(digest.digest(), residents, footprint, wish, samples, kept)

    def _kept(
        self,
        plans: Sequence[ModelPlan],
        salvage: Salvage | None,
        digest: bytes,
        samples: dict[str, str],
    ) -> Salvage | None:
        """Return the salvage if it is what would be read; say so if it is not.

        Raises:
            ConfigError: It is not, and there is nothing to read.
        """
        if salvage is None:
            return None
        reason = "in rank-local mode nothing is spread over ranks"
        if self.gathers:
            place = (self._agreement.rank, self._agreement.size)
            host = (self._config.host, self._config.pin_budget_bytes)
            reason = salvage.why_not(digest=digest, samples=samples, place=place, host=host)
        if not reason:
            return salvage
        _drop(plans, reason)
        return None

    def _build(
        self, made: _Made, plans: Sequence[ModelPlan], decision: _Decision, progress: Progress
    ) -> tuple[Engine, Footprint]:
        """Settle the host memory, allocate and read, prepare the commit; each with a vote."""
        wishes = self._agreement.exchange(decision.wish, "the host memory")
        problem: BaseException | None = None
        try:
            if self._by_copies:
                check_one_node([wish.node for wish in wishes])
            made.settle(wishes, self._agreement.rank)
        # Every rank must hear of it, whatever it is.
        except BaseException as error:
            problem = error
        try:
            self._agreement.vote(problem, "the host memory")
            if made.allotment.shares:
                self._share(made, decision.wish)
            try:
                # First: who fails before it would leave the others waiting in it.
                if self.gathers:
                    made.collective = make_collective(self._config, self._backend, self._agreement)
                footprint = self._make(made, plans, decision, progress)
            # As above.
            except BaseException as error:
                problem = error
            for turn in range(made.allotment.num_turns):
                problem = made.lock(turn, problem)
                self._agreement.exchange(None, "page-locking shared memory")
            self._agreement.vote(problem, "loading")
            assert made.engine is not None
            if self._by_copies:
                # After the vote: whoever could not allocate would leave the others waiting in it.
                what = "making the slots known to the peers"
                do_together(self._agreement, what, made.collective.settle_memory)
            what = "loading the resident layers"
            do_together(self._agreement, what, made.engine.load_residents)
        except BaseException:
            made.discard()
            raise
        # All ranks have read: what one gives back, no other wants any more.
        for plan in plans:
            if plan.checkpoint is not None:
                plan.checkpoint.give_back_pages()
        return made.engine, footprint

    def _share(self, made: _Made, wish: Wish) -> None:
        """Hand the memory that the first rank of each node made to the others there."""
        addresses = self._agreement.exchange(made.address, "sharing host memory")
        problem: BaseException | None = None
        try:
            made.attach(addresses, wish)
        # As above.
        except BaseException as error:
            problem = error
        self._agreement.vote(problem, "sharing host memory")
        made.close_maker()

    def _make(
        self, made: _Made, plans: Sequence[ModelPlan], decision: _Decision, progress: Progress
    ) -> Footprint:
        """Make the store and the engine, which reads; return what they take."""
        if self._by_default and made.allotment.tier not in OWN_TIERS:
            self._config, self._by_default = self._host_config, False
            footprint = predict(plans, self._config, decision.residents)
            decision = replace(decision, footprint=footprint)
        kept = made.kept = decision.kept
        made.store = (
            make_store(
                made.allotment,
                self._host_config,
                self._backend,
                plans,
                rank=made.collective.rank,
                digest=decision.digest,
                segment=made.segment,
                staying=sorted(decision.wish.staying),
            )
            if kept is None
            else kept.store
        )
        made.engine = Engine(
            plans,
            self._config,
            residents=decision.residents,
            backend=self._backend,
            collective=made.collective,
            store=made.store,
            digest=decision.digest,
            progress=progress,
            samples=decision.samples,
            kept=kept,
            shares=made.allotment.shares,
            restocks=self._config.packed == "auto" and not self._by_default,
        )
        made.engine.prepare(self._agreement)
        if self._config.packed == "auto":
            coder = Coder(self._backend, verify=self._config.verify_packed)
            ranks = self._agreement if self.gathers else LoneAgreement()
            made.engine.lend_to(coder)
            passes = PassAgreement(ranks, made.engine.pool, self._config.timeout_s)
            choice = PackedChoice(
                made.engine, coder, self._backend, passes, by_default=self._by_default
            )
            made.engine.let_choose(choice)
        if made.allotment.note:
            warnings.warn(made.allotment.note, DloWarning, stacklevel=2)
        return _with_host(decision, made)


class _Made:
    """What the start has made so far, to be given back when it fails."""

    def __init__(self) -> None:
        self.allotment = Allotment("pageable", ())
        self.segment: Segment | None = None
        self.store: HostStore | None = None
        self.kept: Salvage | None = None
        self.engine: Engine | None = None
        self.collective: Collective = LoneCollective()
        self._maker: SegmentMaker | None = None

    @property
    def address(self) -> str:
        """Where the other ranks of the node get the memory that this one made."""
        return "" if self._maker is None else self._maker.address

    def settle(self, wishes: Sequence[Wish], rank: int) -> None:
        """Take what the ledger gives; the first rank of a node makes what is shared there."""
        self.allotment = settle(wishes, rank)
        if self.allotment.tier == "shared" and self.allotment.local_rank == 0:
            self._maker = SegmentMaker(wishes[rank].nbytes)

    def attach(self, addresses: Sequence[str], wish: Wish) -> None:
        """Map the node's memory, and make a part of its pages."""
        mine = self.allotment
        if mine.tier != "shared":
            return
        if self._maker is not None:
            descriptor = self._maker.duplicate()
        else:
            descriptor = receive(addresses[mine.maker], wish.node)
        try:
            self.segment = Segment(descriptor, wish.nbytes, (mine.local_rank, mine.local_size))
        finally:
            os.close(descriptor)

    def lock(self, turn: int, problem: BaseException | None) -> BaseException | None:
        """Page-lock the shared memory if it is this rank's turn; return what is wrong."""
        if problem is not None or self.allotment.tier != "shared":
            return problem
        if turn != self.allotment.local_rank:
            return None
        assert self.store is not None
        try:
            self.store.register()
        # Every rank must hear of it, whatever it is.
        except BaseException as error:
            return error
        return None

    def close_maker(self) -> None:
        """Hand the memory to nobody any more."""
        maker, self._maker = self._maker, None
        if maker is not None:
            maker.close()

    def discard(self) -> None:
        """Give everything back."""
        self.close_maker()
        if self.engine is not None:
            # It has the store, and knows whether anything still reads it.
            self.engine.discard()
        elif self.store is not None and self.kept is None:
            self.store.release()
        if self.segment is not None:
            self.segment.release()
        self.collective.close()


def _with_host(decision: _Decision, made: _Made) -> Footprint:
    """Return the footprint with the host memory that was had for it."""
    assert made.store is not None
    host, wish = made.store.account, decision.wish
    pinned = host.pinned
    if made.allotment.tier == "shared" and wish.pins:
        # It is locked when all of it is read.
        pairs = zip(wish.shard_nbytes, made.allotment.pinned, strict=True)
        pinned = sum(nbytes for nbytes, yes in pairs if yes)
    return replace(
        decision.footprint,
        host_nbytes=made.store.nbytes,
        pinned_nbytes=pinned,
        shared_nbytes=host.shared,
        pageable_nbytes=host.pageable,
        staging_nbytes=host.staging,
    )


def _facts_of(number: int, plan: ModelPlan) -> dict[str, str]:
    facts = {f"blocks of model {number}": str(len(plan.layouts))}
    for layout in plan.layouts:
        key = f"layout of block {layout.name!r} of model {number}"
        facts[key] = f"{layout.nbytes} bytes, {layout.digest().hex()[:12]}"
    facts[f"all layouts of model {number}"] = plan.digest().hex()[:12]
    return facts


def _files(plans: Sequence[ModelPlan]) -> list[str]:
    """Return the names of the facts that say which files are read."""
    return [
        _FILES.format(number) for number, plan in enumerate(plans) if plan.checkpoint is not None
    ]


def _samples(plans: Sequence[ModelPlan], salvage: Salvage | None) -> dict[str, str]:
    """Return facts about the values: which files, a sample of the module's, or as they were."""
    facts: dict[str, str] = {}
    kept = False
    for number, plan in enumerate(plans):
        on_meta = any(item.tensor.is_meta for owned in plan.inventory.streamed for item in owned)
        name = f"values of model {number} (a sample)"
        kept = kept or on_meta
        if plan.checkpoint is not None:
            facts |= {_FILES.format(number): f"{Machine().node} {files_of(plan)}"}
        elif not on_meta:
            facts[name] = sample_values(plan).hex()[:12]
        facts |= {
            f"values of {name!r} of model {number} (post_load=, or the module's)": digest
            for name, digest in own_values(plan).items()
        }
    # What is on meta has no values to look at.
    return {**salvage.samples, **facts} if salvage is not None and kept else facts


def _drop(plans: Sequence[ModelPlan], reason: str) -> None:
    """Say that a salvage is not used.

    Raises:
        ConfigError: There is nothing to read instead.
    """
    for plan in plans:
        if plan.checkpoint is None and any(
            item.tensor.is_meta for owned in plan.inventory.streamed for item in owned
        ):
            raise ConfigError(
                f"reuse= cannot be honoured: {reason}; and there is nothing to read instead: "
                "pass checkpoint= too, or a model with its values"
            )
    _logger.warning("the shards of reuse= are not used, the weights are read: %s", reason)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"offload() needs a torch.nn.Module; got {type(model).__name__}")
    for path, module in model.named_modules():
        if offload_of(module) is not None:
            what = f"its submodule {path!r}" if path else "it"
            raise ConfigError(
                f"{type(model).__name__} cannot be offloaded: {what} is offloaded already (or was "
                "shut down); call dlo_core.offloaded(model).disable() first"
            )
    for name, tensor in model.named_parameters():
        if isinstance(tensor, Placeholder):
            raise ConfigError(
                f"{type(model).__name__} cannot be offloaded: {name!r} belongs to a model that is "
                "offloaded already (or was shut down); disable() that one first"
            )


def _check_layouts(model: nn.Module, backend: Backend) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (reason := backend.refusal(tensor)) is not None:
            raise ConfigError(f"{name!r} cannot be offloaded: {reason}")


def _check_disjoint(models: Sequence[nn.Module]) -> None:
    seen: dict[int, str] = {}
    for number, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            first = seen.setdefault(id(tensor), f"{number}:{name}")
            if not first.startswith(f"{number}:"):
                other = first.partition(":")[2]
                raise ConfigError(
                    f"{name!r} of model {number} is also {other!r} of another model; models that "
                    "share tensors cannot be offloaded together: offload one, or untie them"
                )
