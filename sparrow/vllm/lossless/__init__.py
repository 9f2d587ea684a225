"""Lossless mode in vLLM: sparse steps draft, a dense pass of vLLM's own verifies.

``setup`` tells vLLM of it before a model is loaded. In the engine, ``scheduler`` asks a ``chooser``
how many tokens to draft (``draft_length``) and what they read (``draft_budget``), which it decides
by the times and the acceptance ``measured`` so far; a ``plan`` takes the answer to the workers. In
these, ``speculator`` drafts, on CUDA graphs (``graphs``) and with the weights or a copy of them
(``draft_weights``); ``verify`` draws tokens that do not depend on the drafts; ``meter`` measures
how many are accepted.
"""
