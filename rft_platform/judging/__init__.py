"""Judges, the functions and rules that reward runs.

A *judge pass* is one call that judges many runs, for example all runs of a round.

Read in this order:

- ``types``: judge functions, ``JudgeOutput``, and ``RunJudgement``, the result for one run; ``judged_run``:
  ``JudgedRun``, what a judge may read of a run.
- ``judge_context``: ``JudgeContext`` with models and stored answers.
- ``execution``: ``judge_runs`` and ``judge_rollouts``, the entry points, and the experience pipeline.
- ``rules`` (built-in judges by rule), ``llm`` (judges that ask a model), ``sandbox`` (code within limits),
  ``operators`` (filters and reward changes).
- ``preferences``: preference pairs from judged groups; ``inert_text``: text of answers made harmless.
"""
