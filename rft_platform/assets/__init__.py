"""The Dagster assets of a project. Each one calls a function of ``rounds`` and turns its result into metadata.

Read in this order:
- ``common``: how an asset is defined once and made for each project; pools, metadata builders.
- ``run_failure`` (``@reports_faults``, the decorator of every asset) and ``round_lock`` (one run works on a round).
- A round: ``tasks``, ``policy``, ``experiences``, ``evaluation``. Beside the rounds: ``prompts``.
- Production traffic: ``online``. Traces of other tools: ``imports``.
- Offline training: ``offline``.
- ``checks``: the asset checks.
"""
