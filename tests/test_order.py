"""The order of work: right bits however late or early streams run, and no wait that is not needed.

On the late device (``late.py``) each of the waits and records in ``transfer.py`` that order data is
taken out in turn, and some choice of eager streams then gives wrong bits. A new one without its
case here fails a test, too.
"""

from __future__ import annotations

import ast
import copy
import inspect
import types
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from late import LateBackend, LateToy
from ranks import run_ranks

import dlo_core.binding
import dlo_core.engine
import dlo_core.transfer
from dlo_core import offload
from dlo_core.errors import FillError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Eager = tuple[str, ...]
    Calls = Sequence[Sequence[int] | None]


@pytest.fixture(autouse=True)
def compute_that_keeps_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The late device's queue of compute holds tensors and writes late, as no device does."""
    monkeypatch.setattr(dlo_core.binding, "buffer_state", lambda buffer: (0, 0))


LOCAL, STAGED, IN_PLACE = "local", "staged", "in place"
MODES = (LOCAL, STAGED, IN_PLACE)
LATE: Eager = ()
EVERY_EAGER: tuple[Eager, ...] = (
    LATE,
    ("copy",),
    ("comm",),
    ("compute",),
    ("copy", "comm"),
    ("copy", "comm", "compute"),
)
WHOLE: Calls = (None, None, None)
# The first pass is whole: the ranks agree after it, and there one thread cannot gather meanwhile.
SKIPPING: Calls = (None, (), (0, 4), (1,), None)


@torch.no_grad()
def run_late(
    mode: str,
    backend: LateBackend,
    *,
    n: int = 5,
    depth: int = 2,
    calls: Calls = WHOLE,
    whole_elsewhere: bool = False,
    num_models: int = 1,
) -> list[torch.Tensor]:
    """Run passes on the late device without a wait of the host; return what differs.

    Args:
        mode: With or without a gather over all ranks, staged or in place.
        backend: The device.
        n: Blocks.
        depth: Slots.
        calls: The blocks of each pass; None is all.
        whole_elsewhere: Whether only rank 0 does so, and the others run whole passes.
        num_models: Models that take turns; each has a block less than the one before.
    """
    if whole_elsewhere and dist.get_rank():
        calls = [None] * len(calls)
    models = [LateToy(n - number, seed=number) for number in range(num_models)]
    resident = copy.deepcopy(models)
    done = offload(
        models,
        device=backend,
        group=None if mode == LOCAL else dist.group.WORLD,
        depth=depth,
        stages=0 if mode == IN_PLACE else 2,
        timeout_s=10.0,
    )
    backend.calls.clear()
    got: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for number, blocks in enumerate(calls):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        for outputs, those, device in ((got, models, backend), (expected, resident, None)):
            try:
                outputs.append(those[number % num_models](x, device, blocks))
            except ArithmeticError:
                outputs.append(x)
    waits = Counter(backend.calls)
    backend.synchronize()
    done.shutdown()
    assert not waits, f"the host waited on the hot path: {waits}"
    return [a for a, b in zip(got, expected, strict=True) if not torch.equal(a, b)]


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


