"""The tape's rules (the note in tape.py), one by one, with a filler that only writes down."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core.cpu_stream import CpuEvent
from dlo_core.errors import UseError
from dlo_core.slots import Pool, Slot
from dlo_core.tape import FirstPass, Tape, agreed_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class NoCheck:
    """Never finds a difference."""

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Do nothing."""

    def failed(self) -> bool:
        """Return False."""
        return False


@dataclass
class Log:
    """A filler that writes down what it is asked for."""

    gathers: bool = True
    fills: list[tuple[int, int, int]] = field(default_factory=list)
    ahead: list[tuple[int, int]] = field(default_factory=list)
    forgotten: int = 0
    fails_at: int | None = None

    def fill(self, slot: Slot, block: int, fill: int) -> None:
        """Write (fill, block, slot) down; a slot that is read must not be written."""
        assert not slot.bound
        if fill == self.fails_at:
            raise KeyboardInterrupt
        self.fills.append((fill, block, slot.index))

    def copy_ahead(self, block: int, fill: int) -> None:
        """Write it down."""
        self.ahead.append((block, fill))

    def forget_staged(self) -> None:
        """Count it."""
        self.forgotten += 1

    @property
    def blocks(self) -> list[int]:
        """The blocks, in the order of their fills."""
        return [block for _, block, _ in self.fills]


def make_pool(depth: int) -> Pool:
    return Pool(
        tuple(
            Slot(index, torch.empty(0), CpuEvent(), CpuEvent(), CpuEvent(), CpuEvent(), NoCheck())  # type: ignore[arg-type]
            for index in range(depth)
        )
    )


class Answer:
    """An exchange that answers what ``answer`` makes of this rank's first pass."""

    def __init__(self, answer: Callable[[FirstPass], FirstPass]) -> None:
        self.answer = answer
        self.told: list[FirstPass] = []
        self.wanted: list[int] = []

    def __call__(self, mine: FirstPass, serve: Callable[[int], None]) -> FirstPass:
        self.told.append(mine)
        return self.answer(mine)

    def announce(self, wanted: int) -> None:
        self.wanted.append(wanted)


def no_order(mine: FirstPass) -> FirstPass:
    return replace(mine, calls=())


never, alone = Answer(no_order), Answer(lambda mine: mine)


def make_tape(
    n: int, depth: int = 2, *, gathers: bool = True, learns: bool = False
) -> tuple[Tape, Log, Pool]:
    pool, log = make_pool(depth), Log(gathers)
    tape = Tape(range(n), pool, log, agree=alone if learns else never)
    return tape, log, pool


def call(tape: Tape, block: int) -> int:
    """Call a block that does nothing; return the fill that served it."""
    slot = tape.before(block)
    assert tape.block(slot.fill) == block
    tape.after(slot)
    return slot.fill


def run_pass(tape: Tape, blocks: Sequence[int]) -> list[int]:
    """Run one pass; return the fills that served it."""
    tape.begin_pass()
    served = [call(tape, block) for block in blocks]
    tape.end_pass()
    return served


both = pytest.mark.parametrize("gathers", [True, False], ids=["gather", "local"])
every_n = pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 12])
every_depth = pytest.mark.parametrize("depth", [2, 3, 4])


@both
@every_n
@every_depth
def test_whole_passes_find_every_block_in_its_slot(n: int, depth: int, gathers: bool) -> None:
    # Case B02: n not a multiple of the slots, and the turn wraps around.
    tape, log, pool = make_tape(n, depth, gathers=gathers)
    for turn in range(4):
        tape.begin_pass()
        for block in range(n):
            slot = tape.before(block)
            fill = turn * n + block
            assert slot.fill == fill
            assert slot is pool.slots[fill % min(depth, n)]
            assert tape.base <= tape.pos <= tape.issued <= tape.pos + tape.depth - 1
            assert tape.issued == tape.pos + tape.depth - 1, "prefetches as far as the slots go"
            tape.after(slot)
        tape.end_pass()
        assert tape.base == tape.pos == (turn + 1) * n
    if n > depth:
        assert log.fills == [
            (fill, fill % n, fill % depth) for fill in range(4 * n + min(depth, n) - 1)
        ]


