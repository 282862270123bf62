"""Compute rewards and advantages from a judge's configuration and stored rollouts.

Read in this order:

- ``compose``: from a configuration to a ``JudgeSpec`` (one judge, found by its name, or a weighted sum);
  ``judge_version``: a digest of everything that its rewards depend on; ``agentscope_metrics``: metrics as judges.
- ``judge_rollouts``: the entry points ``judge_runs`` and ``judge_rollouts``.
- ``judge_executor``: calls judges concurrently, within time limits.
- ``experience_pipeline``: operators on the judged experiences.
"""
