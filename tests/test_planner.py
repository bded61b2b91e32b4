"""The planner's simulation: the table of the design, its bounds, residents, and bad values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_core.errors import ConfigError
from dlo_core.planner import Simulation, simulate
from dlo_core.residency import resident_positions

GB = 1_000_000_000
IN_PLACE: dict[str, Any] = {"stages": 0}
IN_PLACE_3: dict[str, Any] = {"stages": 0, "depth": 3}
ONE_STAGE: dict[str, Any] = {"stages": 1}
STAGED: dict[str, Any] = {"stages": 2}
BLOCKING: dict[str, Any] = {"stages": 2, "host_blocks": True, "copies_ahead": False}
AHEAD: dict[str, Any] = {"stages": 2, "host_blocks": True}


def at(
    copy_ms: float, gather_ms: float, compute_ms: float, blocks: list[int] | None = None, **how: Any
) -> Simulation:
    """Simulate blocks of which one of 1 GB takes so many milliseconds on each lane."""
    sizes = blocks or [GB] * 30
    computes = [compute_ms * nbytes / GB for nbytes in sizes]
    return simulate(sizes, computes, 1e3 / copy_ms, 1e3 / gather_ms, **how)


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        ((5.96, 1.25, 3.00), (5.96, 5.96, 7.21, 5.96, 5.96, 5.96)),
        ((5.96, 5.0, 5.5), (8.15, 5.96, 10.96, 5.96, 8.15, 5.96)),
        ((6.0, 3.0, 6.0), (7.45, 6.00, 9.00, 6.00, 7.45, 6.00)),
    ],
)
def test_the_designs_table_of_orders(
    lanes: tuple[float, float, float], expected: tuple[float, ...]
) -> None:
    """Milliseconds a block in a first pass of 30 equal blocks, order by order."""
    orders = (IN_PLACE, IN_PLACE_3, ONE_STAGE, STAGED, BLOCKING, AHEAD)
    found = [round(at(*lanes, **how).interval_ms, 2) for how in orders]
    assert found == list(expected)


@pytest.mark.parametrize(
    ("lanes", "first", "settled"), [((5.96, 5.0, 5.5), 8.15, 8.23), ((6.0, 3.0, 6.0), 7.45, 7.50)]
)
def test_a_first_pass_is_a_little_shorter_than_those_that_follow(
    lanes: tuple[float, float, float], first: float, settled: float
) -> None:
    """The table's figures are means over a first pass, which begins with every slot free."""
    for how in (IN_PLACE, BLOCKING):
        found = at(*lanes, **how)
        assert round(found.interval_ms, 2) == first
        assert round(found.step_ms / 30, 2) == settled


