"""How good answers are: ``scores`` of rewards, and ``benchmark``, which samples and judges them."""
