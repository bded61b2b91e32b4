"""Random programs: whatever the ranks do, slots hold the right block and fills stay in order.

``programs.py`` makes them, ``tape_ranks.py`` runs and checks them; here are the counts, the proof
that the checks can fail, and the same programs on the real engine over gloo.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from programs import Pass, make_program
from ranks import run_ranks
from tape_ranks import Wrong, run_program
from torch import nn
from toys import WIDTH, Block, WideBlock

import dlo_core
import dlo_core.tape
from dlo_core.cpu import CpuBackend
from dlo_core.errors import UseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from programs import Call, Program

    from dlo_core.tape import Tape


def explore(seeds: Iterable[int]) -> Counter[str]:
    """Run the programs of ``seeds``; count what they met."""
    met: Counter[str] = Counter()
    for seed in seeds:
        program = make_program(seed)
        try:
            outcome = run_program(program)
        except Exception as error:
            error.add_note(f"program {seed}: {program}")
            raise
        together = program.gathers and len(program.ranks) > 1
        met["even by construction"] += together and program.even
        met["even"] += together and outcome.even
        met["stuck"] += outcome.stuck
        met["learnt from different first passes"] += outcome.learnt and outcome.even
        met["refused as nested too deep"] += outcome.num_refused > 0
        met["rank-local"] += not program.gathers
        met["two models"] += len(program.sizes) > 1
    return met


def test_slots_hold_the_right_blocks_and_ranks_fill_alike_in_random_programs() -> None:
    met = explore(range(3_000))
    assert met["even by construction"] > 500
    assert met["even"] > met["even by construction"]
    assert min(met.values()) > 10, met


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slots_hold_the_right_blocks_and_ranks_fill_alike_in_20_000_random_programs() -> None:
    met = explore(range(10_000, 30_000))
    assert met["even by construction"] > 3_000
    assert min(met.values()) > 30, met


PLANTED = {
    "slot by block number": ("slots[fill % self.depth]", "slots[fill % self.n % self.depth]"),
    "no fills at the end of a pass": (
        "        if self._filler.gathers:\n            self._issue_to(self.base)",
        "        if False:\n            self._issue_to(self.base)",
    ),
    "fills at the end of a pass only after the exchange": (
        "            self._issue_to(self.base)\n        else:",
        "            pass\n        else:",
    ),
    "a slot is kept though the ranks gather": (
        "held and (not self._filler.gathers or self.n <= self.depth)",
        "held",
    ),
    "a bound slot is filled": ("and not self.slot(self.issued).bound", ""),
    "one fill too many": ("_issue_to(fill + self.depth)", "_issue_to(fill + self.depth + 1)"),
    "no prefetch": ("_issue_to(fill + self.depth)", "_issue_to(fill + 1)"),
    "no prefetch at the end of a pass": (
        "            self._learn(self._calls)\n        self._issue_to(self.base + self.depth - 1)",
        "            self._learn(self._calls)",
    ),
    "a pass is always one turn": ("max(1, -(-(self.pos - self.base) // self.n))", "1"),
    "an idle pass is no turn": ("max(1, -(", "max(0, -("),
    "the cursor stays where the pass ended": (
        "        self.pos = self.base\n        if self._calls",
        "        if self._calls",
    ),
    "skipped fills are made at a miss": ("self.issued = max(self.issued, fill)", "pass"),
    "skipped fills are made at the end": ("self.issued = max(self.issued, self.base)", "pass"),
    "a held block is filled again": ("        if past:", "        if False:"),
    "a repeat takes the next of the block's two places": (
        "if last >= self.base and",
        "if False and",
    ),
    "a miss goes back": ("(turn + 1) * self.n + places[0]", "turn * self.n + places[0]"),
    "a model is entered from inside": ("if self._pool.busy:", "if False:"),
    "a take-over leaves the other's pass open": ("owner.end_pass()", "owner.open = False"),
    "a take-over leaves the other's prefetch": ("owner.issued = owner.base", "pass"),
    "a new order leaves what slots hold": (
        "                slot.tape = None\n        self._filler.forget_staged()\n\n",
        "                pass\n\n",
    ),
    "the old tape ends where it is": ("self._issue_to(all_ranks.issued)", "pass"),
    "each rank takes its own order": (
        "            all_ranks = self._agree(mine, self._issue_to)",
        "            self._agree(mine, self._issue_to)\n            all_ranks = mine",
    ),
    "each rank goes on from its own turn": ("self.base = self.pos = all_ranks.base", "pass"),
    "a need beyond the first turn is kept secret": ("self._agree.announce(fill + 1)", "pass"),
}


def planted(old: str, new: str) -> type[Tape]:
    """Return the tape with one place edited."""
    source = inspect.getsource(dlo_core.tape)
    assert source.count(old) == 1, f"plant the edit anew: {old!r} is not there once"
    module = types.ModuleType("planted")
    # Dataclasses look their module up.
    sys.modules["planted"] = module
    exec(compile(source.replace(old, new), "planted", "exec"), module.__dict__)
    tape: type[Tape] = module.__dict__["Tape"]
    return tape


@pytest.mark.parametrize("edit", PLANTED)
def test_a_planted_fault_is_found(edit: str) -> None:
    tape = planted(*PLANTED[edit])
    programs = map(make_program, range(3_000))
    with pytest.raises(Wrong):
        deque((run_program(program, tape) for program in programs), maxlen=0)


class Oops(Exception):
    """What a program raises."""


class Step(nn.Module):
    """A block that runs others inside and uses its weights before and after."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.body = WideBlock() if wide else Block()

    def forward(
        self, x: torch.Tensor, inside: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return x after body, what is inside, and body again."""
        out: torch.Tensor = self.body(inside(self.body(x).tanh())).tanh()
        return out


class Programmed(nn.Module):
    """Runs what a pass says."""

    dlo_blocks = ("blocks",)

    def __init__(self, n: int, first: int, *, guarded: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Step(wide=i % 3 == 1) for i in range(n))
        self.requires_grad_(False)
        self.first, self.guarded = first, guarded

    def forward(self, x: torch.Tensor, one: Pass) -> torch.Tensor:
        """Run the calls, then fail if that is the program."""
        x = self.run(x, one.calls)
        if one.fails:
            raise Oops
        return x

    def run(self, x: torch.Tensor, calls: Sequence[Call]) -> torch.Tensor:
        """Run the calls."""
        for call in calls:
            try:
                x = self.blocks[call.block - self.first](x, partial(self._inside, call))
            except Oops:
                if not call.caught:
                    raise
        return x

    def _inside(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        x = self.run(x, call.inner)
        if call.reenters and self.guarded:
            with pytest.raises(UseError, match="busy"):
                self(x, Pass(0, ()))
        if call.fails:
            raise Oops
        return x


def answers(models: Sequence[Programmed], passes: Sequence[Pass]) -> list[torch.Tensor | None]:
    """Run the passes; a failed one answers None."""
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    got: list[torch.Tensor | None] = []
    for one in passes:
        model = models[one.model]
        try:
            got.append(model(x, one) if one.rooted else model.run(x, one.calls))
        except Oops:
            got.append(None)
    return got


def run_offloaded(program: Program, rank: int, size: int) -> None:
    torch.manual_seed(program.seed)
    models = [
        Programmed(n, program.first_block(number), guarded=True)
        for number, n in enumerate(program.sizes)
    ]
    resident = copy.deepcopy(models)
    for model in resident:
        model.guarded = False
    passes = program.ranks[rank]
    expected = answers(resident, passes)
    done = dlo_core.offload(
        models,
        device=CpuBackend(),
        group=dist.group.WORLD if size > 1 else None,
        depth=program.depth,
        stages=program.seed % 2 * 2,
        timeout_s=20.0,
    )
    got = answers(models, passes)
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        same = mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)
        assert same, f"pass {number} on rank {rank} of program {program.seed}"
    done.disable()
    for model, reference in zip(models, resident, strict=True):
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine, theirs), program.seed


def real_programs(count: int, size: int, start: int) -> list[Program]:
    """Return programs that get neither stuck nor refused: so the simulation says."""
    found: list[Program] = []
    seed = start
    while len(found) < count:
        program = make_program(seed)
        seed += 1
        if program.gathers != (size > 1) or len(program.ranks) != size:
            continue
        outcome = run_program(program)
        if not outcome.stuck and outcome.even and not outcome.num_refused:
            found.append(program)
    return found


def run_on_gloo(count: int, size: int, start: int = 0) -> None:
    programs = real_programs(count, size, start)

    def child(rank: int) -> None:
        torch.set_grad_enabled(False)
        for program in programs:
            run_offloaded(program, rank, size)

    run_ranks(child, size, limit_s=30.0 + count)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_programs_on_the_real_engine_give_the_bits_of_the_resident_run(size: int) -> None:
    run_on_gloo(12, size)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_many_programs_on_the_real_engine_give_the_bits_of_the_resident_run(size: int) -> None:
    run_on_gloo(150, size, start=100_000)
