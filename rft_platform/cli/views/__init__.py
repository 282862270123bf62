"""Look-ups and output of the ``rft`` commands.

- ``round_table``: the rounds as a table (``rft rounds``, ``run``, ``demo``), what the project waits for, the policy of
  a round that the user names, and every policy in one table (``rft eval --all``).
- ``user_code``: the user's code behind a checkpoint (``rft trace``).
- ``demo_summary``: the last lines of ``rft demo`` and of ``rft recipe``.
- ``transcript``: a run's messages, tokens, rows and reward (``rft debug``).
"""
