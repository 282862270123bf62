"""Results of a project: histories, tables, traces, and logs for MLflow and TensorBoard.

1. ``round_history``: evaluations and the learning curve, read from the records; time per stage;
2. ``run_log``: log steps, rounds, evaluations, datasets, LoggedModels and transcripts; ``lineage_events``: OpenLineage;
3. ``bench``: the table of all policies on the held-out tasks; ``round_tables``: the data of rounds as data frames;
4. ``lineage`` (``trace_checkpoint``, ``trace_row``): from weights to rows and back; ``imported_from``: to traces of
   other tools; ``model_card`` of an export;
5. ``reward_audit``: what may be wrong with the rewards; ``prompt_report``: a search for a prompt beside the rounds.
"""
