"""Execute the runs of an explore batch and report counts, costs and errors.

Read in this order:

- ``run_rollouts``: the entry point ``run_rollouts``; group policy and the errors of a batch without usable groups;
  attempts in this process (``rollout.workers`` has the executor of worker processes).
- ``single_turn``: workflows of one model call, which need no agent: whole batches in one call of the engine, and
  batches that overlap (``explorer.batches_in_flight``).
- ``agent_runner``: ``AgentRunner`` makes attempts concurrently in the slots of an ``Executor``, with retries; the
  time-out of an attempt (``explorer.max_timeout``), dynamic time-outs, and over-rollout (finish a batch without its
  slowest runs).
- ``report``: ``RolloutReport``, ``Tally`` and statistics of shared prompt prefixes.
"""
