"""The self-check every engine runs at startup.

``names.check_names`` runs before memory is allocated. It checks that vLLM has all the private names
and parameters that Sparrow replaces or uses. ``engine.check_engine`` is called after the warm-up.
It runs decode steps of every layer on that layer's KV cache (``layers``), plus a few steps of the
whole model (``steps``), and compares the results with the correct ones. All checks raise a
ConfigError (``refusal``) that says in one sentence what is wrong.
"""
