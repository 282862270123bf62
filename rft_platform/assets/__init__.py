"""The Dagster assets of a project. Each one calls a function of ``rounds`` and turns its result into metadata.

Read in this order:
- ``project_asset``: how an asset is defined once and made for each project; ``common``: pools, metadata builders.
- ``run_failure`` (``@reports_faults``, the decorator of every asset) and ``round_lock`` (one run works on a round).
- A round: ``tasks``, ``policy``, ``rollouts``, ``experiences``, ``checkpoints``, ``evaluation``.
- Production traffic: ``online``, ``releases``.
- Offline training: ``offline_data``, ``offline``.
- ``checks``: the asset checks.
"""
