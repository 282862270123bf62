"""A tiny agent learns to solve word problems of several steps with a calculator: correctly, briefly, in a set format.

Read in this order:

- ``prepare``: ``prepare()`` writes everything into one folder.
- ``problems``: ``Problem``, ``draw()`` and ``split_problems()``: the word problems; templates and numbers are held out.
- ``demonstrations``: ``demonstrate()``: conversations of a careless teacher for the warm start.

The model is ``recipes.arithmetic.model`` with another vocabulary; the workflow is ``rollout.workflows.calculator``.
"""
