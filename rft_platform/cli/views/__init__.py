"""Look-ups and output of the ``rft`` commands.

- ``round_table``: the rounds as a table (``rft rounds``, ``run``, ``demo``), and what the project waits for.
- ``round_policy``: the policy of a round that the user names.
- ``user_code``: the user's code behind a checkpoint (``rft trace``).
- ``bench``: every policy in one table (``rft eval --all``).
- ``demo_summary``: the last lines of ``rft demo``.
- ``recipe_report``: the report of ``rft recipe``.
- ``transcript``: a run's messages, tokens, rows and reward (``rft debug``).
"""
