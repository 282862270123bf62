"""What a workflow returned for its judge, as JSON; and back to the object that the judge was written for.

Agent frameworks return messages of their own classes (AgentScope's ``Msg``, pydantic models, dataclasses), judges are
written for these, and a judge may run long after the run, in another process. Such an object is kept as
``{"$class": "package.module:Class", "value": ...}``. Where the class cannot be imported the judge gets ``value``.
"""

import dataclasses
import importlib
import json
from typing import Any

_CLASS, _VALUE = "$class", "value"


def encode_response(value: Any) -> Any:
    """``value`` as JSON can hold it: JSON values as they are, an object with its class beside its content.

    Objects are pydantic models, dataclasses, and whatever has ``to_dict``. Raises TypeError for anything else.
    """
    content = _content(value)
    document = value if content is None else {_CLASS: _name(type(value)), _VALUE: content}
    try:
        return json.loads(json.dumps(document, allow_nan=False))
    except (TypeError, ValueError) as error:
        expected = "expected text, JSON values, a dataclass, a pydantic model or an object with to_dict()"
        raise TypeError(
            f"the workflow's response ({type(value).__name__}) cannot be stored: {error}; {expected}"
        ) from error


def decode_response(document: Any) -> Any:
    """The object that ``encode_response`` was given; its content alone where its class is not to be had."""
    if not (isinstance(document, dict) and set(document) == {_CLASS, _VALUE}):
        return document
    content = document[_VALUE]
    try:
        return _rebuild(_load(document[_CLASS]), content)
    except Exception:  # another environment, another version of the class: the content says it all
        return content


def _content(value: Any) -> Any:
    """The content of an object as plain values; None for what is no such object."""
    for method in ("model_dump", "to_dict"):
        if hasattr(value, method) and not isinstance(value, type):
            return getattr(value, method)()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else None


def _rebuild(kind: Any, content: Any) -> Any:
    for method in ("model_validate", "from_dict"):
        if hasattr(kind, method):
            return getattr(kind, method)(content)
    return kind(**content)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value
