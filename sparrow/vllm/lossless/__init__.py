"""Lossless mode in vLLM: sparse steps draft, a dense pass of vLLM's own verifies.

``setup`` tells vLLM of it before a model is loaded. In the engine, ``scheduler`` chooses how many
tokens to draft and what they read (``draft_length``). In its workers, ``speculator`` drafts, on
CUDA graphs (``graphs``) and with the weights or a copy of them (``draft_weights``); ``verify``
draws tokens that do not depend on the drafts; ``meter`` measures how many are accepted.
"""