@both
def test_a_single_block_is_filled_once_and_found_again(gathers: bool) -> None:
    tape, log, _ = make_tape(1, 2, gathers=gathers)
    for turn in range(3):
        run_pass(tape, [0])
        assert tape.base == tape.pos == turn + 1
    assert log.fills == [(0, 0, 0)]


@both
@every_depth
def test_blocks_that_all_fit_are_filled_once(depth: int, gathers: bool) -> None:
    tape, log, _ = make_tape(depth, depth, gathers=gathers)
    for _ in range(3):
        run_pass(tape, range(depth))
    assert log.blocks == list(range(depth))
    assert tape.num_fills == depth
    assert tape.num_skipped == tape.issued - depth


def test_fixed_places_when_the_blocks_are_a_multiple_of_the_slots() -> None:
    tape, log, _ = make_tape(6, 3)
    for _ in range(4):
        run_pass(tape, range(6))
    assert {(block, slot) for _, block, slot in log.fills} == {(b, b % 3) for b in range(6)}


def test_prefetch_queues_one_fill_less_than_there_are_slots() -> None:
    tape, log, pool = make_tape(5, 3)
    tape.prefetch()
    assert log.blocks == [0, 1]
    assert pool.owner is tape
    assert tape.issued == 2
    tape.begin_pass()
    assert call(tape, 0) == 0
    assert log.blocks == [0, 1, 2], "the first call found its block prefetched"


def test_the_copy_of_the_next_fill_is_queued_ahead_of_it() -> None:
    tape, log, _ = make_tape(4, 2)
    tape.prefetch()
    assert log.ahead == [(1, 1)]
    run_pass(tape, range(4))
    assert log.ahead == [((fill + 1) % 4, fill + 1) for fill, _, _ in log.fills]


@both
def test_no_copy_runs_ahead_where_all_blocks_fit(gathers: bool) -> None:
    tape, log, _ = make_tape(2, 2, gathers=gathers)
    run_pass(tape, range(2))
    assert log.ahead == []


def test_a_skipped_fill_is_made_where_ranks_gather() -> None:
    tape, log, _ = make_tape(6, 2)
    assert run_pass(tape, [0, 3, 5]) == [0, 3, 5]
    assert log.blocks == [0, 1, 2, 3, 4, 5, 0]


def test_a_skipped_fill_is_not_made_where_nothing_is_gathered() -> None:
    tape, log, _ = make_tape(6, 2, gathers=False)
    assert run_pass(tape, [0, 3, 5]) == [0, 3, 5]
    # 1 and 4 were prefetched behind 0 and 3.
    assert log.blocks == [0, 1, 3, 4, 5, 0]


@both
def test_the_end_of_a_pass_serves_a_skipped_tail(gathers: bool) -> None:
    tape, log, _ = make_tape(6, 2, gathers=gathers)
    run_pass(tape, [0, 1])
    assert log.blocks == ([0, 1, 2, 3, 4, 5, 0] if gathers else [0, 1, 2, 0])
    assert tape.base == tape.pos == 6
    assert run_pass(tape, range(6)) == [6, 7, 8, 9, 10, 11]


def test_an_idle_pass_makes_one_turn_of_fills() -> None:
    tape, log, _ = make_tape(4, 2)
    run_pass(tape, [])
    assert log.blocks == [0, 1, 2, 3, 0]
    run_pass(tape, [])
    assert log.blocks == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_an_idle_pass_makes_nothing_but_a_prefetch_where_nothing_is_gathered() -> None:
    tape, log, _ = make_tape(4, 2, gathers=False)
    run_pass(tape, [])
    run_pass(tape, [])
    assert log.blocks == [0]
    assert tape.num_skipped == 1, "the slot holds the block already"


@both
def test_a_block_called_again_at_once_costs_no_fill(gathers: bool) -> None:
    tape, log, _ = make_tape(4, 2, gathers=gathers)
    assert run_pass(tape, [0, 0, 0, 1, 2, 2, 3]) == [0, 0, 0, 1, 2, 2, 3]
    assert log.blocks == [0, 1, 2, 3, 0]


