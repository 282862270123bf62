"""`rft view`: pages over rounds and the experience store: overview, search, transcripts, two policies on one task.

``page`` has what the pages share; ``overview`` summarises rounds for the first page; ``queries`` reads runs and rows by
DuckDB; ``production`` is the page of production calls; ``app`` has the routes of the pages, turns token ids into
coloured text, and serves the pages behind the web guard. ``templates`` has Jinja templates; the style sheets, scripts
and charts that all pages of the platform share are in ``online.pages``. Read in this order: ``overview``, ``queries``,
``production``, ``app``.
"""
