"""The rows of a training: from Parquet files to token ids with a loss mask.

A ``Sample`` is one row: the token ids of a model call, the mask of trained tokens, and the weight of the row.
``TrainingRows`` are the rows of a request with their groups, and with facts for the metrics.

Read in this order: ``samples``; ``rollout_rows`` (rollouts with their judgements); ``conversations``, ``offline_data``
(demonstrations and preference pairs); ``token_advantages`` (advantages per token, computed over whole runs; subtracts
the KL penalty from the reward).
"""
