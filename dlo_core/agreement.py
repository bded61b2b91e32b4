"""Agreement: what the ranks of a group tell each other on the host, and how they vote.

Runs on a control group of dlo's own (gloo), never on the caller's group. Every exchange has the
group's timeout; when it runs out the error names the ranks that did not come.
"""

from __future__ import annotations

import itertools
import pickle
import time
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from dlo_core import errors
from dlo_core.board import Board
from dlo_core.collective import abandon, release_group
from dlo_core.errors import AgreementError, ConfigError, DloError, FillError
from dlo_core.rendezvous import MissingRanks, default_store, meet, new_group_of
from dlo_core.store_line import StoreLine, StoreSilent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = ["Agreement", "GroupAgreement", "LoneAgreement", "Problem", "agree_on"]

T = TypeVar("T")
_POLL_S = 0.0005
_EXCHANGES = "exchanges"
_ERRORS = errors.__name__


@dataclass(frozen=True, slots=True)
class Problem:
    """What a rank tells the others of an error; always picklable, whatever the error is.

    Attributes:
        kind: Name of the nearest class of dlo's own errors, or nothing.
        text: The error's class and text.
    """

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        """Return what is to be told of ``error``."""
        names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == _ERRORS]
        try:
            text = str(error)
        # A vote must not fail for what somebody's error says of itself.
        except Exception as problem:
            text = f"(no text: {type(problem).__name__})"
        return cls(names[0] if names else "", f"{type(error).__name__}: {text}")

    def error(self, before: str) -> DloError:
        """Return an error of the same kind, where there is one, with ``before`` and the text."""
        kind = getattr(errors, self.kind, AgreementError) if self.kind else AgreementError
        # One with a place of its own cannot be made of a text.
        usable: type[DloError] = AgreementError if issubclass(kind, FillError) else kind
        return usable(before + self.text)


