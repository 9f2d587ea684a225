"""Test hybrid models in lossy mode on vLLM's V2 model runner; ``test_lossless.py`` runs this file
in its own process.
"""

from tests.vllm import v2_on_cpu  # noqa: F401  isort: skip  before vLLM is imported

from tests.engines.vllm.test_hybrid import (  # noqa: F401
    made,
    stock,
    test_attention_layers_match_stock_vllm_and_transformers,
    test_bytes_that_states_left_in_a_block_are_not_read_as_landmarks,
    test_other_hybrids_match_stock_vllm_if_every_page_is_kept,
    test_preempted_sequences_match_stock_vllm,
)
