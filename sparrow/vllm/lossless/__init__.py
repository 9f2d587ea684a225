"""Lossless mode in vLLM: sparse steps draft, a dense pass of vLLM's own verifies.

``setup`` tells vLLM of it before a model is loaded. In the engine, ``scheduler`` asks a ``chooser``
how many tokens to draft (``draft_length``) and what they read (``draft_budget``), which it decides
by the times and the acceptance ``measured`` so far; a ``plan`` takes the answer to the workers. In
these, vLLM calls the ``speculator``, which has a ``drafter`` propose tokens: the ``sparse_drafter``,
with the weights or a copy of them (``draft_weights``). ``graphs`` names the CUDA graphs of a cycle;
``verify`` draws tokens that do not depend on the drafts; ``meter`` measures how many are accepted.
"""
