"""From enable to disable or shutdown: all or nothing, the same objects back, nothing left."""

from __future__ import annotations

import contextlib
import gc
import logging
import subprocess
import sys
import textwrap
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from faults import Injected, called, failing_at
from leaks import nothing_left
from pinning import PinningBackend
from poison import PoisonBackend
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from toys import (
    WIDTH,
    AwkwardBlock,
    Block,
    NestedToy,
    Toy,
    assert_restored,
    inputs,
    make_toy,
    same_bits,
    snapshot,
    twin,
)

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable

N = 4


def check_three(model: nn.Module, reference: nn.Module, rank: int = 0) -> None:
    for seed in range(3):
        assert torch.equal(model(inputs(seed + rank)), reference(inputs(seed + rank)))


def world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def everywhere(job: Callable[[int], Any], size: int) -> list[Any]:
    return run_ranks(job, size) if size > 1 else [job(0)]


def stored_toy(folder: Path) -> Path:
    path = folder / "toy.safetensors"
    save_file(make_toy(N).state_dict(), path)
    return path


def meta_toy() -> Toy:
    model = make_toy(N)
    position = model.position
    model.to("meta").position = position
    return model


# --- enable is all or nothing ---------------------------------------------------------------------

# What carries the news of a failure, or comes after the last vote.
MESSENGERS = ("dlo_core.agreement:", "dlo_core.rendezvous:", "dlo_core.together:")


def steps_of(enable: Callable[[], Any]) -> list[str]:
    """Return the functions of dlo that ``enable`` calls before it commits, in order."""
    names: list[str] = []
    with called(names):
        enable()
    return names[: next(n for n, name in enumerate(names) if name.endswith("commit"))]


@pytest.mark.parametrize("source", ["module", "checkpoint"])
def test_a_failure_in_any_step_of_enable_leaves_the_model_as_it_was(
    source: str, tmp_path: Path
) -> None:
    """An exception at the first call of every function that runs before the commit."""
    path = stored_toy(tmp_path) if source == "checkpoint" else None
    backend = PoisonBackend(0)

    def enable(model: nn.Module) -> dlo.LayerwiseOffload:
        return dlo.offload(model, device=backend, checkpoint=path, resident=("blocks.1.norm",))

    steps = steps_of(lambda: enable(make_toy(N)).disable())
    # Its finaliser needs what its constructor sets first.
    steps = [step for step in steps if not step.endswith("_Descriptor.__init__")]
    assert len(steps) > 60
    model = make_toy(N)
    reference, before = twin(model), snapshot(model)
    for step in steps:
        with nothing_left(backend):
            with failing_at(step), contextlib.suppress(Injected, dlo.DloError):
                enable(model).disable()
            assert dlo.offloaded(model) is None, step
            assert_restored(model, before)
    offloaded = enable(model)
    check_three(model, reference)
    offloaded.disable()
    assert_restored(model, before)


