"""Random request bodies for an OpenAPI document: some as its schemas say, some broken on purpose."""

import json
import string
from random import Random
from typing import Any

MAX_ITEMS = 3
DEPTH = 6
ODD_NUMBERS = [0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.1, -0.0, 1e308, 1e-320]
ODD_STRINGS = [
    "",
    " ",
    "abc",
    "0",
    "1e9",
    "\ud83d",
    "\udc00x",
    "\x00",
    "é\u2028😀",
    "{{ 7 * 7 }}",
    "x" * 20_000,
    "[" * 5_000,
]
ODD_WORDS = ["<|im_start|>", "<tool_call>", "required", "auto", "x" * 20_000, "[" * 5_000]
ODD_SHAPES = [[], {}, [[]], [{}], {"": ""}, [None], {"$ref": "#"}, {"type": "function"}, {"role": "user"}]
ODD_VALUES: list[Any] = [None, True, False, *ODD_NUMBERS, *ODD_STRINGS, *ODD_WORDS, *ODD_SHAPES]
ODD_TEXTS = [b"NaN", b"Infinity", b"1e999", b"\xff", b"\\ud83d", b"\\u0000", b"}", b"]", b'"', b"[" * 300, b"\x00"]
NAMES = ["messages", "prompt", "input", "tools", "tool_choice", "n", "stop", "seed", "model", "stream", "logprobs"]


class Bodies:
    """Bodies for the POST routes of one document."""

    def __init__(self, document: dict[str, Any], model: str) -> None:
        """``model`` is the name that the server knows."""
        self.schemas = {
            path: routes["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, routes in document["paths"].items()
            if "post" in routes
        }
        self.paths = sorted(self.schemas)
        self._definitions = document.get("components", {}).get("schemas", {})
        self._model = model

    def make(self, random: Random) -> tuple[str, bytes]:
        """(path, body)"""
        path = random.choice(self.paths)
        body = self._value(self.schemas[path], random, 0)
        self._keep_small(body, random)
        kind = random.random()
        if kind < 0.5:
            return path, json.dumps(body).encode()
        if kind < 0.85:
            for _ in range(random.randint(1, 3)):
                body = _mutated(body, random)
            return path, json.dumps(body).encode()
        return path, _broken(json.dumps(body).encode(), random)

    def _keep_small(self, body: dict[str, Any], random: Random) -> None:
        """Sampling a thousand choices would test the model, not the server: that stays rare."""
        if random.random() < 0.9:
            body["model"] = self._model
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            body.pop(name, None)
        body[random.choice(("max_tokens", "max_output_tokens"))] = random.randint(1, 3)
        if random.random() < 0.99:
            body["n"] = random.choice((None, 1, 2))

    def _value(self, schema: dict[str, Any], random: Random, depth: int) -> Any:
        if "$ref" in schema:
            return self._value(self._definitions[schema["$ref"].rpartition("/")[2]], random, depth)
        if "anyOf" in schema:
            return self._value(random.choice(schema["anyOf"]), random, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return random.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, random, depth)
            case "array":
                least, most = schema.get("minItems", 0), schema.get("maxItems", MAX_ITEMS)
                count = random.randint(least, max(least, min(most, MAX_ITEMS)))
                return [self._value(schema.get("items", {}), random, depth + 1) for _ in range(count)]
            case "string":
                return "".join(random.choices(string.printable + "é😀", k=random.randint(0, 12)))
            case "integer" | "number" as kind:
                return _number(schema, random, whole=kind == "integer")
            case "boolean":
                return random.random() < 0.5
            case "null":
                return None
        return random.choice(ODD_VALUES)  # anything goes

    def _object(self, schema: dict[str, Any], random: Random, depth: int) -> dict[str, Any]:
        required = schema.get("required", [])
        share = 0.3 if depth < DEPTH else 0.0
        made = {
            name: self._value(field, random, depth + 1)
            for name, field in schema.get("properties", {}).items()
            if name in required or random.random() < share
        }
        if random.random() < 0.1:
            made[random.choice(NAMES)] = random.choice(ODD_VALUES)
        return made


def _number(schema: dict[str, Any], random: Random, whole: bool) -> Any:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -10))
    most = schema.get("maximum", schema.get("exclusiveMaximum", max(least, 0) + 10))
    if random.random() < 0.2:
        return random.choice((least, most))
    return random.randint(int(least), int(most)) if whole else random.uniform(least, most)


def _mutated(value: Any, random: Random) -> Any:
    """``value`` with something odd at a random place."""
    if random.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return random.choice(ODD_VALUES)
    if isinstance(value, list):
        place = random.randrange(len(value))
        return [*value[:place], _mutated(value[place], random), *value[place + 1 :]]
    name = random.choice(list(value))
    match random.randrange(4):
        case 0:
            return {key: item for key, item in value.items() if key != name}
        case 1:
            return {**value, random.choice(NAMES): value[name]}
        case _:
            return {**value, name: _mutated(value[name], random)}


def _broken(text: bytes, random: Random) -> bytes:
    """JSON text that is cut, or has foreign bytes in it."""
    place = random.randrange(len(text) + 1)
    match random.randrange(3):
        case 0:
            return text[:place]
        case 1:
            return text[:place] + random.choice(ODD_TEXTS) + text[place:]
        case _:
            return text[:place] + random.choice(ODD_TEXTS) + text[place + random.randint(1, 5) :]
