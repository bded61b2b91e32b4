"""The order of work: right bits however late or early streams run, and no wait that is not needed.

The real engine runs on the testing kit's backend, rank-local and on forked gloo ranks, with a host
that runs ahead of compute. Each of the waits and records that order data is taken out in turn, and
some choice of early streams then gives wrong bits. A new one without its case here fails a test,
too.
"""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kernels import Program
from mutations import MODULES, RESIDENTS, Site, mutant, packed_sites, sites
from torch import nn
from toys import twin

import dlo_core.engine
import dlo_core.transfer
from dlo_core import offload
from dlo_core.errors import FillError
from dlo_core.testing import GlooAgreement, Recorder, SimBackend, World, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Early = tuple[str, ...]
    Calls = Sequence[Sequence[int] | None]

# The streams of one offload, as World(early=...) knows them.
COPY, COMM, COMPUTE = "stream 0", "stream 1", "compute"
LOCAL, STAGED, IN_PLACE = "local", "staged", "in place"
MODES = (LOCAL, STAGED, IN_PLACE)
LATE: Early = ()
EVERY_EARLY: tuple[Early, ...] = (
    LATE,
    (COPY,),
    (COMM,),
    (COMPUTE,),
    (COPY, COMM),
    (COPY, COMM, COMPUTE),
)
WHOLE: Calls = (None, None, None)
SKIPPING: Calls = (None, (), (0, 4), (1,), None)
SKIPPING_AT_FIRST: Calls = ((1, 3), (), (4,), None)


@torch.no_grad()
def run_program(
    mode: str,
    world: World,
    *,
    n: int = 5,
    depth: int = 2,
    calls: Calls = WHOLE,
    whole_elsewhere: bool = False,
    num_models: int = 1,
    recorder: Recorder | None = None,
) -> list[torch.Tensor]:
    """Run passes without a wait of the host; return what differs from the resident run.

    Args:
        mode: With or without a gather over all ranks, staged or in place.
        world: Decides the order.
        n: Blocks.
        depth: Slots.
        calls: The blocks of each pass; None is all.
        whole_elsewhere: Whether only rank 0 does so, and the others run whole passes.
        num_models: Models that take turns; each has a block less than the one before.
        recorder: Is told of everything.
    """
    if whole_elsewhere and dist.get_rank():
        calls = [None] * len(calls)
    models = [Program(n - number, seed=number) for number in range(num_models)]
    resident = [twin(model) for model in models]
    backend = SimBackend(world, recorder=recorder, host_ahead=True)
    done = offload(
        models,
        device=backend,
        group=None if mode == LOCAL else GlooAgreement(backend),
        depth=depth,
        stages=0 if mode == IN_PLACE else 2,
        timeout_s=10.0,
    )
    backend.host_syncs.clear()
    with backend.compute():
        got = run_passes(models, calls)
        waits = list(backend.host_syncs)
    expected = run_passes(resident, calls)
    backend.synchronize()
    done.shutdown()
    assert not waits, f"the host waited on the hot path: {waits}"
    return [a for a, b in zip(got, expected, strict=True) if not torch.equal(a, b)]


def run_passes(models: Sequence[nn.Module], calls: Calls) -> list[torch.Tensor]:
    """Return what each pass gives; its input where it fails."""
    outputs = []
    for number, blocks in enumerate(calls):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        try:
            outputs.append(models[number % len(models)](x, blocks))
        except ArithmeticError:
            outputs.append(x)
    return outputs


def count_wrong(mode: str, runs: Sequence[Callable[[], Any]], size: int = 2) -> int:
    """Return how many outputs of ``runs`` are wrong on the ranks; a mix that is noticed is one."""

    def child(rank: int) -> int:
        wrong = 0
        for run in runs:
            try:
                wrong += len(run())
            except FillError as error:
                if "another block's bytes" not in str(error):
                    raise
                wrong += 1
        return wrong

    return child(0) if mode == LOCAL else sum(run_ranks(child, size))


def worlds(choice: str, num_seeds: int = 0) -> list[World]:
    """Return worlds with some or every choice of early streams, and with random orders."""
    early = EVERY_EARLY if choice == "every" else EVERY_EARLY[:: len(EVERY_EARLY) - 1]
    seeds = range(num_seeds if choice == "every" else 1)
    made = [World(early=streams) for streams in early]
    return made + [World(mode="random", seed=seed) for seed in seeds]


SOME_OR_EVERY = pytest.mark.parametrize(
    "choice", ["some", pytest.param("every", marks=pytest.mark.slow)]
)


