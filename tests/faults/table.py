"""What a reviewer will try, what must come of it, and the tests that hold it: a row per fault.

Tests are named as file::function below tests/, or as reproduction/file::function below reproduction/tests/. A row
without tests says why there is nothing to test.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One item of the list.

    Args:
        what: is tried.
        outcome: must come of it.
        tests: that hold it.
        absent: why there are none.
    """

    what: str
    outcome: str
    tests: tuple[str, ...] = ()
    absent: str = ""


SAMPLING, RATES = "optimizer/test_sampling.py::", "optimizer/test_rates.py::"
REFUSALS, STATE = "optimizer/test_refusals.py::", "optimizer/test_state.py::"
SLANG, PURE = "methods/test_slang.py::", "methods/test_slang_refusals.py::"
FORMAT, CAPTURE = "checkpoint/test_format.py::", "rows/test_recorder.py::"
REPRODUCTION = "reproduction/"
REMOTE, DOWNLOAD = REPRODUCTION + "data/test_remote.py::", REPRODUCTION + "data/test_download.py::"
LOCK = REPRODUCTION + "data/test_lock.py::"
DATA, MODELS, FUZZ = "faults/test_data_faults.py::", "faults/test_model_faults.py::", "faults/test_fuzz.py::"
ARGUMENTS = (REFUSALS + "test_impossible_arguments_are_named", PURE + "test_impossible_arguments_are_named")