@pytest.mark.parametrize(
    ("how", "factor"),
    [(IN_PLACE, 1.10), (IN_PLACE_3, 1.00), (STAGED, 1.00), (BLOCKING, 1.10), (AHEAD, 1.00)],
)
def test_the_designs_row_of_unequal_blocks(how: dict[str, Any], factor: float) -> None:
    """19 large blocks with two of half the size after each, as a multiple of the bound."""
    blocks = [GB, GB // 2, GB // 2] * 19
    found = at(5.96, 1.25, 3.00, blocks, **how)
    assert found.step_ms / found.bound_ms == pytest.approx(factor, abs=0.01)


def test_a_rank_alone_is_bound_by_its_link_or_by_its_computation() -> None:
    """40 blocks of 340 MB over 55 GB/s take 247 ms, whatever computes in less."""
    by_link = simulate([340_000_000] * 40, 2.0, 55.0)
    assert by_link.step_ms == pytest.approx(40 * 340 / 55)
    assert by_link.exposed_ms == pytest.approx(40 * 340 / 55 - 80)
    by_compute = simulate([340_000_000] * 40, 22.0, 55.0)
    assert by_compute.step_ms == pytest.approx(880.0)
    assert by_compute.exposed_ms == pytest.approx(0.0, abs=1e-6)


def test_evenly_spread_residents_hide_what_leading_ones_leave_exposed() -> None:
    """Ten of 40 blocks stay: the others' copies take 185 ms, and only spread ones reach that."""
    blocks, compute_ms = [340_000_000] * 40, 86.0 / 40
    spread = simulate(blocks, compute_ms, 55.0, residents=10)
    leading = simulate(blocks, compute_ms, 55.0, residents=10, placement="leading")
    assert spread.copy_ms == leading.copy_ms == pytest.approx(30 * 340 / 55)
    assert spread.step_ms <= 1.001 * spread.bound_ms
    assert leading.step_ms > 1.05 * spread.step_ms


def test_residents_may_be_given_as_places() -> None:
    blocks = [GB, GB, 3 * GB, GB]
    chosen = simulate(blocks, 1.0, 1000.0, residents={2})
    assert chosen.copy_ms == pytest.approx(3.0)
    everything = simulate(blocks, 1.0, 1000.0, residents=4)
    assert (everything.step_ms, everything.copy_ms) == (4.0, 0.0)


def test_blocks_that_all_have_a_slot_are_loaded_once() -> None:
    found = simulate([GB, GB], 1.0, 1000.0, depth=2)
    assert found.copy_ms == 0.0
    assert found.step_ms == pytest.approx(2.0)
    assert found.ends_ms == pytest.approx((2.0, 3.0))


@pytest.mark.parametrize(
    ("compute_ms", "decode_ms", "settled", "exposed"),
    [(1.0, 0.5, 12.0, 6.0), (3.0, 1.0, 16.0, 0.0), (3.0, 0.0, 12.0, 0.0)],
)
def test_a_packed_step_is_its_link_or_computation_and_decoding(
    compute_ms: float, decode_ms: float, settled: float, exposed: float
) -> None:
    """Four blocks that are copied in 3 ms each: max(T_x, T_c + n t_dec)."""
    found = simulate([GB] * 4, compute_ms, 1e3 / 3, t_decode=decode_ms)
    times = found.step_ms, found.bound_ms, found.lockstep_ms
    assert times == pytest.approx((settled,) * 3)
    assert found.exposed_ms == pytest.approx(exposed, abs=1e-6)
    assert (found.compute_ms, found.decode_ms) == (4 * compute_ms, 4 * decode_ms)


def test_a_slot_is_free_again_once_it_is_decoded() -> None:
    """Copies and gathers of 3 ms in place; by hand, block after block."""
    packed = at(3.0, 3.0, 3.0, [GB] * 4, t_decode=1.0, **IN_PLACE)
    # Copy 2 begins at 7, when block 0 is decoded; copy 3 at 11. So neither is waited for.
    assert packed.ends_ms == pytest.approx((10.0, 14.0, 18.0, 22.0))
    assert packed.step_ms == pytest.approx(16.0)
    # Of blocks that compute in their slots copy 2 begins at 10, so block 2 at 16 and not at 14.
    raw = at(3.0, 3.0, 4.0, [GB] * 4, **IN_PLACE)
    assert raw.ends_ms == pytest.approx((10.0, 14.0, 20.0, 24.0))
    assert raw.step_ms == pytest.approx(20.0)


def test_blocks_that_stay_are_decoded_where_they_are_packed() -> None:
    """Of six blocks three stay, raw; the others' copies take 3 * 3 ms."""
    four = simulate([GB] * 4, 1.0, 1e3 / 3, t_decode=0.5, residents={1, 3})
    # Two slots hold the others for good; only the home is written anew.
    assert (four.decode_ms, four.copy_ms, four.step_ms) == pytest.approx((2.0, 0.0, 6.0))
    six = simulate([GB] * 6, 1.0, 1e3 / 3, t_decode=[0.5, 0.0] * 3, residents={1, 3, 5})
    assert (six.decode_ms, six.copy_ms) == pytest.approx((1.5, 9.0))
    assert six.step_ms == pytest.approx(9.0)
    slow = simulate([GB] * 6, 1.0, 1e3 / 3, t_decode=[1.5, 0.0] * 3, residents={1, 3, 5})
    assert slow.step_ms == pytest.approx(6 * 1.0 + 3 * 1.5)


def test_one_packed_block_alone_stays_decoded() -> None:
    found = simulate([GB], 2.0, 1e3 / 3, t_decode=1.0)
    assert found.ends_ms == pytest.approx((6.0,))
    assert (found.step_ms, found.decode_ms) == pytest.approx((2.0, 0.0))
    two = simulate([GB] * 2, 2.0, 1e3 / 3, t_decode=1.0)
    assert (two.step_ms, two.decode_ms, two.copy_ms) == pytest.approx((6.0, 2.0, 0.0))


def test_each_rank_copies_its_part_only() -> None:
    whole, half = (at(6.0, 1.0, 0.5, size=size) for size in (1, 2))
    assert (whole.copy_ms, half.copy_ms) == pytest.approx((180.0, 90.0))
    assert half.step_ms == pytest.approx(90.0)


def test_spread_places_are_distinct_and_even() -> None:
    assert resident_positions(40, 10) == set(range(2, 40, 4))
    assert resident_positions(5, 2, "leading") == {0, 1}
    for count in range(1, 40):
        for num in range(1, count + 1):
            places = sorted(resident_positions(count, num))
            assert len(places) == num
            assert places[0] >= 0
            assert places[-1] < count


shapes = st.fixed_dictionaries(
    {
        "depth": st.integers(2, 4),
        "stages": st.integers(0, 3),
        "host_blocks": st.booleans(),
        "copies_ahead": st.booleans(),
    }
)
lanes = st.tuples(*[st.floats(0.5, 8.0)] * 3)
sizes = st.lists(st.integers(1, 5).map(lambda parts: parts * GB // 5), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(shapes, lanes, sizes, st.data())
def test_a_step_lies_between_the_bound_and_lockstep(
    shape: dict[str, Any], ms: tuple[float, float, float], blocks: list[int], data: st.DataObject
) -> None:
    stay = data.draw(st.sets(st.integers(0, len(blocks) - 1)))
    found = at(*ms, blocks, residents=stay, **shape)
    assert found.step_ms >= found.bound_ms * (1 - 1e-9)
    assert found.step_ms <= found.lockstep_ms * (1 + 1e-9)
    assert found.exposed_ms == pytest.approx(found.step_ms - found.compute_ms, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(shapes, lanes, sizes, st.floats(0.0, 4.0), st.data())
def test_a_packed_step_lies_between_the_bound_and_one_that_computes_longer(
    shape: dict[str, Any],
    ms: tuple[float, float, float],
    blocks: list[int],
    decode_ms: float,
    data: st.DataObject,
) -> None:
    """For its slots are free again before the computation, and not behind it."""
    stay = data.draw(st.sets(st.integers(0, len(blocks) - 1)))
    decodes = [decode_ms * nbytes / GB for nbytes in blocks]
    found = at(*ms, blocks, residents=stay, t_decode=decodes, **shape)
    assert found.step_ms >= found.bound_ms * (1 - 1e-9)
    assert found.step_ms <= found.lockstep_ms * (1 + 1e-9)
    assert found.exposed_ms == pytest.approx(
        found.step_ms - found.compute_ms - found.decode_ms, abs=1e-6
    )
    copy_ms, gather_ms, compute_ms = ms
    longer = at(copy_ms, gather_ms, compute_ms + decode_ms, blocks, residents=stay, **shape)
    assert found.step_ms <= longer.step_ms * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(shapes, lanes, sizes)
def test_more_of_anything_is_never_slower(
    shape: dict[str, Any], ms: tuple[float, float, float], blocks: list[int]
) -> None:
    """Deeper, one stage more, copies ahead, a host that runs ahead, a faster link or gather."""
    now = at(*ms, blocks, **shape).step_ms * (1 + 1e-9)
    copy_ms, gather_ms, compute_ms = ms
    assert at(*ms, blocks, **shape | {"depth": shape["depth"] + 1}).step_ms <= now
    assert at(*ms, blocks, **shape | {"copies_ahead": True}).step_ms <= now
    assert at(*ms, blocks, **shape | {"host_blocks": False}).step_ms <= now
    assert at(copy_ms / 2, gather_ms, compute_ms, blocks, **shape).step_ms <= now
    assert at(copy_ms, gather_ms / 2, compute_ms, blocks, **shape).step_ms <= now
    if shape["stages"]:
        assert at(*ms, blocks, **shape | {"stages": shape["stages"] + 1}).step_ms <= now


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"blocks": []}, "at least one block"),
        ({"blocks": [-1, 1]}, "byte counts"),
        ({"t_compute": [1.0]}, "2 blocks and 1 times"),
        ({"t_compute": float("nan")}, "t_compute must be milliseconds"),
        ({"t_decode": [1.0]}, "one t_decode for each; got 2 blocks and 1 times"),
        ({"t_decode": -1.0}, "t_decode must be milliseconds"),
        ({"link": 0.0}, "link must be a rate"),
        ({"gather": -1.0}, "gather must be a rate"),
        ({"depth": 1}, "depth must be at least 2"),
        ({"stages": -1}, "stages must be at least 0"),
        ({"size": 0}, "size must be at least 1"),
        ({"residents": 3}, "residents must be 0 to 2"),
        ({"residents": {7}}, "places 0 to 1"),
        ({"placement": "middle"}, "placement must be"),
    ],
)
def test_values_out_of_range_are_named(arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"blocks": [GB, GB], "t_compute": 1.0, "link": 1.0} | arguments
    with pytest.raises(ConfigError, match=words):
        simulate(**given)
