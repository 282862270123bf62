"""rft_platform: reinforcement fine-tuning of LLM agents, orchestrated by Dagster.

``docs/architecture.md`` describes the packages. This folder holds the modules that all of them may use:

- ``errors.py``, ``faults.py``: the error taxonomy, and the mapping of any exception to it.
- ``files.py``, ``leftovers.py``, ``checkpoint_files.py``, ``sqlite_files.py``: durable writes and damage checks.
- ``weights.py``: digest of a set of weights.
- ``user_code.py``, ``signature.py``, ``threads.py``: load and call the user's functions.
- ``progress.py``, ``redaction.py``: progress reports, and masking of secrets.
- ``definitions.py``: Dagster's ``Definitions``, the entry point of the code location.
"""

__version__ = "0.1.0"