@pytest.mark.parametrize(
    ("size", "host"),
    [
        (2, None),
        pytest.param(3, None, marks=pytest.mark.slow),
        pytest.param(2, "shared", marks=pytest.mark.slow),
        pytest.param(2, "mapped", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
def test_a_failure_in_any_step_on_one_rank_is_told_to_all(
    size: int, host: str | None, tmp_path: Path
) -> None:
    """All raise; all models are as they were; after all of that all can offload."""
    path = stored_toy(tmp_path) if host == "mapped" else None

    def job(rank: int) -> int:
        backend = PoisonBackend(0) if host is None else PinningBackend()

        def enable(model: nn.Module) -> dlo.LayerwiseOffload:
            return dlo.offload(
                model,
                device=backend,
                group=world(),
                load_timeout_s=15,
                host=host,
                use_allgather=host != "shared",
                checkpoint=path,
            )

        steps = steps_of(lambda: enable(make_toy(N)).disable())
        # What comes before is not guarded: a rank that dies there did not come, say the others.
        first = next(n for n, step in enumerate(steps) if step.endswith("Startup._plan"))
        unguarded: tuple[str, ...] = (
            "Startup._build",
            "Startup._compare_files",
            "gathering:make_collective",
            "gathering:make_group",
            "gathering:_saying",
            ".group_environment",
            "Startup._share",
        )
        # The same, and its finaliser needs what its constructor sets first.
        unguarded += ("_Made.address", "_Made.lock", "_Made.close_maker", "_Descriptor.__init__")
        # Advice to the system, which harms nobody when it fails.
        unguarded += (".give_back_pages", "CachedPages.give_back")
        steps = [s for s in steps[first:] if not s.startswith(MESSENGERS)]
        steps = [s for s in steps if not s.endswith(unguarded)]
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, steps)
        steps = [step for step in everyone[0] if all(step in theirs for theirs in everyone)]
        model = make_toy(N)
        reference, before = twin(model), snapshot(model)
        for number, step in enumerate(steps):
            injected = failing_at(step) if rank == number % size else contextlib.nullcontext()
            raised: Exception | None = None
            with nothing_left(backend):
                with injected:
                    try:
                        enable(model)
                    except (Injected, dlo.DloError) as error:
                        raised = error.with_traceback(None)
                assert raised is not None, step
                assert "injected" in str(raised), step
                raised = None
                assert_restored(model, before)
        offloaded = enable(model)
        check_three(model, reference, rank)
        offloaded.disable()
        assert_restored(model, before)
        return len(steps)

    assert min(run_ranks(job, size, limit_s=240.0)) > 40


# --- disable --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("source", ["module", "checkpoint"])
def test_disable_gives_the_same_objects_and_bits_back(
    source: str, size: int, tmp_path: Path
) -> None:
    """From the host copy, from the checkpoint, from the next turn of the tape: every dtype, stride,
    tie and flag."""

    def make() -> Toy:
        torch.manual_seed(0)
        model = Toy([AwkwardBlock(seed=s) for s in range(3)])
        attrgetter("blocks.1.weight")(model).requires_grad_(False)
        return model

    path: Path | None = None
    if source == "checkpoint":
        path = tmp_path / "toy.safetensors"
        kept = {name: t.contiguous() for name, t in make().state_dict().items()}
        save_file({k: t for k, t in kept.items() if not k.endswith("again")}, path)

    def job(rank: int) -> bool:
        model = make()
        before = snapshot(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), checkpoint=path)
        with torch.no_grad():
            model(inputs(rank))
            if rank == 0 and source == "checkpoint":
                # A restore from the checkpoint needs no peer, so ranks may be out of step.
                time.sleep(0.2)
        offloaded.disable()
        assert_restored(model, before)
        for block in model.blocks:
            assert block.again is block.weight
        offloaded.disable()
        assert "not enabled" in repr(offloaded)
        return True

    assert all(everywhere(job, size))


@pytest.mark.parametrize("size", [1, 2])
def test_disable_to_meta_gives_a_plain_module_without_values(size: int, tmp_path: Path) -> None:
    """Local, and the module can be offloaded again with a checkpoint."""
    path = stored_toy(tmp_path)

    def job(rank: int) -> bool:
        model, reference = make_toy(N), make_toy(N)
        strides = {name: p.stride() for name, p in model.named_parameters()}
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world())
        check_three(model, reference)
        time.sleep(0.2 * rank)
        offloaded.disable(to="meta")
        assert all(p.is_meta and type(p) is nn.Parameter for p in model.parameters())
        assert {name: p.stride() for name, p in model.named_parameters()} == strides
        assert all(not p.requires_grad for p in model.parameters())
        model.position = reference.position.clone()
        again = dlo.offload(model, device=PoisonBackend(0), group=world(), checkpoint=path)
        check_three(model, reference)
        again.disable()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert same_bits(p, q), name
        return True

    assert all(everywhere(job, size))


def test_disable_refuses_another_place() -> None:
    model = make_toy(N)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    with pytest.raises(dlo.ConfigError, match="'cpu' or 'meta'; got 'cuda'"):
        offloaded.disable(to="cuda")
    check_three(model, make_toy(N))


class Acting(Block):
    """Does something in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[], object] | None = None

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Act, then compute."""
        if self.act is not None:
            self.act()
        return super().forward(x, scale)


def acting() -> tuple[Toy, Acting, nn.Module]:
    torch.manual_seed(0)
    block = Acting()
    model = Toy([Block(), block, Block()]).requires_grad_(False)
    return model, block, twin(model)


