"""The durable copy of a project's home on an object store (``store_url``); docs/store.md has the layout.

Read ``remote_files`` (requests and their repetition), ``commits`` (numbered documents that name the current files),
``driver_heartbeat`` (one driver at a time), ``scope`` (which files are stored, and how), ``packs`` (small files in one
object), ``row_ids`` (the index that finds the file of a row), ``recorded_digests`` (which files are damaged),
``home_state`` (what a home knows of the store, and which files were removed), ``replaced_files`` (files that a
take-over moves aside), then ``mirror`` (what is uploaded and fetched) and ``weights`` (for engines on other machines).
"""
