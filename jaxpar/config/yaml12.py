"""YAML text as plain Python and back, with numbers as YAML 1.2 writes them; PyYAML alone reads version 1.1.

| text | PyYAML | here |
|---|---|---|
| 1:30, 0100, 1_000 | 90, 64, 1000 | text, which a number's field refuses |
| 3e-4 | text | 0.0003 |
| 2024-01-01 | a date | text |
| 0o14, 0x40 | text, 64 | 12, 64 |

A key that stands twice is an error; ``<<: *anchor`` merges. Every error says where it is.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_MERGE = "tag:yaml.org,2002:merge"
_LEFT_OUT = {_INT, _FLOAT, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
"""Kinds that version 1.2 knows not at all, or by other texts, which stand below."""

_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]*)$|0o[0-7]+$|0x[0-9a-fA-F]+$")
_REAL = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$|[-+]?[0-9]+[eE][-+]?[0-9]+$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


def read(text: str, name: str) -> Any:
    """The one document in `text`; None if there is none.

    Args:
        name: of the file, for errors.

    Raises:
        yaml.YAMLError: not YAML, a key that stands twice, or a value that is not what its tag says.
    """
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.YAMLError("it is nested too deep") from None
    finally:
        loader.dispose()


def write(data: Any) -> str:
    """Plain data as YAML; `read` gives it back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Reads what `read` reads."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self._merged: set[int] = set()

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # What PyYAML's constructors raise where a tag is written out and the value is not of its kind.
        except (ValueError, LookupError, AttributeError, OverflowError) as error:
            problem = f"what stands here is not of the kind {node.tag.rpartition(':')[2]}"
            raise ConstructorError(None, None, problem, node.start_mark) from error

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what ``<<`` names before the keys that stand here, without those that they override.

        PyYAML's own takes different winners in its versions.
        """
        if id(node) in self._merged:
            return
        self._merged.add(id(node))
        keys: list[Any] = []
        for key_node, _ in node.value:
            key = "<<" if key_node.tag == _MERGE else self.construct_object(key_node, deep=True)
            if key in keys:
                raise ConstructorError(None, None, f"key {key} stands twice", key_node.start_mark)
            keys.append(key)
        merged = []
        for key_node, value in node.value:
            for part in self._to_merge(value) if key_node.tag == _MERGE else ():
                for pair in part.value:
                    key = self.construct_object(pair[0], deep=True)
                    if key not in keys:
                        keys.append(key)
                        merged.append(pair)
        node.value = merged + [pair for pair in node.value if pair[0].tag != _MERGE]

    def _to_merge(self, node: yaml.Node) -> list[yaml.MappingNode]:
        parts: list[yaml.MappingNode] = []
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(part, yaml.MappingNode):
                problem = "<< merges a mapping, or a list of mappings"
                raise ConstructorError(None, None, problem, part.start_mark)
            self.flatten_mapping(part)
            parts.append(part)
        return parts


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else."""


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if not _WHOLE.match(text):
        raise ConstructorError(
            None, None, f"{text!r} is not a whole number in plain digits", node.start_mark
        )
    return int(text, 0)


def _real(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node))
    if not (_REAL.match(text) or _WHOLE.match(text)):
        raise ConstructorError(None, None, f"{text!r} is not a number", node.start_mark)
    return float(loader.construct_yaml_float(node))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in some if tag not in _LEFT_OUT]
    for first, some in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor(_INT, _whole)
_Loader.add_constructor(_FLOAT, _real)
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_INT, _WHOLE, list("-+0123456789"))
    _kind.add_implicit_resolver(_FLOAT, _REAL, list("-+.0123456789"))