@pytest.mark.parametrize("to", ["cpu", "meta"])
def test_disable_while_a_block_computes_is_refused(to: str) -> None:
    """From inside of the block, and from another thread; then it works."""
    model, block, reference = acting()
    before = snapshot(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))

    def disable() -> None:
        with pytest.raises(dlo.RestoreError, match="busy"):
            offloaded.disable(to=to)

    def from_another_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(disable).result(10)

    for act in (disable, from_another_thread):
        block.act = act
        assert torch.equal(model(inputs()), reference(inputs()))
    block.act = None
    check_three(model, reference)
    offloaded.disable()
    assert_restored(model, before)


def test_shutdown_while_a_block_computes_ends_the_forward_with_an_error() -> None:
    """What the block computes is right still; the next block says what happened."""
    model, block, _ = acting()
    backend = PoisonBackend(0)
    with nothing_left(backend):
        offloaded = dlo.offload(model, device=backend)
        block.act = offloaded.shutdown
        with pytest.raises(dlo.UseError, match="shut down"):
            model(inputs())
        block.act = None
        with pytest.raises(dlo.UseError, match="shut down"):
            model(inputs())
        offloaded.disable(to="meta")
        assert all(p.is_meta for p in model.parameters())
        del offloaded


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("depth", [2, 3])
def test_enable_and_disable_ten_times(depth: int, size: int) -> None:
    """One object or a new one each time; nothing is kept between."""

    def job(rank: int) -> bool:
        model = make_toy(N)
        reference, before = twin(model), snapshot(model)
        backend = PoisonBackend(0)
        offloaded = dlo.LayerwiseOffload(
            dlo.OffloadConfig(depth=depth), device=backend, group=world()
        )
        offloaded.enable(model).disable()
        for _ in range(10):
            with nothing_left(backend):
                offloaded.enable(model)
                assert torch.equal(model(inputs(rank)), reference(inputs(rank)))
                offloaded.disable()
                assert_restored(model, before)
        for _ in range(10):
            with nothing_left(backend):
                made = dlo.offload(model, device=backend, group=world(), depth=depth)
                assert torch.equal(model(inputs(rank)), reference(inputs(rank)))
                made.disable()
                del made
                assert_restored(model, before)
        return True

    assert all(everywhere(job, size))


def test_the_model_keeps_its_offload_alive() -> None:
    model = make_toy(N)
    backend = PoisonBackend(0)
    with nothing_left(backend):
        dlo.offload(model, device=backend)
        check_three(model, make_toy(N))
        found = dlo.offloaded(model)
        assert found is not None
        found.disable()
        del found
    assert dlo.offloaded(model) is None


def test_a_model_that_is_dropped_takes_everything_with_it() -> None:
    """Without disable or shutdown: memory and threads go when the last reference goes."""
    backend = PoisonBackend(0)
    with nothing_left(backend):
        model = make_toy(N)
        dlo.offload(model, device=backend)
        model(inputs())
        del model


# --- as a context manager, and shutdown -----------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_as_a_context_manager_it_disables(size: int) -> None:
    def job(rank: int) -> bool:
        model = make_toy(N)
        reference, before = twin(model), snapshot(model)
        backend = PoisonBackend(0)
        with nothing_left(backend):
            with dlo.offload(model, device=backend, group=world()):
                check_three(model, reference)
            assert_restored(model, before)
        return True

    assert all(everywhere(job, size))


def test_as_a_context_manager_it_shuts_down_after_an_exception() -> None:
    """On the rank that fails; no collective, so the other rank needs not know."""

    def job(rank: int) -> str:
        model = make_toy(N)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), timeout_s=3)
        if rank == 1:
            time.sleep(0.5)
            return ""
        with pytest.raises(ZeroDivisionError), offloaded:
            raise ZeroDivisionError
        assert "shut down" in repr(offloaded)
        with pytest.raises(dlo.UseError, match="shut down") as caught:
            model(inputs())
        return str(caught.value)

    assert "disable(to='meta')" in run_ranks(job, 2)[0]


