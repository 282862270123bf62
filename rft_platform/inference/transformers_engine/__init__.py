"""The embedded engine: a transformers model behind the OpenAI HTTP subset, in its own process.

Read in this order:

- ``__main__.py``, ``server.py``: the process, its application and its end.
- ``engine.py``: ``TransformersEngine``, which combines model, tokenizer, chat template and scheduler.
- ``scheduler.py``, ``generator.py``, ``request.py``: the engine's thread and the decode loop.
- ``model.py``, ``attention.py``: forward passes on a cache with one slot per row (a row is one sequence to sample).
- ``sampling.py``: tokens from logits by seeded, counter-based draws.
- ``weights.py``: swap weights in place.
- ``async_adapter.py``, ``openai_routes.py``: the control and OpenAI routes.
"""
