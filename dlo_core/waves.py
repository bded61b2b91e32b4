"""Waves: the requests that data-parallel ranks run together, one a rank."""

from __future__ import annotations

import pickle
import time
import traceback
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dlo_core.agreement import Agreement, GroupAgreement, LoneAgreement
from dlo_core.errors import AgreementError, ConfigError, DloError, UseError
from dlo_core.shard_group import reach
from dlo_core.wave_request import CompatibilityKey, WaveRequest, check_wave, compatibility_key
from dlo_core.wave_walk import FreeWalk, Walk, of_turn, stamped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from dlo_core.board import Board
    from dlo_core.layerwise import LayerwiseOffload
    from dlo_core.topology import Topology
    from dlo_core.watch import Watch

# Of progress: a pass of a real model takes longer.
_TELL_S = 0.05

__all__ = ["WaveReport", "WaveResult", "WaveRunner"]


@dataclass(frozen=True, slots=True)
class WaveResult:
    """What became of one request.

    Attributes:
        value: What the function returned on the primary rank of the replica.
        error: Traceback of what it raised there, or on another rank of the replica; None: nothing.
        replica: Rank in the data-parallel group that ran it.
        seconds: It took.
        cancelled: Whether ``cancel`` stopped it.
    """

    value: Any
    error: str | None
    replica: int
    seconds: float
    cancelled: bool = False

    def get(self) -> Any:
        """Return the value.

        Raises:
            CancelledError: It was cancelled.
            RuntimeError: The function raised; holds its traceback.
        """
        if self.cancelled:
            raise CancelledError(f"the request was cancelled on replica {self.replica}")
        if self.error is not None:
            raise RuntimeError(f"the request failed on replica {self.replica}:\n{self.error}")
        return self.value


@dataclass(frozen=True, slots=True)
class WaveReport:
    """What the last ``run`` cost this rank.

    Attributes:
        waves: How many.
        passes: Of this rank's own requests.
        idle_passes: Made to serve the others.
        idle_seconds: Spent in serving and waiting for the others.
    """

    waves: int
    passes: int
    idle_passes: int
    idle_seconds: float


class _Stop(Exception):
    """Comes out of the model's call where the request was cancelled."""