FAULTS = {
    1: Fault(
        "NaN or Inf in inputs, targets or loss",
        "`NumericalError`, or the batch is skipped and counted; the state is as before",
        (
            SAMPLING + "test_a_bad_batch_leaves_state_and_weights_and_training_goes_on",
            SAMPLING + "test_a_loss_that_is_not_a_number_is_refused",
            "optimizer/test_bad_batches.py::test_a_skipped_batch_leaves_no_trace",
            PURE + "test_bad_inputs_leave_the_state_and_name_the_trouble",
        ),
    ),
    2: Fault(
        "labels out of range, negative, or of another type",
        "`ValueError` or `TypeError` with the range",
        (
            REFUSALS + "test_integer_labels_out_of_range_are_named_by_the_likelihoods",
            "test_likelihoods.py::test_labels_that_are_not_classes_are_refused",
        ),
    ),
    3: Fault("one class only", "finite", (DATA + "test_awkward_data_are_learnt_from",)),
    4: Fault(
        "a constant column, repeated columns, more parameters than examples, one example",
        "finite",
        (DATA + "test_awkward_data_are_learnt_from", "methods/test_exact.py::test_bad_input_says_what_to_do"),
    ),
    5: Fault(
        "separable data, logits of any size",
        "finite",
        (
            SLANG + "test_logits_of_any_size_stay_finite",
            "methods/test_exact.py::test_separable_data_under_a_flat_prior",
            "test_likelihoods.py::test_extreme_logits_give_finite_values_and_gradients",
        ),
    ),
    7: Fault(
        "targets (N, 1) for outputs (N,) and the reverse",
        "refused, never broadcast",
        (
            "test_likelihoods.py::test_columns_of_targets_are_not_broadcast",
            "test_likelihoods.py::test_rows_of_targets_are_not_broadcast",
            "test_metrics.py::test_predictions_and_targets_of_different_shapes_are_refused",
        ),
    ),
    8: Fault(
        "an empty batch, a loader without batches",
        "`ValueError`, or `RuntimeError` where a step finds nothing",
        (
            REFUSALS + "test_an_empty_batch_is_refused",
            PURE + "test_empty_batches_and_bad_params_are_refused",
            SAMPLING + "test_step_without_gradients_says_what_to_do",
            "test_metrics.py::test_nothing_to_score_is_refused_rather_than_nan",
        ),
    ),
    9: Fault(
        "a short last batch",
        "scaled by its own size",
        ("optimizer/test_accumulation.py::test_a_short_batch_is_scaled_by_its_own_size",),
    ),
    10: Fault(
        "batches of one, smaller than the rank, larger than the data",
        "a step; the last with a warning",
        (DATA + "test_batches_of_any_size_are_steps", REFUSALS + "test_a_batch_larger_than_the_data_is_noticed_once"),
    ),
    11: Fault("`num_data` missing or impossible", "named", (REFUSALS + "test_num_data_is_required", *ARGUMENTS)),
    12: Fault(
        "losses that are means, sums, or not reduced",
        "means and sums are the same model; others are refused",
        (
            "optimizer/test_accumulation.py::test_sum_and_mean_losses_are_the_same_model",
            DATA + "test_a_loss_that_is_not_reduced_is_torchs_error_and_leaves_the_mean",
        ),
    ),
    14: Fault(
        "batches that are dicts or tuples; ignored targets",
        "read; ignored targets are examples without gradient",
        (
            CAPTURE + "test_every_product_equals_the_loop",
            "predict/test_samples.py::test_tuples_are_positional_and_dicts_are_keyword_arguments",
            DATA + "test_ignored_targets_are_examples_without_gradient",
        ),
    ),
    15: Fault("data without a length", "trained on", (DATA + "test_data_without_a_length_are_trained_on",)),
    16: Fault(
        "no parameters, all frozen, some frozen",
        "refused; frozen ones are untouched and absent",
        (
            REFUSALS + "test_models_that_cannot_be_inferred_are_refused",
            CAPTURE + "test_frozen_parameters_are_absent_and_untouched",
            "params/test_spec.py::test_nothing_to_infer_is_refused",
        ),
    ),
    17: Fault(
        "tied weights",
        "counted once, gradients added",
        (
            RATES + "test_tied_weights_are_one_parameter",
            "predict/test_samples.py::test_tied_weights_are_drawn_together",
        ),
    ),
    18: Fault(
        "BatchNorm",
        "refused in train mode by name, served in eval mode",
        (
            REFUSALS + "test_batch_statistics_are_refused_when_training_starts",
            CAPTURE + "test_every_product_equals_the_loop",
        ),
    ),
    19: Fault(
        "dropout",
        "replays draw the same mask",
        (
            "rows/test_checks.py::test_dropout_that_is_on_in_eval_mode_is_replayed",
            CAPTURE + "test_every_product_equals_the_loop",
        ),
    ),
    20: Fault(
        "recurrent layers, in-place operations, control flow by numbers",
        "another way to the same gradients, or a refusal by name",
        (
            CAPTURE + "test_every_product_equals_the_loop",
            "optimizer/test_aliasing.py::test_an_activation_that_is_changed_after_backward_is_told",
        ),
    ),
    21: Fault("parameters without gradient", "zero rows", (RATES + "test_unused_parameters_relax_to_the_prior",)),
    22: Fault(
        "scalar, empty and 5-dimensional parameters",
        "trained; empty ones stay empty",
        (MODELS + "test_parameters_of_any_shape_are_trained",),
    ),
    24: Fault(
        "complex, integer, boolean, sparse parameters",
        "`UnsupportedModuleError`, a `TypeError`, by name",
        ("params/test_spec.py::test_parameters_without_a_posterior_are_refused_by_name",),
    ),
    25: Fault(
        "half precision, autocast, `GradScaler`",
        "a float32 state",
        (
            "optimizer/test_precision.py::test_half_precision_models_keep_float32_state",
            "optimizer/test_precision.py::test_autocast_is_close_to_float32",
            "optimizer/test_precision.py::test_grad_scaler_scales_nothing_twice",
        ),
    ),
    26: Fault(
        "mixed dtypes or devices",
        "dtypes are kept, devices are refused",
        (MODELS + "test_mixed_dtypes_keep_their_own", MODELS + "test_several_devices_are_refused"),
    ),
    27: Fault(
        "meta-device and lazy parameters",
        "refused",
        (
            "params/test_spec.py::test_lazy_modules_are_refused_until_they_have_run",
            "params/test_spec.py::test_parameters_without_a_posterior_are_refused_by_name",
        ),
    ),
    28: Fault(
        "compiled, wrapped, parametrised and quantised models",
        "trained as the model inside, or refused",
        (
            MODELS + "test_wrapped_models_are_trained_as_what_they_wrap",
            MODELS + "test_quantised_models_have_nothing_to_infer",
            CAPTURE + "test_every_product_equals_the_loop",
        ),
    ),
    31: Fault(
        "ranks of 0, 1, P, more, and impossible ones",
        "steps, or named",
        (SLANG + "test_whole_steps_equal_the_dense_oracle", *ARGUMENTS),
    ),
    32: Fault(
        "rates of 0, 1, more, NaN, negative, tensors",
        "named; 0 from a scheduler stands still",
        (
            *ARGUMENTS,
            RATES + "test_a_group_with_rate_zero_does_not_move",
            RATES + "test_a_rate_above_one_needs_its_own_precision_rate",
            "correctness/test_conformance.py::test_optimizers_behave_as_torchs",
        ),
    ),
    33: Fault(
        "priors of 0, negative, tiny, huge, of the wrong length",
        "named, or finite",
        (*ARGUMENTS, PURE + "test_impossible_priors_are_named_at_init", DATA + "test_priors_of_any_size_are_finite"),
    ),
    34: Fault("no draws", "named", ARGUMENTS),
    35: Fault(
        "very many steps",
        "positive diagonals, no drift, flat memory",
        (
            "test_soak.py::test_invariants_hold",
            "test_soak.py::test_invariants_do_not_drift_in_a_million_steps",
            "test_soak.py::test_memory_is_flat_over_ten_thousand_steps",
        ),
    ),
    36: Fault("identical and zero gradients", "finite", (DATA + "test_awkward_data_are_learnt_from",)),
    37: Fault(
        "rates far too large",
        "`NumericalError`, or a warning or `DivergenceError` where all is finite; the last good state kept",
        (
            "test_divergence.py::test_a_hundred_times_the_usual_rate_is_loud",
            "test_divergence.py::test_raising_leaves_the_state_before_and_is_no_bad_batch",
            "test_divergence.py::test_estimators_tell_of_it",
            SAMPLING + "test_far_too_large_rates_fail_loudly_and_keep_the_last_good_state",
            "test_soak.py::test_rates_far_too_large_never_show_a_bad_state",
        ),
    ),
    38: Fault(
        "condition numbers to 1e12 in float32", "finite", ("test_soak.py::test_condition_numbers_to_1e12_in_float32",)
    ),
    39: Fault(
        "denormal and overflowing squares",
        "finite, or named by parameter",
        (PURE + "test_gradients_that_overflow_are_named_by_parameter", DATA + "test_awkward_data_are_learnt_from"),
    ),
    40: Fault(
        "groups with their own numbers, added mid-run, parameters given twice",
        "each its own; twice is refused",
        (
            RATES + "test_groups_have_their_own_rate_and_prior",
            RATES + "test_a_group_added_mid_run_starts_at_its_values",
            "correctness/test_conformance.py::test_optimizers_behave_as_torchs",
        ),
    ),
    41: Fault("every scheduler", "works", ("correctness/test_conformance.py::test_optimizers_behave_as_torchs",)),
    42: Fault(
        "copies, pickles, worker processes",
        "go on as the original",
        (
            "optimizer/test_methods.py::test_copies_go_on_like_the_original",
            "estimators/test_resume.py::test_partial_fits_go_on_from_every_moment",
            DATA + "test_worker_processes_do_no_harm",
        ),
    ),
    43: Fault(
        "an exception or Ctrl-C while the weights are a draw, or while an estimator is fitted",
        "the mean is back; the estimator is as it was",
        (
            SAMPLING + "test_an_exception_inside_restores_the_mean",
            "estimators/test_resume.py::test_a_call_that_ends_early_leaves_the_estimator_as_it_was",
        ),
    ),
    45: Fault(
        "a closure that raises or changes the model",
        "nothing has changed; changes are named",
        (
            SAMPLING + "test_a_closure_that_raises_leaves_everything",
            SAMPLING + "test_a_closure_that_fails_half_way_leaves_no_rows",
            MODELS + "test_a_closure_that_changes_the_model_is_told",
        ),
    ),
    46: Fault(
        "any call at all",
        "random state, grad mode, dtype, threads, flags and `requires_grad` are as before",
        (
            FUZZ + "test_any_arguments_give_a_result_or_a_documented_error",
            FUZZ + "test_every_public_callable_is_in_the_table",
            FUZZ + "test_training_leaves_the_world_as_it_was",
            SAMPLING + "test_flags_grad_mode_and_requires_grad_are_unchanged",
        ),
    ),
    48: Fault(
        "predictions for no rows, one row, the wrong columns, in chunks",
        "refused, of that many rows, refused, and independent of chunks",
        (
            MODELS + "test_predictions_for_any_number_of_rows",
            MODELS + "test_predictions_for_no_rows_are_refused",
            "predict/test_samples.py::test_result_does_not_depend_on_the_chunk",
        ),
    ),
    50: Fault(
        "the same seed twice, and another",
        "equal, and different",
        ("test_methods_common.py::test_the_same_seed_gives_the_same_state_and_another_does_not",),
    ),
    51: Fault(
        "a kill during a save",
        "the checkpoint before it loads",
        ("checkpoint/test_kill.py::test_kill_at_any_moment_of_back_to_back_saves",),
    ),
    52: Fault(
        "a full disk, missing, read-only or odd paths",
        "`CheckpointError`, the old file stays",
        (
            FORMAT + "test_a_disk_that_refuses_leaves_the_old_file",
            FORMAT + "test_names_links_and_folders",
            FORMAT + "test_a_folder_is_no_file",
            "test_files.py::test_whatever_fails_the_old_files_stay",
        ),
    ),
    53: Fault(
        "damaged, forged, foreign and malicious checkpoints",
        "`CheckpointError`, and nothing is run",
        (
            FORMAT + "test_a_malicious_pickle_is_refused_and_not_run",
            FORMAT + "test_what_is_no_checkpoint_is_told_apart",
            FORMAT + "test_forged_headers_are_refused",
        ),
    ),
    54: Fault(
        "a checkpoint of another model, rank, dtype or device",
        "refused by the first difference",
        (
            "checkpoint/test_refusals.py::test_another_optimizer_is_refused_and_left_alone",
            "checkpoint/test_refusals.py::test_another_device_is_refused_unless_asked_for",
        ),
    ),
    55: Fault(
        "resuming with another number of examples",
        "a warning",
        (STATE + "test_resuming_with_another_number_of_examples_is_noticed",),
    ),
    57: Fault(
        "caches that cannot be written, offline, wrong sums, servers that stop, redirects, bombs",
        "`DataError` with what to do, and nothing left behind; no archives with folders are read",
        (
            REMOTE + "test_a_cache_that_cannot_be_written_is_said_so",
            REMOTE + "test_offline_never_asks_and_says_what_to_do_by_hand",
            DOWNLOAD + "test_a_failure_says_why_and_leaves_nothing",
            DOWNLOAD + "test_only_https_is_asked",
            REMOTE + "test_a_full_disk_is_said_so_and_leaves_nothing",
            REMOTE + "test_a_read_only_cache_serves_what_it_has_and_says_so_for_the_rest",
            DOWNLOAD + "test_a_server_that_drips_is_given_up_in_the_end",
            DOWNLOAD + "test_a_handshake_that_never_ends_is_given_up",
            DOWNLOAD + "test_a_certificate_nobody_vouches_for_is_refused",
            LOCK + "test_processes_fetch_once",
            REMOTE + "test_every_file_stays_in_the_cache_and_is_checked",
            "checkpoint/test_refusals.py::test_nothing_in_the_library_unpacks_archives",
            "reproduction/data/test_idx.py::test_a_bomb_is_not_unpacked",
            "reproduction/data/test_svmlight.py::test_a_file_that_unpacks_without_end_is_refused",
        ),
    ),
    58: Fault(
        "the command line: Ctrl-C, a closed pipe, narrow terminals, unknown names, JSON",
        "130 with what is kept; quiet; whole; a suggestion; pure JSON",
        (
            "reproduction/cli/test_reproduce.py::test_ctrl_c_says_what_is_kept_and_ends_with_130",
            "reproduction/cli/test_data.py::test_list_as_json_has_addresses_and_paths",
            "reproduction/data/test_uci.py::test_unknown_names_are_answered_with_the_nearest",
            "faults/test_command_line.py::test_a_closed_pipe_is_no_error",
            "faults/test_command_line.py::test_narrow_terminals_are_no_error",
            "faults/test_command_line.py::test_any_arguments_end_with_a_known_code",
            "reproduction/faults/test_command_line.py::test_a_closed_pipe_is_no_error",
            "reproduction/faults/test_command_line.py::test_any_arguments_end_with_a_known_code",
            "faults/test_command_line_tables.py::test_any_words_end_with_a_known_code_and_nothing_half_written",
        ),
    ),
    59: Fault("one of several processes dies", "the others end", absent="training in several processes is not offered"),
    60: Fault(
        "missing extras",
        "a line that says what to install",
        (
            "cli/test_app.py::test_main_without_click_says_what_to_install",
            "cli/test_app.py::test_a_missing_extra_is_said_in_one_line_before_anything_is_trained",
            "data/test_toy.py::test_missing_scikit_learn_says_what_to_install",
        ),
    ),
}
