"""MLflow registry and lineage: training runs, model versions with aliases, checkpoints and their parents.

MLflow holds one experiment per project and one registered model per policy. ``ModelRegistry`` registers every
checkpoint as a version; the alias ``champion`` marks the promoted one. Read in this order:
1. ``mlflow_client`` (``open_client``: an SQLite file or a server; MLflow errors become a ``RegistryError``);
   ``moved_database`` (the SQLite file of a copied or moved home);
2. ``models`` (``ModelRegistry``, ``RegisteredModel``), ``sqlite_reader`` (reads versions without importing MLflow);
   ``pages`` (links to MLflow's interface); ``mlflow_model`` (a checkpoint in MLflow's format, also
   uploaded to a server, for other machines);
3. ``tracking`` (``TrainingRun``: parameters, metrics, use of the machine, datasets and LoggedModels of a run in
   MLflow), ``run_traces`` (transcripts), ``otlp_traces`` (the same for receivers of OpenTelemetry), ``metric_sinks``
   (TensorBoard, plug-ins) and ``experiment_trackers`` (Weights & Biases, SwanLab);
4. ``manifests`` (checkpoints and their parents), ``prompts`` (versions of a project's system prompt).
"""
