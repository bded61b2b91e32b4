"""What every test gets: the testing kit's plug-in, as a backend's author has it.

``make test-all`` runs, and ``make test`` does not, what a quicker sibling in the fast suite shows
nearly as well: the tests that ``REPEATS`` names, and of a test over one, two and more ranks of a
real job those over more than two.
"""

from __future__ import annotations

import gc

import pytest

pytest_plugins = ["dlo_core.testing.pytest_plugin"]

REPEATS = frozenset(
    {
        "test_agreement.py::test_a_peer_that_stops_is_an_error_within_the_timeout_and_closes_the_offload[disable-0]",
        "test_agreement.py::test_a_peer_that_stops_is_an_error_within_the_timeout_and_closes_the_offload[disable-2]",
        "test_agreement.py::test_a_peer_that_stops_is_an_error_within_the_timeout_and_closes_the_offload[forward-0]",
        "test_agreement.py::test_a_peer_that_stops_is_an_error_within_the_timeout_and_closes_the_offload[pass-0]",
        "test_agreement.py::test_a_peer_that_stops_is_an_error_within_the_timeout_and_closes_the_offload[pass-2]",
        "test_agreement.py::test_a_rank_that_never_comes_is_named_within_the_timeout[0]",
        "test_agreement.py::test_a_rank_that_never_comes_is_named_within_the_timeout[2]",
        "test_bad_input.py::test_bad_input_on_one_rank_is_refused_on_all[3]",
        "test_bits.py::test_a_checkpoint_of_any_form_gives_the_same_bits[3]",
        "test_bits.py::test_a_checkpoint_of_any_form_gives_the_same_bits[4]",
        "test_bits.py::test_an_offloaded_model_computes_the_same_bits[4]",
        "test_cases_lifecycle.py::test_a_block_that_calls_itself_or_another_is_right_or_an_error[2-2]",
        "test_cases_lifecycle.py::test_a_block_that_calls_itself_or_another_is_right_or_an_error[3-2]",
        "test_cases_lifecycle.py::test_an_exception_in_a_block_does_not_poison_the_next_forward[2-GeneratorExit]",
        "test_cases_lifecycle.py::test_an_exception_in_a_block_does_not_poison_the_next_forward[2-MemoryError]",
        "test_cases_lifecycle.py::test_an_exception_in_a_block_does_not_poison_the_next_forward[2-SystemExit]",
        "test_cases_lifecycle.py::test_inference_mode_no_grad_and_plain_mix[inference-no_grad-plain-no_grad-2]",
        "test_cases_lifecycle.py::test_inference_mode_no_grad_and_plain_mix[inference-no_grad-plain-plain-2]",
        "test_cases_lifecycle.py::test_inference_mode_no_grad_and_plain_mix[inference-plain-inference-inference-2]",
        "test_cases_lifecycle.py::test_inference_mode_no_grad_and_plain_mix[inference-plain-inference-plain-2]",
        "test_cases_lifecycle.py::test_inference_mode_no_grad_and_plain_mix[no_grad-inference-plain-inference-2]",
        "test_cases_lifecycle.py::test_inference_mode_no_grad_and_plain_mix[no_grad-inference-plain-no_grad-2]",
        "test_cases_lifecycle.py::test_inference_mode_no_grad_and_plain_mix[plain-no_grad-inference-no_grad-2]",
        "test_cases_lifecycle.py::test_inference_mode_no_grad_and_plain_mix[plain-no_grad-inference-plain-2]",
        "test_cases_order.py::test_a_block_that_is_called_twice_in_a_forward[0-3-2]",
        "test_cases_order.py::test_a_block_that_is_called_twice_in_a_forward[00123-3-2]",
        "test_cases_order.py::test_a_block_that_is_called_twice_in_a_forward[01203-3-2]",
        "test_cases_order.py::test_a_block_that_is_called_twice_in_a_forward[01230-3-2]",
        "test_cases_order.py::test_a_block_that_is_called_twice_in_a_forward[01230123-3-2]",
        "test_cases_order.py::test_a_block_that_is_called_twice_in_a_forward[01233-3-2]",
        "test_cases_order.py::test_a_block_that_is_called_twice_in_a_forward[030303-3-2]",
        "test_cases_order.py::test_a_block_that_is_called_twice_in_a_forward[none-3-2]",
        "test_cases_order.py::test_a_number_of_blocks_that_depth_does_not_divide[3-2]",
        "test_cases_weights.py::test_sizes_that_the_group_does_not_divide_are_padded_alike[4-counts1]",
        "test_conformance_faults.py::test_a_planted_fault_fails_its_test[TestRoundingAllocator]",
        "test_cpu_backend.py::test_the_interpreter_exits_cleanly_with_work_pending[a stuck stream]",
        "test_demo_run.py::test_two_ranks_draw_the_same_bits_streamed_as_resident[both modes]",
        "test_demo_run.py::test_two_ranks_draw_the_same_bits_streamed_as_resident[rank-local]",
        "test_host_tiers.py::test_a_model_over_a_rounding_allocator_is_exact_and_right[False]",
        "test_host_tiers.py::test_a_pin_budget_is_kept[None-0-0]",
        "test_host_tiers.py::test_a_pin_budget_is_kept[None-10240-10]",
        "test_host_tiers.py::test_a_pin_budget_is_kept[None-1125899906842624-10]",
        "test_host_tiers.py::test_a_pin_budget_is_kept[None-512-0]",
        "test_host_tiers.py::test_a_pin_budget_is_kept[shared-0-0]",
        "test_host_tiers.py::test_a_pin_budget_is_kept[shared-10240-10]",
        "test_host_tiers.py::test_a_pin_budget_is_kept[shared-1125899906842624-10]",
        "test_host_tiers.py::test_a_pin_budget_is_kept[shared-512-0]",
        "test_host_tiers.py::test_ranks_with_different_tiers_gather_alike",
        "test_kit.py::test_the_engine_as_it_is_has_no_race_and_no_host_sync[3-0-late]",
        "test_kit.py::test_the_engine_as_it_is_has_no_race_and_no_host_sync[3-0-random]",
        "test_kit.py::test_the_engine_as_it_is_has_no_race_and_no_host_sync[3-2-late]",
        "test_kit.py::test_the_engine_as_it_is_has_no_race_and_no_host_sync[3-2-random]",
        "test_kit_gloo.py::test_a_missing_wait_or_record_is_found[drained not recorded]",
        "test_kit_gloo.py::test_a_missing_wait_or_record_is_found[no wait on filled]",
        "test_kit_gloo.py::test_a_missing_wait_or_record_is_found[no wait on the copy, in place]",
        "test_kit_gloo.py::test_a_missing_wait_or_record_is_found[no wait on the copy, staged]",
        "test_kit_gloo.py::test_a_seed_replays_its_schedule",
        "test_kit_gloo.py::test_a_slot_chosen_by_block_number_is_found",
        "test_kit_gloo.py::test_awkward_models_have_no_race_and_right_bits[called twice]",
        "test_kit_gloo.py::test_awkward_models_have_no_race_and_right_bits[mixed]",
        "test_kit_gloo.py::test_awkward_models_have_no_race_and_right_bits[run order of its own]",
        "test_kit_gloo.py::test_the_engine_as_it_is_has_no_race_and_right_bits[3-0-1]",
        "test_lifecycle.py::test_a_failure_in_any_step_of_enable_leaves_the_model_as_it_was[checkpoint]",
        "test_lifecycle.py::test_a_failure_in_any_step_on_one_rank_is_told_to_all[2-None]",
        "test_lifecycle.py::test_a_process_ends_cleanly_whatever_was_closed_first",
        "test_lifecycle.py::test_enable_and_disable_ten_times[2-2]",
        "test_lifecycle.py::test_enable_and_disable_ten_times[3-2]",
        "test_lifecycle.py::test_shutdown_waits_for_no_peer[2-0]",
        "test_lifecycle.py::test_shutdown_waits_for_no_peer[3-0]",
        "test_lifecycle.py::test_shutdown_waits_for_no_peer[3-2]",
        "test_mapped.py::test_bits_are_right_and_come_back[in place-1]",
        "test_mapped.py::test_bits_are_right_and_come_back[in place-3]",
        "test_mapped.py::test_bits_are_right_and_come_back[local-3]",
        "test_mapped.py::test_bits_are_right_and_come_back[staged-1]",
        "test_mapped.py::test_bits_are_right_and_come_back[staged-3]",
        "test_mapped.py::test_bits_are_right_however_late_the_reading_and_the_streams_are[in place]",
        "test_mapped.py::test_bits_are_right_however_late_the_reading_and_the_streams_are[staged]",
        "test_mapped.py::test_pages_that_the_device_can_lock_are_copied_from_where_they_lie[in place]",
        "test_mapped.py::test_pages_that_the_device_can_lock_are_copied_from_where_they_lie[staged]",
        "test_mapped.py::test_the_simulation_finds_no_race[eager-2-2]",
        "test_mapped.py::test_the_simulation_finds_no_race[random-1-2]",
        "test_mapped.py::test_the_simulation_finds_no_race[random-2-2]",
        "test_memory.py::test_a_small_process_holds_no_second_copy[False]",
        "test_memory.py::test_many_rounds_leave_no_files_open",
        "test_memory.py::test_ranks_get_all_memory_back[False]",
        "test_memory.py::test_ranks_get_all_memory_back[True]",
        "test_order.py::test_bits_are_right_for_any_number_of_blocks_and_slots[2-staged]",
        "test_order.py::test_bits_are_right_for_any_number_of_blocks_and_slots[3-in place]",
        "test_order.py::test_bits_are_right_for_any_number_of_blocks_and_slots[4-staged]",
        "test_order.py::test_bits_are_right_however_late_or_early_streams_run[a pass fails-in place-some]",
        "test_order.py::test_bits_are_right_however_late_or_early_streams_run[blocks are skipped-staged-some]",
        "test_order.py::test_bits_are_right_however_late_or_early_streams_run[blocks repeat-in place-some]",
        "test_order.py::test_bits_are_right_however_late_or_early_streams_run[order changes-staged-some]",
        "test_order.py::test_bits_are_right_where_one_rank_skips_what_the_other_computes[in place-calls1-some]",
        "test_order.py::test_bits_are_right_where_one_rank_skips_what_the_other_computes[staged-calls0-some]",
        "test_packed_engine.py::test_ranks_that_gather_packed_bytes_have_the_bits_in_every_use[2-settings1]",
        "test_parallel_matrix.py::test_an_accepted_cell_is_bit_identical_and_as_large_as_predicted[DP2-gather]",
        "test_parallel_matrix.py::test_an_accepted_cell_is_bit_identical_and_as_large_as_predicted[DP2xTP2-gather]",
        "test_parallel_matrix.py::test_an_accepted_cell_is_bit_identical_and_as_large_as_predicted[HSDP2x2-no-gather]",
        "test_parallel_table.py::test_the_table_is_written_from_the_report_and_a_stale_one_is_noticed",
        "test_parallel_tensors.py::test_a_dtensor_comes_back_as_the_object_it_was",
        "test_parallel_tensors.py::test_a_tp_rank_reads_its_slices_from_a_checkpoint[DP2xTP2-names]",
        "test_ranks.py::test_results_come_back_by_rank[spawn]",
        "test_reading.py::test_a_file_damaged_on_one_rank_alone_is_refused_on_every_rank",
        "test_reading.py::test_a_missing_file_is_refused_on_every_rank[file]",
        "test_reading.py::test_a_missing_file_is_refused_on_every_rank[folder]",
        "test_reading.py::test_a_missing_file_of_an_index_is_named_with_a_key",
        "test_reading.py::test_a_truncated_file_is_refused_on_every_rank[False-drop_half_the_header]",
        "test_reading.py::test_a_truncated_file_is_refused_on_every_rank[False-drop_tail]",
        "test_reading.py::test_a_truncated_file_is_refused_on_every_rank[False-empty]",
        "test_reading.py::test_a_truncated_file_is_refused_on_every_rank[True-drop_half_the_header]",
        "test_reading.py::test_a_truncated_file_is_refused_on_every_rank[True-drop_tail]",
        "test_reading.py::test_a_truncated_file_is_refused_on_every_rank[True-empty]",
        "test_reading.py::test_an_exception_of_one_ranks_callback_cancels_on_all[False]",
        "test_refit.py::test_the_bits_are_those_of_a_model_with_the_new_weights[ordered-3]",
        "test_refit.py::test_the_bits_are_those_of_a_model_with_the_new_weights[tied-3]",
        "test_refit.py::test_the_bits_are_those_of_a_model_with_the_new_weights[toy-3]",
        "test_refit.py::test_the_bits_are_those_of_a_model_with_the_new_weights[two blocks-3]",
        "test_residents.py::test_a_load_that_fails_at_the_start_leaves_every_model_as_it_was[2]",
        "test_residents.py::test_bits_are_right_however_late_or_early_streams_run[in place]",
        "test_salvage.py::test_awkward_blocks_and_what_no_checkpoint_has[1]",
        "test_salvage.py::test_packed_shards_are_read_again_where_they_can_be",
        "test_save.py::test_what_is_saved_is_what_torch_would_save[900-awkward-3]",
        "test_save.py::test_what_is_saved_is_what_torch_would_save[900-ordered-3]",
        "test_save.py::test_what_is_saved_is_what_torch_would_save[900-tied-3]",
        "test_save.py::test_what_is_saved_is_what_torch_would_save[900-toy-3]",
        "test_save.py::test_what_is_saved_is_what_torch_would_save[None-awkward-3]",
        "test_save.py::test_what_is_saved_is_what_torch_would_save[None-ordered-3]",
        "test_save.py::test_what_is_saved_is_what_torch_would_save[None-tied-3]",
        "test_save.py::test_what_is_saved_is_what_torch_would_save[None-toy-3]",
        "test_several_gpus.py::test_contenders_on_ranks_give_the_resident_bits[sp-1-contenders1]",
        "test_shared.py::test_a_lock_that_fails_half_way_gives_everything_back",
        "test_shared.py::test_a_rank_that_cannot_be_handed_the_memory_is_told_why",
        "test_shared.py::test_a_rank_that_is_slow_is_named",
        "test_shared.py::test_all_ranks_map_one_memory_and_divide_the_reading[4-False]",
        "test_shared.py::test_all_ranks_map_one_memory_and_divide_the_reading[4-True]",
        "test_shared.py::test_no_room_for_the_memory_is_an_error_on_every_rank[pages]",
        "test_state.py::test_all_ranks_read_a_whole_state_dict[ordered-3]",
        "test_state.py::test_all_ranks_read_a_whole_state_dict[tied-3]",
        "test_state.py::test_all_ranks_read_a_whole_state_dict[toy-3]",
        "test_tape_random.py::test_programs_on_the_real_engine_give_the_bits_of_the_resident_run[2]",
        "test_tape_random.py::test_programs_on_the_real_engine_give_the_bits_of_the_resident_run[3]",
        "test_topology.py::test_a_rank_that_stays_in_a_block_is_an_error_in_its_subgroup_alone",
        "test_watch.py::test_an_exception_that_a_rank_does_not_come_back_from_reaches_the_others",
        "test_watch.py::test_the_thread_ends_with_the_offload_and_keeps_no_model",
        "test_waves.py::test_results_come_in_order_with_the_bits_of_each_request_alone[sizes1-0-False]",
        "test_waves.py::test_results_come_in_order_with_the_bits_of_each_request_alone[sizes2-3-False]",
        "test_waves.py::test_results_come_in_order_with_the_bits_of_each_request_alone[sizes3-0-False]",
    }
)

