"""Datasets: load tasks, demonstrations and preference pairs, and select batches of tasks.

Read in this order: ``task`` (``Task``, one row of a dataset); ``sources`` (where the rows are: file, folder or Hugging
Face hub), ``splits`` and ``readers`` (how they are read); ``dataset`` (``load_tasks``: rows become a
``TaskDataset``) and ``leaks`` (evaluation tasks that were trained on). For offline trainings: ``messages`` and
``columns`` (rows become conversations or pairs), ``offline`` (``load_conversations``, ``load_pairs``). Package
``selectors`` chooses the tasks of each explore batch.
"""
