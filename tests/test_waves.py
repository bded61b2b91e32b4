"""Waves: every request has the bits that it has alone, whoever runs beside it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from poison import PoisonBackend
from ranks import RanksError, run_ranks
from toys import make_toy

import dlo_core as dlo
from dlo_core.gather_transfer import StagedTransfer
from dlo_core.rendezvous import default_store
from dlo_core.wave_request import check_wave, compatibility_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlo_core.slots import Slot

N = 5
WIDTH = 8


def noise(seed: int) -> torch.Tensor:
    """Return a start of its own for each seed."""
    return torch.rand(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def sample(model: Any, request: dlo.WaveRequest) -> torch.Tensor:
    """Denoise, as a pipeline would; some blocks may be skipped, by a seed."""
    x = noise(request.seed or 0)
    skips = request.kwargs.get("skips")
    chance = random.Random(skips)
    for step in range(request.num_inference_steps):
        if request.kwargs.get("fails_at") == step:
            raise ValueError(f"request {request.seed} is broken")
        time.sleep(request.kwargs.get("delay_s", 0.0))
        skip = () if skips is None else tuple(i for i in range(N) if chance.random() < 0.4)
        with torch.inference_mode():
            x = model(x, skip=skip) / 2
    return x.clone()


def alone(requests: Sequence[dlo.WaveRequest]) -> list[torch.Tensor]:
    """Return what every request gives on a plain model."""
    return [sample(make_toy(N), request) for request in requests]


def steps(*counts: int, **kwargs: Any) -> list[dlo.WaveRequest]:
    """Return one request a count."""
    return [dlo.WaveRequest(count, kwargs, seed=seed) for seed, count in enumerate(counts)]


def run_waves(
    sizes: dict[str, int],
    requests: Sequence[dlo.WaveRequest],
    *,
    entry: int = 0,
    fn: Callable[..., Any] = sample,
    use_allgather: bool = True,
    **options: Any,
) -> list[tuple[list[dlo.WaveResult] | None, dlo.WaveReport, dlo.Stats]]:
    """Run the requests on all ranks of a topology; return what each rank has in the end."""

    def job(rank: int) -> Any:
        sp = sizes.get("sp", 1)
        topology = dlo.Topology.from_sizes(dp=sizes.get("dp", 1), sp=sp, device_type="cpu")
        model = make_toy(N)
        offloaded = dlo.offload(
            model, device="cpu", topology=topology, use_allgather=use_allgather, timeout_s=20
        )
        with (
            offloaded,
            dlo.WaveRunner(
                offloaded, topology=topology, fn=lambda request: fn(model, request), **options
            ) as runner,
        ):
            results = runner.run(requests if rank == entry else None)
            return results, runner.report, offloaded.stats()

    world = 1
    for size in sizes.values():
        world *= size
    return run_ranks(job, world)


@pytest.mark.parametrize("use_allgather", [True, False])
@pytest.mark.parametrize(
    ("sizes", "entry"), [({"dp": 2}, 1), ({"dp": 3}, 0), ({"dp": 2, "sp": 2}, 3), ({"sp": 2}, 0)]
)
def test_results_come_in_order_with_the_bits_of_each_request_alone(
    sizes: dict[str, int], entry: int, use_allgather: bool
) -> None:
    # One more than whole waves need, so that a rank is idle in the last one.
    requests = steps(*[3] * (2 * sizes.get("dp", 1) + 1))
    outcomes = run_waves(sizes, requests, entry=entry, use_allgather=use_allgather)
    for rank, (results, _, _) in enumerate(outcomes):
        assert (results is not None) == (rank == entry)
    results = outcomes[entry][0]
    assert results is not None
    for number, (mine, wanted) in enumerate(zip(results, alone(requests), strict=True)):
        assert torch.equal(mine.get(), wanted)
        assert mine.replica == number % sizes.get("dp", 1)
    if use_allgather:
        assert len({stats.fills for _, _, stats in outcomes}) == 1


def test_ragged_requests_have_the_bits_that_they_have_alone() -> None:
    """Other step counts, skipped blocks, one that starts late: the others are served to the end."""
    kwargs: list[dict[str, Any]] = [{}, {"skips": 1}, {"skips": 2}, {"delay_s": 0.02}]
    requests = [
        dlo.WaveRequest(count, kwargs[seed], seed=seed)
        for seed, count in enumerate((10, 20, 30, 5))
    ]
    outcomes = run_waves({"dp": 4}, requests, ragged=True)
    results = outcomes[0][0]
    assert results is not None
    for mine, wanted in zip(results, alone(requests), strict=True):
        assert torch.equal(mine.get(), wanted)
    assert [(report.passes, report.idle_passes) for _, report, _ in outcomes] == [
        (10, 20),
        (20, 10),
        (30, 0),
        (5, 25),
    ]
    assert len({stats.fills for _, _, stats in outcomes}) == 1


@pytest.mark.slow
def test_ragged_requests_of_four_ranks_fill_in_one_order() -> None:
    """Of 10, 20, 30 and 50 steps, two that skip random blocks, one that comes late."""
    kwargs: list[dict[str, Any]] = [{}, {"skips": 7}, {"skips": 8}, {"late_s": 0.4}]
    requests = [
        dlo.WaveRequest(count, kwargs[seed], seed=seed)
        for seed, count in enumerate((10, 20, 30, 50))
    ]

    def job(rank: int) -> Any:
        order: list[int] = []
        fill = StagedTransfer.fill

        def noted(self: StagedTransfer, slot: Slot, block: int, number: int) -> None:
            order.append(block)
            fill(self, slot, block, number)

        topology = dlo.Topology.from_sizes(dp=4, device_type="cpu")
        model = make_toy(N)

        def late(request: dlo.WaveRequest) -> torch.Tensor:
            time.sleep(request.kwargs.get("late_s", 0.0))
            return sample(model, request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StagedTransfer, "fill", noted)
            with (
                dlo.offload(model, device=PoisonBackend(), topology=topology) as offloaded,
                dlo.WaveRunner(offloaded, topology=topology, fn=late, ragged=True) as runner,
            ):
                results = runner.run(requests if rank == 0 else None)
                report = runner.report
        return order, results and [each.get() for each in results], report.idle_passes

    outcomes = run_ranks(job, 4)
    orders = [order for order, _, _ in outcomes]
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) >= 50 * N
    for mine, wanted in zip(outcomes[0][1], alone(requests), strict=True):
        assert torch.equal(mine, wanted)
    assert [idle for _, _, idle in outcomes] == [40, 30, 20, 0]


def test_a_broken_request_harms_nobody() -> None:
    requests = [
        dlo.WaveRequest(6, {"fails_at": 2}, seed=0),
        dlo.WaveRequest(6, {}, seed=1),
        dlo.WaveRequest(6, {}, seed=2),
        dlo.WaveRequest(6, {}, seed=3),
    ]
    outcomes = run_waves({"dp": 2}, requests, key=lambda request: {})
    results = outcomes[0][0]
    assert results is not None
    with pytest.raises(RuntimeError, match=r"replica 0.*(?s:.)*request 0 is broken"):
        results[0].get()
    for mine, wanted in zip(results[1:], alone(requests[1:]), strict=True):
        assert torch.equal(mine.get(), wanted)


def test_an_error_on_any_rank_of_a_replica_is_the_requests() -> None:
    def fails_on_the_second(model: Any, request: dlo.WaveRequest) -> torch.Tensor:
        out = sample(model, request)
        if dist.get_rank() % 2:
            raise ValueError("only here")
        return out

    results = run_waves({"dp": 2, "sp": 2}, steps(2, 2), fn=fails_on_the_second)[0][0]
    assert results is not None
    assert [("only here" in (result.error or "")) for result in results] == [True, True]


def test_a_result_that_cannot_travel_is_that_requests_error() -> None:
    def odd(model: Any, request: dlo.WaveRequest) -> Any:
        out = sample(model, request)
        return (lambda: 0) if request.seed else out

    results = run_waves({"dp": 2}, steps(2, 2), fn=odd)[0][0]
    assert results is not None
    assert results[0].error is None
    assert "cannot be pickled" in (results[1].error or "")


def test_a_request_that_is_cancelled_stops_and_the_others_go_on() -> None:
    """Its progress is seen from another thread, which then cancels it."""
    requests = [
        dlo.WaveRequest(1000, {"delay_s": 0.002}, seed=0),
        dlo.WaveRequest(8, seed=1),
        dlo.WaveRequest(3, seed=2),
    ]

    def job(rank: int) -> Any:
        topology = dlo.Topology.from_sizes(dp=2, device_type="cpu")
        model = make_toy(N)
        offloaded = dlo.offload(model, device="cpu", topology=topology, timeout_s=20)
        runner = dlo.WaveRunner(
            offloaded, topology=topology, fn=lambda request: sample(model, request), ragged=True
        )
        seen: list[int] = []

        def watch() -> None:
            while runner.progress(0) < 10:
                time.sleep(0.001)
            seen.append(runner.progress(0))
            assert runner.cancel(0)

        watcher = threading.Thread(target=watch)
        if rank == 0:
            watcher.start()
        results = runner.run(requests if rank == 0 else None)
        if rank == 0:
            watcher.join(10)
            assert seen[0] >= 10
        runner.close()
        offloaded.disable()
        return results, runner.report

    (results, report), _ = run_ranks(job, 2)
    assert results[0].cancelled
    with pytest.raises(CancelledError):
        results[0].get()
    assert 10 <= report.passes < 1000
    for mine, wanted in zip(results[1:], alone(requests[1:]), strict=True):
        assert torch.equal(mine.get(), wanted)


def test_a_replica_of_several_ranks_is_not_cancelled_half_way() -> None:
    def job(rank: int) -> bool:
        topology = dlo.Topology.from_sizes(dp=1, sp=2, device_type="cpu")
        with dlo.offload(make_toy(N), device="cpu", topology=topology) as offloaded:
            runner = dlo.WaveRunner(offloaded, topology=topology, fn=lambda request: None)
            answer = runner.cancel(0)
            runner.close()
            return answer

    assert run_ranks(job, 2) == [False, False]


def test_two_models_take_turns_while_a_rank_is_idle() -> None:
    """The idle rank fills from the model that the other one computes with."""

    def job(rank: int) -> Any:
        topology = dlo.Topology.from_sizes(dp=2, device_type="cpu")
        high, low = make_toy(3, seed=1), make_toy(4, seed=2)

        def both(request: dlo.WaveRequest) -> torch.Tensor:
            x = noise(request.seed or 0)
            with torch.inference_mode():
                for step in range(request.num_inference_steps):
                    x = (high if step < 2 else low)(x) / 2
            return x.clone()

        wanted = both(dlo.WaveRequest(5, seed=7))
        with dlo.offload([high, low], device="cpu", topology=topology, timeout_s=20) as offloaded:
            runner = dlo.WaveRunner(offloaded, topology=topology, fn=both)
            results = runner.run([dlo.WaveRequest(5, seed=7)] if rank == 0 else None)
            runner.close()
        return results is None or torch.equal(results[0].get(), wanted)

    assert run_ranks(job, 2) == [True, True]


def test_a_server_that_runs_for_ever_does_not_fill_the_store() -> None:
    """Exchanges, waves, progress and cancelled requests leave no more behind than the first."""

    def job(rank: int) -> list[int]:
        topology = dlo.Topology.from_sizes(dp=2, device_type="cpu")
        high, low = make_toy(3, seed=1), make_toy(4, seed=2)
        store = default_store()
        keys = []

        def both(request: dlo.WaveRequest) -> int:
            runner.cancel(2)
            with torch.inference_mode():
                for step in range(request.num_inference_steps):
                    (high if step % 2 else low)(noise(step))
            return request.num_inference_steps

        with dlo.offload([high, low], device="cpu", topology=topology, timeout_s=20) as offloaded:
            runner = dlo.WaveRunner(offloaded, topology=topology, fn=both)
            for _ in range(4):
                results = runner.run(steps(3, 3, 3, 3, 3) if rank == 0 else None)
                if results is not None:
                    assert [each.cancelled for each in results] == [False, False, True] + [
                        False
                    ] * 2
                    assert runner.progress(4) >= 1
                offloaded.agreement.exchange(None, "the end of a run")
                keys.append(store.num_keys())
                offloaded.agreement.exchange(None, "counted")
            runner.close()
        return keys

    for keys in run_ranks(job, 2):
        assert len(set(keys[1:])) == 1


# --- refused, on every rank and before anything is dispatched -------------------------------------


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (steps(3, 4), "num_inference_steps: request 0 has 3, request 1 has 4"),
        (
            [dlo.WaveRequest(3, {"height": 8}), dlo.WaveRequest(3, {"height": 16, "width": 1})],
            "height: request 0 has 8, request 1 has 16; width: request 0 has 'not given'",
        ),
        (
            [dlo.WaveRequest(3, {"negative_prompt": "x"}), dlo.WaveRequest(3)],
            "negative_prompt is given",
        ),
    ],
)
def test_requests_that_differ_are_refused_on_every_rank(
    requests: list[dlo.WaveRequest], message: str
) -> None:
    ran: list[int] = []
    with pytest.raises(RanksError) as caught:
        run_waves({"dp": 2}, requests, fn=lambda *_: ran.append(1))
    assert set(caught.value.errors) == {0, 1}
    for text in caught.value.errors.values():
        assert message in text
        assert "ConfigError" in text
        assert "nothing was dispatched" in text


def test_rank_local_replicas_run_what_they_like() -> None:
    requests = steps(2, 7, 4)
    results = run_waves({"dp": 2}, requests, use_allgather=False)[0][0]
    assert results is not None
    for mine, wanted in zip(results, alone(requests), strict=True):
        assert torch.equal(mine.get(), wanted)


@pytest.mark.parametrize("entries", [(), (0, 1)])
def test_requests_on_no_rank_or_on_two_are_refused(entries: tuple[int, ...]) -> None:
    def job(rank: int) -> str:
        topology = dlo.Topology.from_sizes(dp=2, device_type="cpu")
        model = make_toy(N)
        with dlo.offload(model, device="cpu", topology=topology) as offloaded:
            runner = dlo.WaveRunner(
                offloaded, topology=topology, fn=lambda request: sample(model, request)
            )
            with pytest.raises(dlo.ConfigError) as caught:
                runner.run(steps(2) if rank in entries else None)
            # Nothing is lost: the next wave is right.
            results = runner.run(steps(2, 2) if rank == 1 else None)
            runner.close()
            assert (results is None) == (rank == 0)
        return str(caught.value)

    for message in run_ranks(job, 2):
        assert "exactly one rank" in message


def test_settings_that_cannot_be_honoured_are_refused_on_every_rank() -> None:
    def job(rank: int) -> str:
        topology = dlo.Topology.from_sizes(dp=2, device_type="cpu")
        with (
            dlo.offload([make_toy(3), make_toy(4)], device="cpu", topology=topology) as offloaded,
            pytest.raises(dlo.ConfigError) as caught,
        ):
            dlo.WaveRunner(offloaded, topology=topology, fn=lambda request: None, ragged=True)
        return str(caught.value)

    for message in run_ranks(job, 2):
        assert "several models" in message


def test_a_topology_that_is_not_the_offloads_is_refused() -> None:
    """Another dimension, another group, or HSDP, whose ranks all run the same passes."""

    def job(rank: int) -> None:
        world: Any = dist.group.WORLD
        dp = dlo.Topology.from_groups(dp=world)
        sp = dlo.Topology.from_groups(sp=world)
        hsdp = dlo.Topology.from_groups(hsdp=world)
        lone = dist.new_group([0])
        half = dlo.Topology.from_groups(dp=lone if rank == 0 else None)
        dist.barrier()

        def refused(wrong: dlo.Topology, message: str, **settings: Any) -> None:
            groups = len(dist.distributed_c10d._world.pg_map)
            with dlo.offload(make_toy(2), device="cpu", **settings) as offloaded:
                with pytest.raises(dlo.ConfigError, match=message):
                    dlo.WaveRunner(offloaded, topology=wrong, fn=lambda request: None)
                more = settings.get("topology")
                # One that fits, and the failed ones left no group behind.
                if more is not hsdp:
                    dlo.WaveRunner(offloaded, topology=more or dp, fn=lambda request: None).close()
            assert len(dist.distributed_c10d._world.pg_map) == groups

        refused(sp, r"whose dp group has the global ranks \[0, 1\]; got one with", topology=dp)
        refused(half, r"shards the weights over the global ranks \[\d\], but", group=world)
        refused(hsdp, "cannot run over HSDP", topology=dp)
        refused(dp, "cannot run over HSDP", topology=hsdp, use_allgather=False)

    run_ranks(job, 2)


def test_a_rank_that_serves_gives_up_on_one_that_shows_no_sign() -> None:
    with pytest.raises(RanksError) as caught:
        run_waves(
            {"dp": 2},
            [dlo.WaveRequest(2, {"delay_s": 3.0}, seed=0)],
            idle_timeout_s=0.5,
        )
    assert "no sign of rank 0 (in pass 0) for 0.5 s" in caught.value.errors[1]


@pytest.mark.parametrize(
    ("fault", "sizes"),
    [
        (signal.SIGKILL, {"dp": 2}),
        pytest.param(signal.SIGSTOP, {"dp": 2}, marks=pytest.mark.slow),
        # Ranks 1 and 3 share no weights with rank 0.
        (signal.SIGKILL, {"dp": 2, "sp": 2}),
    ],
)
def test_a_rank_that_waits_in_a_wave_hears_of_one_that_is_gone(
    fault: signal.Signals, sizes: dict[str, int]
) -> None:
    """Within the deadline of a fill, not only when ``idle_timeout_s`` is over."""

    def job(rank: int) -> None:
        dp, sp = sizes.get("dp", 1), sizes.get("sp", 1)
        topology = dlo.Topology.from_sizes(dp=dp, sp=sp, device_type="cpu")
        model = make_toy(N)
        offloaded = dlo.offload(model, device="cpu", topology=topology, timeout_s=1.0)

        def fn(request: dlo.WaveRequest) -> torch.Tensor:
            out = sample(model, request)
            if rank == 0:
                os.kill(os.getpid(), fault)
            return out

        runner = dlo.WaveRunner(offloaded, topology=topology, fn=fn, ragged=True)
        began = time.monotonic()
        with pytest.raises(dlo.DloError, match=r"rank 0 \(global rank 0, process") as caught:
            runner.run(steps(3, 3) if rank == 1 else None)
        assert time.monotonic() - began < 15
        assert "gone" in str(caught.value) or "stopped" in str(caught.value)
        assert offloaded.failed
        began = time.monotonic()
        runner.close()
        offloaded.shutdown()
        assert time.monotonic() - began < 10

    world = 1
    for size in sizes.values():
        world *= size
    with pytest.raises(RanksError) as error:
        run_ranks(job, world, limit_s=30.0)
    assert set(error.value.errors) == {0}, error.value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dlo.WaveRequest(None), "num_inference_steps must be given"),  # type: ignore[arg-type]
        (lambda: dlo.WaveRequest(0), "at least 1; got 0"),
        (lambda: dlo.WaveRequest(True), "at least 1; got True"),
        (lambda: dlo.WaveRequest(1, {"num_inference_steps": 2}), "stands twice"),
        (lambda: dlo.WaveRequest(1, seed=1.5), "seed must be a whole number"),  # type: ignore[arg-type]
        (lambda: dlo.WaveRequest(1, kwargs=["a"]), "mapping"),  # type: ignore[arg-type]
    ],
)
def test_a_request_checks_itself(make: Callable[[], object], message: str) -> None:
    with pytest.raises(dlo.ConfigError, match=message):
        make()


def test_free_arguments_may_differ_and_tensors_count_by_shape() -> None:
    same = [
        dlo.WaveRequest(3, {"prompt": "a", "mask": torch.zeros(2), "sizes": [1, 2]}, seed=1),
        dlo.WaveRequest(3, {"prompt": "b", "mask": torch.ones(2), "sizes": [1, 2]}, seed=2),
    ]
    check_wave(same, compatibility_key)
    other = dlo.WaveRequest(3, {"prompt": "b", "mask": torch.ones(3), "sizes": [1, 2]})
    with pytest.raises(dlo.ConfigError, match=r"mask: .*tensor \(2,\).*tensor \(3,\)"):
        check_wave([same[0], other], compatibility_key)


def test_the_key_can_be_extended() -> None:
    def with_adapter(request: dlo.WaveRequest) -> dict[str, Any]:
        return {**compatibility_key(request), "adapter": request.kwargs["prompt"][0]}

    pair = [dlo.WaveRequest(3, {"prompt": "ab"}), dlo.WaveRequest(3, {"prompt": "bb"})]
    check_wave(pair, compatibility_key)
    with pytest.raises(dlo.ConfigError, match="adapter: request 0 has 'a', request 1 has 'b'"):
        check_wave(pair, with_adapter)
