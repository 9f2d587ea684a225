"""Test models with sliding-window layers in lossy mode on vLLM's V2 model runner;
``test_lossless.py`` runs this file in its own process.
"""

from tests.vllm import v2_on_cpu  # noqa: F401  isort: skip  before vLLM is imported

from tests.engines.vllm.test_windows import (  # noqa: F401
    made,
    test_full_layers_select_pages_and_window_layers_stay_vllms_own,
    test_other_windowed_models_match_stock_vllm_if_every_page_is_kept,
    test_preempted_sequences_with_windows_match_stock_vllm,
    test_settings_that_do_not_work_with_windows_are_refused,
)
