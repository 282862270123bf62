"""What the configuration knows of the judges that ask a model."""

#: Their names.
MODEL_JUDGES = ("llm", "pairwise")
#: Their arguments that say how patiently and how often the model is asked: no part of a judge's version.
PATIENCE = ("timeout_s", "retries", "backoff_s", "concurrency", "cache", "budget", "on_invalid")
