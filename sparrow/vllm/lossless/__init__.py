"""Lossless mode in vLLM: sparse steps draft, and one of vLLM's own dense passes verifies.

``setup`` configures vLLM for it before a model is loaded. In the engine, the ``scheduler`` asks a
``chooser`` how many tokens to draft (``draft_length``) and how much they read (``draft_budget``).
It decides by the times and the acceptance ``measured`` so far, and a ``plan`` takes the answer to
the workers. There, vLLM calls the ``speculator``, which has a ``drafter`` propose tokens: the
``sparse_drafter``, with the weights or a copy of them (``draft_weights``). ``graphs`` lists the
CUDA graphs of a cycle, ``verify`` draws tokens that do not depend on the drafts, and ``meter``
measures how many drafts are accepted.
"""
