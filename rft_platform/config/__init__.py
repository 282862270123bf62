"""Configuration of a run: the schema of ``rft.yaml``, loading, checks, the derived settings, and the dry run.

Read in this order:

- ``schema``: ``RftConfig``, the whole file, and its sections.
- ``load`` (YAML to ``RftConfig``, with ``${...}``), ``foreign`` (files of Trinity-RFT) and
  ``paths``; ``allowed_changes``: which settings a started project may change; ``online_halves``: the files of an
  online project whose service and training are two commands.
- ``reference``: descriptions of the keys, for people.
- ``resolve``: ``RunSettings``, the preset merged with the configuration, batch sizes, number of rounds;
  ``training_specs`` (what the trainer receives) and ``rollout_limits`` (bounds on workflow runs) belong to it.
- ``engine_choice``: which engine ``engine.kind: auto`` means; ``gpu_placement``: which GPUs the engines and the trainer
  use; ``node_placement``: which nodes of a Ray cluster have room for them.
- ``model_shape``: the sizes of a model; ``gpu_models``: the models on the GPUs; ``memory_plan``: the memory they need.
- ``findings``: what a check yields, and the refusal of a start; ``checks``: all checks of a configuration.
- ``dry_run``: what ``rft run --dry-run`` prints; ``home``: the folders below ``RFT_HOME``.
"""
