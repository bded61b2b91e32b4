"""The suite of a collective: gathers of every kind, on groups of several sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest

from dlo_core.testing.conformance import gathers
from dlo_core.testing.conformance.base import Suite
from dlo_core.testing.conformance.member import Member, member_main
from dlo_core.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend

__all__ = ["CollectiveConformance", "Member", "OnRanks"]

_NBYTES = (1, 16, 256, 4097, (1 << 20) + 3, 256)
_SETTINGS = [{"depth": depth, "stages": stages} for depth in (2, 3) for stages in (0, 2)]


class OnRanks(Protocol):
    """Runs a check on every member of a group."""

    def __call__(
        self, check: Callable[..., None], size: int, *args: Any, outsiders: int = 0
    ) -> None:
        """Run ``check(member, *args)`` on a group of ``size`` ranks.

        Args:
            check: A function of ``gathers``.
            size: Number of members.
            *args: For the check.
            outsiders: Ranks of the job before the first member's, so that ranks in the group are
                not the job's.
        """


class CollectiveConformance(Suite):
    """What the interface promises of ``Collective``.

    Attributes:
        start_method: How the ranks' processes are started; ``"spawn"`` where a device cannot be
            used in a forked process.
        limit_s: After so many seconds the ranks of one test are killed.
    """

    start_method = "fork"
    limit_s = 45.0

    @pytest.fixture
    def make_backend(self) -> Callable[[int], Backend]:
        """Return what makes the backend of a rank, in that rank's process; override it."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a fixture named 'make_backend' that returns a function "
            "from a rank of the job to its backend; see 'Checking it' in docs/backends.md"
        )

    @pytest.fixture
    def on_ranks(self, make_backend: Callable[[int], Backend]) -> OnRanks:
        """Return what runs a check on ranks; override it where ranks are no processes."""

        def on_ranks(check: Callable[..., None], size: int, *args: Any, outsiders: int = 0) -> None:
            world = outsiders + size
            members = tuple(range(outsiders, world))
            absent = run_ranks(
                member_main,
                world,
                check,
                make_backend,
                members,
                args,
                limit_s=self.limit_s,
                start_method=self.start_method,
            )
            if reason := next((reason for reason in absent if reason is not None), None):
                pytest.skip(reason)

        return on_ranks

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_rank_and_size_are_those_of_the_group(self, on_ranks: OnRanks, size: int) -> None:
        on_ranks(gathers.tell_rank_and_size, size)

    def test_ranks_of_the_group_need_not_be_those_of_the_job(self, on_ranks: OnRanks) -> None:
        on_ranks(gathers.tell_rank_and_size, 2, outsiders=1)
        on_ranks(gathers.gather_bytes, 2, _NBYTES, True, outsiders=1)

    @pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_every_rank_gets_every_shard(
        self, on_ranks: OnRanks, size: int, in_place: bool
    ) -> None:
        on_ranks(gathers.gather_bytes, size, _NBYTES, in_place)

    @pytest.mark.parametrize("size", [2, 3])
    def test_gathers_run_in_the_order_in_which_they_are_queued(
        self, on_ranks: OnRanks, size: int
    ) -> None:
        on_ranks(gathers.gather_many, size)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_events_of_the_current_stream_order_a_gather(
        self, on_ranks: OnRanks, size: int
    ) -> None:
        on_ranks(gathers.gather_in_turns, size)

    def test_a_gather_runs_on_the_compute_stream_too(self, on_ranks: OnRanks) -> None:
        on_ranks(gathers.gather_on_compute, 2)

    def test_two_groups_of_the_same_ranks_do_not_mix(self, on_ranks: OnRanks) -> None:
        on_ranks(gathers.gather_over_two_groups, 2)

    @pytest.mark.parametrize("size", [1, 2])
    def test_closing_is_no_collective_and_may_be_repeated(
        self, on_ranks: OnRanks, size: int
    ) -> None:
        on_ranks(gathers.close_alone, size)

    @pytest.mark.parametrize("size", [2, 3])
    def test_an_offloaded_model_gives_the_resident_bits(self, on_ranks: OnRanks, size: int) -> None:
        on_ranks(gathers.run_model, size, _SETTINGS)
