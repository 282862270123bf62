"""Judges that ask a model: ``llm`` (scores by criteria) and ``pairwise`` (comparisons within a group).

Read in this order:

- ``asking``: ``ask`` with ``AskingSettings`` and ``Budget``: stored answers, limits and retries of all judges here.
- ``endpoint``: ``Endpoint``, the model to ask; ``answers``: ``AnswerStore``, stored answers and spending.
- ``scoring``: ``LlmJudge``; ``comparing``: ``PairwiseJudge``.
- ``prompts``: the prompts; ``inert``: makes graded text harmless in them.
"""
