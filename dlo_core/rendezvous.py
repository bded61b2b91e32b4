"""The rendezvous: how the ranks of a group find a name for a new group that was never used before.

``torch.distributed.new_group(use_local_synchronization=True)`` derives the name from the ranks and
from how many groups this process has. After a group was destroyed the name comes back, and with it
the dead group's addresses in the store; and ranks that are in unequally many groups get different
names and never meet. So the first rank of the group makes a fresh name and gives it to whoever asks
with a fresh request.

[Note: who asks twice is there]
A rank that was killed or interrupted may have left a request behind, and nobody would read the
answer to it. So the first rank answers a request with *again*, and counts those who then ask once
more; a newer request takes the place of an older one until all have. Who waits long for an answer
asks once more of its own accord, for the first rank may be another one by then.
"""

from __future__ import annotations

import inspect
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dlo_core.store_line import StoreGone

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    from dlo_core.store_line import StoreLine

__all__ = ["MissingRanks", "default_store", "meet", "new_group_of"]

_POLL_S = 0.2
_AGAIN = "again"
# A group may have an order of its own since torch has this argument; before, it never had.
_KEEP_ORDER: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
)
_lock = threading.Lock()


class MissingRanks(RuntimeError):
    """Raised when ranks of a group did not come within the timeout.

    Attributes:
        ranks: Group ranks that are missing, as far as is known.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"ranks {list(ranks)} did not come")
        self.ranks = tuple(ranks)


def default_store() -> Store:
    """Return the store of the job."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def meet(store: StoreLine, members: Sequence[int], rank: int, timeout_s: float) -> str:
    """Return a fresh name that all members of a group return alike.

    Args:
        store: Shared by all members.
        members: Global ranks of the group.
        rank: This process's rank among them.
        timeout_s: How long to wait for the others.

    Raises:
        MissingRanks: Somebody did not come in time.
        StoreSilent: The store did not answer.
    """
    place = "dlo/meet/" + "-".join(map(str, members))
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        return _lead(store, place, len(members), deadline)
    return _follow(store, place, rank, deadline)


def _lead(store: StoreLine, place: str, size: int, deadline: float) -> str:
    # See [Note: who asks twice is there].
    name = uuid.uuid4().hex
    asked: dict[int, str] = {}
    there: dict[int, str] = {}
    while True:
        for rank in range(1, size):
            request = _take(store, f"{place}/ask/{rank}")
            if request is None:
                continue
            if asked.get(rank) == request:
                # With *again* unread it asked of its own accord, and would delete a later answer.
                if not store.check([f"{place}/answer/{request}"]):
                    there[rank] = request
                continue
            if rank in asked:
                store.delete_key(f"{place}/answer/{asked[rank]}")
            asked[rank] = request
            there.pop(rank, None)
            store.set(f"{place}/answer/{request}", _AGAIN)
        if len(there) == size - 1:
            break
        if time.monotonic() > deadline:
            missing = [rank for rank in range(1, size) if rank not in there]
            _dismiss(store, place, asked, there, missing)
            raise MissingRanks(missing)
        time.sleep(0.001 if deadline - time.monotonic() > _POLL_S else 0.0)
    for request in there.values():
        store.set(f"{place}/answer/{request}", name)
    return name


def _take(store: StoreLine, key: str) -> str | None:
    """Return the value of a key, which is deleted; None where there is none."""
    if not store.check([key]):
        return None
    value = store.get(key).decode()
    store.delete_key(key)
    return value


def _dismiss(
    store: StoreLine,
    place: str,
    asked: dict[int, str],
    there: dict[int, str],
    missing: Sequence[int],
) -> None:
    """Tell those who are there who is missing, and leave nothing to those who are not."""
    for rank, request in asked.items():
        answer = f"{place}/answer/{request}"
        if rank in there:
            store.set(answer, "missing " + " ".join(map(str, missing)))
        else:
            store.delete_key(answer)


def _follow(store: StoreLine, place: str, rank: int, deadline: float) -> str:
    request = uuid.uuid4().hex
    asking, answer = f"{place}/ask/{rank}", f"{place}/answer/{request}"
    try:
        text = _await(store, asking, answer, request, deadline)
    except StoreGone:
        raise
    except BaseException:
        with suppress(RuntimeError):
            store.delete_key(asking)
            store.delete_key(answer)
        raise
    # It may have been asked once more while the answer came.
    store.delete_key(asking)
    if text.startswith("missing "):
        raise MissingRanks([int(part) for part in text.split()[1:]])
    return text


def _await(store: StoreLine, asking: str, answer: str, request: str, deadline: float) -> str:
    """Ask until there is an answer, and return it."""
    store.set(asking, request)
    # The first rank tells who is missing a little after its own deadline.
    while time.monotonic() < deadline + 4 * _POLL_S:
        try:
            store.wait([answer], timedelta(seconds=_POLL_S))
        # There will be no answer.
        except StoreGone:
            raise
        except RuntimeError:
            # Who took the request may have been interrupted, and come again.
            store.set(asking, request)
            continue
        text: str = store.get(answer).decode()
        store.delete_key(answer)
        if text != _AGAIN:
            return text
        store.set(asking, request)
    raise MissingRanks([0])


def new_group_of(
    members: Sequence[int],
    comm_library: str,
    timeout_s: float,
    name: str,
    options: Any | None = None,
) -> ProcessGroup:
    """Return a new process group of dlo's own; all members must call this, nobody else has to.

    Args:
        members: Global ranks, in the order of their group ranks.
        comm_library: Name of the ``torch.distributed`` backend.
        timeout_s: Seconds after which an operation of the group gives up.
        name: Fresh, and the same on every member.
        options: The comm library's own, its ``pg_options``.

    Raises:
        RuntimeError: The members could not connect.
    """
    with _lock, _group_name(name):
        made = dist.new_group(
            list(members),
            timeout=timedelta(seconds=timeout_s),
            backend=comm_library,
            use_local_synchronization=True,
            pg_options=options,
            **_KEEP_ORDER,
        )
    if not isinstance(made, dist.ProcessGroup):
        raise TypeError(f"torch.distributed.new_group returned {made!r} to a member of the group")
    return made


@contextmanager
def _group_name(name: str) -> Iterator[None]:
    """Let torch take ``name`` for the group that is made inside; there is no public way."""
    module: Any = dist.distributed_c10d
    original = module._process_group_name
    module._process_group_name = lambda *args, **kwargs: name
    try:
        yield
    finally:
        module._process_group_name = original
