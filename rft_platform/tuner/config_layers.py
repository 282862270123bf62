"""Nested configuration mappings in layers; later layers override earlier ones."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

Layer = dict[str, Any]


def nested(values: Mapping[str, Any]) -> Layer:
    """Convert dotted keys to nested mappings: ``{"model.top_p": 1}`` becomes ``{"model": {"top_p": 1}}``."""
    layer: Layer = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        section = layer
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return layer


def merged(*layers: Mapping[str, Any]) -> Layer:
    """Merge layers into one: mappings key by key; any other value replaces the earlier one."""
    result: Layer = {}
    for layer in layers:
        for key, value in layer.items():
            known = result.get(key)
            if isinstance(known, dict) and isinstance(value, Mapping):
                result[key] = merged(known, value)
            else:
                result[key] = deepcopy(value)
    return result


def value_at(layer: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if there is none."""
    found: Any = layer
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
