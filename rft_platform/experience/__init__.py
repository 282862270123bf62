"""The experience store: rows of model calls and their judgements in Parquet files, with queries and integrity checks.

Read in this order:

- ``record``: ``RolloutRow`` and ``JudgedRow``; ``schema``: records to Arrow tables and back.
- ``file_names`` and ``notes`` (round folders); ``file_ledger`` (which files are stored); ``parquet`` (how files are
  written and read).
- ``store``: ``ExperienceStore``, the main type, with ``integrity``.
- ``queries``: ``connect``, DuckDB views over all rounds; ``transcripts``: a few runs of a round.
- ``quality``: checks of a round's data.
- ``selections``: which rows a training took; ``maintenance``: compaction, removal of old rollouts.
- ``responses``: what a workflow returned, as JSON, and as the class that a judge declares.

To add a column: add a field in ``record`` and its type in ``schema``.
"""
