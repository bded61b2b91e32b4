"""The queue: full waves at once, partial ones after the window, nobody starves, memory bounded."""

from __future__ import annotations

import threading
import time

import pytest

import dlo_core as dlo
from dlo_core.wave_queue import WaveQueue
from dlo_core.waves import WaveResult

LONG_S = 30.0


def request(steps: int = 4, seed: int = 0) -> dlo.WaveRequest:
    return dlo.WaveRequest(steps, {"prompt": str(seed)}, seed=seed)


def seeds(wave: list[dlo.WaveTicket]) -> list[int | None]:
    return [ticket.request.seed for ticket in wave]


def test_a_full_wave_does_not_wait_for_the_window() -> None:
    queue = WaveQueue(3, window_s=LONG_S)
    for seed in range(4):
        queue.submit(request(seed=seed))
    assert seeds(queue.take(timeout_s=1)) == [0, 1, 2]
    assert len(queue) == 1


def test_a_partial_wave_comes_after_the_window_and_not_before() -> None:
    queue = WaveQueue(3, window_s=0.2)
    began = time.monotonic()
    queue.submit(request(seed=7))
    assert seeds(queue.take(timeout_s=LONG_S)) == [7]
    assert time.monotonic() - began >= 0.2


def test_only_requests_that_go_together_are_one_wave_and_the_oldest_goes_first() -> None:
    queue = WaveQueue(2, window_s=0.0)
    for seed, steps in enumerate((4, 9, 4, 9, 9)):
        queue.submit(request(steps, seed))
    assert [seeds(queue.take(timeout_s=1)) for _ in range(3)] == [[0, 2], [1, 3], [4]]


def test_without_a_key_anything_goes_together() -> None:
    queue = WaveQueue(3, window_s=LONG_S, key=None)
    for seed, steps in enumerate((4, 9, 2)):
        queue.submit(request(steps, seed))
    assert seeds(queue.take(timeout_s=1)) == [0, 1, 2]


def test_a_request_that_is_taken_back_is_not_given_out_and_leaves_its_place() -> None:
    queue = WaveQueue(2, window_s=0.0, max_waiting=2)
    tickets = [queue.submit(request(seed=seed)) for seed in range(2)]
    assert tickets[0].future.cancel()
    tickets.append(queue.submit(request(seed=2)))
    assert seeds(queue.take(timeout_s=1)) == [1, 2]
    # It runs now, so it is too late.
    assert not tickets[1].future.cancel()


def test_more_requests_than_may_wait_are_refused() -> None:
    queue = WaveQueue(2, max_waiting=2)
    for seed in range(2):
        queue.submit(request(seed=seed))
    with pytest.raises(dlo.UseError, match="2 requests wait already"):
        queue.submit(request(seed=2))
    assert len(queue) == 2


def test_nothing_to_take_is_no_wave() -> None:
    assert WaveQueue(2).take(timeout_s=0.01) == []


def test_closing_gives_out_what_waits_and_wakes_who_takes() -> None:
    queue = WaveQueue(2, window_s=LONG_S)
    queue.submit(request(seed=1))
    waves: list[list[dlo.WaveTicket]] = []
    taker = threading.Thread(target=lambda: waves.extend((queue.take(), queue.take())))
    taker.start()
    queue.close()
    taker.join(10)
    assert [seeds(wave) for wave in waves] == [[1], []]
    with pytest.raises(dlo.UseError, match="closed"):
        queue.submit(request())


def test_many_clients_each_get_their_own_result() -> None:
    queue = WaveQueue(4, window_s=0.001)
    sizes: list[int] = []

    def serve() -> None:
        while wave := queue.take():
            sizes.append(len(wave))
            seeds = [ticket.request.seed for ticket in wave]
            results = [WaveResult(s, "broken" if s == 13 else None, 0, 0.0) for s in seeds]
            queue.settle(wave, results)

    server = threading.Thread(target=serve)
    server.start()
    tickets = {}

    def client(first: int) -> None:
        for seed in range(first, first + 10):
            tickets[seed] = queue.submit(request(steps=4 + seed % 3, seed=seed))

    clients = [threading.Thread(target=client, args=(10 * number,)) for number in range(5)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(10)
    queue.close()
    server.join(10)
    assert sum(sizes) == 50
    assert max(sizes) <= 4
    for seed, ticket in tickets.items():
        if seed == 13:
            with pytest.raises(RuntimeError, match="broken"):
                ticket.future.result(1)
        else:
            assert ticket.future.result(1) == seed


@pytest.mark.parametrize("wrong", [{"size": 0}, {"window_s": -1.0}, {"max_waiting": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(dlo.ConfigError, match="needs size >= 1"):
        WaveQueue(**{"size": 2, **wrong})  # type: ignore[arg-type]
