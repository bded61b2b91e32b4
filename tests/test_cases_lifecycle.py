"""Public faults in time: a failed request, inference mode, threads, re-entry.

Each docstring has the address of the thread; the fault told there must not be ours.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from poison import PoisonBackend
from ranks import run_ranks
from torch import nn
from toys import WIDTH, Block, Toy, assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

N = 4


class Fragile(Block):
    """Raises what it is told to, before or after it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: BaseException | None = None
        self.late = False

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Raise or compute."""
        if self.fault is not None and not self.late:
            raise self.fault
        out = super().forward(x, scale)
        if self.fault is not None:
            raise self.fault
        return out


def fragile() -> tuple[Toy, list[Fragile], nn.Module]:
    torch.manual_seed(0)
    blocks = [Fragile() for _ in range(N)]
    model = Toy(blocks).requires_grad_(False)
    return model, blocks, twin(model)


FAULTS = [
    ValueError("bad request"),
    KeyboardInterrupt(),
    SystemExit(3),
    MemoryError(),
    GeneratorExit(),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("size", [1, 2])
def test_an_exception_in_a_block_does_not_poison_the_next_forward(
    size: int, fault: BaseException
) -> None:
    """In each block, before and after its compute, in the first pass and later; ranks alike.

    B20, https://github.com/vllm-project/vllm-omni/pull/7188
    """

    def job(rank: int) -> bool:
        for number in range(N):
            model, blocks, reference = fragile()
            before = snapshot(model)
            group = dist.group.WORLD if size > 1 else None
            offloaded = dlo.offload(model, device=PoisonBackend(0), group=group)
            for late in (False, True):
                blocks[number].fault, blocks[number].late = fault, late
                with pytest.raises(type(fault)):
                    model(inputs())
                blocks[number].fault = None
                for seed in range(2):
                    assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
            offloaded.disable()
            assert_restored(model, before)
        return True

    assert all(run_ranks(job, size)) if size > 1 else job(0)


@pytest.mark.parametrize("stages", [2, 0])
def test_a_rank_whose_block_raises_alone_strands_nobody(stages: int) -> None:
    """The failed rank still serves its peer, and both go on.

    B20, https://github.com/vllm-project/vllm-omni/pull/7188
    """

    def job(rank: int) -> bool:
        model, blocks, reference = fragile()
        offloaded = dlo.offload(
            model, device=PoisonBackend(0), group=dist.group.WORLD, stages=stages
        )
        for number in range(N):
            for victim in range(2):
                if rank == victim:
                    blocks[number].fault = ValueError("alone")
                    with pytest.raises(ValueError, match="alone"):
                        model(inputs())
                    blocks[number].fault = None
                else:
                    assert torch.equal(model(inputs(number)), reference(inputs(number)))
                assert torch.equal(model(inputs(9)), reference(inputs(9)))
        offloaded.disable()
        return True

    assert run_ranks(job, 2) == [True, True]


def test_an_exception_in_the_root_between_blocks() -> None:
    """B20, https://github.com/vllm-project/vllm-omni/pull/7188"""

    class Root(Toy):
        stop: int | None = None

        def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
            """Stop before a block."""
            for number, block in enumerate(self.blocks):
                if number == self.stop:
                    raise ValueError("stopped")
                x = block(x)
            if self.stop == len(self.blocks):
                raise ValueError("stopped")
            return x

    model = Root([Block() for _ in range(N)]).requires_grad_(False)
    reference = twin(model)
    dlo.offload(model, device=PoisonBackend())
    for stop in range(N + 1):
        model.stop = stop
        with pytest.raises(ValueError, match="stopped"):
            model(inputs())
        model.stop = None
        assert torch.equal(model(inputs()), reference(inputs()))


class Lazy(Block):
    """Makes a buffer in its first forward and updates it in place later."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Add the cache, which counts."""
        if self.cache is None:
            self.cache = torch.zeros(WIDTH)
        if not self.cache.is_inference() or torch.is_inference_mode_enabled():
            self.cache.add_(1)
        return super().forward(x, scale)


