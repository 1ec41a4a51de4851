# SPDX-License-Identifier: Apache-2.0
"""The tests that take longest. `make test` leaves some of them to `make test-all`, as it does with
the half of a test that runs torch's own loader (`conftest.py`), and begins with the files that take
minutes, so that no process is left with one of them at the end.
"""

from __future__ import annotations

# Each shows once more, for another case, what a test that stays shows; a name stands for all of its
# parameters.
LEFT_TO_TEST_ALL = (
    "tests/chaos/test_chaos.py::test_no_batch_is_lost[full-disks]",
    "tests/chaos/test_chaos.py::test_no_batch_is_lost[full-shared-memory]",
    "tests/chaos/test_chaos.py::test_no_batch_is_lost[no-descriptors]",
    "tests/frameworks/test_geometric.py::"
    "test_a_library_imported_after_gives_torchs_batches_through_penstock",
    "tests/frameworks/test_torchvision.py::"
    "test_a_training_script_prints_the_losses_it_prints_under_python[distributed]",
    "tests/model/test_delivery_model.py::"
    "test_every_run_is_safe_and_ends_with_all_delivered"
    "[a worker is cut off and a message lost]",
    "tests/model/test_delivery_model.py::"
    "test_every_run_is_safe_and_ends_with_all_delivered[one crash and one silence]",
    "tests/model/test_delivery_model.py::"
    "test_every_run_is_safe_and_ends_with_all_delivered[three batches, credit of two]",
    "tests/python/test_automatic_pool.py::"
    "test_workers_that_are_not_forked_are_changed_too[forkserver]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[audio]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[first_batch/tiny]",
    "tests/python/test_bench.py::"
    "test_each_case_writes_a_line_for_each_figure[forkserver_start/tensor]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[large]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[memory/object_list]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[memory/shared_list]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[nested]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[next_epoch/tiny]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[object_store]",
    "tests/python/test_bench.py::"
    "test_each_case_writes_a_line_for_each_figure[one_batch/object_store]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[photographs]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[spawn_start/array]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[tabular]",
    "tests/python/test_bench.py::test_each_case_writes_a_line_for_each_figure[text]",
    "tests/python/test_bench_cut.py::test_a_workload_has_a_line_for_each_rate_plan_and_ratio",
    "tests/python/test_bench_executor.py::test_a_case_has_a_line_for_each_time_and_ratio",
    "tests/python/test_bench_pool.py::test_a_link_is_filled_or_the_reason_said",
    "tests/python/test_bench_pool.py::test_each_way_of_the_bytes_has_its_ratios",
    "tests/python/test_bench_pool.py::test_soak_counts_after_each_epoch",
    "tests/python/test_bench_pool.py::test_the_loader_is_measured_for_each_size",
    "tests/python/test_compiled_prefix.py::test_other_bits_are_seen_before_they_are_used",
    "tests/python/test_compiled_prefix.py::"
    "test_what_cannot_be_compiled_apart_is_left_to_the_executor",
    "tests/python/test_examples.py::"
    "test_an_example_trains_and_its_plan_is_explained[purchases-moved2]",
    "tests/python/test_examples.py::"
    "test_an_example_trains_and_its_plan_is_explained[spectrogram-moved1]",
    "tests/python/test_examples.py::"
    "test_three_trainings_have_equal_losses_and_leave_a_picture_and_figures",
    "tests/python/test_explain_program.py::test_a_program_that_fails_ends_as_under_run[before]",
    "tests/python/test_explain_program.py::test_a_program_that_fails_ends_as_under_run[by_exit]",
    "tests/python/test_explain_program.py::test_a_program_that_fails_ends_as_under_run[by_message]",
    "tests/python/test_explain_program.py::test_a_program_that_fails_ends_as_under_run[in_a_model]",
    "tests/python/test_explain_program.py::"
    "test_a_raw_tensor_beside_a_converted_one_does_not_end_the_search",
    "tests/python/test_fetch_threads.py::"
    "test_the_stream_of_persistent_workers_is_torchs_however_they_start[nested-forkserver]",
    "tests/python/test_fetch_threads.py::"
    "test_the_stream_of_persistent_workers_is_torchs_however_they_start[odd_ones_fail-spawn]",
    "tests/python/test_fuzz.py::test_every_canary_is_found_and_nothing_else",
    "tests/python/test_offload_compiled.py::"
    "test_under_inductor_training_is_that_of_inductor[dropout_on_input]",
    "tests/python/test_program.py::test_a_file_sees_the_surroundings_that_python_gives[./train.py]",
    "tests/python/test_program.py::"
    "test_a_file_sees_the_surroundings_that_python_gives[code/train.py]",
    "tests/python/test_program.py::test_a_module_sees_the_surroundings_that_python_gives[package]",
    "tests/python/test_program.py::"
    "test_a_program_and_what_it_spawns_have_penstocks_loader[-m train]",
    "tests/python/test_program.py::test_torchrun_starts_programs_under_penstock[-m penstock run]",
    "tests/python/test_shared_list.py::test_the_stream_is_that_of_a_list[DataLoader0-forkserver]",
    "tests/python/test_shared_list.py::test_the_stream_is_that_of_a_list[DataLoader1-forkserver]",
    "tests/python/test_shared_list.py::test_the_stream_is_that_of_a_list[DataLoader1-spawn]",
    "tests/python/test_worker_start.py::test_a_dataset_is_pickled_once_for_all_workers[forkserver]",
    "tests/python/test_worker_start.py::"
    "test_whatever_a_dataset_holds_arrives_as_with_torch[forkserver]",
    "tests/sim/test_simulation.py::test_a_bug_is_found[a gap on a link is not seen]",
    "tests/sim/test_simulation.py::"
    "test_a_bug_is_found[a trainer that knows nothing is taken for one that does]",
    "tests/sim/test_simulation.py::test_a_bug_is_found[messages of ended links count]",
    "tests/zoo/test_zoo.py::test_a_life_with_the_maximal_cut_is_the_life_without[faster_rcnn]",
    "tests/zoo/test_zoo.py::test_a_life_with_the_maximal_cut_is_the_life_without[hf_bert]",
    "tests/zoo/test_zoo.py::test_a_life_with_the_maximal_cut_is_the_life_without[hf_t5]",
    "tests/zoo/test_zoo.py::test_a_life_with_the_maximal_cut_is_the_life_without[hf_vit]",
    "tests/zoo/test_zoo.py::test_a_life_with_the_maximal_cut_is_the_life_without[hf_wav2vec2]",
    "tests/zoo/test_zoo.py::test_a_life_with_the_maximal_cut_is_the_life_without[retina_net]",
    "tests/zoo/test_zoo.py::test_training_with_a_cut_by_price_is_training_without[faster_rcnn]",
    "tests/zoo/test_zoo.py::test_training_with_a_cut_by_price_is_training_without[hf_t5]",
    "tests/zoo/test_zoo.py::test_training_with_a_cut_by_price_is_training_without[hf_wav2vec2]",
    "tests/zoo/test_zoo.py::test_training_with_a_cut_by_price_is_training_without[retina_net]",
    "tests/zoo/test_zoo.py::test_what_workers_send_is_what_the_trainer_uses[faster_rcnn]",
    "tests/zoo/test_zoo.py::test_what_workers_send_is_what_the_trainer_uses[hf_bert]",
    "tests/zoo/test_zoo.py::test_what_workers_send_is_what_the_trainer_uses[hf_t5]",
    "tests/zoo/test_zoo.py::test_what_workers_send_is_what_the_trainer_uses[hf_wav2vec2]",
    "tests/zoo/test_zoo.py::test_what_workers_send_is_what_the_trainer_uses[retina_net]",
)

# The longest first, as measured.
LONG_FILES = (
    "tests/chaos/test_chaos.py",
    "tests/python/test_random_models.py",
    "tests/python/test_bench.py",
    "tests/python/test_explain_program.py",
    "tests/python/test_compiled_prefix.py",
    "tests/python/test_pool_links.py",
    "tests/python/test_examples.py",
    "tests/python/test_pool_stream.py",
    "tests/zoo/test_zoo.py",
    "tests/python/test_worker_start.py",
    "tests/python/test_pool_worker.py",
    "tests/python/test_program.py",
    "tests/python/test_pool_security.py",
    "tests/sim/test_simulation.py",
    "tests/python/test_offload_between.py",
    "tests/python/test_bench_pool.py",
    "tests/python/test_repricing.py",
    "tests/python/test_pool_skews.py",
    "tests/python/test_seeding.py",
    "tests/model/test_delivery_model.py",
    "tests/python/test_offload_workers.py",
    "tests/python/test_three_machines.py",
)