@pytest.mark.parametrize("size", [1, 2])
def test_after_shutdown_everything_says_so(size: int, tmp_path: Path) -> None:
    """Twice is fine; a forward, a block, a weight, refresh, stats and disable say what happened;
    disable(to='meta') makes a plain module that a checkpoint can fill."""
    path = stored_toy(tmp_path)

    def job(rank: int) -> bool:
        model, reference = make_toy(N), make_toy(N)
        backend = PoisonBackend(0)
        with nothing_left(backend):
            offloaded = dlo.offload(model, device=backend, group=world())
            check_three(model, reference)
            offloaded.shutdown()
            offloaded.shutdown()
            # Streamed and resident weights are gone.
            uses: list[Callable[[], Any]] = [
                lambda: model(inputs()),
                lambda: model.blocks[0](inputs()),
                lambda: attrgetter("blocks.0.linear.weight")(model) + 1,
                lambda: attrgetter("pre.weight")(model) + 1,
                offloaded.refresh,
                offloaded.stats,
                offloaded.run_pass,
                partial(offloaded.enable, model),
            ]
            for use in uses:
                with pytest.raises(dlo.UseError, match="shut down"):
                    use()
            with pytest.raises(dlo.RestoreError, match="shut down"):
                offloaded.disable()
            with pytest.raises(dlo.ConfigError, match="shut down"):
                dlo.offload(model, device=backend, group=world())
            offloaded.disable(to="meta")
            assert dlo.offloaded(model) is None
            assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
            del offloaded, uses
        model.position = reference.position.clone()
        again = dlo.offload(model, device=backend, group=world(), checkpoint=path)
        check_three(model, reference)
        again.disable()
        return True

    assert all(everywhere(job, size))


@pytest.mark.parametrize("stages", [2, 0])
@pytest.mark.parametrize("depth", [2, 3])
def test_shutdown_waits_for_no_peer(depth: int, stages: int) -> None:
    """With gathers under way that the other rank will never join."""

    def job(rank: int) -> float:
        model = make_toy(6)
        offloaded = dlo.offload(
            model, device=PoisonBackend(0), group=world(), depth=depth, stages=stages, timeout_s=30
        )
        model(inputs())
        if rank == 1:
            dist.barrier()
            return 0.0
        with offloaded.run_pass():
            pass
        start = time.monotonic()
        offloaded.shutdown()
        took_s = time.monotonic() - start
        dist.barrier()
        return took_s

    assert run_ranks(job, 2)[0] < 10


SCRIPT = """
    import os
    import sys
    import torch
    import torch.distributed as dist
    import dlo_core as dlo
    from dlo_core.cpu import CpuBackend
    from toys import inputs, make_toy

    torch.set_num_threads(1)


    def run(rank, act, folder):
        store = f"file://{folder}/store-{act}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        model, reference = make_toy(5), make_toy(5)
        offloaded = dlo.offload(model, device=CpuBackend(), group=dist.group.WORLD, timeout_s=20)
        assert torch.equal(model(inputs()), reference(inputs()))
        if act != "exit":
            dist.destroy_process_group()
        if act in ("disable", "all"):
            try:
                offloaded.disable()
            except dlo.RestoreError as error:
                print("RestoreError", error)
        if act in ("forward", "all"):
            try:
                model(inputs())
            except dlo.DloError as error:
                print("forward:", type(error).__name__, error)
        if act in ("shutdown", "all"):
            offloaded.shutdown()
        if act in ("del", "all"):
            del offloaded, model
        print("end")


    folder = sys.argv[1]
    for act in sys.argv[2:]:
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                out = os.open(f"{folder}/{act}-{rank}", os.O_CREAT | os.O_WRONLY)
                os.dup2(out, 1)
                os.dup2(out, 2)
                run(rank, act, folder)
                sys.exit()  # the whole way out, with everything that runs at exit
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(act, *codes, flush=True)
"""
ACTS = ("exit", "nothing", "disable", "forward", "shutdown", "del", "all")


