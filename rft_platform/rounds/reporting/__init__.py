"""Results of a project: comparisons, promotion, tables, and logs for MLflow and TensorBoard.

1. ``round_history``: evaluations and the learning curve, read from the notes; time per stage;
2. ``promotion``: compare a policy with the champion, decide by the gate, roll back;
3. ``run_log``: log steps, rounds and evaluations; ``run_origin``: datasets and LoggedModels in MLflow;
   ``sampled_traces``: transcripts in MLflow; ``lineage_events``: OpenLineage;
4. ``bench``: the table of all policies on the held-out tasks; ``round_tables``: the data of rounds as data frames;
5. ``servable_versions``: the versions that an online project can serve; ``imported_versions``: those of others;
   ``withdrawn_versions``: those that a release or a person withdrew.
"""
