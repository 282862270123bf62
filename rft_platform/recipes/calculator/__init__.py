"""A tiny model learns to use a calculator: word problems, real tool calls, noisy demonstrations, multi-step GRPO.

Read in this order:

- ``prepare``: ``prepare()`` writes everything into one folder; ``__main__`` is its command.
- ``problems``: ``Problem``, ``split_problems()`` and ``write_tasks()``: the word problems, some of them held out.
- ``demonstrations``: ``write_demonstrations()``: conversations for the warm start, more than half of them wrong.

The model is ``recipes.arithmetic.model`` with another vocabulary; the workflow is ``rollout.workflows.calculator``.
"""