def test_a_process_ends_cleanly_whatever_was_closed_first(tmp_path: Path) -> None:
    """destroy_process_group first, then disable, a forward, shutdown, del, interpreter exit.

    B39, https://github.com/sgl-project/sglang/pull/33434
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    paths = [str(Path(__file__).parent), *[entry for entry in sys.path if entry]]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), *ACTS],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": ":".join(paths), "PYTHONSAFEPATH": "1", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{act} 0 0" for act in ACTS]
    for act in ACTS:
        for rank in range(2):
            text = (tmp_path / f"{act}-{rank}").read_text(encoding="utf-8")
            assert text.endswith("end\n"), text
            assert "Traceback" not in text
            if act in ("disable", "all"):
                assert "RestoreError the weights cannot be given back" in text
            if act in ("forward", "all"):
                assert "forward: " in text


def test_a_restore_that_cannot_be_is_an_error_and_the_placeholders_stay() -> None:
    """Gather mode, no checkpoint, the group gone: RestoreError as often as one likes."""

    def job(rank: int) -> list[str]:
        model = make_toy(N)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), timeout_s=5)
        model(inputs())
        dist.destroy_process_group()
        texts = []
        for _ in range(2):
            with pytest.raises(dlo.RestoreError) as caught:
                offloaded.disable()
            texts.append(str(caught.value))
            with pytest.raises(dlo.UseError, match=r"blocks\.0\.linear\.weight"):
                attrgetter("blocks.0.linear.weight")(model).sum()
        offloaded.shutdown()
        offloaded.disable(to="meta")
        assert all(p.is_meta for p in model.parameters())
        return texts

    for texts in run_ranks(job, 2):
        assert all("placeholders" in text for text in texts)


def test_disable_from_a_checkpoint_needs_no_group(tmp_path: Path) -> None:
    path = stored_toy(tmp_path)

    def job(rank: int) -> bool:
        model, reference = make_toy(N), make_toy(N)
        before = snapshot(model)
        offloaded = dlo.offload(
            model, device=PoisonBackend(0), group=world(), checkpoint=path, timeout_s=5
        )
        model(inputs())
        dist.destroy_process_group()
        offloaded.disable()
        assert_restored(model, before)
        check_three(model, reference)
        return True

    assert run_ranks(job, 2) == [True, True]


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_are_refused_and_never_wrong() -> None:
    """Grad mode on and a tensor argument or a streamed parameter that wants one: an error."""
    torch.manual_seed(0)
    model = Toy([Block() for _ in range(N)])
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    with pytest.raises(dlo.UseError, match="argument requires one"):
        model(inputs())
    with pytest.raises(dlo.UseError, match=r"blocks\.0\.norm\.weight.* requires one"):
        model.blocks[0](inputs())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            check_three(model, reference)
    model.requires_grad_(False)
    check_three(model, reference)
    x = inputs().requires_grad_(True)
    calls: list[Callable[[], Any]] = [
        lambda: model(x),
        lambda: model(x=x),
        lambda: model.blocks[0](x),
        lambda: model.blocks[0]([x]),
        lambda: model.blocks[0](inputs(), {"deep": [(x,)]}),
    ]
    for call in calls:
        with pytest.raises(dlo.UseError, match="argument requires one"):
            call()
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    # What is outside of the blocks may have a gradient where nothing streamed is passed by it.
    model.post.requires_grad_(True)
    model(inputs()).sum().backward()
    reference.requires_grad_(False).get_submodule("post").requires_grad_(True)
    reference(inputs()).sum().backward()
    gradient = model.post.weight.grad
    assert gradient is not None
    assert torch.equal(gradient, attrgetter("post.weight.grad")(reference))
    offloaded.disable()


# --- modules replaced while offloaded -------------------------------------------------------------


class Adapted(nn.Module):
    """A linear and a low-rank addition, as adapters have it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.rand(2, WIDTH) / 3, requires_grad=False)
        self.b = nn.Parameter(torch.rand(WIDTH, 2) / 3, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both."""
        out: torch.Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return out


def wrap(model: nn.Module, number: int) -> Adapted:
    torch.manual_seed(number)
    block: Any = attrgetter(f"blocks.{number}")(model)
    block.linear = Adapted(block.linear)
    adapted: Adapted = block.linear
    return adapted


def unwrap(model: nn.Module, number: int) -> None:
    block: Any = attrgetter(f"blocks.{number}")(model)
    block.linear = block.linear.base


@pytest.mark.parametrize("size", [1, 2])
def test_an_adapter_put_on_and_taken_off(size: int) -> None:
    """Until refresh() an error names the new parameter; then equal; then off again.

    B22, https://github.com/huggingface/diffusers/pull/11804
    """

    def job(rank: int) -> bool:
        model = make_toy(N)
        reference, before = twin(model), snapshot(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world())
        check_three(model, reference, rank)
        adapted = wrap(model, 1)
        wrap(reference, 1)
        for _ in range(2):
            with pytest.raises(dlo.UseError, match=r"'blocks\.1\.linear\.a' is new.*refresh\(\)"):
                model(inputs())
        offloaded.refresh()
        check_three(model, reference, rank)
        # The adapter's own weights may be changed: they are resident.
        adapted.a.mul_(2)
        attrgetter("blocks.1.linear.a")(reference).mul_(2)
        check_three(model, reference, rank)
        unwrap(model, 1)
        unwrap(reference, 1)
        with pytest.raises(dlo.UseError, match=r"refresh\(\)"):
            model(inputs())
        offloaded.refresh()
        check_three(model, reference, rank)
        offloaded.disable()
        assert_restored(model, before)
        return True

    assert all(everywhere(job, size))


def test_an_adapter_that_is_on_at_disable_stays_on() -> None:
    """B22, https://github.com/huggingface/diffusers/pull/11804"""
    model = make_toy(N)
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    for net in (model, reference):
        wrap(net, 2)
    offloaded.refresh()
    check_three(model, reference)
    offloaded.disable()
    check_three(model, reference)
    values = model.state_dict()
    assert values.keys() == reference.state_dict().keys()
    assert all(torch.equal(values[k], v) for k, v in reference.state_dict().items())


def test_a_replaced_parameter_is_an_error_that_names_it() -> None:
    model = make_toy(N)
    reference = twin(model)
    dlo.offload(model, device=PoisonBackend(0))
    norm: Any = attrgetter("blocks.2.norm")(model)
    old = norm.weight
    norm.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    with pytest.raises(dlo.UseError, match=r"'blocks\.2\.norm\.weight' was replaced"):
        model(inputs())
    norm.weight = old
    check_three(model, reference)


def test_refresh_refuses_what_it_cannot_place_and_can_be_tried_again() -> None:
    model = make_toy(N)
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    adapted = wrap(model, 1)
    wrap(reference, 1)
    whole = adapted.a
    adapted.a = nn.Parameter(torch.empty(2, WIDTH, device="meta"), requires_grad=False)
    with pytest.raises(dlo.ConfigError, match=r"'blocks\.1\.linear\.a' is new and on the meta"):
        offloaded.refresh()
    adapted.a = whole
    offloaded.refresh()
    check_three(model, reference)


class Writing(Block):
    """Writes into a large buffer in its forward."""

    cache: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(size))
        self.write = True

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Write, then compute."""
        if self.write:
            self.cache.add_(1)
        return super().forward(x + self.cache[0], scale)


def test_a_write_into_a_streamed_buffer_is_an_error_and_into_a_small_one_is_kept() -> None:
    torch.manual_seed(0)
    model = Toy([Writing(300_000), Block(), Block()]).requires_grad_(False)
    block: Any = model.blocks[0]
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    with pytest.raises(dlo.UseError, match=r"block 'blocks\.0' was written.*resident="):
        model(inputs())
    block.write = False
    attrgetter("blocks.0")(reference).write = False
    check_three(model, reference)
    offloaded.disable()
    assert not block.cache.any()
    for resident, size in (("blocks.0.cache",), 300_000), ((), 10):
        model = Toy([Writing(size), Block(), Block()]).requires_grad_(False)
        reference = twin(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), resident=resident)
        check_three(model, reference)
        offloaded.disable()
        assert attrgetter("blocks.0.cache")(model).eq(3).all()


# --- passes ---------------------------------------------------------------------------------------


def by_blocks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a toy without calling its root."""
    net: Any = model
    x = net.pre(x) + net.table + net.position
    for block in net.blocks:
        x = block(x)
    out: torch.Tensor = net.post(x)
    return out


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("inside", [True, False])
def test_engines_that_call_blocks_and_not_the_root(inside: bool, size: int) -> None:
    """In run_pass(), or without any: the first block of the next turn begins a new pass."""

    def job(rank: int) -> bool:
        model = make_toy(N)
        reference, before = twin(model), snapshot(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world())
        for seed in range(4):
            x = inputs(seed + rank)
            with offloaded.run_pass() if inside else contextlib.nullcontext():
                assert torch.equal(by_blocks(model, x), reference(x))
        check_three(model, reference, rank)
        if inside:
            assert offloaded.stats().passes == 7
        offloaded.disable()
        assert_restored(model, before)
        return True

    assert all(everywhere(job, size))


