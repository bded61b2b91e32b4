"""The protocol in every interleaving: no conflict, no wrong read, no deadlock."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from mutations import RESIDENTS, mutant, sites
from protocol import Shape, Violation, explore, trace

from dlo_core.errors import UseError
from dlo_core.tape import Tape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlo_core.slots import Slot

Program = tuple[tuple[int, ...], ...]
MODES = [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]


def subsets(n: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to skip blocks; a pass cut short by an exception is one of them."""
    for keep in itertools.product((False, True), repeat=n):
        yield tuple(block for block, kept in enumerate(keep) if kept)


def programs(n: int) -> Iterator[Program]:
    """Yield programs of three passes: skips, then all blocks, then the same skips again."""
    whole = tuple(range(n))
    for some in subsets(n):
        yield (some, whole, some)
    for block in range(n):
        repeated = (*whole[: block + 1], block, *whole[block + 1 :])
        yield (whole, repeated, whole)


def reorders(n: int) -> Iterator[Program]:
    """Yield programs whose run order is not the registration order, learnt in the first pass."""
    for order in itertools.permutations(range(n)):
        yield (order, order, order[1:])
        yield (tuple(range(n)), order, order)


def check_all(n: int, depth: int, ranks: int, stages: int, every: Iterator[Program]) -> int:
    """Explore every program on one rank and return how many states were seen."""
    states = 0
    gathers: dict[int, list[str]] = {}
    for program in every:
        traced = trace(Shape(n, depth, stages, ranks), program)
        states += explore([traced]).states
        if program[0] == tuple(range(n)) or set(program[0]) != set(range(n)):
            # No new order was learnt: the gathers are the same whatever was skipped or repeated.
            gathers.setdefault(len(program), traced.gathers)
            assert traced.gathers == gathers[len(program)]
    return states


@pytest.mark.parametrize("n", range(1, 5))
@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "stages"), MODES)
def test_no_interleaving_conflicts(n: int, depth: int, ranks: int, stages: int) -> None:
    assert check_all(n, depth, ranks, stages, programs(n)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 6])
@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "stages"), MODES)
@pytest.mark.timeout(300)
def test_no_interleaving_of_many_blocks_conflicts(
    n: int, depth: int, ranks: int, stages: int, record_property: Any
) -> None:
    record_property("states", check_all(n, depth, ranks, stages, programs(n)))


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("ranks", "stages"), MODES)
def test_a_run_order_of_its_own_conflicts_in_no_interleaving(
    n: int, ranks: int, stages: int
) -> None:
    for depth in (2, 3):
        for program in reorders(n):
            explore([trace(Shape(n, depth, stages, ranks), program)])


def two_rank_programs(n: int) -> Iterator[tuple[Program, Program]]:
    whole = tuple(range(n))
    for one, other in itertools.product(subsets(n), repeat=2):
        yield (one, whole), (other, other)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stages", [0, 1, 2])
def test_two_ranks_that_skip_differently_never_block_each_other(n: int, stages: int) -> None:
    check_pairs(n, stages)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [0, 1, 2, 3])
@pytest.mark.timeout(900)
def test_two_ranks_of_three_blocks_never_block_each_other(stages: int) -> None:
    check_pairs(3, stages)


def check_pairs(n: int, stages: int) -> int:
    states = 0
    for depth in (2, 3):
        shape = Shape(n, depth, stages, 2)
        for programs_of_ranks in two_rank_programs(n):
            traces = [trace(shape, program) for program in programs_of_ranks]
            assert traces[0].gathers == traces[1].gathers
            states += explore(traces).states
    return states


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_ranks_of_two_blocks_never_block_each_other() -> None:
    shape = Shape(2, 2, 2, 3)
    ones = [((0, 1), (0, 1)), ((1,), (0,)), ((), (0, 1))]
    for some in itertools.product(ones, repeat=3):
        traces = [trace(shape, program) for program in some]
        assert traces[0].gathers == traces[1].gathers == traces[2].gathers
        explore(traces)


def test_ranks_with_other_gathers_are_found_to_block_each_other() -> None:
    shape = Shape(3, 2, 2, 2)
    short, long = trace(shape, ((0, 1, 2),)), trace(shape, ((0, 1, 2), (0, 1, 2)))
    with pytest.raises(Violation, match="deadlock"):
        explore([short, long])


# What shows that a wait is needed: whole passes, skips, repeats, an idle pass, a cut tail.
TELLING: list[Program] = [
    ((0, 1, 2, 3, 4),) * 3,
    ((0, 2, 4), (1, 3), (0, 1, 2, 3, 4)),
    ((0, 0, 1, 2, 2), (), (4,)),
    ((0, 1, 2, 3, 4), (0, 1), (0, 1, 2, 3, 4)),
]
# The machine has one compute stream; test_kit.py shows the need of this wait on several.
SEVERAL_COMPUTE_STREAMS = "Transfer._wait_for_reader: stream.wait_event(slot.drained)"
ORDERING = [
    site
    for site in sites()
    if not (site.timing_only or site.of_graphs)
    and str(site) not in (SEVERAL_COMPUTE_STREAMS, *RESIDENTS)
]


def explore_telling(transfers: Any = None, tape_class: type[Tape] = Tape) -> None:
    given = {} if transfers is None else {"transfers": transfers}
    for (ranks, stages), depth, program in itertools.product(
        ((1, 0), (2, 0), (2, 2)), (2, 3), TELLING
    ):
        explore([trace(Shape(5, depth, stages, ranks), program, tape_class=tape_class, **given)])


def test_the_telling_programs_pass_as_they_are() -> None:
    explore_telling()


def test_every_wait_and_record_is_listed() -> None:
    assert len(ORDERING) == 15
    assert sum(site.text.count("wait_event") for site in ORDERING) == 8


@pytest.mark.parametrize("site", ORDERING, ids=str)
def test_without_any_one_wait_or_record_some_interleaving_is_wrong(site: Any) -> None:
    with pytest.raises(Violation):
        explore_telling(mutant(site.number))


class SlotByBlock(Tape):
    """The fault of other systems: the slot follows the block's number and not the fill's."""

    def slot(self, fill: int) -> Slot:
        """Return the wrong slot where blocks are no multiple of slots."""
        return self._pool.slots[self.block(fill) % self.depth]


class NoTail(Tape):
    """The fills that a forward did not ask for are not made."""

    def end_pass(self) -> None:
        """End the pass, issuing nothing in between."""
        self.issued = max(self.issued, self.base + self.n)
        super().end_pass()


def explore_faulty_tape(faulty: type[Tape]) -> None:
    explore_telling(tape_class=faulty)
    pair = [((0, 2), (0, 1, 2, 3, 4)), ((0, 1, 2, 3, 4), (1,))]
    explore([trace(Shape(5, 2, 2, 2), program, tape_class=faulty) for program in pair])


@pytest.mark.parametrize("faulty", [SlotByBlock, NoTail])
def test_a_tape_with_a_planted_fault_is_found(faulty: type[Tape]) -> None:
    with pytest.raises((Violation, UseError)):
        explore_faulty_tape(faulty)
