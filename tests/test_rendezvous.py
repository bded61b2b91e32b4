"""The rendezvous: whoever left a request behind and is gone, the ranks that are there meet."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed

from dlo_core.rendezvous import MissingRanks, meet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

HashStore: Any = torch.distributed.HashStore  # type: ignore[attr-defined]
MEMBERS = (0, 1, 2)
PLACE = "dlo/meet/0-1-2"
LONG_S = 20.0


class Line:
    """A store of this process, which can call back where a key is waited for."""

    def __init__(self, store: Any, on_wait: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._on_wait = on_wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Call back, then wait."""
        self._on_wait()
        self._store.wait(list(keys), timeout)


def come(store: Any, rank: int, timeout_s: float = LONG_S) -> str:
    line: Any = Line(store)
    return meet(line, MEMBERS, rank, timeout_s)


def num_keys(store: Any) -> int:
    # A store has keys of its own at the start.
    return int(store.num_keys() - HashStore().num_keys())


@pytest.mark.parametrize("first", [0, 1])
def test_a_request_of_a_rank_that_is_gone_does_not_stand_for_the_rank(first: int) -> None:
    """The first rank finds the request and nobody behind it, then the rank comes that there is."""
    store = HashStore()
    store.set(f"{PLACE}/ask/1", "of a rank that was killed")
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(come, store, rank) for rank in (0, 2)] if first == 0 else []
        if first == 0:
            store.wait([f"{PLACE}/answer/of a rank that was killed"])
        late = [pool.submit(come, store, rank) for rank in range(3) if first or rank == 1]
        names = {future.result(LONG_S) for future in early + late}
    assert len(names) == 1
    assert num_keys(store) == 0


def test_a_rank_that_is_gone_is_missing_and_its_request_too() -> None:
    store = HashStore()
    store.set(f"{PLACE}/ask/1", "of a rank that was killed")
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(come, store, rank, 1.5) for rank in (0, 2)]
        for future in futures:
            with pytest.raises(MissingRanks) as caught:
                future.result(LONG_S)
            assert caught.value.ranks == (1,)
    assert num_keys(store) == 0


def test_a_rank_that_is_interrupted_takes_its_request_back() -> None:
    store = HashStore()

    def interrupt() -> None:
        raise KeyboardInterrupt

    line: Any = Line(store, interrupt)
    with pytest.raises(KeyboardInterrupt):
        meet(line, MEMBERS, 1, LONG_S)
    assert num_keys(store) == 0


def test_the_first_rank_may_be_interrupted_and_come_again() -> None:
    """The others wait on, though their requests were taken."""
    store = HashStore()

    class Interrupted(Line):
        def set(self, key: str, value: str) -> None:
            raise KeyboardInterrupt

    line: Any = Interrupted(store)
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(come, store, rank) for rank in (1, 2)]
        with pytest.raises(KeyboardInterrupt):
            meet(line, MEMBERS, 0, LONG_S)
        names = {come(store, 0), *(future.result(LONG_S) for future in others)}
    assert len(names) == 1
    assert num_keys(store) == 0


def test_who_asks_again_of_its_own_accord_does_not_lose_its_answer() -> None:
    """The second request is on its way before *again* is read and deleted."""
    store = HashStore()
    answer = f"{PLACE}/answer/request"
    polls = threading.Semaphore(0)

    class Leading(Line):
        def check(self, keys: Sequence[str]) -> bool:
            if keys == [f"{PLACE}/ask/2"]:
                polls.release()
            return bool(self._store.check(keys))

    line: Any = Leading(store)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(meet, line, MEMBERS, 0, LONG_S), pool.submit(come, store, 2)]
        store.set(f"{PLACE}/ask/1", "request")
        store.wait([answer])
        store.set(f"{PLACE}/ask/1", "request")
        while store.check([f"{PLACE}/ask/1"]):
            polls.acquire(timeout=LONG_S)
        # Rounds more, in which the first rank could have answered.
        rounds = polls._value + 3
        while rounds and not futures[0].done():
            rounds -= polls.acquire(timeout=0.1)
        assert store.get(answer) == b"again"
        store.delete_key(answer)
        store.set(f"{PLACE}/ask/1", "request")
        store.wait([answer])
        names = {store.get(answer).decode(), *(future.result(LONG_S) for future in futures)}
        store.delete_key(answer)
    assert len(names) == 1
    assert num_keys(store) == 0


def test_each_meeting_has_a_name_of_its_own() -> None:
    store = HashStore()
    names = set()
    for _ in range(5):
        with ThreadPoolExecutor(3) as pool:
            met = set(pool.map(come, [store] * 3, range(3)))
        assert len(met) == 1
        names |= met
    assert len(names) == 5
    assert num_keys(store) == 0
