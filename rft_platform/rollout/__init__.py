"""From tasks to rollout rows: workflows, the clients that record them and the runner."""
