"""Evaluation of policies on held-out tasks: metrics, the promotion gate, plots and reports.

``evaluate`` runs the tasks with a workflow and a judge and returns an ``EvaluationResult``. ``gate``
decides whether the policy becomes champion. Read in this order:

1. ``evaluate`` (runs and judgements), ``results`` (``EvaluationResult``, with runs kept for reading);
2. ``metrics`` (pass rates, mean@n, best@k, intervals), ``comparison`` (``compare``: two policies, paired over tasks);
3. ``gate`` (``GateDecision``);
4. ``prompt_search`` (a better prompt for the same weights);
5. ``plots`` (the learning curve as PNG), ``prompt_plot`` (a search for a prompt beside it), ``report`` (in Markdown).
"""