def test_idle_passes_serve_the_peer() -> None:
    """One rank computes while the other has no work, in turn."""

    def job(rank: int) -> bool:
        model = make_toy(5)
        reference = twin(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world())
        for turn in range(6):
            if turn % 2 == rank:
                assert torch.equal(model(inputs(turn)), reference(inputs(turn)))
            else:
                with offloaded.run_pass():
                    pass
        check_three(model, reference, rank)
        offloaded.disable()
        return torch.equal(model(inputs()), reference(inputs()))

    assert run_ranks(job, 2) == [True, True]


def test_run_pass_must_be_told_which_of_several_models() -> None:
    a, b = make_toy(N), make_toy(N, seed=1)
    references = twin(a), twin(b)
    offloaded = dlo.offload([a, b], device=PoisonBackend(0))
    with pytest.raises(dlo.ConfigError, match="which"):
        offloaded.run_pass()
    with pytest.raises(dlo.ConfigError, match="not one of the enabled models"):
        offloaded.run_pass(make_toy(2))
    for model, reference in zip((a, b), references, strict=True):
        with offloaded.run_pass(model):
            assert torch.equal(by_blocks(model, inputs()), reference(inputs()))
    check_three(a, references[0])


# --- compile --------------------------------------------------------------------------------------


class Counting:
    """A compiler backend that compiles nothing and counts."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        self.graphs.append(graph.code)
        return graph.forward


def compile_blocks(model: Toy, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


@pytest.mark.parametrize("first", ["compile", "enable"])
@pytest.mark.parametrize("use", ["eager", "counting"])
def test_compiled_blocks_stay_inside_of_the_wrapper(first: str, use: str) -> None:
    """Either order: equal bits, no transfer in a graph, and compiled still after disable.

    B25, https://github.com/vllm-project/vllm-omni/pull/6073
    """
    torch._dynamo.reset()
    model = make_toy(N)
    reference, before = twin(model), snapshot(model)
    counting = Counting()
    backend = counting if use == "counting" else "eager"
    device = PoisonBackend(0)
    if first == "compile":
        compile_blocks(model, backend)
    offloaded = dlo.offload(model, device=device)
    if first == "enable":
        compile_blocks(model, backend)
    with torch.no_grad():
        check_three(model, reference)
        copies = device.num_copies
        check_three(model, reference)
    assert device.num_copies - copies == 3 * N
    if use == "counting":
        # Blocks of one class share their code; their weights are inputs of the graph.
        assert len(counting.graphs) == 1
        assert "linear" in counting.graphs[0]
    offloaded.disable()
    for block in model.blocks:
        assert block._compiled_call_impl is not None
        block._compiled_call_impl = None
    assert_restored(model, before)
    torch._dynamo.reset()


def test_what_a_refused_call_was_given_is_let_go_with_the_error() -> None:
    """Without the collector: on a device it is memory that nobody can use until it comes."""
    model = NestedToy(2)
    with dlo.offload(model.requires_grad_(False), device=PoisonBackend(0)):
        handle = model.blocks[1].register_forward_pre_hook(lambda *_: model.blocks[2](inputs()))
        x = inputs().clone()
        given = weakref.ref(x)
        gc.collect()
        gc.disable()
        try:
            with torch.no_grad(), pytest.raises(dlo.UseError, match="inside each other") as caught:
                model(x)
            del caught, x
            assert given() is None
        finally:
            gc.enable()
            handle.remove()


# --- what it says of itself -----------------------------------------------------------------------


def test_one_line_at_enable_and_one_at_disable(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dlo"):
        offloaded = dlo.offload(make_toy(N), device=PoisonBackend(0))
        assert len(caplog.records) == 1
        assert "enabled Toy" in caplog.text
        offloaded.disable()
        assert len(caplog.records) == 2
        assert "disabled Toy" in caplog.text
    assert all(vars(record)["rank"] == 0 for record in caplog.records)
    assert all(record.name == "dlo" for record in caplog.records)


def test_repr_shows_the_state() -> None:
    model = make_toy(N)
    offloaded = dlo.LayerwiseOffload(dlo.OffloadConfig(depth=3), device=PoisonBackend(0))
    assert "not enabled" in repr(offloaded)
    offloaded.enable(model)
    assert "Toy, 4 blocks" in repr(offloaded)
    assert "depth=3" in repr(offloaded)
    offloaded.shutdown()
    assert "shut down" in repr(offloaded)
