"""Names of the model judges and of their arguments, for the checks of the configuration."""

#: Names of the judges that ask a model.
MODEL_JUDGES = ("llm", "pairwise")
#: Their arguments for time-outs, retries, concurrency, cache and budget. They are not part of a judge's version.
PATIENCE = ("timeout_s", "retries", "backoff_s", "concurrency", "cache", "budget", "on_invalid")
