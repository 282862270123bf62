"""The stages of a round as plain functions, and the plan that decides which one runs next. Independent of Dagster.

Each stage is one module of this folder. It stores its part of the round's record when it is complete, so that a
repeated call after a crash continues or repeats it with the same result. Sub-folders do not import the stages.

Read in this order:
1. ``round`` (``Round``: the stages of a round in order), then the stages: ``explore`` (online ``collect``), ``judge``,
   ``train``, ``evaluate``; before round 1 ``warm_start``;
2. ``project`` (what a stage works with) and ``setup`` (its configuration turned into running parts);
3. ``selection`` (tasks and rows), ``releases`` (which versions are promoted, serve and are trained further),
   ``planning`` (what runs next), ``reporting``, ``maintenance``;
4. ``offline``: a training on a dataset, the only round of its project; ``prompt_search``: a better
   system prompt for the starting weights.
"""