_COUNTS = ("num_ranks", "ranks", "size")


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Freeze what is there before each file: collections skip it, and ranks copy fewer pages."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the repeats; a name that stands for no test of a collected file is an error."""
    names = {f"{item.path.name}::{item.name}": item for item in items}
    _mark_many_ranks(items)
    for name in REPEATS:
        if name in names:
            names[name].add_marker(pytest.mark.slow)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        stale = sorted(name for name in REPEATS if name not in names)
        if stale:
            raise pytest.UsageError(f"tests/conftest.py names tests that are not there: {stale}")


def _mark_many_ranks(items: list[pytest.Item]) -> None:
    """Mark tests of a real job; slow are those over more than two ranks that are there over two."""
    counts: dict[pytest.Item, int] = {}
    for item in items:
        if isinstance(item, pytest.Function) and "run_ranks" in item.function.__code__.co_names:
            item.add_marker(pytest.mark.ranks)
            given = item.callspec.params if hasattr(item, "callspec") else {}
            for name in _COUNTS:
                count = given.get(name)
                if isinstance(count, int):
                    counts[item] = count
    with_two = {_origin(item) for item, count in counts.items() if count == 2}
    for item, count in counts.items():
        if count > 2 and _origin(item) in with_two:
            item.add_marker(pytest.mark.slow)


def _origin(item: pytest.Item) -> tuple[str, str]:
    return item.path.name, item.originalname if isinstance(item, pytest.Function) else item.name
