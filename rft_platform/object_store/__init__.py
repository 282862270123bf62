"""The durable copy of a project's home on an object store (``store_url``); docs/store.md has the layout.

Read ``remote_files`` (requests and their repetition), ``commits`` (numbered documents that name the current files),
``driver_sign`` (one
driver at a time), then ``mirror`` (what is uploaded, fetched and removed).
"""
