"""The watch: a failure on one rank closes the offload on all, in time, with the rank's name."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from poison import PoisonBackend
from ranks import RanksError, run_ranks
from torch._C._distributed_c10d import TCPStore
from toys import inputs, make_toy, twin

import dlo_core as dlo
from dlo_core import store_line, watch
from dlo_core.accelerator import DeviceSeal
from dlo_core.board import Board, Position
from dlo_core.cpu import CpuBackend, GlooCollective
from dlo_core.engine import Engine
from dlo_core.interface import Capabilities, Seal
from dlo_core.rendezvous import meet
from dlo_core.store_line import StoreGone, StoreLine, StoreSilent

if TYPE_CHECKING:
    from collections.abc import Callable

    from toys import Toy

N = 6


def offload(model: Toy, timeout_s: float = 1.0, **options: Any) -> dlo.LayerwiseOffload:
    group = dist.group.WORLD
    return dlo.offload(model, device=PoisonBackend(0), group=group, timeout_s=timeout_s, **options)


def passes(model: Toy, count: int = 4) -> None:
    for number in range(count):
        model(inputs(number))


def error_of(call: Callable[[], object]) -> tuple[dlo.FillError, float]:
    began = time.monotonic()
    with pytest.raises(dlo.FillError) as caught:
        call()
    return caught.value, time.monotonic() - began


def stay_until_failed(offloaded: dlo.LayerwiseOffload, limit_s: float = 8.0) -> str:
    limit = time.monotonic() + limit_s
    while not offloaded.failed:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return str(offloaded.failure)


# --- what the others are told ---------------------------------------------------------------------


def test_a_rank_that_is_killed_is_named_at_once() -> None:
    """However long the deadline is: the host waits in gloo, which hears of it."""

    def job(rank: int) -> tuple[int, float, bool, bool]:
        model = make_toy(N)
        offloaded = offload(model, timeout_s=30.0)
        model(inputs())
        assert not offloaded.failed
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        error, took_s = error_of(partial(passes, model))
        assert isinstance(offloaded.failure, dlo.FillError)
        assert f"rank {rank}: block {error.block!r}" in str(error)
        assert "rank 1 (global rank 1, process " in str(error)
        again = time.monotonic()
        for call in (partial(passes, model), offloaded.state_dict, offloaded.run_pass):
            with pytest.raises(dlo.UseError, match="failed earlier"):
                call()
        offloaded.shutdown()
        quick = time.monotonic() - again < 10
        return error.culprit, took_s, offloaded.failed, quick

    with pytest.raises(RanksError) as caught:
        run_ranks(partial(_answer, job), 3)
    assert set(caught.value.errors) == {1}
    # The others had the right answer, or they would be here.
    assert "exit code -9" in caught.value.errors[1]


def _answer(job: Callable[[int], Any], rank: int) -> None:
    culprit, took_s, failed, quick = job(rank)
    assert culprit == 1
    assert took_s < 15
    assert failed
    assert quick


def test_an_exception_that_a_rank_does_not_come_back_from_reaches_the_others() -> None:
    """With its type, its text, its block and its rank; after the deadline, for it might come.

    B37, https://github.com/tier4/Diffusion-Planner/pull/336
    """

    def job(rank: int) -> tuple[str, int]:
        model = make_toy(N)
        offloaded = offload(model, timeout_s=0.8)
        model(inputs())
        if rank == 1:
            model.blocks[2].register_forward_pre_hook(_raise)
            with pytest.raises(ValueError, match="broken"):
                model(inputs())
            return stay_until_failed(offloaded), -1
        error, _ = error_of(partial(passes, model))
        return str(error), error.culprit

    (text, culprit), (told, _) = run_ranks(job, 2)
    assert culprit == 1
    assert "rank 1 (" in text
    assert "its last pass raised ValueError: the block is broken in block 'blocks.2'" in text
    # Whoever stayed away hears of it, too, and that it was to blame.
    assert "rank 0 (" in told
    assert "this rank" not in told or "rank 1" in told


def _raise(module: Any, args: Any) -> None:
    raise ValueError("the block is broken")


def test_a_rank_that_shuts_down_is_named_before_the_deadline() -> None:
    def job(rank: int) -> tuple[str, int, float]:
        model = make_toy(N)
        offloaded = offload(model, timeout_s=15.0)
        passes(model, 2)
        if rank == 1:
            offloaded.shutdown()
            dist.barrier()
            return "", 1, 0.0
        error, took_s = error_of(partial(passes, model))
        dist.barrier()
        return str(error), error.culprit, took_s

    text, culprit, took_s = run_ranks(job, 2)[0]
    assert culprit == 1
    assert "closed its offload after pass 2: its offload was shut down" in text
    assert took_s < 12


class Odd(Exception):
    """With attributes that have the names of ours, and no text."""

    reason = OSError("not a text")
    culprit = missing = "nobody"

    def __str__(self) -> str:
        raise ValueError


def test_a_failure_of_any_class_reaches_the_others() -> None:
    def job(rank: int) -> str:
        model = make_toy(N)
        offloaded = offload(model, timeout_s=2.0)
        model(inputs())
        if rank == 0:
            text = stay_until_failed(offloaded)
        else:
            assert offloaded.engine is not None
            offloaded.engine.pool.fail(Odd())
            text = ""
        dist.barrier()
        offloaded.shutdown()
        return text

    assert "failed: Odd: (no text: ValueError)" in run_ranks(job, 2)[0]


def test_ranks_hear_each_other_after_a_start_that_failed_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them had made its board by then, and the other had not."""
    prepare = Engine.prepare

    def job(rank: int) -> str:
        model = make_toy(N)
        config = dlo.OffloadConfig(timeout_s=2.0)
        offloaded = dlo.LayerwiseOffload(config, device=PoisonBackend(0), group=dist.group.WORLD)
        if rank == 1:
            monkeypatch.setattr(Engine, "prepare", partial(throw, OSError("once")))
        with pytest.raises((OSError, dlo.AgreementError), match="once"):
            offloaded.enable(model)
        monkeypatch.setattr(Engine, "prepare", prepare)
        offloaded.enable(model)
        model(inputs())
        if rank == 1:
            assert offloaded.engine is not None
            offloaded.engine.pool.fail(RuntimeError("out of order"))
        text = stay_until_failed(offloaded)
        dist.barrier()
        return text

    assert "rank 1 (global rank 1, process" in run_ranks(job, 2)[0]


