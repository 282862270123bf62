"""The policy engine: serve the policy's weights, sample from them, and change them while the engine runs.

- ``interface.py``: ``PolicyEngine`` and its data types. Read it first.
- ``client.py``: ``EngineClient``, a ``PolicyEngine`` over HTTP for one engine process.
- ``launcher.py``: ``find_or_start_engine`` finds an engine by its lease or starts one.
- ``canary.py``: ``update_checked`` changes weights and compares the engine's log-probs with the trainer's.
- ``pool.py``: ``EnginePool``, several replicas as one ``PolicyEngine``; started by ``pool_start.py``. Its parts:
  ``replicas.py`` (table and load), ``spreading.py`` and ``shares.py`` (split a batch), ``everyone.py``
  (call all replicas), ``pool_weights.py`` (common weights), ``mending.py`` (restart lost replicas).
- ``http_contract.py``: API keys and the keep-alive time, which servers and clients share.
- ``serving/``: server parts that both engines share.
- ``transformers_engine/`` and ``vllm_engine/``: the two servers.
"""
