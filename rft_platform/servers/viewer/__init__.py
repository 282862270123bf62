"""`rft view`: pages over the experience store: search runs, read a transcript token by token, compare two policies.

``queries`` reads runs and rows by DuckDB; ``app`` has the routes of the pages, turns token ids into coloured text, and
serves the pages behind the web guard. ``templates`` has Jinja templates; the style sheets and scripts that all
pages of the platform share are in ``online.pages``. Read in this order: ``queries``, ``app``.
"""
