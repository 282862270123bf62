"""An opened project, and the records of its rounds. Every other folder of ``rounds`` builds on this one.

1. ``project`` (``Project``: home, configuration, store, tasks): the argument of every stage;
2. ``notes``: names of the notes that stages write;
3. ``policy`` (``Policy``): publish, look up and deploy the weights of a round;
4. ``repair``: detect a damaged checkpoint or damaged rows, quarantine them, and withdraw the notes that depend on them;
5. ``code_version``: the version of the running code, for lineage.
"""