class Agreement(ABC):
    """The ranks that decide together.

    Attributes:
        rank: Of this process among them.
        size: How many they are.
        members: Their global ranks, where they are processes of one job.
    """

    rank: int
    size: int
    members: tuple[int, ...] = ()

    @abstractmethod
    def exchange(
        self,
        value: T,
        what: str,
        timeout_s: float | None = None,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[T]:
        """Return every rank's ``value``, in rank order; an interrupt gets through.

        Args:
            value: Picklable, small.
            what: Names the exchange in the error.
            timeout_s: How long to wait for the others; None: as long as for loading.
            meanwhile: Called now and then while the others are awaited; what it raises gets out.

        Raises:
            AgreementError: A rank did not answer within the timeout.
        """

    @abstractmethod
    def announce(self, topic: str, number: int) -> None:
        """Tell all ranks a growing ``number``, without waiting.

        What is told of a topic lasts as long as the job, so topics must be few: reuse them.
        """

    def announced(self, topic: str) -> int:
        """Return the largest number that any rank announced; 0 when none did."""
        return max(self.heard(topic))

    @abstractmethod
    def heard(self, topic: str) -> list[int]:
        """Return what every rank announced last, in rank order; 0 where it did not."""

    def heard_from(self, rank: int, topic: str) -> int:
        """Return what one rank announced last; 0 when it did not."""
        return self.heard(topic)[rank]

    def collect(
        self,
        value: T,
        to: int,
        what: str,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[T]:
        """Return every rank's ``value`` on rank ``to``, and nothing on the others.

        Args:
            value: Picklable, of any size.
            to: The rank that gets them.
            what: Names it in the error.
            meanwhile: Called now and then while the others are awaited.

        Raises:
            AgreementError: A rank did not come within the timeout.
        """
        values = self.exchange(value, what, meanwhile=meanwhile)
        return values if self.rank == to else []

    @abstractmethod
    def new_group(
        self, comm_library: str, timeout_s: float, options: Any | None = None
    ) -> ProcessGroup:
        """Return a new process group of the same ranks; all of them must call this.

        Args:
            comm_library: Name of the ``torch.distributed`` backend.
            timeout_s: Seconds after which an operation of the group gives up.
            options: The comm library's own, its ``pg_options``.
        """

    def board(self) -> Board | None:
        """Return where the ranks write what they do; a new one on every call, all ranks alike.

        None where nobody needs one.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Give the control group back. Idempotent, no collective."""

    def vote(self, error: BaseException | None, what: str) -> None:
        """Raise on every rank when any rank brings an ``error``.

        The rank that brings one raises it as it is; the others raise one of the same class where
        it is dlo's own, else ``AgreementError``, naming the rank.
        """
        answers = self.exchange(None if error is None else Problem.of(error), what)
        if error is not None:
            raise error
        failed = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
        if failed:
            rank, problem = failed[0]
            more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise problem.error(
                f"{what} failed on rank {rank}{more}, so it was refused on all {self.size}: "
            )


class LoneAgreement(Agreement):
    """One rank agrees with itself."""

    rank = 0
    size = 1

    def exchange(
        self,
        value: T,
        what: str,
        timeout_s: float | None = None,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[T]:
        """Return the one value."""
        return [value]

    def announce(self, topic: str, number: int) -> None:
        """Tell nobody."""

    def heard(self, topic: str) -> list[int]:
        """Return 0: nothing is told to nobody."""
        return [0]

    def new_group(
        self, comm_library: str, timeout_s: float, options: Any | None = None
    ) -> ProcessGroup:
        """Refuse: one rank needs no group.

        Raises:
            AgreementError: Always.
        """
        raise AgreementError("a lone rank has no process group")

    def close(self) -> None:
        """Do nothing."""


class GroupAgreement(Agreement):
    """The ranks of a control group."""

    def __init__(
        self,
        group: ProcessGroup | Sequence[int],
        timeout_s: float,
        patience_s: float | None = None,
    ) -> None:
        """Make a control group of the ranks of ``group``; all of them must come.

        Args:
            group: A process group, or the global ranks in the order of their group ranks.
            timeout_s: How long the ranks wait for each other.
            patience_s: How long to wait for the store of the job; None: as long.

        Raises:
            AgreementError: A rank did not come within ``timeout_s``, or the store did not
                answer.
        """
        if isinstance(group, dist.ProcessGroup):
            group = dist.get_process_group_ranks(group)
        self.members = tuple(group)
        self.rank, self.size = self.members.index(dist.get_rank()), len(self.members)
        self._timeout_s = timeout_s
        self._steps = itertools.count(1)
        self._groups = itertools.count()
        self._boards = itertools.count()
        self._line = StoreLine(default_store(), patience_s or timeout_s)
        self._group: ProcessGroup | None = None
        try:
            self._name = f"dlo-{meet(self._line, self.members, self.rank, timeout_s)}"
            self._group = new_group_of(self.members, "gloo", timeout_s, f"{self._name}-control")
        except MissingRanks as error:
            self._line.close()
            raise self._nobody("offload()", error.ranks, error) from None
        except StoreSilent as error:
            self._line.close()
            raise AgreementError(f"offload(): the ranks could not meet: {error}") from error
        except RuntimeError as error:
            self._line.close()
            raise self._nobody("offload()", (), error) from error
        # A model that is forgotten without disable() takes its groups along.
        self._finalizer = weakref.finalize(self, release_group, self._group)
        self._finalizer.atexit = False

    def new_group(
        self, comm_library: str, timeout_s: float, options: Any | None = None
    ) -> ProcessGroup:
        """Return a new process group of the same ranks; all of them must call this.

        Raises:
            AgreementError: They could not connect.
        """
        name = f"{self._name}-{next(self._groups)}"
        try:
            return new_group_of(self.members, comm_library, timeout_s, name, options)
        except RuntimeError as error:
            raise AgreementError(f"the group for the weights could not be made: {error}") from error

    def exchange(
        self,
        value: T,
        what: str,
        timeout_s: float | None = None,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[T]:
        """Return every rank's ``value``, in rank order."""
        group = self._control(what)
        limit_s = timeout_s or self._timeout_s
        deadline = time.monotonic() + limit_s
        step = self._arrive()
        try:
            payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            mine = torch.tensor([payload.numel()], device="cpu")
            sizes = self._gather(group, mine, deadline, meanwhile)
            longest = int(max(size.item() for size in sizes))
            padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            padded[: payload.numel()] = payload
            parts = self._gather(group, padded, deadline, meanwhile)
        # What ``meanwhile`` raised says more.
        except DloError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self._nobody(what, self._missing(step), error, limit_s) from error
        # Peers of one job, over a group of our own: trusted as far as each other's code is.
        return [
            pickle.loads(part[: int(size.item())].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def announce(self, topic: str, number: int) -> None:
        """Tell all ranks through the store."""
        key = f"dlo/{self._name}/{topic}/{self.rank}"
        self._line.post(lambda store: store.set(key, str(number)))

    def heard(self, topic: str) -> list[int]:
        """Return every rank's number in the store."""
        return self._numbers(topic, range(self.size))

    def heard_from(self, rank: int, topic: str) -> int:
        """Return one rank's number in the store."""
        return self._numbers(topic, (rank,))[0]

    def _numbers(self, topic: str, ranks: Iterable[int]) -> list[int]:
        keys = [f"dlo/{self._name}/{topic}/{rank}" for rank in ranks]

        def read(store: Store) -> list[int]:
            return [int(store.get(key)) if store.check([key]) else 0 for key in keys]

        try:
            return self._line.ask(read)
        except RuntimeError as error:
            raise AgreementError(
                f"the other ranks cannot be asked how far they are: {error}"
            ) from error

    def board(self) -> Board | None:
        """Return a board of these ranks in the store."""
        return Board(self._line, f"{self._name}/{next(self._boards)}", self.rank, self.size)

    def collect(
        self,
        value: T,
        to: int,
        what: str,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[T]:
        """Return every rank's ``value`` on rank ``to``; each travels once."""
        payload = pickle.dumps(value) if self.rank != to else b""
        sizes = self.exchange(len(payload), what, meanwhile=meanwhile)
        group = self._control(what)
        deadline = time.monotonic() + self._timeout_s
        if self.rank != to:
            if payload:
                with torch.inference_mode(False):
                    mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                self._move(partial(dist.isend, mine, group=group, group_dst=to), deadline, what)
            return []
        return [
            value if rank == to else self._receive(group, size, rank, deadline, what)
            for rank, size in enumerate(sizes)
        ]

    def _receive(
        self, group: ProcessGroup, size: int, rank: int, deadline: float, what: str
    ) -> Any:
        with torch.inference_mode(False):
            theirs = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._move(partial(dist.irecv, theirs, group=group, group_src=rank), deadline, what)
        return pickle.loads(theirs.numpy().tobytes())

    def _move(self, begin: Callable[[], Any], deadline: float, what: str) -> None:
        """Begin a message and wait for it; gloo tells of one's end only to who waits."""
        try:
            with torch.inference_mode(False):
                work = begin()
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except (RuntimeError, ValueError) as error:
            raise self._nobody(what, (), error) from error

    def _control(self, what: str) -> ProcessGroup:
        """Return the control group; another thread may close it at any time.

        Raises:
            AgreementError: It is closed.
        """
        group = self._group
        if group is None:
            raise AgreementError(f"{what}: the control group is closed")
        return group

    def _gather(
        self,
        group: ProcessGroup,
        mine: torch.Tensor,
        deadline: float,
        meanwhile: Callable[[], object] | None,
    ) -> list[torch.Tensor]:
        """Gather equal tensors, looking up now and then so that an interrupt gets through."""
        with torch.inference_mode(False):
            parts = [torch.empty_like(mine) for _ in range(self.size)]
            work: Any = dist.all_gather(parts, mine, group=group, async_op=True)
        try:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError("timed out")
                if meanwhile is not None:
                    meanwhile()
                time.sleep(_POLL_S)
        except BaseException:
            abandon(group, work)
            raise
        work.wait()
        return parts

    def close(self) -> None:
        """Destroy the control group; local."""
        self._group = None
        self._finalizer()
        self._line.close()

    def _arrive(self) -> int:
        """Tell the others that this rank came to the next exchange."""
        step = next(self._steps)
        self.announce(_EXCHANGES, step)
        return step

    def _missing(self, step: int) -> list[int]:
        try:
            return [rank for rank, came in enumerate(self.heard(_EXCHANGES)) if came < step]
        except RuntimeError:
            return []

    def _nobody(
        self,
        what: str,
        missing: Sequence[int],
        error: Exception,
        limit_s: float | None = None,
    ) -> AgreementError:
        names = ", ".join(f"{rank} (global rank {self.members[rank]})" for rank in missing)
        who = f"rank {names} did not come to it" if missing else "a rank left in the middle of it"
        limit_s, remedy = limit_s or self._timeout_s, "load_timeout_s if it is still loading"
        if limit_s != self._timeout_s:
            remedy = "timeout_s if it is only slow"
        return AgreementError(
            f"{what}: the ranks could not agree within {limit_s:g} s; {who}. Every rank of "
            "the group must make the same dlo calls in the same order; look for an earlier error "
            f"there, or raise {remedy} ({error})",
            missing=missing,
        )

    def __repr__(self) -> str:
        """Show rank and size."""
        return f"GroupAgreement(rank={self.rank}, size={self.size})"


def agree_on(agreement: Agreement, facts: Mapping[str, str], what: str) -> None:
    """Raise on every rank when the ranks' ``facts`` differ, naming the first differences.

    Args:
        agreement: The ranks.
        facts: Names and values that must be equal everywhere.
        what: Names the exchange in the error.

    Raises:
        AgreementError: They differ.
    """
    everyone = agreement.exchange(dict(facts), what)
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    different = [
        name for name in names if len({theirs.get(name, "nothing") for theirs in everyone}) > 1
    ]
    if different:
        rows = [
            f"{name}: "
            + ", ".join(f"rank {r} has {t.get(name, 'nothing')}" for r, t in enumerate(everyone))
            for name in different[:4]
        ]
        more = f" (and {len(different) - 4} more)" if len(different) > 4 else ""
        raise AgreementError(
            f"{what}: the ranks of the group differ in {'; '.join(rows)}{more}. Give every rank "
            "the same "
            "model, checkpoint and settings, or use_allgather=False"
        )


def check_member(group: Any) -> ProcessGroup:
    """Return ``group`` when it is a process group that this process is in.

    Raises:
        ConfigError: It is not.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "group= needs torch.distributed to be initialised; call init_process_group() first"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER or group is dist.group.WORLD is None:
        raise ConfigError(
            f"this process (global rank {dist.get_rank()}) is not in the group that it was given; "
            "call offload() with a group that it belongs to"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group= must be a torch.distributed.ProcessGroup; got {type(group).__name__}"
        )
    if dist.get_rank(group) < 0:
        raise ConfigError(
            f"this process (global rank {dist.get_rank()}) is not in the group that it was given, "
            "whose "
            f"ranks are {dist.get_process_group_ranks(group)}"
        )
    return group
