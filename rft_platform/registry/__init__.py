"""MLflow: training runs, model versions and their aliases; lineage from weights to rows and back."""
