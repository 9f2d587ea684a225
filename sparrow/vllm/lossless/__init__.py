"""Lossless mode in vLLM: sparse steps draft tokens, and one of vLLM's own dense passes verifies
them.

Before a model is loaded, ``setup`` configures vLLM for lossless mode. In the engine, the
``scheduler`` uses a ``chooser`` to decide how many tokens to draft (``draft_length``) and how much
the drafts read (``draft_budget``). The chooser's decisions are based on the times and acceptance
rates ``measured`` so far. A ``plan`` carries each decision to the workers. In a worker, vLLM calls
the ``speculator``, and a ``drafter`` proposes tokens. The default is the ``sparse_drafter``, which
uses the policy's weights or a copy of them (``draft_weights``); the ``cascade`` also uses
``guesses``, from ``history``, from a trained ``head``, or from both (``mixed``). ``graphs`` lists a
cycle's CUDA graphs, ``verify`` samples tokens independently of the drafts, and ``meter`` measures
draft acceptance.
"""
