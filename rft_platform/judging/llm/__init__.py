"""Judges that ask a model: ``llm`` (scores by criteria), ``pairwise`` and ``ranking`` (within a group).

Read in this order:

- ``asking``: ``ask`` with ``AskingSettings`` and ``Budget``: stored answers, limits and retries for all these judges.
- ``judges``: ``LlmJudge``, ``PairwiseJudge``, and ``ReactionJudge``, which judges production answers by the user's next
  message.
- ``ranking``: ``RankingJudge``.

In the prompts ``judging.inert_text`` makes graded text harmless.
"""