PROGRAMS: dict[str, Calls] = {
    "whole": WHOLE,
    "blocks are skipped": ((0, 2, 4), (1,), (), None, (3, 4), None),
    "blocks repeat": ((0, 0, 1, 2, 2, 2, 3, 4, 4), (0, 1, 1), None),
    "order changes": ((2, 0, 3, 1, 4), (2, 0, 3, 1, 4), (4, 3, 2, 1, 0), None),
    "a pass fails": ((0, 1, -1), None, (-1,), (0, -1), None),
}


@SOME_OR_EVERY
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_bits_are_right_however_late_or_early_streams_run(
    program: str, mode: str, choice: str
) -> None:
    calls = PROGRAMS[program]
    runs = [partial(run_program, mode, world, calls=calls) for world in worlds(choice, 8)]
    assert count_wrong(mode, runs) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_bits_are_right_for_any_number_of_blocks_and_slots(depth: int, mode: str) -> None:
    runs = [
        partial(run_program, mode, World(early=early), n=n, depth=depth)
        for n, early in ((1, LATE), (2, LATE), (3, (COPY, COMM)), (4, LATE), (7, (COPY, COMM)))
    ]
    assert count_wrong(mode, runs) == 0


@SOME_OR_EVERY
@pytest.mark.parametrize("calls", [SKIPPING, SKIPPING_AT_FIRST])
@pytest.mark.parametrize("mode", [STAGED, IN_PLACE])
def test_bits_are_right_where_one_rank_skips_what_the_other_computes(
    mode: str, calls: Calls, choice: str
) -> None:
    runs = [
        partial(run_program, mode, world, calls=calls, whole_elsewhere=True)
        for world in worlds(choice, 8)
    ]
    assert count_wrong(mode, runs) == 0


@SOME_OR_EVERY
@pytest.mark.parametrize("mode", MODES)
def test_bits_are_right_where_two_models_take_turns_in_the_slots(mode: str, choice: str) -> None:
    runs = [
        partial(run_program, mode, world, n=4, num_models=2, calls=[None] * 6)
        for world in worlds(choice, 8)
    ]
    assert count_wrong(mode, runs) == 0


@pytest.mark.parametrize("mode", [STAGED, IN_PLACE])
def test_bits_are_right_on_three_ranks(mode: str) -> None:
    some = [World(), World(early=(COPY, COMM)), World(mode="random")]
    runs = [partial(run_program, mode, world, depth=3) for world in some]
    assert count_wrong(mode, runs, size=3) == 0


