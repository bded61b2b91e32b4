"""The ledger: right for every budget, the same on every rank; a refusal shows the table."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from dlo_core.arena import cut
from dlo_core.cgroup import Bound
from dlo_core.errors import AgreementError, HostMemoryError
from dlo_core.ledger import Allotment, Wish, settle, spread

GB = 10**9


def bound(free: int, key: str = "machine", name: str = "MemAvailable") -> Bound:
    return Bound(key, name, free)


def wish(rank: int = 0, **more: Any) -> Wish:
    given: dict[str, Any] = {
        "node": "a",
        "tiers": ("pinned",),
        "shard_nbytes": (GB,) * 10,
        "staging_nbytes": 2 * GB,
        "identity": "same",
        "pins": True,
        "must_pin": False,
        "pin_budget": None,
        "lock": None,
        "bounds": (bound(100 * GB),),
    }
    return Wish(rank=rank, **{**given, **more})


def everyone(wishes: list[Wish]) -> list[Allotment]:
    return [settle(wishes, rank) for rank in range(len(wishes))]


# --- which blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "pinned"),
    [
        (0, ""),
        (GB // 2, ""),
        (GB - 1, ""),
        (GB, "9"),
        (5 * GB // 2, "37"),
        (5 * GB, "13579"),
        (10 * GB - 1, "123456789"),
        (10 * GB, "0123456789"),
        (99 * GB, "0123456789"),
        (-1, ""),
    ],
)
def test_a_budget_is_spread_over_the_blocks(budget: int, pinned: str) -> None:
    chosen = spread([GB] * 10, budget)
    assert "".join(str(n) for n, yes in enumerate(chosen) if yes) == pinned


def test_what_is_left_of_a_budget_goes_to_the_largest_block_that_fits() -> None:
    assert spread([3, 4, 4], 7) == (True, True, False)
    assert spread([5, 3, 2], 4) == (False, True, False)


def test_blocks_that_stay_get_what_the_others_leave() -> None:
    sizes, staying = [GB] * 6, {1, 4}
    for budget in range(7):
        chosen = spread(sizes, budget * GB, staying)
        first = [chosen[index] for index in range(6) if index not in staying]
        assert sum(first) == min(budget, 4)
        assert sum(chosen) == budget if budget < 6 else all(chosen)
    assert spread(sizes, 2 * GB, range(6)) == spread(sizes, 2 * GB)


def test_any_budget_is_kept_and_nothing_that_fits_is_left_out() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        sizes = [draw.choice((1, 2, 7, 100, 101)) for _ in range(draw.randrange(1, 30))]
        budget = draw.randrange(0, sum(sizes) + 10)
        chosen = spread(sizes, budget)
        taken = sum(n for n, yes in zip(sizes, chosen, strict=True) if yes)
        assert taken <= budget
        left = [n for n, yes in zip(sizes, chosen, strict=True) if not yes]
        assert all(n > budget - taken for n in left)
        if len(set(sizes)) == 1 and left:
            # Evenly: runs of slow blocks differ by one, but for the ends.
            gaps = [len(list(run)) for yes, run in groupby(chosen) if not yes]
            assert max(gaps[1:-1], default=0) - min(gaps[1:-1], default=0) <= 1


def test_a_total_is_cut_into_powers_of_two_that_take_hardly_more() -> None:
    for nbytes in (1, 4096, 5000, 1 << 20, (1 << 20) + 1, 12_582_912, 339_800_000, 13_593_000_001):
        pieces = cut(nbytes)
        assert all(piece & (piece - 1) == 0 for piece in pieces)
        assert pieces == sorted(pieces, reverse=True)
        assert nbytes <= sum(pieces) <= max(nbytes * 1.004 + 1, -(-nbytes // 4096) * 4096)
        assert len(pieces) < 12
    assert cut(0) == []


# --- one decision ---------------------------------------------------------------------------------


def test_what_fits_is_given_as_wished() -> None:
    for given in everyone([wish(0), wish(1)]):
        assert given == Allotment("pinned", (True,) * 10)


def test_ranks_that_fit_one_by_one_but_not_together_are_refused_alike() -> None:
    bounds = (bound(200 * GB), bound(35 * GB, "cgroup 1:2", "cgroup /pod"))
    wishes = [wish(rank, bounds=bounds) for rank in range(4)]
    for one in wishes:
        assert settle([replace(one, rank=0)], 0).tier == "pinned"
    texts = set()
    for rank in range(4):
        with pytest.raises(HostMemoryError) as caught:
            settle(wishes, rank)
        texts.add(str(caught.value))
    (text,) = texts
    assert "ranks 0, 1, 2, 3 together want 40,000,000,000 bytes" in text
    assert "cgroup /pod has 35,000,000,000 free" in text
    # The table: a row a rank, and what there is.
    assert text.count("pinned  10,000,000,000") == 4
    assert "MemAvailable: 200,000,000,000 bytes free" in text
    assert "host='mapped'" in text


def test_ranks_in_cgroups_of_their_own_do_not_share_a_limit() -> None:
    wishes = [wish(r, bounds=(bound(15 * GB, f"cgroup 1:{r}"),)) for r in range(4)]
    assert all(given.tier == "pinned" for given in everyone(wishes))
    wishes[2] = replace(wishes[2], bounds=(bound(9 * GB, "cgroup 1:2", "cgroup /two"),))
    with pytest.raises(HostMemoryError, match=r"rank 2 wants .* cgroup /two has 9,000,000,000"):
        settle(wishes, 0)


def test_every_bound_of_the_chain_counts() -> None:
    chain = (bound(50 * GB, "leaf"), bound(9 * GB, "parent", "cgroup /parent"), bound(99 * GB))
    with pytest.raises(HostMemoryError, match="cgroup /parent has 9,000,000,000 free"):
        settle([wish(bounds=chain)], 0)


def test_nodes_are_counted_apart_and_one_that_cannot_refuses_all() -> None:
    wishes = [wish(0, node="a"), wish(1, node="b", bounds=(bound(10 * GB),))]
    assert [given.tier for given in everyone(wishes)] == ["pinned", "pinned"]
    wishes[1] = replace(wishes[1], bounds=(bound(10 * GB - 1),))
    for rank in range(2):
        with pytest.raises(HostMemoryError, match="node 'b'"):
            settle(wishes, rank)


def test_a_tier_that_takes_less_is_used_where_the_choice_is_free() -> None:
    free = (bound(25 * GB),)
    tiers = ("pinned", "shared", "mapped")
    for given in everyone([wish(rank, tiers=tiers, bounds=free) for rank in range(4)]):
        assert (given.tier, given.local_size, given.shares) == ("shared", 4, True)
        assert "together want 40,000,000,000" in given.note
    different = [wish(r, tiers=tiers, bounds=free, identity=str(r)) for r in range(4)]
    assert {given.tier for given in everyone(different)} == {"mapped"}
    little = [wish(r, tiers=tiers, bounds=(bound(9 * GB),)) for r in range(4)]
    assert {given.tier for given in everyone(little)} == {"mapped"}
    less = [wish(r, tiers=tiers, bounds=(bound(7 * GB),)) for r in range(4)]
    with pytest.raises(HostMemoryError):
        settle(less, 0)


# --- page-locking ---------------------------------------------------------------------------------


def test_ranks_may_have_budgets_of_their_own() -> None:
    wishes = [wish(0), wish(1, pin_budget=5 * GB // 2), wish(2, pin_budget=0), wish(3, pins=False)]
    assert [sum(given.pinned) for given in everyone(wishes)] == [10, 2, 0, 0]


def test_the_systems_limit_leaves_some_pageable_unless_pinning_was_told_by_name() -> None:
    lock = Bound("ulimit -l", "ulimit -l", 3 * GB)
    assert sum(settle([wish(lock=lock)], 0).pinned) == 3
    with pytest.raises(HostMemoryError, match=r"10,000,000,000 bytes and ulimit -l leaves 3,0"):
        settle([wish(lock=lock, must_pin=True)], 0)
    # The caller's own budget is no such limit.
    assert sum(settle([wish(lock=lock, must_pin=True, pin_budget=2 * GB)], 0).pinned) == 2


def test_staging_is_pinned_where_the_budget_allows() -> None:
    for budget, pinned in ((None, True), (2 * GB, True), (2 * GB - 1, False), (0, False)):
        given = settle([wish(tiers=("mapped",), pin_budget=budget, bounds=(bound(2 * GB),))], 0)
        assert (given.tier, given.pinned) == ("mapped", (pinned,) * 10)
    with pytest.raises(HostMemoryError, match=r"2,000,000,000 bytes and .* 1,999,999,999 free"):
        settle([wish(tiers=("mapped",), bounds=(bound(2 * GB - 1),))], 0)


# --- sharing --------------------------------------------------------------------------------------


def test_the_ranks_of_a_node_share_and_know_their_places() -> None:
    tiers = ("shared",)
    nodes = ["a", "b", "a", "b", "b"]
    wishes = [wish(rank, node=node, tiers=tiers) for rank, node in enumerate(nodes)]
    places = [(g.local_rank, g.local_size, g.maker, g.num_turns) for g in everyone(wishes)]
    assert places == [(0, 2, 0, 3), (0, 3, 1, 3), (1, 2, 0, 3), (1, 3, 1, 3), (2, 3, 1, 3)]


def test_shared_memory_counts_once_a_node() -> None:
    wishes = [wish(rank, tiers=("shared",), bounds=(bound(10 * GB),)) for rank in range(4)]
    assert {given.tier for given in everyone(wishes)} == {"shared"}
    short = [replace(each, bounds=(bound(10 * GB - 1),)) for each in wishes]
    with pytest.raises(HostMemoryError, match="together want 10,000,000,000"):
        settle(short, 3)


def test_nobody_takes_turns_where_nothing_is_locked() -> None:
    wishes = [wish(rank, tiers=("shared",), pins=False) for rank in range(2)]
    assert [(given.shares, given.num_turns) for given in everyone(wishes)] == [(True, 0)] * 2


def test_ranks_that_are_to_share_must_agree_on_it_and_on_the_model() -> None:
    mixed = [wish(0, tiers=("shared",)), wish(1)]
    unequal = [wish(0, tiers=("shared",)), wish(1, tiers=("shared",), identity="other")]
    for rank in range(2):
        with pytest.raises(AgreementError, match=r"given on ranks 0 and not on ranks 1 of node"):
            settle(mixed, rank)
        with pytest.raises(AgreementError, match=r"models differ: rank 0 has same; rank 1 has oth"):
            settle(unequal, rank)
    # On nodes of their own they may differ.
    assert settle([mixed[0], replace(mixed[1], node="b")], 1).tier == "pinned"
