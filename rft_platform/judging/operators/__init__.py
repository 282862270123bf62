"""Operators of the experience pipeline drop or mask judged experiences, or change rewards, before advantages.

An operator is a pure NumPy function ``(experiences, *, options) -> Change`` over the runs and rows of a round.

Read in this order:

- ``registry``: ``Experiences``, the columns that an operator gets, and ``Change``, what it returns; the decorator
  ``operator``, and ``find_operator``.
- ``filters``: operators that leave out or mask; ``rewards``: operators that change rewards or add parts.
"""