class Log(Recorder):
    """Notes waits, too."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, str]] = []

    def waits(self, timeline: str, event: Any) -> None:
        """Note it."""
        self.steps.append((timeline, "wait"))
        super().waits(timeline, event)

    def accesses(self, timeline: str, op: str, **touched: Any) -> None:
        """Note it."""
        self.steps.append((timeline, op))
        super().accesses(timeline, op, **touched)


@pytest.mark.parametrize("mode", MODES)
def test_fills_are_queued_before_the_wait_of_the_block(mode: str) -> None:
    # DESIGN.md: find, issue, wait, bind. Issued after the wait, a fill would start a block late
    # wherever the wait blocks the host.
    def child(rank: int) -> list[tuple[str, str]]:
        log = Log()
        run_program(mode, World(), recorder=log)
        return log.steps

    log = child(0) if mode == LOCAL else run_ranks(child, 2)[0]
    arrives = ("rank 0 stream 0", "copy") if mode == LOCAL else ("rank 0 stream 1", "gather")
    waits = [at for at, step in enumerate(log) if step == (COMPUTE, "wait")]
    assert len(waits) == 15
    # Two slots: when block k is waited for, fills 0 to k + 1 are queued.
    assert [log[:at].count(arrives) for at in waits] == list(range(2, 17))


def test_a_wait_of_the_host_on_the_hot_path_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every run above counts stream, event and backend synchronize() calls; none may happen.
    def acquire(self: dlo_core.transfer.Transfer, slot: Any, block: int) -> None:
        slot.filled.synchronize()

    monkeypatch.setattr(dlo_core.transfer.Transfer, "acquire", acquire)
    with pytest.raises(AssertionError, match=r"hot path.*event\.synchronize"):
        run_program(LOCAL, World())


# --- no superfluous wait --------------------------------------------------------------------------

# What breaks without the call: the mode, the streams that are early, and the passes.
NEEDED: dict[str, tuple[str, Early, Calls]] = {
    "Transfer.acquire: stream.wait_event(slot.filled)": (LOCAL, LATE, WHOLE),
    "Transfer.release: stream.record_event(slot.drained)": (LOCAL, (COPY,), WHOLE),
    "LocalTransfer._fill_copy: self._copy_stream.wait_event(slot.drained)": (LOCAL, (COPY,), WHOLE),
    "LocalTransfer._fill_copy: self._copy_stream.record_event(filled)": (LOCAL, LATE, WHOLE),
    "StagedTransfer.fill: self._comm_stream.wait_event(stage.filled)": (STAGED, (COMM,), WHOLE),
    "StagedTransfer.fill: self._comm_stream.wait_event(slot.drained)": (
        STAGED,
        (COPY, COMM),
        WHOLE,
    ),
    "StagedTransfer.fill: self._comm_stream.record_event(stage.drained)": (
        STAGED,
        (COPY,),
        WHOLE,
    ),
    "StagedTransfer.fill: self._comm_stream.record_event(slot.filled)": (STAGED, LATE, WHOLE),
    "StagedTransfer._stage_copy: self._copy_stream.wait_event(stage.drained)": (
        STAGED,
        (COPY,),
        WHOLE,
    ),
    "StagedTransfer._stage_copy: self._copy_stream.record_event(stage.filled)": (
        STAGED,
        (COMM,),
        WHOLE,
    ),
    "GatheringTransfer._part_copy: self._copy_stream.wait_event(slot.filled)": (
        IN_PLACE,
        (COPY,),
        SKIPPING,
    ),
    "GatheringTransfer._part_copy: self._copy_stream.wait_event(slot.drained)": (
        IN_PLACE,
        (COPY, COMM),
        WHOLE,
    ),
    "GatheringTransfer._part_copy: self._copy_stream.record_event(slot.copied)": (
        IN_PLACE,
        (COMM,),
        WHOLE,
    ),
    "GatheringTransfer._bring: self._comm_stream.wait_event(slot.copied)": (
        IN_PLACE,
        (COMM,),
        WHOLE,
    ),
    "GatheringTransfer._bring: self._comm_stream.record_event(slot.filled)": (
        IN_PLACE,
        LATE,
        WHOLE,
    ),
}


def ordering() -> dict[str, Site]:
    """Return the waits and records that order data, by name."""
    return {str(site): site for site in sites() if not site.timing_only}


def test_every_wait_and_record_that_orders_data_has_its_case() -> None:
    found = [str(site) for site in sites() if not site.timing_only]
    cases = [*NEEDED, *RESIDENTS, SEVERAL_COMPUTE_STREAMS, *IN_GRAPHS]
    assert sorted(found) == sorted(cases)


def test_waits_are_statements_of_the_modules_that_order_transfers() -> None:
    """So none is hidden in another kind of statement, nor anywhere else."""
    (core,) = dlo_core.__path__
    calls = {
        path.name: sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "wait_event"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
        for path in Path(core).glob("*.py")
    }
    every = (*sites(), *packed_sites())
    assert sum(calls.values()) == sum("wait_event" in str(site) for site in every)
    assert {name for name, count in calls.items() if count} == {
        Path(module.__file__ or "").name for module in MODULES
    }


# Their cases are in test_capture.py.
IN_GRAPHS = (
    "Transfer.fork: current.record_event(self._edge)",
    "Transfer.fork: side.wait_event(self._edge)",
    "Transfer.join: side.record_event(self._edge)",
    "Transfer.join: current.wait_event(self._edge)",
    "Transfer.before_graph: stream.wait_event(slot.filled)",
    "Transfer.before_graph: stream.wait_event(slot.drained)",
    "Transfer.after_graph: stream.record_event(slot.drained)",
)
# This device has one compute stream; test_kit.py shows the need on several.
SEVERAL_COMPUTE_STREAMS = "Transfer._wait_for_reader: stream.wait_event(slot.drained)"


@pytest.mark.slow
@pytest.mark.parametrize("call", NEEDED)
def test_bits_are_wrong_without(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, early, calls = NEEDED[call]
    skips = calls is SKIPPING
    run = partial(run_program, mode, World(early=early), calls=calls, whole_elsewhere=skips)
    module = mutant(ordering()[call].number)
    for name in ("LocalTransfer", "StagedTransfer", "InPlaceTransfer"):
        monkeypatch.setattr(dlo_core.engine, name, vars(module)[name])
    assert count_wrong(mode, [run]) > 0
