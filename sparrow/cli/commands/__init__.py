"""The subcommands of ``sparrow``, one per module. Each is a dataclass: its fields are the options,
and its ``run`` method does the work.

Options shared by several commands are in ``sampled``. The option groups of ``train``, such as
``rollout`` in ``--rollout.samples``, are in ``train.config``. Slow imports are inside functions, so
that ``--help`` is instant.
"""
