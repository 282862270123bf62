"""The vLLM engine: vLLM's own OpenAI server, with the platform's control plane added to its process.

Read in this order:

- ``__main__.py``, ``server_settings.py``: from the launcher's settings to vLLM's command line.
- ``versions.py``: supported versions of vLLM and the differences between its builds.
- ``middleware.py``: ``EnginePlanes``, the ASGI middleware inside vLLM's server.
- ``engine.py``: ``VllmEngine``, a ``ServedEngine`` on vLLM's ``AsyncLLM``; ``admission.py`` holds requests back.
- ``weights.py``, ``adapters.py``, ``worker.py``: change weights; ``worker.py`` runs in vLLM's worker processes.
- ``scheduler.py``: ``InPieces``, a mixin of vLLM's scheduler in its engine process; sends answers in pieces.
- ``openai_wire.py``, ``sampling_conversion.py``: conversion of requests, responses, sampling parameters and seeds.
"""
