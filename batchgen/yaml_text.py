"""YAML 1.2 (core schema) text to plain values and back, through ruamel.yaml.

ruamel's own 1.2 resolver still reads `1_000`, `0b11` and `2024-01-01` as a number, a number and a date, and honours
merge keys. The core schema (YAML 1.2.2, section 10.3) has none of these, so a resolver with exactly its rules is used.
"""

import io
import re
from collections.abc import Iterable
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent, Event
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import BaseResolver

from batchgen.errors import SpecError

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000  # after aliases are expanded; a hand-written spec has some dozens
MAX_DEPTH = 50

_TAG = "tag:yaml.org,2002:"
_DIGITS = list("-+0123456789")
_CORE_TAGS = frozenset(_TAG + name for name in ("str", "int", "float", "bool", "null", "seq", "map"))
_QUOTE_HINT = 'a value that starts with "{{" must be quoted, as in "{{ column }}"'


class CoreResolver(BaseResolver):
    """Which plain scalars are not text: the table of YAML 1.2.2, section 10.3.2."""

    def __init__(self, version: Any = None, loader: Any = None, loadumper: Any = None) -> None:
        super().__init__(None)
        self.loadumper = loader or loadumper

    @property
    def processing_version(self) -> tuple[int, int]:
        return (1, 2)


def _add_rule(name: str, pattern: str, first: list[str]) -> None:
    CoreResolver.add_implicit_resolver_base(_TAG + name, re.compile(rf"(?:{pattern})\Z"), first)


_add_rule("null", "null|Null|NULL|~|", ["n", "N", "~", ""])
_add_rule("bool", "true|True|TRUE|false|False|FALSE", list("tTfF"))
_add_rule("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", _DIGITS)
_add_rule("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", [*_DIGITS, "."])
_add_rule("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", ["-", "+", "."])


class CoreRepresenter(SafeRepresenter):
    """ruamel's, but text with a line break other than a line feed is double-quoted: else it is read as a line feed."""

    def represent_str(self, data: str) -> Any:
        style = '"' if re.search("[\r\x85\u2028\u2029]", data) else None
        return self.represent_scalar(_TAG + "str", data, style=style)


CoreRepresenter.add_representer(str, CoreRepresenter.represent_str)


def _yaml() -> Any:
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Resolver = CoreResolver
    yaml.Representer = CoreRepresenter
    yaml.composer.warn_double_anchors = False  # the later one holds from there on, says YAML
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.allow_unicode = True
    yaml.width = 4096
    return yaml


def read_yaml(text: str, where: str, positions: bool = True) -> Any:
    """The value of one YAML document: dict, list, str, int, float, bool or None.

    Raises SpecError, as one line that starts with `where` (and `:line:column` if `positions`), for a syntax error,
    a duplicate or non-text key, a tag outside the core schema, a second document, or a value that nests or expands
    (aliases) beyond the limits of this module.
    """
    if len(text) > MAX_BYTES:
        raise SpecError(f"{where}: longer than {MAX_BYTES >> 20} MiB; this is not a job spec")
    try:
        _check_events(_yaml().parse(text))
        node = _yaml().compose(text)
        if node is not None:
            _check(node)
        return _yaml().load(text)
    except MarkedYAMLError as error:
        raise SpecError(_place(error, where, positions) + ": " + _problem(error) + _hint(error, text)) from None
    except RecursionError:
        raise SpecError(f"{where}: nested too deep") from None
    except (YAMLError, ValueError, KeyError) as error:
        raise SpecError(f"{where}: not valid YAML: {_one_line(error)}") from None


def write_yaml(value: Any, ascii_only: bool = False) -> str:
    """`value` (dicts, lists, str, int, float, bool, None) as YAML text that `read_yaml` reads back equal."""
    stream, yaml = io.StringIO(), _yaml()
    yaml.allow_unicode = not ascii_only
    yaml.dump(value, stream)
    return stream.getvalue()


def _place(error: MarkedYAMLError, where: str, positions: bool) -> str:
    mark = error.problem_mark or error.context_mark
    return f"{where}:{mark.line + 1}:{mark.column + 1}" if positions and mark else where


def _problem(error: MarkedYAMLError) -> str:
    if isinstance(error, _Refused):
        return str(error.problem)
    parts = [part for part in (error.context, error.problem) if part]
    return "not valid YAML: " + _one_line(": ".join(parts))


def _hint(error: MarkedYAMLError, text: str) -> str:
    """Say how to write a template where one stands unquoted on the line of the error, the likeliest mistake."""
    mark = error.problem_mark
    lines = text.splitlines()
    if mark is None or mark.line >= len(lines) or not re.search(r"(?:^|:\s+|-\s+)\{\{", lines[mark.line]):
        return ""
    return f"; {_QUOTE_HINT}"


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


class _Refused(MarkedYAMLError):
    """Valid YAML that a job spec must not hold."""


def _refuse(node: Node, problem: str) -> _Refused:
    return _Refused(None, None, problem, node.start_mark)


def _check_events(events: Iterable[Event]) -> None:
    """Raise _Refused for what would take minutes to compose, as soon as it is met."""
    depth = 0
    for number, event in enumerate(events):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > MAX_DEPTH + 1:
            raise _Refused(None, None, f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        if number > 4 * MAX_VALUES:
            raise _Refused(None, None, f"more than {MAX_VALUES} values; this is not a job spec", event.start_mark)


def _check(root: Node) -> None:
    """Raise _Refused for what the core schema or the size limits exclude."""
    sizes: dict[int, int] = {}
    _measure(root, sizes, set())
    if sizes[id(root)] > MAX_VALUES:
        raise _refuse(root, f"more than {MAX_VALUES} values once its aliases are expanded")


def _measure(node: Node, sizes: dict[int, int], above: set[int]) -> int:
    """How many values `node` holds with aliases expanded; each node is visited once (`sizes`), so bombs are cheap."""
    key = id(node)
    if key in above:
        raise _refuse(node, "a value contains itself through an alias")
    if len(above) > MAX_DEPTH:
        raise _refuse(node, f"nested deeper than {MAX_DEPTH} levels")
    if key not in sizes:
        _check_tag(node)
        above.add(key)
        sizes[key] = 1 + sum(_measure(child, sizes, above) for child in _children(node))
        above.remove(key)
    return sizes[key]


def _children(node: Node) -> list[Node]:
    if isinstance(node, SequenceNode):
        return list(node.value)
    if not isinstance(node, MappingNode):
        return []
    for key, _ in node.value:
        _check_key(key)
    return [value for _, value in node.value]


def _check_key(key: Node) -> None:
    if isinstance(key, MappingNode):
        raise _refuse(key, "a key must be text")
    if not isinstance(key, ScalarNode) or key.tag != _TAG + "str":
        raise _refuse(key, f"a key must be text, but {_source(key)} is not; put it in quotes")


def _source(node: Node) -> str:
    return str(node.value) if isinstance(node, ScalarNode) else "a list"


def _check_tag(node: Node) -> None:
    if node.tag not in _CORE_TAGS:
        shown = str(node.tag).replace(_TAG, "!!")
        raise _refuse(node, f"the tag {shown} is not supported")