@both
@every_depth
def test_a_repeat_does_not_take_the_next_place_of_a_block_that_has_two(
    depth: int, gathers: bool
) -> None:
    # With depth 3 the next place was prefetched and taken, and the pass went another turn alone.
    tape, _, _ = make_tape(3, depth, gathers=gathers)
    tape.restart([0, 1, 0, 2])
    for turn in range(3):
        served = run_pass(tape, [0, 0, 1, 0, 0, 2])
        assert served == [4 * turn + place for place in (0, 0, 1, 2, 2, 3)]
        assert tape.base == 4 * (turn + 1)


@both
def test_a_miss_goes_forward_to_the_blocks_next_turn(gathers: bool) -> None:
    tape, log, _ = make_tape(4, 2, gathers=gathers)
    tape.begin_pass()
    assert [call(tape, block) for block in (2, 0, 3, 1)] == [2, 4, 7, 9]
    tape.end_pass()
    assert tape.base == 12, "the pass took three turns"
    if gathers:
        assert log.blocks == [fill % 4 for fill in range(13)]


@both
def test_a_block_that_stands_twice_in_the_order_has_two_fills(gathers: bool) -> None:
    tape, log, _ = make_tape(3, 2, gathers=gathers)
    tape.restart([0, 1, 0, 2])
    for turn in range(2):
        served = run_pass(tape, [0, 1, 0, 2])
        assert served == [4 * turn + place for place in range(4)]
    # Where nothing is gathered, a slot that holds the block already is not filled again.
    assert log.blocks == ([0, 1, 0, 2, 0, 1, 0, 2, 0] if gathers else [0, 1, 2, 1, 2])


@both
@every_depth
def test_blocks_nest_as_deep_as_there_are_slots(depth: int, gathers: bool) -> None:
    tape, _, _ = make_tape(6, depth, gathers=gathers)
    tape.begin_pass()
    slots = [tape.before(block) for block in range(depth)]
    assert [tape.block(slot.fill) for slot in slots] == list(range(depth))
    with pytest.raises(UseError, match=rf"inside each other .* there are {depth} slots.*depth"):
        tape.before(depth)
    for slot in reversed(slots):
        tape.after(slot)
    tape.end_pass()
    assert run_pass(tape, range(6)) == list(range(6, 12)), "nothing stays broken"


def test_fills_wait_for_the_slots_that_nested_calls_hold() -> None:
    tape, log, _ = make_tape(6, 3)
    tape.begin_pass()
    outer = tape.before(0)
    inner = tape.before(1)
    assert log.blocks == [0, 1, 2], "fill 3 wants the slot of fill 0, which is being read"
    tape.after(inner)
    tape.after(outer)
    call(tape, 2)
    assert log.blocks == [0, 1, 2, 3, 4]


@both
def test_a_block_inside_itself_uses_its_slot_twice(gathers: bool) -> None:
    tape, _, _ = make_tape(3, 2, gathers=gathers)
    tape.begin_pass()
    outer = tape.before(0)
    inner = tape.before(0)
    assert inner is outer
    assert outer.bound == 2
    tape.after(inner)
    tape.after(outer)
    assert outer.bound == 0
    tape.end_pass()


@both
def test_a_pass_cannot_begin_while_a_block_computes(gathers: bool) -> None:
    tape, log, pool = make_tape(4, 2, gathers=gathers)
    other = Tape([10, 11], pool, log, agree=never)
    tape.begin_pass()
    slot = tape.before(0)
    before = (tape.base, tape.pos, tape.issued, tape.open, list(log.fills))
    for refused in (tape, other):
        with pytest.raises(UseError, match="busy"):
            refused.begin_pass()
    with pytest.raises(UseError, match="busy"):
        other.before(10)
    assert (tape.base, tape.pos, tape.issued, tape.open, log.fills) == before
    tape.after(slot)
    assert [call(tape, block) for block in (1, 2, 3)] == [1, 2, 3]


@both
def test_a_new_pass_ends_one_that_is_open(gathers: bool) -> None:
    tape, log, _ = make_tape(3, 2, gathers=gathers)
    tape.begin_pass()
    call(tape, 0)
    tape.begin_pass()
    assert tape.base == 3
    assert tape.num_passes == 1
    assert call(tape, 0) == 3
    assert log.blocks[-1] == 1


