"""The ledger: what the ranks of a node plan to take of its host memory, and what there is.

Each rank writes one ``Wish``; all ranks exchange them and compute the same answer from the same
rows, so the decision needs no second vote and no rank counts on bytes that another one takes. The
answer is one of three: everything as wished; a tier that takes less, where the caller left the
choice; or a refusal that prints the table. Which blocks are page-locked is settled here, too.

[Note: the blocks worth most]
A byte that is page-locked saves the same time in whichever block it lies, since every block is
copied once a pass. What differs is how much of a slow copy can hide behind compute: pageable blocks
one behind the other add up, those among pinned ones do not. So under a budget the pinned blocks
are spread evenly over the ring, as many bytes as fit; what is left of the budget then goes to the
largest block that still fits. Blocks that stay on the device are copied once and not once a pass:
they get what the others leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlo_core.errors import AgreementError, HostMemoryError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dlo_core.cgroup import Bound

__all__ = ["Allotment", "Wish", "settle", "spread"]


@dataclass(frozen=True, slots=True)
class Wish:
    """What one rank plans.

    Attributes:
        rank: In the group.
        node: Ranks of one node have it in common.
        tiers: The tiers that the rank can have and would take, the best first; never empty.
        shard_nbytes: Bytes of each block's shard.
        staying: Numbers of the blocks that stay on the device.
        staging_nbytes: What the mapped tier stages through.
        identity: Equal for ranks whose shards have equal bytes.
        pins: Whether the rank page-locks its memory at all.
        must_pin: Whether it was told to by name.
        pin_budget: The most bytes that it may lock by the caller's word; None: any number.
        lock: What the system still lets it lock; None: any number.
        bounds: What limits its memory.
    """

    rank: int
    node: str
    tiers: tuple[str, ...]
    shard_nbytes: tuple[int, ...]
    staging_nbytes: int
    identity: str
    pins: bool
    must_pin: bool
    pin_budget: int | None
    lock: Bound | None
    bounds: tuple[Bound, ...]
    staying: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.shard_nbytes)


@dataclass(frozen=True, slots=True)
class Allotment:
    """What one rank gets.

    Attributes:
        tier: The tier of all its blocks; ``"pinned"`` may leave some of them pageable.
        pinned: Which blocks are page-locked (in the mapped tier: whether the staging is).
        local_rank: Number among the ranks of the node that share memory with it.
        local_size: How many these are; 1 where nothing is shared.
        maker: Rank in the group of the first of them.
        shares: Whether any rank of the group shares memory.
        num_turns: How often ranks take turns to page-lock shared memory; the same on all ranks.
        note: Why it is not what was wished first; empty where it is.
    """

    tier: str
    pinned: tuple[bool, ...]
    local_rank: int = 0
    local_size: int = 1
    maker: int = 0
    shares: bool = False
    num_turns: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    """What one rank takes with a tier."""

    wish: Wish
    tier: str
    pinned: tuple[bool, ...]
    private: int
    shared: int
    staging: int

    @property
    def nbytes(self) -> int:
        return self.private + self.shared + self.staging

    @property
    def locked(self) -> int:
        if self.tier == "mapped":
            return self.staging if all(self.pinned) and self.wish.pins else 0
        return sum(n for n, yes in zip(self.wish.shard_nbytes, self.pinned, strict=True) if yes)


def settle(wishes: Sequence[Wish], rank: int) -> Allotment:
    """Return what ``rank`` gets; every rank raises, or none does.

    Args:
        wishes: Of all ranks of the group, in rank order.
        rank: Whose answer is wanted.

    Raises:
        HostMemoryError: The ranks of a node want more than there is; prints the table.
        AgreementError: Ranks that are to share memory have different models or settings.
    """
    answers: dict[str, tuple[list[_Row], str]] = {}
    for node in sorted({wish.node for wish in wishes}):
        answers[node] = _settle_node([wish for wish in wishes if wish.node == node])
    rows, note = answers[wishes[rank].node]
    mine = next(row for row in rows if row.wish.rank == rank)
    sharing = [node for node, _ in answers.values() if node[0].tier == "shared"]
    turns = max((len(node) for node in sharing if any(row.wish.pins for row in node)), default=0)
    common = Allotment(mine.tier, mine.pinned, shares=bool(sharing), num_turns=turns, note=note)
    if mine.tier != "shared":
        return common
    locals_ = [row.wish.rank for row in rows]
    return replace(
        common,
        local_rank=locals_.index(rank),
        local_size=len(locals_),
        maker=locals_[0],
    )


def spread(sizes: Sequence[int], budget: int, staying: Collection[int] = ()) -> tuple[bool, ...]:
    """Return which of the runs of ``sizes`` bytes are pinned within ``budget`` bytes.

    See [Note: the blocks worth most].

    Args:
        sizes: Of all blocks.
        budget: Bytes.
        staying: Numbers of those that stay on the device.
    """
    if staying:
        first = [index for index in range(len(sizes)) if index not in staying]
        pinned = dict(zip(first, spread([sizes[n] for n in first], budget), strict=True))
        left = budget - sum(sizes[index] for index, yes in pinned.items() if yes)
        last = sorted(staying)
        pinned |= zip(last, spread([sizes[n] for n in last], left), strict=True)
        return tuple(pinned[index] for index in range(len(sizes)))
    total = sum(sizes)
    if total <= budget:
        return (True,) * len(sizes)
    chosen = [False] * len(sizes)
    left, passed = max(budget, 0), 0
    for index, nbytes in enumerate(sizes):
        passed += nbytes
        # As much as falls to the blocks so far, if the budget is spread over all of them.
        due = budget * passed // total - (max(budget, 0) - left)
        if nbytes <= min(due, left):
            chosen[index] = True
            left -= nbytes
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if not chosen[index] and sizes[index] <= left:
            chosen[index] = True
            left -= sizes[index]
    return tuple(chosen)


def _settle_node(wishes: list[Wish]) -> tuple[list[_Row], str]:
    """Return the rows of one node, and why they are not the first choice."""
    first = [_row(wish, wish.tiers[0], leads=n == 0) for n, wish in enumerate(wishes)]
    _check_sharing(first)
    problem = _problem(first)
    if not problem:
        return first, ""
    for tier in ("shared", "mapped"):
        if all(tier in wish.tiers[1:] for wish in wishes):
            rows = [_row(wish, tier, leads=n == 0) for n, wish in enumerate(wishes)]
            alike = tier != "shared" or len({wish.identity for wish in wishes}) == 1
            if alike and not _problem(rows):
                return rows, f"{problem}; the {tier} tier is used instead"
    raise HostMemoryError(
        f"the host memory cannot be had: {problem}.\n{_table(first)}\n"
        "Use more ranks (gather mode keeps 1/size of the model in each), host='shared' (rank-local "
        "mode, one copy a node) or host='mapped' (the checkpoint's pages), or raise the limit"
    )


def _row(wish: Wish, tier: str, *, leads: bool) -> _Row:
    count = len(wish.shard_nbytes)
    none = (False,) * count
    if tier == "mapped":
        fits = wish.pins and wish.staging_nbytes <= _lockable(wish)
        return _Row(wish, tier, (fits,) * count, 0, 0, wish.staging_nbytes)
    pinned = none
    if wish.pins and tier in ("pinned", "shared"):
        pinned = spread(wish.shard_nbytes, _lockable(wish), wish.staying)
    if tier == "shared":
        # Counted once a node.
        return _Row(wish, tier, pinned, 0, wish.nbytes if leads else 0, 0)
    return _Row(wish, tier, pinned, wish.nbytes, 0, 0)


def _lockable(wish: Wish) -> int:
    """Return the bytes that a rank may lock; told to pin, it goes by the caller's budget alone."""
    limits = [sum(wish.shard_nbytes) + wish.staging_nbytes]
    if wish.pin_budget is not None:
        limits.append(wish.pin_budget)
    if wish.lock is not None and not wish.must_pin:
        limits.append(wish.lock.free_nbytes)
    return min(limits)