def throw(error: BaseException, *args: object) -> None:
    raise error


def test_a_rank_that_is_idle_fails_too_and_its_next_call_says_so() -> None:
    """Nobody waits in dlo there: the watch marks it."""

    def job(rank: int) -> str:
        model = make_toy(N)
        offloaded = offload(model, timeout_s=2.0)
        model(inputs())
        if rank == 1:
            assert offloaded.engine is not None
            offloaded.engine.pool.fail(RuntimeError("out of order"))
        text = stay_until_failed(offloaded)
        with pytest.raises(dlo.UseError, match="failed earlier and is closed"):
            model(inputs())
        assert "failed: " in repr(offloaded)
        dist.barrier()
        return text

    first, second, third = run_ranks(job, 3)
    assert "rank 1 (global rank 1, process" in first
    assert "RuntimeError: out of order" in first
    assert "RuntimeError: out of order" in third
    assert second == "out of order"


def test_another_checkpoint_of_the_same_layout_is_refused(tmp_path: Any) -> None:
    """Each rank gives a part of every block: a mixture would be computed with."""
    from safetensors.torch import save_file

    for seed in range(2):
        save_file(make_toy(N, seed).state_dict(), tmp_path / f"{seed}.safetensors")

    def job(rank: int) -> str:
        with pytest.raises(dlo.AgreementError) as caught:
            offload(make_toy(N), checkpoint=tmp_path / f"{rank}.safetensors", load_timeout_s=20)
        return str(caught.value)

    texts = run_ranks(job, 2)
    assert texts[0] == texts[1]
    assert "values of model 0 (a sample): rank 0 has " in texts[0]


def test_a_copy_of_the_checkpoint_is_the_same(tmp_path: Any) -> None:
    """As on two nodes: a few bytes are compared."""
    from safetensors.torch import save_file

    for rank in range(2):
        save_file(make_toy(N).state_dict(), tmp_path / f"{rank}.safetensors")

    def job(rank: int) -> bool:
        model = make_toy(N, seed=5)
        offloaded = offload(model, checkpoint=tmp_path / f"{rank}.safetensors", load_timeout_s=20)
        right = torch.equal(model(inputs()), make_toy(N)(inputs()))
        offloaded.disable()
        return right

    assert run_ranks(job, 2) == [True, True]


@pytest.mark.slow
def test_a_failure_keeps_no_memory() -> None:
    """The watch closed it while the host waited; afterwards nothing holds what it streamed through.

    gloo lets go of what it had begun when its own time is over. In processes of their own: what a
    fork of a long test process has inherited may hold more.
    """
    assert run_ranks(forgotten_after_a_failure, 2, start_method="spawn") == [0, 0]


