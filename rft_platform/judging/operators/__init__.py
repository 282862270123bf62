"""Operators of the experience pipeline drop or mask judged experiences, or change rewards, before advantages.

An operator is a pure NumPy function ``(experiences, *, options) -> Change`` over the runs and rows of a round.

Read in this order:

- ``experiences``: ``Experiences``, the columns that an operator gets, and ``Change``, what it returns.
- ``registry``: the decorator ``operator``, and ``find_operator``.
- one operator per file: ``dynamic_sampling``, ``invalid_filter``, ``overlong_penalty``, ``pass_rate_calculator``,
  ``reward_filter``, ``reward_shaping``, ``std_filter``, ``surplus_groups``, ``truncated_mask``.
"""
