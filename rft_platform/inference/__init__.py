"""The policy engine: serve the policy's weights, sample from them, and change them while the engine runs.

- ``interface``: ``PolicyEngine`` and its data types. Read it first.
- ``client``: ``EngineClient``, a ``PolicyEngine`` over HTTP for one engine process.
- ``http_contract``: API keys and the keep-alive time, which servers and clients share.
- ``canary``: ``update_checked`` changes weights and compares the engine's log-probs with the trainer's.
- ``launch``: find an engine, or the replicas of a pool, by lease or start them.
- ``pool``: ``EnginePool``, several replicas as one ``PolicyEngine``.
- ``serving``: server parts that both engines share.
- ``transformers_engine`` and ``vllm_engine``: the two servers.
"""