def forgotten_after_a_failure(rank: int) -> int:
    """Return what is allocated when a closed offload was let go without a shutdown."""
    model = make_toy(N)
    backend = PoisonBackend(0)
    offloaded = dlo.offload(model, device=backend, group=dist.group.WORLD, timeout_s=2.0)
    model(inputs())
    if rank == 1:
        assert offloaded.engine is not None
        offloaded.engine.pool.fail(RuntimeError("out of order"))
    else:
        with pytest.raises(dlo.DloError):
            passes(model)
    # Forgotten, without shutdown().
    del offloaded, model
    limit = time.monotonic() + 10
    while gc.collect() >= 0 and backend.memory().allocated and time.monotonic() < limit:
        time.sleep(0.05)
    dist.barrier()
    return backend.memory().allocated


# --- what is no failure ---------------------------------------------------------------------------


def test_a_rank_that_is_slow_or_away_for_less_than_the_deadline_is_waited_for() -> None:
    def job(rank: int) -> bool:
        model = make_toy(N)
        reference = twin(model)
        offloaded = offload(model, timeout_s=6.0)
        for number in range(3):
            time.sleep(0.2 * rank)
            assert torch.equal(model(inputs(number)), reference(inputs(number)))
        # Nothing is queued now that has not come: it may last.
        dist.barrier()
        time.sleep(0.3)
        assert not offloaded.failed
        offloaded.disable()
        return True

    assert run_ranks(job, 2) == [True, True]


