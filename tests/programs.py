"""Random programs for tapes: what each rank calls in each pass, and how likely what is.

A program is *even* when no rank can go another turn of the ring alone: then all ranks must make the
same fills and none may get stuck (the note in tape.py). The other programs may only get stuck.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

__all__ = ["Call", "Pass", "Program", "make_program"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a block.

    Attributes:
        block: Its number among those of all models.
        inner: Calls from inside of it.
        fails: Whether it raises at its end.
        caught: Whether the forward catches what comes out of it.
        reenters: Whether it calls its own model, which must be refused.
    """

    block: int
    inner: tuple[Call, ...] = ()
    fails: bool = False
    caught: bool = False
    reenters: bool = False


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one rank.

    Attributes:
        model: Whose pass.
        calls: What it calls.
        rooted: Whether the root is called, and not only its blocks.
        fails: Whether the root raises at its end.
    """

    model: int
    calls: tuple[Call, ...]
    rooted: bool = True
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """What all ranks do.

    Attributes:
        seed: Makes this program again.
        sizes: Blocks of each model.
        depth: Slots.
        gathers: Whether the ranks gather.
        ranks: Each rank's passes.
        even: Whether no rank can go another turn alone, as the program was made.
    """

    seed: int
    sizes: tuple[int, ...]
    depth: int
    gathers: bool
    ranks: tuple[tuple[Pass, ...], ...]
    even: bool

    def first_block(self, model: int) -> int:
        """Return the number of a model's first block."""
        return sum(self.sizes[:model])


@dataclass
class _Model:
    """What the maker of a program knows of one model.

    Attributes:
        order: In which it runs its blocks.
        ring_known: Whether the tape's ring order is this order, on all ranks.
        fresh: Whether it had no pass yet.
        open: Whether its pass is open still, because the root was not called.
    """

    order: list[int]
    ring_known: bool
    fresh: bool = True
    open: bool = False


@dataclass
class _Maker:
    rng: random.Random
    depth: int
    size: int
    models: list[_Model]
    even: bool = True
    ranks: list[list[Pass]] = field(default_factory=list)

    def add_passes(self, count: int) -> None:
        self.ranks = [[] for _ in range(self.size)]
        for _ in range(count):
            self._add_pass(self.rng.randrange(len(self.models)))

    def finish(self) -> None:
        """End every model's last pass, so that ranks without a root are done too."""
        for number, model in enumerate(self.models):
            calls = tuple(map(Call, model.order))
            for passes in self.ranks:
                passes.append(Pass(number, calls))

    def _add_pass(self, number: int) -> None:
        model = self.models[number]
        kinds = {"differ": 10, "alike": 3, "whole": 4, "shuffled": 2, "wild": 1, "rootless": 2}
        if not model.open:
            # Without a root a second pass would go on in the first one's turn.
            kinds["loose"] = 2
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
        rooted = kind not in ("rootless", "loose")
        if model.open and kind == "rootless":
            rooted = True
        model.open = not rooted
        if kind in ("differ", "wild", "loose"):
            lists = [self._calls(model, wild=kind == "wild") for _ in range(self.size)]
            if kind == "loose":
                # A rank that calls nothing has no pass.
                lists = [calls or (Call(self.rng.choice(model.order)),) for calls in lists]
            # Whatever the first pass was, after it all ranks take the same place.
            self.even = self.even and (model.fresh or (kind != "wild" and model.ring_known))
        else:
            order = list(model.order)
            if kind == "shuffled":
                self.rng.shuffle(order)
            whole = kind in ("whole", "rootless")
            calls = tuple(map(Call, order)) if whole else self._calls(model, order)
            lists = [calls] * self.size
        if model.fresh:
            # The first pass may teach an order; only these teach the one that is known here.
            learns = kind == "whole" or (kind == "differ" and model.ring_known)
            model.ring_known = learns
            model.fresh = False
        for passes, calls in zip(self.ranks, lists, strict=True):
            passes.append(Pass(number, calls, rooted, self.rng.random() < 0.05))

    def _calls(
        self, model: _Model, order: list[int] | None = None, *, wild: bool = False
    ) -> tuple[Call, ...]:
        rng = self.rng
        blocks = list(model.order if order is None else order)
        if wild:
            blocks = [rng.choice(blocks) for _ in range(rng.randrange(2 * len(blocks)))]
        elif rng.random() < 0.6:
            keep = rng.choice([0.0, 0.4, 0.8, 0.8])
            blocks = [block for block in blocks if rng.random() < keep]
        if blocks and rng.random() < 0.2:
            blocks = blocks[: rng.randrange(len(blocks))]
        return tuple(self._nest(set(pairwise(model.order)), blocks))

    def _nest(self, neighbours: set[tuple[int, int]], blocks: list[int]) -> list[Call]:
        """Make calls of ``blocks``: repeats, failures, and neighbours inside each other."""
        rng, made, at = self.rng, [], 0
        while at < len(blocks):
            levels = 1
            while (
                levels < self.depth
                and at + levels < len(blocks)
                and rng.random() < 0.1
                and (blocks[at + levels - 1], blocks[at + levels]) in neighbours
            ):
                levels += 1
            call = self._leaf(blocks[at + levels - 1])
            for block in reversed(blocks[at : at + levels - 1]):
                call = Call(block, (call,), rng.random() < 0.02, rng.random() < 0.5)
            made.append(call)
            while levels == 1 and rng.random() < 0.15:
                made.append(self._leaf(blocks[at]))
            at += levels
        return made

    def _leaf(self, block: int) -> Call:
        rng = self.rng
        itself = (Call(block),) if rng.random() < 0.02 else ()
        return Call(
            block,
            itself,
            fails=rng.random() < 0.03,
            caught=rng.random() < 0.5,
            reenters=rng.random() < 0.02,
        )


def make_program(seed: int) -> Program:
    """Return the program of ``seed``."""
    rng = random.Random(seed)
    sizes = tuple(rng.randint(1, 7) for _ in range(rng.choice([1, 1, 2])))
    size, depth, gathers = rng.randint(1, 3), rng.randint(2, 4), rng.random() < 0.7
    models, first = [], 0
    for n in sizes:
        order = list(range(first, first + n))
        registered = rng.random() < 0.6
        if not registered:
            rng.shuffle(order)
            if rng.random() < 0.5:
                # One block runs twice in a forward.
                order.insert(rng.randrange(n), rng.choice(order))
        models.append(_Model(order, order == sorted(order)))
        first += n
    maker = _Maker(rng, depth, size, models)
    maker.add_passes(rng.randint(2, 5))
    maker.finish()
    ranks = tuple(map(tuple, maker.ranks))
    return Program(seed, sizes, depth, gathers, ranks, maker.even)
