"""The formats that can be imported, by name."""

from rft_platform.traces.readers.base import TraceReader
from rft_platform.traces.readers.langfuse import LangfuseReader
from rft_platform.traces.readers.langsmith import LangsmithReader
from rft_platform.traces.readers.mlflow_traces import MlflowReader
from rft_platform.traces.readers.spans import SpanReader

FORMATS: dict[str, type[TraceReader]] = {
    "langfuse": LangfuseReader,
    "langsmith": LangsmithReader,
    "mlflow": MlflowReader,
    "otel": SpanReader,
}
