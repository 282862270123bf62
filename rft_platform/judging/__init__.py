"""Judge stored rollouts: rewards per run, operators on the judged experiences, advantages, and judge versions.

Read in this order:

- ``types``, ``judged_run``: judge functions, ``JudgeOutput``, and ``JudgedRun``, what a judge may read of a run.
- ``registry``, ``compose``, ``version``: from a configuration to a ``JudgeSpec`` (one judge or a weighted sum) and its
  version.
- ``apply``: ``judge_runs`` and ``judge_rollouts``, the entry points; ``running`` calls judges concurrently, ``session``
  (``JudgeContext``) holds what they share.
- ``rules``: built-in judges by rule; ``llm``: judges that ask a model; ``metric_base``: AgentScope metrics as judges.
- ``view``, ``pipeline``, ``operators``: the experience pipeline.
- ``sandbox``, ``bounded``, ``bounded_patterns``: code, computations and pattern searches within limits.
- ``preferences``: preference pairs from judged groups.
"""