@both
def test_a_block_that_is_called_without_the_root_opens_a_pass(gathers: bool) -> None:
    tape, log, _ = make_tape(3, 2, gathers=gathers)
    assert [call(tape, block % 3) for block in range(9)] == list(range(9))
    assert tape.open
    assert tape.base == 0
    assert log.blocks == [block % 3 for block in range(10)]
    tape.end_pass()
    assert tape.base == 9


@both
def test_another_model_takes_the_slots_over_at_a_pass_boundary(gathers: bool) -> None:
    first, log, pool = make_tape(3, 2, gathers=gathers)
    second = Tape([10, 11, 12], pool, log, agree=never)
    run_pass(first, range(3))
    assert first.issued == 4, "one fill is prefetched"
    run_pass(second, [10, 11, 12])
    assert pool.owner is second
    assert first.issued == first.base == 3, "what was prefetched is to be made again"
    assert log.blocks == [0, 1, 2, 0, 10, 11, 12, 10]
    assert run_pass(first, range(3)) == [3, 4, 5]
    assert second.issued == second.base == 3
    assert log.blocks[8:] == [0, 1, 2, 0]
    assert log.forgotten == 3, "copies that ran ahead are forgotten"


@both
def test_a_take_over_ends_the_owners_open_pass_first(gathers: bool) -> None:
    first, log, pool = make_tape(4, 2, gathers=gathers)
    second = Tape([10, 11], pool, log, agree=never)
    call(first, 0)
    call(second, 10)
    assert not first.open
    assert first.base == first.pos == first.issued == 4
    assert log.blocks == ([0, 1, 2, 3, 0, 10, 11] if gathers else [0, 1, 10, 11])


def test_a_slot_that_another_model_filled_is_not_held() -> None:
    first, log, pool = make_tape(2, 2)
    second = Tape([10], pool, log, agree=never)
    run_pass(first, range(2))
    run_pass(second, [10])
    run_pass(first, range(2))
    assert log.blocks == [0, 1, 10, 0, 1]


@both
def test_the_order_of_the_first_pass_becomes_the_ring_order(gathers: bool) -> None:
    tape, log, _ = make_tape(4, 2, gathers=gathers, learns=True)
    run_pass(tape, [2, 0, 0, 3, 1])
    assert tape.order == (2, 0, 3, 1)
    assert (tape.base, tape.pos, tape.issued) == (0, 0, 1), "a new tape, one fill prefetched"
    log.fills.clear()
    assert run_pass(tape, [2, 0, 3, 1]) == [0, 1, 2, 3]
    assert log.blocks == [0, 3, 1, 2]


def test_an_order_is_learnt_once() -> None:
    tape, _, _ = make_tape(3, 2, learns=True)
    run_pass(tape, [0, 1, 2])
    run_pass(tape, [2, 1, 0])
    assert tape.order == (0, 1, 2)


@both
@pytest.mark.parametrize("calls", [[2, 0, 3], [], [3, 2]])
def test_a_first_pass_that_missed_a_block_teaches_nothing(calls: list[int], gathers: bool) -> None:
    agree = Answer(no_order)
    tape = Tape(range(4), make_pool(2), Log(gathers), agree=agree)
    run_pass(tape, calls)
    assert [mine.calls for mine in agree.told] == [()]
    assert tape.order == (0, 1, 2, 3)


def test_an_endless_first_pass_teaches_nothing_and_keeps_no_list() -> None:
    agree = Answer(no_order)
    tape = Tape(range(2), make_pool(2), Log(), agree=agree)
    for turn in range(1000):
        call(tape, turn % 2)
    assert tape._calls is not None
    assert len(tape._calls) <= 128
    tape.end_pass()
    assert [mine.calls for mine in agree.told] == [()]


def test_an_exchange_that_fails_closes_the_pool() -> None:
    def late(mine: FirstPass) -> FirstPass:
        raise TimeoutError("a rank did not come")

    pool = make_pool(2)
    tape = Tape(range(3), pool, Log(), agree=Answer(late))
    with pytest.raises(TimeoutError, match="did not come"):
        run_pass(tape, range(3))
    assert isinstance(pool.failure, TimeoutError)