MODES: dict[str, Any] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "plain": nullcontext,
}
ORDERS = [
    ("inference", "no_grad", "plain"),
    ("plain", "no_grad", "inference"),
    ("no_grad", "inference", "plain"),
    ("inference", "plain", "inference"),
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("enabled_in", MODES)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_inference_mode_no_grad_and_plain_mix(
    order: tuple[str, ...], enabled_in: str, size: int
) -> None:
    """Enabled, run and disabled in any mode; slots and weights are no inference tensors.

    B26, https://github.com/sgl-project/sglang/issues/33470
    """

    def mode(name: str) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = MODES[name]()
        return made

    def job(rank: int) -> bool:
        model = make_toy(3)
        reference, before = twin(model), snapshot(model)
        seen: list[bool] = []
        for block in model.blocks:
            block.register_forward_pre_hook(
                lambda module, args: seen.extend(p.is_inference() for p in module.parameters())
            )
        with mode(enabled_in):
            group = dist.group.WORLD if size > 1 else None
            offloaded = dlo.offload(model, device=PoisonBackend(0), group=group)
        for name in order:
            with mode(name):
                assert torch.equal(model(inputs()), reference(inputs()))
        assert seen
        assert not any(seen)
        with mode(order[0]):
            offloaded.disable()
        assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
        assert_restored(model, before)
        # A plain module trains again; backward itself is not for forked processes.
        model.blocks[0].requires_grad_(True)
        assert model(inputs()).requires_grad
        return True

    assert all(run_ranks(job, size)) if size > 1 else job(0)


def test_a_buffer_made_lazily_by_the_model_is_not_ours_to_break() -> None:
    """B26, https://github.com/sgl-project/sglang/issues/33470"""
    model = Toy([Lazy() for _ in range(3)]).requires_grad_(False)
    reference = twin(model)
    dlo.offload(model, device=PoisonBackend())
    for name in ("no_grad", "inference", "plain"):
        with MODES[name]():
            assert torch.equal(model(inputs()), reference(inputs()))
    assert all(vars(block)["cache"].eq(3).all() for block in model.blocks)


def test_two_threads_in_one_model_are_right_or_told_busy() -> None:
    """Whatever comes back is equal; else the error is at once and says "busy".

    B44, https://github.com/sgl-project/sglang/pull/8521
    """
    model = make_toy(N)
    reference = twin(model)
    dlo.offload(model, device=PoisonBackend(0.0002))
    wanted = [reference(inputs(seed)) for seed in range(5)]
    outcomes: list[str] = []

    def run() -> None:
        for turn in range(50):
            try:
                got = model(inputs(turn % 5))
            except dlo.UseError as error:
                outcomes.append("busy" if "busy" in str(error) else str(error))
                time.sleep(0.001)
            else:
                outcomes.append("right" if torch.equal(got, wanted[turn % 5]) else "WRONG")

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(outcomes) == 100
    assert set(outcomes) <= {"right", "busy"}
    assert "right" in outcomes
    assert torch.equal(model(inputs()), reference(inputs()))


def test_a_thread_inside_a_block_makes_others_busy() -> None:
    """Surely, not by chance: root, block, idle pass and refresh.

    B44, https://github.com/sgl-project/sglang/pull/8521
    """
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(Block):
        wait = False

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            """Wait for the other thread."""
            if self.wait:
                inside.set()
                assert go_on.wait(10)
            return super().forward(x, scale)

    model = Toy([Block(), Waiting(), Block()]).requires_grad_(False)
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend())
    vars(model.blocks[1])["wait"] = True
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(model(inputs())))
    thread.start()
    try:
        assert inside.wait(10)
        for call in (
            lambda: model(inputs()),
            lambda: model.blocks[0](inputs()),
            lambda: model.blocks[1](inputs()),
            offloaded.run_pass().__enter__,
            offloaded.refresh,
        ):
            with pytest.raises(dlo.UseError, match="busy"):
                call()
    finally:
        go_on.set()
        thread.join(10)
    assert torch.equal(results[0], reference(inputs()))
    vars(model.blocks[1])["wait"] = False
    assert torch.equal(model(inputs()), reference(inputs()))


class Calling(Block):
    """Calls something in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.target: Any = None

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Call and compute."""
        target, self.target = self.target, None
        x = self.norm(x)
        if target is not None:
            x = target(x)
        out: torch.Tensor = x + self.linear(x)
        return out


def calling(n: int = 4) -> tuple[Toy, nn.Module]:
    torch.manual_seed(0)
    model = Toy([Calling() for _ in range(n)]).requires_grad_(False)
    return model, twin(model)


def aim(model: nn.Module, caller: int, target: Any) -> None:
    vars(attrgetter(f"blocks.{caller}")(model))["target"] = target


def test_a_block_that_calls_the_whole_model_is_refused() -> None:
    """B44, https://github.com/sgl-project/sglang/pull/8521"""
    model, reference = calling()
    dlo.offload(model, device=PoisonBackend())
    for caller in range(4):
        aim(model, caller, model)
        with pytest.raises(dlo.UseError, match="busy"):
            model(inputs())
        aim(model, caller, None)
        assert torch.equal(model(inputs()), reference(inputs()))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("depth", [2, 3])
def test_a_block_that_calls_itself_or_another_is_right_or_an_error(depth: int, size: int) -> None:
    """Every pair; one more level than there are slots is an error that says so.

    B44, https://github.com/sgl-project/sglang/pull/8521
    """

    def job(rank: int) -> list[str]:
        outcomes = []
        for caller in range(4):
            for target in range(4):
                model, reference = calling()
                group = dist.group.WORLD if size > 1 else None
                offloaded = dlo.offload(model, device=PoisonBackend(0), group=group, depth=depth)
                assert torch.equal(model(inputs()), reference(inputs()))
                for net in (reference, model):
                    aim(net, caller, attrgetter(f"blocks.{target}")(net))
                wanted = reference(inputs(1))
                try:
                    got = model(inputs(1))
                except dlo.UseError as error:
                    outcomes.append("deep" if "inside each other" in str(error) else str(error))
                else:
                    outcomes.append("right")
                    assert torch.equal(got, wanted)
                aim(model, caller, None)
                assert torch.equal(model(inputs(2)), reference(inputs(2)))
                offloaded.disable()
        return outcomes

    answers = run_ranks(job, size) if size > 1 else [job(0)]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].count("right") >= 8
    assert set(answers[0]) <= {"right", "deep"}
