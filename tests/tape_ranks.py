"""Simulated ranks: runs a program on tapes whose slots are numbers, and checks every step.

A rank's steps depend on the others in one place only, the exchange after a first pass. So each rank
runs alone until it needs an answer, all are asked, and the ranks run anew with one answer more:
deterministic, without threads. Who waits for whom is checked afterwards on what they wrote down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dlo_core.cpu_stream import CpuEvent
from dlo_core.errors import UseError
from dlo_core.slots import Pool, Slot
from dlo_core.tape import FirstPass, Tape, agreed

if TYPE_CHECKING:
    from programs import Call, Pass, Program

    Answer = tuple[int, FirstPass]

__all__ = ["Outcome", "Wrong", "run_program"]


class Wrong(AssertionError):
    """Raised when a rule of the tape does not hold."""


class _Oops(Exception):
    """What a program raises."""


class _Asks(BaseException):
    """Raised at an exchange that has no answer yet."""

    def __init__(self, model: int, mine: FirstPass) -> None:
        super().__init__(model)
        self.model, self.mine = model, mine


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise Wrong(text)


class _NoCheck:
    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None: ...

    def failed(self) -> bool:
        return False


@dataclass
class _Filler:
    """Fills slots with block numbers, through a staged copy that may run one fill ahead."""

    gathers: bool
    contents: dict[int, int] = field(default_factory=dict)
    gathered: dict[int, int] = field(default_factory=dict)
    steps: list[tuple[object, ...]] = field(default_factory=list)
    num_fills: int = 0
    _ahead: tuple[int, int] | None = None
    _staged: int = -1

    def copy_ahead(self, block: int, fill: int) -> None:
        if self._ahead != (block, fill):
            self._ahead, self._staged = (block, fill), block

    def fill(self, slot: Slot, block: int, fill: int) -> None:
        _check(not slot.bound, "a slot was filled while its block computes")
        _check(slot.tape.block(fill) == block, "a fill loads the block of its place in the ring")
        if not self.gathers:
            _check(fill >= slot.tape.pos - 1, "a skipped fill was made though nobody gathers")
        self._take_staged(block, fill)
        self.contents[slot.index] = self._staged
        self.num_fills += 1
        self.gathered[slot.index] = self.num_fills
        self.steps.append(("fill", self._staged, slot.index))

    def _take_staged(self, block: int, fill: int) -> None:
        # As StagedTransfer does it: what was staged under this name is taken unseen.
        self.copy_ahead(block, fill)
        self._ahead = None

    def forget_staged(self) -> None:
        self._ahead = None


class _Agree:
    """The exchange of one tape; what it serves meanwhile is played afterwards."""

    def __init__(self, rank: _Rank, model: int) -> None:
        self._rank, self._model = rank, model

    def __call__(self, mine: FirstPass, serve: object) -> FirstPass:
        return self._rank.agree(self._model, mine)

    def announce(self, wanted: int) -> None:
        # Fills are counted over all tapes, which every rank makes in the same order.
        tape, filler = self._rank.tapes[self._model], self._rank.filler
        filler.steps.append(("announce", filler.num_fills + wanted - tape.issued))


class _Rank:
    """One rank's run of its passes."""

    def __init__(
        self, program: Program, passes: tuple[Pass, ...], answers: list[Answer], tape: type[Tape]
    ) -> None:
        self.program, self.passes, self.answers = program, passes, answers
        self.num_asked = self.num_refused = 0
        self.turns: list[tuple[int, int]] = []
        self.pool = Pool(
            tuple(
                Slot(i, torch.empty(0), CpuEvent(), CpuEvent(), CpuEvent(), CpuEvent(), _NoCheck())  # type: ignore[arg-type]
                for i in range(min(program.depth, max(program.sizes)))
            )
        )
        self.filler = _Filler(program.gathers)
        self.tapes = [self._make_tape(tape, model, n) for model, n in enumerate(program.sizes)]

    def _make_tape(self, kind: type[Tape], model: int, n: int) -> Tape:
        first = self.program.first_block(model)
        agree = _Agree(self, model)
        return kind(range(first, first + n), self.pool, self.filler, agree=agree)

    def agree(self, model: int, mine: FirstPass) -> FirstPass:
        """Return what was answered, or ask."""
        if not self.program.gathers:
            return mine
        self.filler.steps.append(("agree", model))
        if self.num_asked == len(self.answers):
            raise _Asks(model, mine)
        asked, answer = self.answers[self.num_asked]
        _check(asked == model, "the ranks agree on the same model")
        self.num_asked += 1
        return answer

    def run(self) -> _Asks | None:
        """Run until the end, or until an answer is needed."""
        try:
            self.tapes[0].prefetch()
            for one in self.passes:
                self._run_pass(one)
        except _Asks as asks:
            return asks
        return None

    def _run_pass(self, one: Pass) -> None:
        tape = self.tapes[one.model]
        order, skipped = tape.order, tape.num_skipped
        try:
            if not one.rooted:
                self._run_calls(one.calls)
            else:
                tape.begin_pass()
                try:
                    self._run_calls(one.calls)
                    if one.fails:
                        raise _Oops
                finally:
                    tape.end_pass()
        except _Oops:
            pass
        except UseError as error:
            _check("inside each other" in str(error), f"no UseError is due here: {error}")
            self.num_refused += 1
        _check(not self.pool.busy, "nothing is bound between two passes")
        if self.program.gathers and tape.n > tape.depth and tape.order == order:
            _check(tape.num_skipped == skipped, "every fill is made where the ranks gather")
        if one.rooted:
            self.turns.append((one.model, tape.base))
            _check(tape.base == tape.pos, "a pass ends at a whole turn")
            _check(tape.issued == tape.base + tape.depth - 1, "a pass ends with a prefetch")

    def _run_calls(self, calls: tuple[Call, ...]) -> None:
        for call in calls:
            try:
                self._run_call(call)
            except _Oops:
                if not call.caught:
                    raise

    def _run_call(self, call: Call) -> None:
        tape = next(t for t in self.tapes if call.block in t.order)
        alone, pos = not self.pool.busy, tape.pos
        held = [
            s.fill for s in self.pool.slots if s.tape is tape and tape.block(s.fill) == call.block
        ]
        try:
            slot = tape.before(call.block)
        except UseError as error:
            _check(not alone, f"refused as nested, but nothing is: {error}")
            raise
        try:
            self._check_bound(tape, slot, call.block)
            _check(not held or slot.fill in held, "what a slot holds already is not filled again")
            if alone and tape.pos != pos:
                _check(tape.issued == tape.pos + tape.depth - 1, "a call prefetches")
            self._run_calls(call.inner)
            if call.reenters:
                self._check_refused(tape)
            self._check_bound(tape, slot, call.block)
            if call.fails:
                raise _Oops
        finally:
            tape.after(slot)

    def _check_bound(self, tape: Tape, slot: Slot, block: int) -> None:
        _check(slot.bound > 0, "the slot of a block that computes is bound")
        _check(slot.tape is tape and tape.block(slot.fill) == block, "the slot says it holds it")
        _check(self.filler.contents[slot.index] == block, "the slot holds the block's bytes")
        self.filler.steps.append(("wait", self.filler.gathered[slot.index]))
        text = f"base <= pos <= issued, bounded: {tape}"
        _check(tape.base <= tape.pos <= tape.issued <= tape.pos + tape.depth - 1, text)

    def _check_refused(self, tape: Tape) -> None:
        before = (tape.base, tape.pos, tape.issued, tape.open)
        try:
            tape.begin_pass()
        except UseError as error:
            _check("busy" in str(error), str(error))
        else:
            raise Wrong("the model was entered from inside one of its blocks")
        _check(before == (tape.base, tape.pos, tape.issued, tape.open), "a refusal changes nothing")


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        even: Whether all ranks made equally many turns in every pass.
        stuck: Whether a rank waits for a fill that another one never makes.
        num_refused: Calls that were refused as nested too deep.
        learnt: Whether the ranks agreed on another order though their first passes differed.
    """

    even: bool
    stuck: bool
    num_refused: int
    learnt: bool


def run_program(program: Program, tape: type[Tape] = Tape) -> Outcome:
    """Run ``program`` on tapes of the class ``tape``.

    Raises:
        Wrong: A rule does not hold.
    """
    answers: list[Answer] = []
    learnt = False
    while True:
        ranks = [_Rank(program, passes, answers, tape) for passes in program.ranks]
        asks = [rank.run() for rank in ranks]
        asked = [ask for ask in asks if ask is not None]
        if not asked:
            break
        _check(len(asked) == len(ranks), "a rank ended while others agree")
        _check(len({ask.model for ask in asked}) == 1, "the ranks agree on the same model")
        answer = agreed([ask.mine for ask in asked])
        differ = len({ask.mine.calls for ask in asked}) > 1
        learnt = learnt or (differ and list(answer.calls) != sorted(set(answer.calls)))
        answers.append((asked[0].model, answer))
    even = all(rank.turns == ranks[0].turns for rank in ranks)
    stuck = program.gathers and _is_stuck([rank.filler.steps for rank in ranks])
    if program.gathers:
        _check_fills(program, ranks, even=even)
        _check(even or not program.even, "skips, idle passes and repeats make no rank go round")
        _check(not (even and stuck), "no rank is stuck")
    return Outcome(even, stuck, sum(rank.num_refused for rank in ranks), learnt)


def _check_fills(program: Program, ranks: list[_Rank], *, even: bool) -> None:
    """Check that every rank queues the same fills in the same order.

    At any time a rank has queued a beginning of its list, so beginnings agree when the lists do.
    """
    lists = [[step[1:] for step in rank.filler.steps if step[0] == "fill"] for rank in ranks]
    if even:
        _check(all(fills == lists[0] for fills in lists), "all ranks make the same fills")
    elif len(program.sizes) == 1:
        shared = min(map(len, lists))
        _check(
            all(fills[:shared] == lists[0][:shared] for fills in lists), "no fill is out of order"
        )


def _is_stuck(lists: list[list[tuple[object, ...]]]) -> bool:
    """Play what the ranks wrote down: a wait needs the fill to be queued on every rank.

    A rank that waits in an exchange makes the fills that another one announced: they are the first
    that it wrote down after the exchange.
    """
    at, fills, agreed = [0] * len(lists), [0] * len(lists), [0] * len(lists)
    served, announced = [0] * len(lists), 0
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(lists):
            while at[rank] < len(steps):
                kind, *rest = steps[at[rank]]
                if kind == "wait" and min(fills) < rest[0]:  # type: ignore[operator]
                    break
                if kind == "agree" and not _all_agree(lists, at, agreed, rank):
                    more = max(0, announced - fills[rank])
                    served[rank] += more
                    fills[rank] += more
                    moved = moved or more > 0
                    break
                if kind == "announce":
                    announced = max(announced, rest[0])  # type: ignore[call-overload]
                if kind == "fill" and served[rank]:
                    served[rank] -= 1
                else:
                    fills[rank] += kind == "fill"
                agreed[rank] += kind == "agree"
                at[rank] += 1
                moved = True
    return any(here < len(steps) for here, steps in zip(at, lists, strict=True))


def _all_agree(
    lists: list[list[tuple[object, ...]]], at: list[int], agreed: list[int], rank: int
) -> bool:
    """Return whether every rank is at the exchange of ``rank`` or beyond it."""
    number = agreed[rank]
    return all(
        agreed[other] > number
        or (agreed[other] == number and at[other] < len(steps) and steps[at[other]][0] == "agree")
        for other, steps in enumerate(lists)
    )
