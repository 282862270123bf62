"""Store what a workflow returned for its judge as JSON, and rebuild the objects that the judge declares.

Agent frameworks return messages of special classes (AgentScope's ``Msg``, pydantic models, dataclasses), and judges
expect these classes. A judge may run long after the run, in another process. Such an object is stored as
``{"$class": "package.module:Class", "value": ...}``.

A stored document is untrusted data: a model wrote it, or it comes from another user's store. The class name in it is
only compared with the names of the classes that the judge declares; it never causes an import or a call. If the
workflow returns a dictionary with a key ``$class``, the dictionary is stored as ``{"$class": null, "value": {...}}``,
so that it is not mistaken for a stored object.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from rft_platform.common.user_code import module_elsewhere
from rft_platform.experience.record import valid_text

_CLASS, _VALUE = "$class", "value"

#: Package of AgentScope's message class, which is always rebuilt if it is installed: its metrics need it.
_AGENTSCOPE = "agentscope."


def encode_response(value: Any) -> Any:
    """Encode ``value`` as JSON: JSON values stay unchanged, an object is replaced by its class name and its content.

    Supported objects are pydantic models, dataclasses and objects with ``to_dict``. Raises TypeError for anything else.
    """
    content = _content(value)
    try:
        text = json.dumps(value if content is None else content, allow_nan=False, ensure_ascii=False)
        plain = json.loads(valid_text(text))
    except (TypeError, ValueError, RecursionError) as error:
        expected = "expected text, JSON values, a dataclass, a pydantic model or an object with to_dict()"
        raise TypeError(
            f"the workflow's response ({type(value).__name__}) cannot be stored: {error}; {expected}"
        ) from error
    if content is not None:
        return {_CLASS: _name(type(value)), _VALUE: plain}
    return {_CLASS: None, _VALUE: plain} if isinstance(plain, dict) and _CLASS in plain else plain


class ResponseDecoder:
    """Decode stored responses for a judge: objects of the classes that the judge declares, otherwise plain values."""

    def __init__(self, classes: Iterable[type] = ()) -> None:
        """``classes`` are the classes that the judge declares. A class whose objects cannot be rebuilt is ignored."""
        self._classes = {_name(kind): kind for kind in classes if is_rebuildable(kind)}
        #: Class name -> reason why its objects were passed as plain values.
        self.left_plain: dict[str, str] = {}

    def decode(self, document: Any) -> Any:
        """The value that ``encode_response`` received, or its plain content if its class cannot be rebuilt."""
        if not (isinstance(document, dict) and set(document) == {_CLASS, _VALUE}):
            return document
        name, content = document[_CLASS], document[_VALUE]
        if name is None:
            return content
        if not isinstance(name, str):
            return document
        kind = self._classes.get(name) or _agentscope_message(name)
        if kind is None:
            self.left_plain.setdefault(name, "the judge does not declare this class")
            return content
        try:
            return _rebuild(kind, content)
        except Exception as error:  # the class refuses the content, e.g. that of another version of the class
            self.left_plain.setdefault(name, f"{type(error).__name__}: {error}")
            return content


def is_rebuildable(kind: Any) -> bool:
    """Whether objects of ``kind`` can be rebuilt from what ``encode_response`` stores."""
    return isinstance(kind, type) and (
        dataclasses.is_dataclass(kind) or hasattr(kind, "model_validate") or hasattr(kind, "from_dict")
    )


def _content(value: Any) -> Any:
    """The content of a supported object as plain values; None for any other value."""
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
    return f"{module_elsewhere(kind.__module__)}:{kind.__qualname__}"


def _agentscope_message(name: str) -> type | None:
    """AgentScope's ``Msg`` if ``name`` is its name. The import does not depend on ``name``."""
    if not (name.startswith(_AGENTSCOPE) and name.endswith(":Msg")):
        return None
    try:
        from agentscope.message import Msg
    except Exception:  # not installed, or a broken installation
        return None
    return Msg if _name(Msg) == name else None