class WaveRunner:
    """Gives each data-parallel rank a request at a time; every rank of the job calls ``run``."""

    def __init__(
        self,
        offloaded: LayerwiseOffload,
        *,
        topology: Topology,
        fn: Callable[[WaveRequest], Any],
        key: CompatibilityKey = compatibility_key,
        ragged: bool = False,
        idle_timeout_s: float = 3600.0,
    ) -> None:
        """Make a control group of all ranks of the topology, which must all call this.

        Args:
            offloaded: Enabled; its weights are sharded as ``topology`` says, or rank-local.
            topology: Says which ranks are one replica.
            fn: Runs one request; called on every rank of a replica with the same request.
            key: Gives what must be equal for all requests of a wave.
            ragged: Let requests with different keys run together: ranks that are done earlier
                serve the others.
            idle_timeout_s: Seconds for which a rank that serves waits for a sign of the others.

        Raises:
            ConfigError: A setting cannot be honoured, or the topology is not the offload's, or one
                of HSDP; on every rank.
            AgreementError: A rank did not come.
        """
        self._offloaded = offloaded
        self._fn = fn
        self._key = key
        self._ragged = ragged
        self._idle_timeout_s = idle_timeout_s
        dp, parts = topology.dp, (topology.sp, topology.tp)
        self._replica = 0 if dp is None else dist.get_rank(dp)
        self._replicas = 1 if dp is None else dist.get_world_size(dp)
        self._primary = all(part is None or dist.get_rank(part) == 0 for part in parts)
        config = offloaded.config
        agreement = _all_ranks(topology, config.load_timeout_s, config.timeout_s)
        self._agreement: Agreement | None = agreement
        self._watched: Board | None = None
        self._lone = all(part is None or dist.get_world_size(part) == 1 for part in parts)
        self._runs = 0
        self._entry = 0
        self._told_s = 0.0
        self.report = WaveReport(0, 0, 0, 0.0)
        try:
            agreement.vote(self._problem(topology), "WaveRunner()")
        except BaseException:
            self.close()
            raise
        # A rank that this one shares no weights with may be waited for, too.
        if self._watch is not None:
            self._watched = agreement.board()
            if self._watched is not None:
                self._watch.add(self._watched, agreement.members)

    def run(self, requests: Sequence[WaveRequest] | None) -> list[WaveResult] | None:
        """Run ``requests``, given on one rank; every rank calls this.

        The requests and results travel by pickle between the ranks of one job, which trust each
        other.

        Args:
            requests: On exactly one rank; None on all others. Any number: replicas take one each,
                wave after wave.

        Returns:
            One result a request, in order, on the rank that gave them; None on the others.

        Raises:
            ConfigError: No rank or several gave requests, or they cannot run together; on every
                rank, and nothing was dispatched.
            AgreementError: A rank did not come, or showed no sign for ``idle_timeout_s``.
        """
        try:
            return self._run(requests)
        except AgreementError:
            # A connection that broke does not say why; the watch may know.
            if self._watch is not None:
                self._watch.look_well()
            raise

    def _run(self, requests: Sequence[WaveRequest] | None) -> list[WaveResult] | None:
        agreement = self._running()
        told: tuple[bytes, None] | tuple[None, BaseException] | None = None
        if requests is not None:
            try:
                told = (pickle.dumps(self._validated(requests)), None)
            # Every rank must hear of it, whatever it is.
            except Exception as error:
                told = (None, error if isinstance(error, DloError) else _unpicklable(error))
        mine_told = None if told is None else _plain(told)
        givers = agreement.exchange(mine_told, "a wave of requests", meanwhile=self._look)
        entries = [rank for rank, given in enumerate(givers) if given is not None]
        if len(entries) != 1:
            raise ConfigError(
                f"run() needs requests on exactly one rank; got them on {entries or 'none'}: pass "
                "None on all others"
            )
        self._entry = entries[0]
        self._runs += 1
        payload, problem = givers[entries[0]] or (b"", None)
        if problem is not None:
            if told is not None and told[1] is not None:
                raise told[1]
            raise ConfigError(f"rank {entries[0]} gave requests that were refused: {problem}")
        everything: list[WaveRequest] = pickle.loads(payload)
        mine = self._run_all(everything)
        answers = agreement.collect(mine, entries[0], "the results of a wave", meanwhile=self._look)
        if agreement.rank != entries[0]:
            return None
        return _in_order(answers, len(everything))

    def progress(self, number: int) -> int:
        """Return how many passes of a request of the running ``run`` have begun, a little late.

        Any thread of any rank may ask, for example while ``run`` runs in another thread.

        Args:
            number: Of the request, in the order in which they were given.
        """
        return max(
            of_turn(self._runs, told) for told in self._running().heard(f"progress {number}")
        )

    def cancel(self, number: int) -> bool:
        """Stop a request of the running ``run`` before its next pass; other requests go on.

        Any thread of the rank that gave the requests may ask. Its result is then ``cancelled``.

        Args:
            number: Of the request, in the order in which they were given.

        Returns:
            False where a replica has several ranks: they would stop in different places and wait
            for each other for ever.
        """
        agreement = self._running()
        if self._lone:
            agreement.announce(f"cancel {number}", stamped(self._runs, 1))
        return self._lone

    def close(self) -> None:
        """Give the control group back; local and idempotent."""
        agreement, self._agreement = self._agreement, None
        if self._watched is not None and self._watch is not None:
            self._watch.drop(self._watched)
        if agreement is not None:
            agreement.close()

    def __enter__(self) -> WaveRunner:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Show this rank's place."""
        return f"WaveRunner(replica {self._replica} of {self._replicas}, ragged={self._ragged})"

    # --- before -----------------------------------------------------------------------------------

    def _problem(self, topology: Topology) -> ConfigError | None:
        if self._offloaded.engine is None:
            return ConfigError("WaveRunner() needs an offload that is enabled; call enable() first")
        if (problem := _why_not(self._offloaded, topology)) is not None:
            return problem
        if self._ragged and self._gathers and len(self._offloaded.engine.streamers) > 1:
            return ConfigError(
                "ragged=True cannot be honoured with several models in one offload: ranks in "
                "different steps would fill the shared slots from different models; offload them "
                "one by one, or use equal requests"
            )
        return None

    def _running(self) -> Agreement:
        if self._agreement is None:
            raise UseError("this WaveRunner was closed")
        return self._agreement

    def _validated(self, requests: Sequence[WaveRequest]) -> list[WaveRequest]:
        if isinstance(requests, WaveRequest):
            raise ConfigError("run() wants a sequence of WaveRequest; got one: write [request]")
        for number, request in enumerate(requests):
            if not isinstance(request, WaveRequest):
                raise ConfigError(
                    f"request {number} must be a WaveRequest; got {type(request).__name__}"
                )
        if not self._ragged and self._gathers:
            for first in range(0, len(requests), self._replicas):
                wave = requests[first : first + self._replicas]
                check_wave(wave, self._key, first=first)
        return list(requests)

    @property
    def _gathers(self) -> bool:
        return self._offloaded.config.use_allgather and self._offloaded.size > 1

    # --- on every rank ----------------------------------------------------------------------------

    @property
    def _watch(self) -> Watch | None:
        engine = self._offloaded.engine
        return None if engine is None else engine.watch

    def _look(self) -> None:
        """Raise when the offload has failed, or a rank of the job will never come back."""
        if self._watch is not None:
            self._watch.look()

    def _run_all(self, requests: Sequence[WaveRequest]) -> list[tuple[int, bool, WaveResult]]:
        """Run this replica's request of every wave; return (number, primary, result) of each."""
        mine: list[tuple[int, bool, WaveResult]] = []
        passes = idle = waves = 0
        idle_s = 0.0
        for first in range(0, len(requests), self._replicas):
            number = first + self._replica
            walk = self._walk(number)
            waves += 1
            with walk:
                if number < len(requests):
                    mine.append((number, self._primary, self._run_one(requests[number])))
                passes += walk.passes
                began = time.monotonic()
                idle += walk.serve(self._idle_timeout_s)
                idle_s += time.monotonic() - began
        self.report = WaveReport(waves, passes, idle, idle_s)
        return mine

    def _walk(self, number: int) -> Walk:
        engine = self._offloaded.engine
        if engine is None:
            raise UseError("the offload of this WaveRunner was disabled; make a new one")
        kind = Walk if self._gathers else FreeWalk
        return kind(self._offloaded, engine, partial(self._before_pass, number))

    def _before_pass(self, number: int, passes: int) -> None:
        """Stop a cancelled request; tell how far it is, now and then."""
        agreement = self._running()
        if self._lone:
            told = agreement.heard_from(self._entry, f"cancel {number}")
            if of_turn(self._runs, told):
                raise _Stop
        if self._primary and (passes == 1 or time.monotonic() - self._told_s > _TELL_S):
            self._told_s = time.monotonic()
            agreement.announce(f"progress {number}", stamped(self._runs, passes))

    def _run_one(self, request: WaveRequest) -> WaveResult:
        began = time.monotonic()
        value, error = None, None
        try:
            value = self._fn(request)
        except _Stop:
            took = time.monotonic() - began
            return WaveResult(None, "the request was cancelled", self._replica, took, True)
        except Exception as caught:
            # The offload is closed: nobody can be served any more.
            if (
                self._offloaded.engine is not None
                and self._offloaded.engine.pool.failure is not None
            ):
                raise
            error = "".join(traceback.format_exception(caught))
        if error is None and self._primary:
            try:
                pickle.dumps(value)
            except Exception as caught:
                value, error = None, f"the result cannot be sent: {_unpicklable(caught)}"
        return WaveResult(
            value if self._primary else None, error, self._replica, time.monotonic() - began
        )


