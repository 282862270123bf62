"""Rollouts: run a workflow on tasks, record its model calls, and return rollout rows with a report.

Read in this order:

- ``workflow``, ``class_style`` with ``class_style_model``: the workflow types that users write, and
  ``resolve_workflow``.
- ``runner``: ``run_rollouts``, the entry point: repeats per task, retries, time-outs and straggler handling.
- ``runs``: one run and one attempt at a run: ``Run``, ``RunResult``, ``make_attempt``, and calls of user code.
- ``workers``: attempts in worker processes, where a crash or hang of user code affects only that run.
- ``recording``: the ``model`` argument of a workflow; clients and gateway that record every model call of a run.
- ``workflows``: built-in workflows, and auxiliary models for workflows and judges.
- ``environments``: episodes that the workflow ``environment`` plays: Gymnasium, OpenEnv servers, and your own classes.

Imports point downward: runner, workers, runs, workflows, environments, workflow, recording.
"""
