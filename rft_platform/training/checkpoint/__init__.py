"""Checkpoints: a Hugging Face folder that any library loads, plus the trainer state and a manifest.

``manifest`` records the origin and the digest of every file (``Manifest``). ``reading`` describes the layout of the
folder and loads it (``load_state``). ``content`` takes a snapshot of the state
(``Draft``: weights, optimiser moments, critic, random state), ``writing`` publishes it
atomically, also in a thread (``Publication``), and ``periodic`` saves intermediate checkpoints
(``PeriodicCheckpoints``).

Read in this order: ``manifest``, ``reading``, ``content``, ``writing``, ``periodic``.
"""