def test_before_a_new_order_the_old_tape_ends_at_the_same_fill_on_all_ranks() -> None:
    agree = Answer(lambda mine: FirstPass((1, 0, 2), mine.base, mine.issued + 4))
    log = Log()
    tape = Tape(range(3), make_pool(2), log, agree=agree)
    tape.begin_pass()
    tape.end_pass()
    assert log.fills[:7] == [(fill, fill % 3, fill % 2) for fill in range(7)]
    assert log.fills[7:] == [(0, 1, 0)], "the first fill of the new tape"
    assert log.forgotten == 2


def test_a_restart_forgets_own_slots_and_no_one_elses() -> None:
    tape, log, pool = make_tape(3, 2)
    other = Tape([10], pool, log, agree=never)
    tape.prefetch()
    pool.slots[1].tape = other
    forgotten = log.forgotten
    tape.restart([2, 1, 0])
    assert pool.slots[0].tape is None
    assert pool.slots[1].tape is other
    assert log.forgotten == forgotten + 1
    assert (tape.base, tape.pos, tape.issued) == (0, 0, 0)


def test_the_first_list_of_which_all_others_are_parts_wins() -> None:
    assert agreed_order([(2, 0, 1), (2, 0, 1)]) == (2, 0, 1)
    assert agreed_order([(0, 1, 2), (0, 1, 0, 2), (1, 2)]) == (0, 1, 0, 2)
    assert agreed_order([(), (1, 0), ()]) == (1, 0), "a rank that did not see all says nothing"
    assert agreed_order([(0, 1), (1, 0)]) is None
    assert agreed_order([(), ()]) is None


@both
def test_walk_visits_one_whole_turn_and_teaches_no_order(gathers: bool) -> None:
    tape, _, _ = make_tape(3, 2, gathers=gathers, learns=True)
    tape.restart([2, 0, 1])
    seen: list[tuple[int, bool]] = []
    tape.walk(lambda block, slot: seen.append((block, tape.block(slot.fill) == block)))
    assert seen == [(2, True), (0, True), (1, True)]
    assert not tape.open
    assert tape.order == (2, 0, 1)


def test_walk_serves_the_peers_when_a_visit_fails() -> None:
    tape, log, pool = make_tape(4, 2)

    def visit(block: int, slot: Slot) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        tape.walk(visit)
    assert log.blocks == [0, 1, 2, 3, 0]
    assert not pool.busy


def test_a_fill_that_was_interrupted_closes_the_pool() -> None:
    tape, log, pool = make_tape(4, 2)
    log.fails_at = 2
    tape.begin_pass()
    call(tape, 0)
    with pytest.raises(KeyboardInterrupt):
        call(tape, 1)
    assert isinstance(pool.failure, KeyboardInterrupt)


def test_repr_shows_the_cursor() -> None:
    tape, _, _ = make_tape(4, 2)
    call(tape, 0)
    assert repr(tape) == "Tape('', n=4, base=0, pos=1, issued=2, open)"


def test_a_fill_beyond_the_first_turn_of_a_first_pass_is_announced() -> None:
    agree = Answer(lambda mine: mine)
    tape = Tape(range(4), make_pool(2), Log(), agree=agree)
    run_pass(tape, [2, 0, 3, 1])
    # Block 0 and block 1 run before their turn: fills 4 and 9.
    assert agree.wanted == [5, 8, 10]
    agree.wanted.clear()
    run_pass(tape, [2, 0, 3, 1])
    assert agree.wanted == []


def test_after_a_first_pass_without_an_order_all_ranks_begin_at_the_farthest_turn() -> None:
    agree = Answer(lambda mine: FirstPass((), 12, mine.issued))
    log = Log()
    tape = Tape(range(4), make_pool(2), log, agree=agree)
    run_pass(tape, [0, 1, 2, 3])
    assert (tape.base, tape.pos, tape.issued) == (12, 12, 13)
    assert [fill for fill, _, _ in log.fills] == list(range(13))