def _why_not(offloaded: LayerwiseOffload, topology: Topology) -> ConfigError | None:
    """Return why requests cannot run over ``topology``; None: they can."""
    own = offloaded.topology
    if topology.sizes.has_hsdp or (own is not None and own.sizes.has_hsdp):
        return ConfigError(
            "WaveRunner() cannot run over HSDP: its ranks gather every block from each other in "
            "each forward, so all of them must run the same passes, and an idle pass takes no part "
            "in that; give all ranks one request at a time, or use DP without fully_shard()"
        )
    if own is not None:
        for name in ("dp", "sp", "tp"):
            theirs, mine = _ranks(getattr(own, name)), _ranks(getattr(topology, name))
            if theirs != mine:
                return ConfigError(
                    f"WaveRunner() wants the topology of its offload, whose {name} group has the "
                    f"global ranks {list(theirs)}; got one with {list(mine)}: pass "
                    "topology=offloaded.topology"
                )
    elif offloaded.config.use_allgather and offloaded.size > 1:
        members = offloaded.agreement.members
        group = _ranks(topology.group_for(use_allgather=True))
        narrowed = offloaded.config.shard_within == "node" and set(members) <= set(group)
        if members != group and not narrowed:
            return ConfigError(
                f"WaveRunner() got a topology that shards the weights over the global ranks "
                f"{list(group)}, but the offload shards them over {list(members)}; pass the same "
                "topology to offload(), instead of group="
            )
    return None


def _ranks(group: ProcessGroup | None) -> tuple[int, ...]:
    return (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))


def _all_ranks(topology: Topology, timeout_s: float, patience_s: float) -> Agreement:
    """Return an agreement of all ranks that the topology's groups reach from here."""
    groups = [group for group in (topology.dp, topology.sp, topology.tp) if group is not None]
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    if not groups:
        return LoneAgreement()
    members = reach(groups, (), timeout_s, "WaveRunner()")
    return GroupAgreement(members, timeout_s, patience_s)


def _plain(told: tuple[bytes, None] | tuple[None, BaseException]) -> tuple[Any, str | None]:
    payload, problem = told
    return payload, None if problem is None else str(problem)


def _unpicklable(error: BaseException) -> ConfigError:
    return ConfigError(
        f"it cannot be pickled ({type(error).__name__}: {error}); send plain values or CPU tensors"
    )


def _in_order(
    answers: Sequence[Sequence[tuple[int, bool, WaveResult]]], count: int
) -> list[WaveResult]:
    """Return the primaries' results by number; an error on any rank of a replica is the result."""
    results: dict[int, WaveResult] = {}
    errors: dict[int, WaveResult] = {}
    for answer in answers:
        for number, primary, result in answer:
            if primary:
                results[number] = result
            if result.error is not None:
                errors.setdefault(number, result)
    return [errors.get(number, results[number]) for number in range(count)]
