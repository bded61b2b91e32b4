"""What every test gets: the testing kit's plug-in, as a backend's author has it.

``REPEATS`` names tests that are slow by their parameters and of which a quicker sibling stays in
the fast suite: ``make test-all`` runs them, ``make test`` does not.
"""

from __future__ import annotations

import pytest

pytest_plugins = ["dlo_core.testing.pytest_plugin"]

REPEATS = frozenset(
    {
        "test_agreement.py::test_a_peer_that_stops_is_an_error_within_the_timeout_and_closes_the_offload[disable-0]",
        "test_agreement.py::test_a_peer_that_stops_is_an_error_within_the_timeout_and_closes_the_offload[pass-2]",
        "test_agreement.py::test_a_rank_that_never_comes_is_named_within_the_timeout[0]",
        "test_bad_input.py::test_bad_input_on_one_rank_is_refused_on_all[3]",
        "test_bits.py::test_a_checkpoint_of_any_form_gives_the_same_bits[3]",
        "test_bits.py::test_a_checkpoint_of_any_form_gives_the_same_bits[4]",
        "test_bits.py::test_an_offloaded_model_computes_the_same_bits[4]",
        "test_cases_lifecycle.py::test_a_block_that_calls_itself_or_another_is_right_or_an_error[3-2]",
        "test_demo_run.py::test_two_ranks_draw_the_same_bits_streamed_as_resident[rank-local]",
        "test_kit_gloo.py::test_the_engine_as_it_is_has_no_race_and_right_bits[3-0-1]",
        "test_lifecycle.py::test_a_failure_in_any_step_on_one_rank_is_told_to_all[2-None]",
        "test_lifecycle.py::test_a_process_ends_cleanly_whatever_was_closed_first",
        "test_lifecycle.py::test_enable_and_disable_ten_times[2-2]",
        "test_lifecycle.py::test_enable_and_disable_ten_times[3-2]",
        "test_mapped.py::test_bits_are_right_and_come_back[in place-3]",
        "test_mapped.py::test_bits_are_right_and_come_back[staged-3]",
        "test_mapped.py::test_bits_are_right_however_late_the_reading_and_the_streams_are[in place]",
        "test_mapped.py::test_bits_are_right_however_late_the_reading_and_the_streams_are[staged]",
        "test_mapped.py::test_pages_that_the_device_can_lock_are_copied_from_where_they_lie[staged]",
        "test_memory.py::test_a_small_process_holds_no_second_copy[False]",
        "test_memory.py::test_ranks_get_all_memory_back[False]",
        "test_parallel_table.py::test_the_table_is_written_from_the_report_and_a_stale_one_is_noticed",
        "test_parallel_tensors.py::test_a_dtensor_comes_back_as_the_object_it_was",
        "test_reading.py::test_a_missing_file_is_refused_on_every_rank[folder]",
        "test_reading.py::test_a_truncated_file_is_refused_on_every_rank[False-drop_half_the_header]",
        "test_reading.py::test_a_truncated_file_is_refused_on_every_rank[False-drop_tail]",
        "test_reading.py::test_a_truncated_file_is_refused_on_every_rank[True-drop_half_the_header]",
        "test_reading.py::test_a_truncated_file_is_refused_on_every_rank[True-empty]",
        "test_reading.py::test_an_exception_of_one_ranks_callback_cancels_on_all[False]",
        "test_shared.py::test_all_ranks_map_one_memory_and_divide_the_reading[4-False]",
        "test_tape_random.py::test_programs_on_the_real_engine_give_the_bits_of_the_resident_run[3]",
    }
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the repeats; a name that stands for no test of a collected file is an error."""
    names = {f"{item.path.name}::{item.name}": item for item in items}
    whole = {item.path.name for item in items}
    for name in REPEATS:
        if name in names:
            names[name].add_marker(pytest.mark.slow)
    if len(whole) > 40:
        stale = sorted(name for name in REPEATS if name not in names)
        if stale:
            raise pytest.UsageError(f"tests/conftest.py names tests that are not there: {stale}")
