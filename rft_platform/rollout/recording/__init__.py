"""Record the model calls of a run with exact token ids, whatever client the agent uses.

Read in this order:

- ``model_handle``: ``ModelHandle``, the ``model`` argument of a workflow.
- ``history``: ``RunHistory``, the recorded calls of one run, with deterministic ids and seeds; ``branches``: which
  calls belong to which of its parallel branches.
- ``recorder``: one model call, from the agent's request to the recorded tokens (API forms: ``openai_api``).
- ``clients``: OpenAI clients that record in their HTTP transport; ``httpx_compat``: the HTTP package of ``openai``.
- ``gateway``: an OpenAI-compatible API on loopback that records calls of agents in other
  processes. ``clients`` starts the gateway, which uses the same recorder.
- ``routing``, ``policy_routes``: send each call to a replica of the pool, or to the engine of a further policy.
"""
