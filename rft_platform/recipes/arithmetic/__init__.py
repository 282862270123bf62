"""The demo: a tiny model learns to add two numbers below 100.

Read in this order:

- ``prepare``: ``prepare()`` writes everything into one folder; ``__main__`` is its command.
- ``tasks``: ``split_additions()`` and ``write_tasks()``: the additions, a part of them held out.
- ``model``: ``build_model()`` and ``build_tokenizer()``: a tiny Qwen3-architecture model with random weights.
"""
