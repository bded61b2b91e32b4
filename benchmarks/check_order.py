"""Order: bits in every shape of offload, waits of the host, compiling, NCCL."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checks import Findings, Options

    from dlo_core.bench.launch import Member

__all__ = ["bits", "compiled", "graph", "nccl", "sanitizer", "sync"]


def _small(options: Options, blocks: int = 12, halves: int = 0) -> Any:
    from dlo_core.bench.model import Shape

    if options.small:
        return Shape(64, 4, min(blocks, 5), halves, "float32")
    return Shape(480, 4, blocks, halves)


def bits(options: Options, found: Findings) -> None:
    """Compare with the resident run: depths, odd counts, unequal blocks, both grad modes, twice."""
    import torch

    import dlo_core as dlo
    from dlo_core.bench.model import build, inputs

    device = torch.device(options.device)
    for blocks, halves in ((12, 0), (7, 0), (5, 2), (1, 0)):
        shape = _small(options, blocks, halves)
        resident, model = build(shape, device), build(shape)
        for mode in (torch.no_grad, torch.inference_mode):
            for depth in (2, 3, 4):
                wrong = 0
                with mode():
                    offloaded = dlo.offload(model, device=options.device, depth=depth)
                    for tokens in (16, 300, 16):
                        args = inputs(shape, tokens, device)
                        wrong += not torch.equal(model(*args), resident(*args))
                    offloaded.disable()
                name = f"wrong passes: {blocks} + {halves} a block, depth {depth}, {mode.__name__}"
                found.at_most(name, wrong, 0)


def sync(options: Options, found: Findings) -> None:
    """Run in steady state where every wait of the host is an error, and count calls that wait."""
    options.need_cuda()
    import torch
    from torch.profiler import ProfilerActivity, profile

    import dlo_core as dlo
    from dlo_core.bench.model import build, inputs

    shape = _small(options)
    model = build(shape)
    args = inputs(shape, 256, options.device)
    with torch.inference_mode():
        offloaded = dlo.offload(model, device=options.device, packed=False)
        for _ in range(3):
            model(*args)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                model(*args)
            found.true("no host synchronisation in five passes", True)
        except RuntimeError as error:
            found.note(synchronised=str(error)[:500])
            found.true("no host synchronisation in five passes", False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                model(*args)
        counts = {event.key: event.count for event in profiler.key_averages()}
        waits = {key: n for key, n in counts.items() if "Synchronize" in key}
        found.note(waiting_calls=waits, copies=counts.get("Memcpy HtoD (Pinned -> Device)"))
        hidden = {key: n for key, n in waits.items() if key != "cudaDeviceSynchronize"}
        found.at_most("stream or event waits in three passes", sum(hidden.values()), 0)
        found.true("copies come from pinned memory", bool(found.facts["copies"]))
        offloaded.shutdown()


def compiled(options: Options, found: Findings) -> None:
    """Compile block by block and the root: the compiled resident run's bits, and one graph."""
    options.need_cuda()
    import torch

    import dlo_core as dlo
    from dlo_core.bench.model import build, inputs

    shape = _small(options)
    device = torch.device(options.device)
    args = inputs(shape, 256, device)
    graphs: list[int] = []

    def counting(graph: Any, example: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        graphs.append(len(example))
        return compile_fx(graph, example)

    def compile_blocks(model: Any) -> None:
        for block in model.blocks:
            block.compile(backend=counting, fullgraph=True)

    with torch.inference_mode():
        resident = build(shape, device)
        compile_blocks(resident)
        reference = resident(*args)
        found.note(graphs_resident=len(graphs))
        for first in ("compile", "enable"):
            torch._dynamo.reset()
            graphs.clear()
            model = build(shape)
            if first == "compile":
                compile_blocks(model)
            offloaded = dlo.offload(model, device=options.device)
            if first == "enable":
                compile_blocks(model)
            with torch._dynamo.config.patch(error_on_recompile=True):
                wrong = sum(not torch.equal(model(*args), reference) for _ in range(4))
            found.at_most(f"wrong passes, {first} first", wrong, 0)
            found.at_most(f"graphs, {first} first", len(graphs), 1)
            offloaded.shutdown()
        torch._dynamo.reset()
        model = build(shape)
        offloaded = dlo.offload(model, device=options.device)
        call = torch.compile(model, backend="eager")
        eager = build(shape, device)(*args)
        wrong = sum(not torch.equal(call(*args), eager) for _ in range(3))
        found.at_most("wrong passes of a compiled root", wrong, 0)
        offloaded.shutdown()


def graph(options: Options, found: Findings) -> None:
    """Capture a pass and replay it: bits, beside ordinary passes, and what a step costs."""
    options.need_cuda()
    import torch

    import dlo_core as dlo
    from dlo_core.bench.model import build, inputs

    shape = _small(options)
    device = torch.device(options.device)
    resident, model = build(shape, device), build(shape)
    args = inputs(shape, 256, device)

    def step_us(call: Any) -> tuple[float, float]:
        """Return the microseconds of a step and of its issue by the host, medians of 60."""
        marks, issued = [], []
        for _ in range(61):
            start = time.perf_counter()
            call(*args)
            issued.append((time.perf_counter() - start) * 1e6)
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        torch.cuda.synchronize()
        steps = [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]
        return round(statistics.median(steps), 1), round(statistics.median(issued), 1)

    with torch.inference_mode():
        offloaded = dlo.offload(model, device=options.device)
        captured = offloaded.capture(model, *args)
        wrong = 0
        for number in range(30):
            fresh = inputs(shape, 256, device, seed=number)
            wanted = resident(*fresh)
            wrong += not torch.equal(captured(*fresh), wanted)
            wrong += not torch.equal(model(*fresh), wanted)
        found.at_most("wrong replays and passes in turn", wrong, 0)
        for name, call in (("resident", resident), ("pass", model), ("replay", captured)):
            step, issue = step_us(call)
            found.note(**{f"{name}_step_us": step, f"{name}_host_us": issue})
        memory = []
        for _ in range(100):
            captured(*args)
            memory.append(offloaded.backend.memory().reserved)
        found.at_most("values of reserved memory in 100 replays", len(set(memory)), 1)
        del captured
        offloaded.shutdown()


def sanitizer(options: Options, found: Findings) -> None:
    """Run under torch's sanitizer, which reports accesses that nothing orders."""
    options.need_cuda()
    import torch
    import torch.cuda._sanitizer

    torch.cuda._sanitizer.enable_cuda_sanitizer()
    import dlo_core as dlo
    from dlo_core.bench.model import build, inputs

    shape = _small(options, 7)
    with torch.inference_mode():
        model = build(shape)
        offloaded = dlo.offload(model, device=options.device)
        for tokens in (16, 64, 16):
            model(*inputs(shape, tokens, options.device))
        torch.cuda.synchronize()
        offloaded.disable()
    found.true("no race was reported", True)


def nccl(options: Options, found: Findings) -> None:
    """Gather over two ranks of one GPU, 200 passes, while another group exchanges beside it."""
    from dlo_core.bench.launch import run_ranks

    passes = 10 if options.small else 200
    # NCCL refuses two ranks on one GPU, unless it takes them for two hosts.
    environment = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    device = options.device if ":" in options.device or not options.cuda else f"{options.device}:0"
    answers = run_ranks(
        gather_rank,
        (passes, options.small),
        device=device,
        ranks=2,
        limit_s=options.limit_s,
        environment=lambda rank: environment | {"NCCL_HOSTID": f"host{rank}"},
    )
    for rank, answer in enumerate(answers):
        found.note(**{f"rank {rank}": answer})
        for stages in ("2", "0"):
            found.at_most(f"wrong passes, rank {rank}, stages {stages}", answer[stages]["wrong"], 0)
            moved = len(set(answer[stages]["reserved"]))
            found.at_most(f"values of reserved memory, rank {rank}, stages {stages}", moved, 1)
        found.at_most(f"wrong exchanges, rank {rank}", answer["wrong_exchanges"], 0)


def gather_rank(member: Member, passes: int, small: bool) -> dict[str, Any]:
    """Run one rank of ``nccl``."""
    import torch
    import torch.distributed as dist

    import dlo_core as dlo
    from dlo_core.bench.model import Shape, build, inputs

    backend = member.backend
    shape = Shape(64, 4, 5, 0, "float32") if small else Shape(480, 4, 12)
    beside = dist.new_group(backend=backend.comm_library)
    device = backend.device
    found: dict[str, Any] = {"wrong_exchanges": 0}
    args = inputs(shape, 16 if small else 256, device, seed=member.rank)
    with torch.inference_mode():
        reference = build(shape, device)(*args)
        for stages in (2, 0):
            model = build(shape)
            offloaded = dlo.offload(
                model, device=backend, group=dist.group.WORLD, stages=stages, timeout_s=60
            )
            wrong, reserved = 0, []
            for number in range(passes // (1 if stages else 4)):
                # As a sequence-parallel forward does, in flight while blocks are gathered.
                send = torch.full((2, 1000), float(10 * member.rank + number % 7), device=device)
                got = torch.empty_like(send)
                work = dist.all_to_all_single(got, send, group=beside, async_op=True)
                wrong += not torch.equal(model(*args), reference)
                work.wait()
                want = torch.tensor([[number % 7.0], [10 + number % 7.0]], device=device)
                found["wrong_exchanges"] += not bool((got == want).all())
                if number >= 3:
                    reserved.append(backend.memory().reserved)
            found[str(stages)] = {
                "wrong": wrong,
                "reserved": sorted(set(reserved))[:5],
                "gathered_gb": round(offloaded.stats().gathered_bytes / 1e9, 3),
            }
            member.barrier()
            offloaded.shutdown()
    return found
