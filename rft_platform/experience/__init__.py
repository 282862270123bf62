"""The experience store: rows of model calls and their judgements in Parquet files, with queries and integrity checks.

Read in this order: ``record`` (``RolloutRow`` and ``JudgedRow``), ``schema`` and ``columns`` (records to Arrow tables
and back); ``rounds`` (names of round folders and files) and ``notes``; ``ledger`` (which files have landed) and
``parquet`` (how they are written and read); ``store`` (``ExperienceStore``, the main type), with ``row_checks`` and
``integrity``; ``queries`` (``connect``: DuckDB views over all rounds); ``selections`` (which rows a training took);
``quality`` (checks of a round's data); ``rewriting`` (compaction, schema upgrade, removal of old rollouts);
``responses`` (what a workflow returned).
"""
