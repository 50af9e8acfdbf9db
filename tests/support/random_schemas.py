"""Random JSON schemas of the keywords that constrained answers support, each with its number as the seed."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

# Texts that a schema may name, some of which look like tokens, tags or JSON.
TEXTS = (
    "x",
    "",
    "two words",
    "über",
    "日本",
    "🐱",
    '"q"',
    "\\",
    "a\nb",
    "<tool_call>",
    "<|role_end|>",
    "</think>",
    "null",
)
NAMES = ("a", "name", "größe", "is it?", "<tool_call>", "c'd\"e", "日", "$ref", "type")
PATTERNS = ("^[a-c]{1,3}$", "[0-9]-", "^(yes|no)$", "^\\d{2}:\\d{2}$", "x$", "^[^a-z]{2}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "duration")
# Keywords that no answer can be held to.
UNSUPPORTED: tuple[Schema, ...] = (
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "array", "unevaluatedItems": False},
    {"$dynamicRef": "#x"},
)


def random_schema(seed: int) -> Schema:
    made = _Generator(random.Random(seed))
    schema = made.schema(3)
    return {**schema, "$defs": made.definitions} if made.definitions else schema


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.definitions: dict[str, Schema] = {}

    def maybe(self, share: float = 0.5) -> bool:
        return self.rng.random() < share

    def schema(self, depth: int) -> Schema:
        kinds = [self.integer, self.number, self.string, self.constant, self.simple]
        if depth:
            kinds += 2 * [self.object, self.array, self.union, self.intersection, self.reference]
        made = self.rng.choice(kinds)(depth)
        if self.maybe(0.1):
            made = {"title": "t", "description": "d", "default": 1, **made}
        return made

    def simple(self, depth: int) -> Schema:
        return self.rng.choice(
            [
                {"type": "boolean"},
                {"type": "null"},
                {"type": ["null", "boolean"]},
                {"type": ["boolean", "integer"]},
            ]
        )

    def integer(self, depth: int) -> Schema:
        low = self.rng.randint(-1000, 1000)
        high = low + self.rng.randint(20, 500)
        made: Schema = {"type": "integer"}
        if self.maybe():
            made[self.rng.choice(["minimum", "exclusiveMinimum"])] = low
        if self.maybe():
            made[self.rng.choice(["maximum", "exclusiveMaximum"])] = high
        if self.maybe(0.2):
            made["multipleOf"] = self.rng.randint(1, 9)
        return made

    def number(self, depth: int) -> Schema:
        low = self.rng.randint(-400, 400) / 4
        return {"type": "number", "minimum": low, "maximum": low + self.rng.randint(1, 99) / 8}

    def string(self, depth: int) -> Schema:
        chosen = self.rng.randrange(3)
        if chosen == 0:
            return {"type": "string", "pattern": self.rng.choice(PATTERNS)}
        if chosen == 1:
            return {"type": "string", "format": self.rng.choice(FORMATS)}
        low = self.rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self.rng.randint(0, 5)}

    def constant(self, depth: int) -> Schema:
        values: list[Any] = [*TEXTS, 0, -1.5, True, None, [1, "a", []], {"b": {"a": None}}]
        if self.maybe():
            return {"const": self.rng.choice(values)}
        return {"enum": self.rng.sample(values, self.rng.randint(1, 4))}

    def object(self, depth: int) -> Schema:
        names = self.rng.sample(NAMES, self.rng.randint(0, 4))
        made: Schema = {
            "type": "object",
            "properties": {name: self.schema(depth - 1) for name in names},
            "required": [name for name in names if self.maybe(0.6)],
        }
        if self.maybe(0.7):
            made["additionalProperties"] = False
        elif self.maybe():
            made["additionalProperties"] = self.schema(0)
        if self.maybe(0.15):
            made["patternProperties"] = {"^p[0-9]": self.schema(0)}
        return made

    def array(self, depth: int) -> Schema:
        low = self.rng.randint(0, 2)
        made: Schema = {"type": "array", "items": self.schema(depth - 1)}
        made |= {"minItems": low, "maxItems": low + self.rng.randint(0, 2)}
        if self.maybe(0.2):
            made["prefixItems"] = [self.schema(depth - 1) for _ in range(self.rng.randint(1, 2))]
            made["items"] = self.rng.choice([False, self.schema(0)])
            made.pop("minItems")
        return made

    def union(self, depth: int) -> Schema:
        if self.maybe(0.3):
            return {"oneOf": [self.string(0), self.integer(0), {"type": "null"}]}
        return {"anyOf": [self.schema(depth - 1) for _ in range(self.rng.randint(1, 3))]}

    def intersection(self, depth: int) -> Schema:
        if self.maybe():
            return {"allOf": [{"type": "integer", "minimum": -40}, {"maximum": 90}]}
        left, right = self.rng.sample(NAMES, 2)
        return {
            "allOf": [
                {"type": "object", "properties": {left: self.schema(depth - 1)}, "required": [left]},
                {"properties": {right: self.schema(0)}, "required": [right]},
            ],
            "properties": {"z": {"type": "boolean"}},
        }

    def reference(self, depth: int) -> Schema:
        """A list or tree that refers to itself, or a plain definition."""
        name = f"d{len(self.definitions)}"
        self.definitions[name] = {}
        if self.maybe(0.4):
            node: Schema = {
                "type": "object",
                "properties": {
                    "v": self.schema(0),
                    "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        else:
            node = self.schema(depth - 1)
        self.definitions[name] = node
        return {"$ref": f"#/$defs/{name}"}