def _check_sharing(rows: list[_Row]) -> None:
    """Refuse ranks of one node that cannot share, where one of them was told to."""
    sharing = [row.wish for row in rows if row.tier == "shared"]
    if not sharing:
        return
    if len(sharing) < len(rows):
        others = ", ".join(str(row.wish.rank) for row in rows if row.tier != "shared")
        raise AgreementError(
            f"host='shared' was given on ranks {', '.join(str(w.rank) for w in sharing)} and not "
            f"on ranks {others} of node {rows[0].wish.node!r}: give it on all ranks of a node"
        )
    if len({wish.identity for wish in sharing}) > 1:
        seen = "; ".join(f"rank {wish.rank} has {wish.identity[:12]}" for wish in sharing)
        raise AgreementError(
            f"host='shared' keeps one copy for all ranks of node {rows[0].wish.node!r}, but their "
            f"models differ: {seen}. Give every rank of the node the same model, the same "
            "checkpoint files and the same resident=, or use host='pinned' or 'pageable'"
        )


def _problem(rows: list[_Row]) -> str:
    """Return what the rows ask too much of, or nothing."""
    for row in rows:
        lock = row.wish.lock
        if row.wish.must_pin and lock is not None and row.locked > lock.free_nbytes:
            return (
                f"rank {row.wish.rank} is to page-lock {row.locked:,} bytes and ulimit -l leaves "
                f"{lock.free_nbytes:,} (raise it, or use host=None, which pins what it may)"
            )
    bounds: dict[str, list[tuple[Bound, _Row]]] = {}
    for row in rows:
        for bound in row.wish.bounds:
            bounds.setdefault(bound.key, []).append((bound, row))
    for under in bounds.values():
        free = min(bound.free_nbytes for bound, _ in under)
        wanted = sum(row.nbytes for _, row in under)
        if wanted > free:
            ranks = ", ".join(str(row.wish.rank) for _, row in under)
            many = f"ranks {ranks} together want" if len(under) > 1 else f"rank {ranks} wants"
            return (
                f"{many} {wanted:,} bytes and {under[0][0].name} has {free:,} free "
                f"(node {under[0][1].wish.node!r})"
            )
    return ""


def _table(rows: list[_Row]) -> str:
    """Return the table of a node: what each rank wants, and what there is."""
    heads = ("rank", "tier", "pinned", "pageable", "shared", "staging", "all")
    lines = [heads] + [
        (
            str(row.wish.rank),
            row.tier,
            f"{row.locked:,}",
            f"{row.private - row.locked if row.private else 0:,}",
            f"{row.shared:,}",
            f"{row.staging:,}",
            f"{row.nbytes:,}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    text = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    free: dict[str, Bound] = {}
    for row in rows:
        for bound in row.wish.bounds:
            known = free.get(bound.key, bound)
            free[bound.key] = min(known, bound, key=lambda each: each.free_nbytes)
    text += [f"{bound.name}: {bound.free_nbytes:,} bytes free" for bound in free.values()]
    return "\n".join(text)
