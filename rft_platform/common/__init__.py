"""Modules without a domain, which all other packages may import: errors, files, digests, progress.

Read in this order:

- ``errors``: the platform's errors; ``fault_classification``: any other exception as one of them; ``redaction``:
  masking of secrets and control characters in text.
- ``files``: durable, atomic writes and digests; ``digests``: files of a checkpoint and identity of weights;
  ``recorded_paths``: paths stored relative to a home; ``policy_names``: names of notes, files and metrics of a policy;
  ``sqlite_files``: damaged SQLite files; ``database_urls``: drivers of databases that are not installed.
- ``user_code``: references to the user's functions, and their parameters; ``code_snapshot``:
  the source of the user's code, stored for lineage.
- ``threads``: user code in threads, which may hang, and in event loops; repeated steps; ``progress``: progress reports
  of long work.
- ``personal_data``: removal of personal data by the user's function, before texts are stored.
- ``json_codec``: strict and fast JSON.
"""
