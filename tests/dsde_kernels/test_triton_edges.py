"""The rules that the twins are tested by, on the kernels: the tests small enough for the interpreter."""

import pytest

from tests.dsde_kernels import test_kld, test_sampling, test_stability, test_verify

pytestmark = pytest.mark.usefixtures("triton_backend", "small_tiles")

SMALL = {
    test_kld: """
        a_draft_probability_counts_down_to_exp_minus_1e15 broken_rows_give_nan_and_leave_others_alone
        equal_rows_give_zero finite_masks_of_the_draft_count_as_1e_minus_8 masked_logits_stay_finite no_rows
        temperature_applies_to_both_sides_and_zero_counts_as_one the_floor_of_q_does_not_make_it_negative
        vocabularies_of_different_width zero_draft_probability_counts_as_1e_minus_8 zero_target_probability_adds_nothing
    """,
    test_sampling: """
        broken_rows_give_minus_one_and_leave_others_alone disabled_rows_beside_enabled_ones
        greedy_takes_the_lowest_id_on_ties no_rows sample_does_not_depend_on_the_batch_and_keeps_its_input
        sample_equals_a_scalar_race threshold_equals_the_scalar_filter thresholds_above_every_logit
        ties_at_the_threshold_are_all_kept top_p_counts_what_top_k_left very_small_temperature_is_the_argmax
    """,
    test_stability: """
        an_enormous_kld_counts_as_1e15_and_leaves_the_neighbours_cap_alone bit_identical_whatever_the_batch empty_batch
        huge_kld_of_a_first_draft_does_not_make_nan more_drafts_than_the_window_holds
        no_drafts_failures_and_broken_klds_change_nothing temperature_divides_only_in_the_released_variant
        the_step_that_completes_calibration_sets_sl_max_and_follows_the_rule
        update_touches_only_its_slots_and_reset_restores weights_count_age_from_the_newest_value wvir_edges
    """,
    test_verify: """
        a_broken_draft_row_ends_a_sampled_sequence a_broken_row_that_is_not_consumed_does_no_harm
        a_broken_target_row_ends_its_sequence_only a_draft_id_beyond_a_broken_draft_row_is_not_accepted
        a_draft_id_beyond_the_drafts_vocabulary_has_q_of_zero a_failed_sequence_keeps_its_slot_and_does_not_vote
        a_small_residual_is_not_an_empty_one deterministic_kld_counts_zero_probability_as_1e_minus_8
        deterministic_kld_of_a_finite_mask_counts_as_1e_minus_8 dtypes_and_shapes empty_batch
        equal_probabilities_pass_at_the_largest_uniform_number greedy_ignores_thresholds
        greedy_keeps_the_matching_prefix greedy_kld_is_taken_at_temperature_one greedy_ties_take_the_lowest_id
        no_drafts_draw_from_the_bonus_row placeholder_and_foreign_ids_are_rejected_and_the_row_drawn_from_p
        row_strides_and_untouched_inputs the_residual_is_that_of_the_truncated_distributions
        thresholds_of_the_caller_stay_as_they_are uninitialised_memory_is_never_used vocabulary_of_one
        zero_target_probability_never_passes
    """,
}
for module, names in SMALL.items():
    part = module.__name__.rsplit("_", 1)[-1]
    for name in names.split():
        globals()[f"test_{part}_{name}"] = getattr(module, f"test_{name}")