PROGRAMS: dict[str, Calls] = {
    "whole": WHOLE,
    "blocks are skipped": ((0, 2, 4), (1,), (), None, (3, 4), None),
    "blocks repeat": ((0, 0, 1, 2, 2, 2, 3, 4, 4), (0, 1, 1), None),
    "order changes": ((2, 0, 3, 1, 4), (2, 0, 3, 1, 4), (4, 3, 2, 1, 0), None),
    "a pass fails": ((0, 1, -1), None, (-1,), (0, -1), None),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_bits_are_right_however_late_or_early_streams_run(program: str, mode: str) -> None:
    backends = [LateBackend(eager) for eager in EVERY_EAGER]
    backends += [LateBackend(seed=seed) for seed in range(3)]
    runs = [partial(run_late, mode, backend, calls=PROGRAMS[program]) for backend in backends]
    assert count_wrong(mode, runs) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_bits_are_right_for_any_number_of_blocks_and_slots(depth: int, mode: str) -> None:
    runs = [
        partial(run_late, mode, LateBackend(eager), n=n, depth=depth)
        for n in (1, 2, 3, 4, 7)
        for eager in (LATE, ("copy", "comm"))
    ]
    assert count_wrong(mode, runs) == 0


@pytest.mark.parametrize("mode", [STAGED, IN_PLACE])
def test_bits_are_right_where_one_rank_skips_what_the_other_computes(mode: str) -> None:
    backends = [LateBackend(eager) for eager in EVERY_EAGER]
    runs = [
        partial(run_late, mode, backend, calls=SKIPPING, whole_elsewhere=True)
        for backend in backends
    ]
    assert count_wrong(mode, runs) == 0


@pytest.mark.parametrize("mode", MODES)
def test_bits_are_right_where_two_models_take_turns_in_the_slots(mode: str) -> None:
    backends = [LateBackend(eager) for eager in EVERY_EAGER]
    runs = [
        partial(run_late, mode, backend, n=4, num_models=2, calls=[None] * 6)
        for backend in backends
    ]
    assert count_wrong(mode, runs) == 0


@pytest.mark.parametrize("mode", [STAGED, IN_PLACE])
def test_bits_are_right_on_three_ranks(mode: str) -> None:
    backends = [LateBackend(), LateBackend(("copy", "comm")), LateBackend(seed=0)]
    runs = [partial(run_late, mode, backend, depth=3) for backend in backends]
    assert count_wrong(mode, runs, size=3) == 0


@pytest.mark.parametrize("mode", MODES)
def test_fills_are_queued_before_the_wait_of_the_block(mode: str) -> None:
    # DESIGN.md: find, issue, wait, bind. Issued after the wait, a fill would start a block late
    # wherever the wait blocks the host.
    backend = LateBackend()

    def child(rank: int) -> list[tuple[str, str]]:
        run_late(mode, backend, calls=(None, None, None))
        return backend.log

    log = child(0) if mode == LOCAL else run_ranks(child, 2)[0]
    arrives = ("copy", "copy") if mode == LOCAL else ("comm", "gather")
    waits = [at for at, step in enumerate(log) if step == ("compute", "wait")]
    assert len(waits) == 15
    # Two slots: when block k is waited for, fills 0 to k + 1 are queued.
    assert [log[:at].count(arrives) for at in waits] == list(range(2, 17))


def test_a_wait_of_the_host_on_the_hot_path_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every run above counts stream, event and backend synchronize() calls; none may happen.
    def acquire(self: dlo_core.transfer.Transfer, slot: Any, block: int) -> None:
        slot.filled.synchronize()

    monkeypatch.setattr(dlo_core.transfer.Transfer, "acquire", acquire)
    with pytest.raises(AssertionError, match=r"hot path.*event\.synchronize"):
        run_late(LOCAL, LateBackend())


# --- no superfluous wait --------------------------------------------------------------------------

# What breaks without the call: the mode, the streams that run early, and the passes.
NEEDED: dict[str, tuple[str, Eager, Calls]] = {
    "Transfer.acquire: stream.wait_event(slot.filled)": (LOCAL, LATE, WHOLE),
    "Transfer.release: stream.record_event(slot.drained)": (LOCAL, ("copy",), WHOLE),
    "LocalTransfer._fill_copy: self._copy_stream.wait_event(slot.drained)": (
        LOCAL,
        ("copy",),
        WHOLE,
    ),
    "LocalTransfer._fill_copy: self._copy_stream.record_event(slot.filled)": (LOCAL, LATE, WHOLE),
    "StagedTransfer.fill: self._comm_stream.wait_event(stage.filled)": (STAGED, ("comm",), WHOLE),
    "StagedTransfer.fill: self._comm_stream.wait_event(slot.drained)": (
        STAGED,
        ("copy", "comm"),
        WHOLE,
    ),
    "StagedTransfer.fill: self._comm_stream.record_event(stage.drained)": (
        STAGED,
        ("copy",),
        WHOLE,
    ),
    "StagedTransfer.fill: self._comm_stream.record_event(slot.filled)": (STAGED, LATE, WHOLE),
    "StagedTransfer._stage_copy: self._copy_stream.wait_event(stage.drained)": (
        STAGED,
        ("copy",),
        WHOLE,
    ),
    "StagedTransfer._stage_copy: self._copy_stream.record_event(stage.filled)": (
        STAGED,
        ("comm",),
        WHOLE,
    ),
    "InPlaceTransfer._part_copy: self._copy_stream.wait_event(slot.filled)": (
        IN_PLACE,
        ("copy",),
        SKIPPING,
    ),
    "InPlaceTransfer._part_copy: self._copy_stream.wait_event(slot.drained)": (
        IN_PLACE,
        ("copy", "comm"),
        WHOLE,
    ),
    "InPlaceTransfer._part_copy: self._copy_stream.record_event(slot.copied)": (
        IN_PLACE,
        ("comm",),
        WHOLE,
    ),
    "InPlaceTransfer.fill: self._comm_stream.wait_event(slot.copied)": (
        IN_PLACE,
        ("comm",),
        WHOLE,
    ),
    "InPlaceTransfer.fill: self._comm_stream.record_event(slot.filled)": (IN_PLACE, LATE, WHOLE),
}


class Ordering(ast.NodeTransformer):
    """Finds the statements that order data, and takes one of them out."""

    def __init__(self, without: str | None = None) -> None:
        self.found: list[str] = []
        self._without = without
        self._where: list[str] = []

    def _enter(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        self._where.append(node.name)
        self.generic_visit(node)
        self._where.pop()
        return node

    visit_ClassDef = visit_FunctionDef = _enter

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Take the statement out if it is the one."""
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            return node
        if call.func.attr not in ("wait_event", "record_event") or is_timing(call, self._where):
            return node
        self.found.append(f"{'.'.join(self._where)}: {ast.unparse(call)}")
        return None if self.found[-1] == self._without else node


def is_timing(call: ast.Call, where: list[str]) -> bool:
    """Return whether the call only takes a time: an event of ``times``, or any in ``mark``."""
    event = ast.unparse(call.args[0])
    return "times." in event or (where == ["Transfer", "mark"] and event == "event")


def edited(without: str | None) -> tuple[types.ModuleType, list[str]]:
    """Return ``transfer.py`` without one statement, and all that order data in it."""
    tree = ast.parse(inspect.getsource(dlo_core.transfer))
    ordering = Ordering(without)
    module = types.ModuleType(dlo_core.transfer.__name__)
    code = compile(ordering.visit(tree), "transfer.py without a wait", "exec")
    exec(code, vars(module))
    return module, ordering.found


def test_every_wait_and_record_that_orders_data_has_its_case() -> None:
    found = edited(None)[1]
    assert sorted(found) == sorted([*NEEDED, SEVERAL_COMPUTE_STREAMS])
    calls = [
        node.func.attr
        for node in ast.walk(ast.parse(inspect.getsource(dlo_core.transfer)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    assert calls.count("wait_event") == sum("wait_event" in name for name in found)


# This device has one compute stream; test_kit.py shows the need on several.
SEVERAL_COMPUTE_STREAMS = "Transfer.acquire: stream.wait_event(slot.drained)"


@pytest.mark.slow
@pytest.mark.parametrize("call", NEEDED)
def test_bits_are_wrong_without(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, eager, calls = NEEDED[call]
    skips = calls is SKIPPING
    run = partial(run_late, mode, LateBackend(eager), calls=calls, whole_elsewhere=skips)
    module, found = edited(call)
    assert found.count(call) == 1
    for name in ("LocalTransfer", "StagedTransfer", "InPlaceTransfer"):
        monkeypatch.setattr(dlo_core.engine, name, vars(module)[name])
    assert count_wrong(mode, [run]) > 0
