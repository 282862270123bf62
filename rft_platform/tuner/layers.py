"""Configurations in layers: nested mappings, the later of which win."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

Layer = dict[str, Any]


def nested(values: Mapping[str, Any]) -> Layer:
    """Dotted keys as nested mappings: ``{"model.top_p": 1}`` is ``{"model": {"top_p": 1}}``."""
    layer: Layer = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        section = layer
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return layer


def merged(*layers: Mapping[str, Any]) -> Layer:
    """One layer of all; mappings are merged key by key, any other value replaces the earlier one."""
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
    """The value of a dotted key; None where there is none."""
    found: Any = layer
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
