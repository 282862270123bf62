"""An opened project, and the records of its rounds. Every other folder of ``rounds`` builds on this one.

1. ``project`` (``Project``: home, configuration, store, tasks): the argument of every stage;
2. ``traffic_source`` (``TrafficSource``): production traffic as the rounds of an online project see it;
3. ``record`` (``RoundRecord``: what the stages of a round have made, such as a ``Policy``): read and write its parts;
   which policy a training starts from;
4. ``policy``: which policy a round explores with; deploy the weights of a round;
5. ``repair``: detect a damaged checkpoint or damaged rows, quarantine them, and withdraw the parts that depend on them;
6. ``code_version``: the version of the running code, for lineage.
"""
