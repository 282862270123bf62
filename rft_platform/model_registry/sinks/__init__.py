"""Destinations of step, round and evaluation metrics beside MLflow, one per file, with one interface.

``metric_sink`` defines ``MetricSink``; read it first. Then ``tensorboard`` (event files), and ``experiment_service``
with what ``wandb_run`` (Weights & Biases) and ``swanlab_run`` (SwanLab) share. All destinations get the same names and
x axes as MLflow, except for characters that MLflow does not allow.
"""
