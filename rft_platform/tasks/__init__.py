"""Datasets: load tasks, demonstrations and preference pairs, and select batches of tasks.

Read in this order:

- ``task``: ``Task``, one row of a dataset.
- ``sources`` (file, folder or Hugging Face hub) and ``readers``: how rows are read; ``reasoning_gym``: rows
  that the package reasoning-gym generates, and ``answer_forms``: which answers its scorers may evaluate.
- ``dataset``: ``load_tasks``, rows become a ``TaskDataset``; ``find_leaks``: evaluation tasks that were trained on.
- for offline trainings: ``messages``, and ``offline_dataset`` (``load_conversations``, ``load_pairs``: rows become
  conversations or pairs).
- ``enclosed_text``: marked parts of an answer, for workflows and judges.
- ``selectors``: choose the tasks of each explore batch, with the decorator ``selector``; ``Mixture``: how many each of
  several tasksets gives.
"""
