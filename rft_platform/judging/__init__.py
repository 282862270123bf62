"""Judges, the functions and rules that reward runs.

A *judging* is one call that judges many runs, for example all runs of a round.

Read in this order:

- ``types``: judge functions and ``JudgeOutput``; ``judged_run``: ``JudgedRun``, what a judge may read of a run.
- ``run_judgement``: ``RunJudgement``, the result for one run.
- ``judge_context``: ``JudgeContext`` with models (``model_endpoint``) and stored answers (``answer_store``).
- ``execution``: ``judge_runs`` and ``judge_rollouts``, the entry points, and the experience pipeline.
- ``rules`` (built-in judges by rule), ``llm`` (judges that ask a model), ``sandbox`` (code within limits),
  ``operators`` (filters and reward changes).
- ``preferences``: preference pairs from judged groups; ``response_text``, ``inert_text``: text of answers.
"""
