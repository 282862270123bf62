"""Versions that pass from the host that trains an online project to the host that serves it.

Each host has its own ``RFT_HOME``. They share a folder or object store (``checkpoint_root_dir``) and the database of
production traffic.

- ``records``: the signed documents that pass between the hosts, and the key.
- ``shared_place``: read and write documents and folders at a path or fsspec URL.
- ``publication``: the training host stores a record of each version, with its weights.
- ``following``: the serving host writes the records of published versions to its own home, as if it had trained them.
"""
