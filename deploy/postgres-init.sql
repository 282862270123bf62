-- Beside the database of POSTGRES_DB, which Dagster uses: one for MLflow.
CREATE DATABASE mlflow;
