"""Rollouts: run a workflow on tasks, record its model calls, and return rollout rows with a report.

Read in this order:

- ``runner``: ``run_rollouts``, the entry point; ``report``: ``RolloutReport`` and ``Tally``.
- ``workflow``, ``class_style``: workflow types, ``resolve_workflow``; built in: ``single_turn``, ``calculator``,
  ``dialogue``, ``agentscope``.
- ``run``, ``identity``: ``Run``, ``RunResult``, and the rows, ids and seeds of a run.
- ``agents``: ``AgentRunner`` makes attempts concurrently (``attempt``, ``calling``, ``straggling``), in this process
  (``inprocess``) or in worker processes (``workers``, ``worker_process``, ``worker_wire``, ``worker``,
  ``worker_service``).
- ``model_handle``, ``history``: the ``model`` argument of a workflow, and the recorded calls of a run.
- ``recorder``, ``endpoints``: one recorded call, made through ``recording`` (OpenAI clients) or ``gateway`` (HTTP, for
  agents in other processes); ``routing`` chooses the replica.
- ``auxiliary``, ``policies``: models that are not trained, and further trainable policies.
"""
