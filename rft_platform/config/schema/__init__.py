"""The schema of ``rft.yaml``: one frozen pydantic model per section; a key's docstring is its description.

Read in this order:

- ``section``: ``Section``, the base class, which refuses unknown keys.
- ``rft_config``: ``RftConfig``, the whole file, with the small sections ``model``, ``policies``, ``cluster``,
  ``data_processor`` and ``synchronizer``.
- ``buffer`` (tasks, judges, experiences), ``explorer`` (engines and workflows), ``algorithm`` (with ``Optimizer``),
  ``trainer`` (with ``warm_start``).
- ``evaluation``, ``prompt_search``, ``service`` (with ``reward_formula``, the formula ``train_on``).

``docs/configuration.md`` is generated from these models.
"""