def test_the_thread_ends_with_the_offload_and_keeps_no_model() -> None:
    """Disabled, shut down, or forgotten; and a fork has no thread, and harms nobody."""

    def threads() -> int:
        return sum(t.name in ("dlo-watch", "dlo-store") for t in threading.enumerate())

    def job(rank: int) -> int:
        for end in ("disable", "shutdown", "forget"):
            model = make_toy(N)
            offloaded = offload(model, timeout_s=5.0)
            model(inputs())
            assert threads() == 2
            if end == "forget":
                # A child that leaves through the exit handlers is not this rank.
                child = os.fork()
                if child == 0:
                    watch._leave()
                    store_line._at_exit.stop()
                    os._exit(1 if offloaded.failed else 0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                model(inputs())
                dist.barrier()
                del offloaded, model
            else:
                getattr(offloaded, end)()
            gc.collect()
            limit = time.monotonic() + 3
            while threads() and time.monotonic() < limit:
                time.sleep(0.01)
            assert not threads()
            dist.barrier()
        return threads()

    assert run_ranks(job, 2) == [0, 0]


# --- a device that goes on ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_seal_spoils_what_the_device_had_not_computed(mode: Callable[[], Any]) -> None:
    """Before ``give_up`` no bit changes, afterwards every plain floating tensor is NaN."""
    flag = torch.zeros((), dtype=torch.bool)
    seal = DeviceSeal(torch.device("cpu"), flag)
    with mode():
        plain, half = torch.rand(3, 4), torch.rand(4).bfloat16()
        others = [torch.arange(3), torch.rand(1, 3).expand(2, 3), torch.empty(2, device="meta")]
        before = plain.clone()
        seal.apply([plain, half, *others])
        assert torch.equal(plain, before)
        assert not half.isnan().any()
        seal.give_up()
        seal.apply([plain, half, *others])
    assert plain.isnan().all()
    assert half.isnan().all()
    assert torch.equal(others[0], torch.arange(3))
    assert not others[1].isnan().any()


def test_a_seal_spoils_what_a_model_made_in_an_inference_mode_of_its_own() -> None:
    seal = DeviceSeal(torch.device("cpu"), torch.zeros((), dtype=torch.bool))
    with torch.inference_mode():
        out = torch.ones(3)
    seal.apply([out])
    assert torch.equal(out, torch.ones(3))
    seal.give_up()
    seal.apply([out])
    assert out.isnan().all()


class Ahead(CpuBackend):
    """A backend whose host is said to run ahead; it notes what the watch does."""

    capabilities = Capabilities(alignment=256)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def new_seal(self) -> Seal:
        return NotingSeal(self.calls)

    def collective(self, group: Any) -> GlooCollective:
        return NotingCollective(group, self.calls)


class NotingSeal(Seal):
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def apply(self, tensors: Any) -> None:
        self.calls.append(f"apply to {len(list(tensors))}")

    def give_up(self) -> None:
        self.calls.append("give up")


class NotingCollective(GlooCollective):
    def __init__(self, group: Any, calls: list[str]) -> None:
        super().__init__(group)
        self.calls = calls

    def abort(self, error: BaseException) -> None:
        self.calls.append("abort")
        super().abort(error)


def test_a_pass_whose_gathers_are_given_up_under_it_never_returns() -> None:
    """First the seal, then the gathers; the pass raises, though all of its blocks were called."""

    def job(rank: int) -> list[str]:
        model = make_toy(N)
        backend = Ahead()
        offloaded = dlo.offload(model, device=backend, group=dist.group.WORLD, timeout_s=1.0)
        model(inputs())

        def stay_until_given_up() -> None:
            # The offload has failed a moment before.
            limit = time.monotonic() + 8
            while "abort" not in backend.calls and time.monotonic() < limit:
                time.sleep(0.01)

        if rank == 1:
            stay_until_given_up()
            dist.barrier()
            return backend.calls
        engine = offloaded.engine
        assert engine is not None

        def fail(module: Any, args: Any) -> None:
            engine.pool.fail(RuntimeError("the device burns"))
            stay_until_given_up()

        model.post.register_forward_pre_hook(fail)
        # The other rank is awaited by nothing in this pass: it makes its own fills of it.
        with pytest.raises(dlo.DloError):
            passes(model, 1)
        dist.barrier()
        return backend.calls

    for calls in run_ranks(job, 2):
        assert calls == ["apply to 1", "give up", "abort"]


# --- shutdown -------------------------------------------------------------------------------------


def test_shutdown_from_another_thread_ends_a_forward_that_waits() -> None:
    """At once, though the deadline is far; and from two threads, and again."""

    def job(rank: int) -> float:
        model = make_toy(N)
        offloaded = offload(model, timeout_s=30.0)
        model(inputs())
        if rank == 1:
            dist.barrier()
            return 0.0
        raised: list[BaseException] = []

        def forward() -> None:
            try:
                passes(model)
            except BaseException as error:
                raised.append(error)

        inside = threading.Thread(target=forward)
        inside.start()
        time.sleep(0.3)
        began = time.monotonic()
        others = [threading.Thread(target=offloaded.shutdown) for _ in range(2)]
        for other in others:
            other.start()
        for thread in (*others, inside):
            thread.join(5)
            assert not thread.is_alive()
        took_s = time.monotonic() - began
        offloaded.shutdown()
        assert isinstance(raised[0], dlo.DloError)
        assert "shut down" in str(raised[0])
        dist.barrier()
        return took_s

    assert run_ranks(job, 2)[0] < 3


# --- the store ------------------------------------------------------------------------------------


def start_store() -> tuple[int, int]:
    """Start a process that keeps a store; return its number and the store's port."""
    ready, wanted = os.pipe()
    child = os.fork()
    if child == 0:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(wanted, str(store.port).encode())
        time.sleep(30)
        os._exit(0)
    port = int(os.read(ready, 16))
    os.close(ready)
    os.close(wanted)
    return child, port


def test_a_store_that_is_stopped_is_an_error_in_time() -> None:
    """Its client would wait for ever, and keep every other thread from it."""
    child, port = start_store()
    try:
        line = StoreLine(TCPStore("127.0.0.1", port, None, False), 20.0)
        line.set("a", "1")
        assert line.get("a") == b"1"
        board = Board(line, "here", 0, 2)
        board.post(Position(passes=7))
        board.wait_for_news(5)
        row = board.heard()[0].row
        assert row is not None
        assert row.position.passes == 7
        assert board.heard()[1].row is None
        line._patience_s = 0.4
        os.kill(child, signal.SIGSTOP)
        # Its threads stop a little later.
        os.waitpid(child, os.WUNTRACED)
        began = time.monotonic()
        with pytest.raises(StoreSilent, match=r"did not answer for 0\.4 s"):
            line.get("a")
        board.post(Position())
        board.post(Position())
        time.sleep(0.1)
        assert board.silent_s > 0.4
        line.close(0.1)
        with pytest.raises(StoreSilent):
            line.get("a")
        assert time.monotonic() - began < 3
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_store_that_is_gone_ends_the_wait_for_the_first_rank() -> None:
    """However long ranks may take to come: nobody can answer any more."""
    child, port = start_store()
    line = StoreLine(TCPStore("127.0.0.1", port, None, False), 20.0)
    asked = TCPStore("127.0.0.1", port, None, False)

    def kill_once_asked() -> None:
        asked.get("dlo/meet/0-1/ask/1")
        os.kill(child, signal.SIGKILL)

    killer = threading.Thread(target=kill_once_asked)
    killer.start()
    with pytest.raises(StoreGone, match=r"the launcher, or global rank 0\) ended"):
        meet(line, (0, 1), 1, 20.0)
    killer.join()
    os.waitpid(child, 0)
    line.close()
