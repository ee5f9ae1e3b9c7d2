"""Templates that a job's spec fills with a row's columns: jinja2 in the bounded sandbox.

Settings: block tags take their own line with them (`trim_blocks`, `lstrip_blocks`), a newline at the end is kept. There
is no random filter and no clock, so a row always gives the same text. A column's text is data: it is never rendered.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from batchgen.errors import RowError, SpecError
from batchgen.text.chat_template import to_json
from batchgen.text.sandbox import BoundedEnvironment, Bounds, BoundsError

_RESULT = "value_"
_GLOBALS = ("range", "dict", "namespace")
_ACCEPT_NULL = frozenset({"default", "d", "tojson", "written_", "items_"})


class PromptTemplate:
    """A text with columns filled in.

    `columns`: the names that it takes from the row. `what` names the template in errors (such as "input.prompt").
    Raises SpecError for invalid syntax, with the line.
    """

    def __init__(self, source: str, what: str = "prompt template", bounds: Bounds | None = None):
        self.source = source
        self._what = what
        self._environment = _environment(bounds or Bounds())
        with _syntax_errors(what):
            tree = self._environment.parse_bounded(source)
            self.columns = _columns(self._environment, tree)
            self._template = self._environment.compile_bounded(_NullChecks().visit(tree))

    def render(self, row: Mapping[str, Any]) -> str:
        """The text for a row.

        Raises RowError("prompt_missing") where a null would be written into the text, naming it (a null may be tested
        for, and replaced: `{{ note or "none" }}`), and RowError("template_error") where the template fails.
        """
        try:
            return self._environment.render_bounded(self._template, _values(row, self.columns))
        except Exception as error:  # a template can raise anything
            raise _row_error(error, self._what) from None


class ValueTemplate:
    """A spec value that may depend on the row.

    Without template syntax it is the source itself. `{{ column }}`, or any single expression in braces, gives that
    expression's value with its own type: the number 7 of a column stays the number 7, null is None. Anything else gives
    text, as `PromptTemplate` does.
    """

    def __init__(self, source: str, what: str = "value", bounds: Bounds | None = None):
        self.source = source
        self._what = what
        self._environment = _environment(bounds or Bounds())
        with _syntax_errors(what):
            tree = self._environment.parse_bounded(source)
            self.columns = _columns(self._environment, tree)
            expression = _single_expression(tree)
            self._expression = None if expression is None else _assignment(self._environment, expression)
        self._column = expression.name if isinstance(expression, nodes.Name) else None
        self._text = PromptTemplate(source, what, bounds) if expression is None else None

    def evaluate(self, row: Mapping[str, Any]) -> Any:
        """The value for a row. Raises RowError as `PromptTemplate.render` does; a null column is no error."""
        if self._text is not None:
            return self._text.render(row)
        if self._column is not None and self._column in row:
            return row[self._column]
        try:
            return self._evaluate(_values(row, self.columns))
        except Exception as error:  # a template can raise anything
            raise _row_error(error, self._what) from None

    def _evaluate(self, values: Mapping[str, Any]) -> Any:
        assert self._expression is not None
        value = self._environment.evaluate_bounded(self._expression, _RESULT, values)
        if isinstance(value, jinja2.Undefined):
            str(value)  # raises: the class is StrictUndefined
        return value


def compile_value(source: str, what: str = "value") -> ValueTemplate:
    """A spec value that may be `{{ column }}`."""
    return ValueTemplate(source, what)


@dataclass(frozen=True, slots=True)
class Field:
    """A column in a template of text and columns, and the text between it and the one before."""

    column: str
    before: str


def plain_fields(source: str) -> list[Field] | None:
    """The columns of a template that is nothing but text and `{{ column }}`, in order; None for any other.

    Text before the first column and behind the last is in none of them.
    """
    outputs = _environment(Bounds()).parse_bounded(source).body
    parts = [part for output in outputs if isinstance(output, nodes.Output) for part in output.nodes]
    if any(not isinstance(output, nodes.Output) for output in outputs):
        return None
    if any(not isinstance(part, (nodes.TemplateData, nodes.Name)) for part in parts):
        return None
    fields, before = list[Field](), ""
    for part in parts:
        if isinstance(part, nodes.Name):
            fields.append(Field(part.name, before if fields else ""))
            before = ""
        elif isinstance(part, nodes.TemplateData):
            before += part.data
    return fields


class _NullError(Exception):
    """A null would be written; the text names it."""


class _NullChecks(NodeTransformer):
    """Lets every value that ends up in text pass a check that knows the value's name in the template: what is
    written, what `~` joins, and what a filter works on (but for those that are made to take a null)."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        node.nodes = [_checked(child) for child in node.nodes]
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node.nodes = [_checked(child) for child in node.nodes]
        return self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.node is not None and node.name not in _ACCEPT_NULL:
            node.node = _checked(node.node, "items_" if node.name == "join" else "written_")
        return self.generic_visit(node)


def _checked(node: nodes.Expr, check: str = "written_") -> nodes.Expr:
    if isinstance(node, (nodes.TemplateData, nodes.Const)):
        return node
    if isinstance(node, nodes.CondExpr):
        node.expr1 = _checked(node.expr1, check)
        node.expr2 = None if node.expr2 is None else _checked(node.expr2, check)
        return node
    return nodes.Filter(node, check, [nodes.Const(_name(node))], [], None, None, lineno=node.lineno)


def _name(node: nodes.Node) -> str:
    """What a template calls a value: `meta.title`, `choices[0]`; for longer expressions the names within."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr):
        return f"{_name(node.node)}.{node.attr}"
    if isinstance(node, nodes.Getitem):
        index = repr(node.arg.value) if isinstance(node.arg, nodes.Const) else "…"
        return f"{_name(node.node)}[{index}]"
    return ", ".join(dict.fromkeys(name.name for name in node.find_all(nodes.Name))) or "an expression"


@jinja2.pass_context
def _written(context: Context, value: Any, name: str) -> Any:
    if value is None:
        raise _NullError(name)
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"{name} is binary and cannot be written into a text")
    return value


@jinja2.pass_context
def _items(context: Context, value: Any, name: str) -> Any:
    if isinstance(value, (list, tuple)) and None in value:
        raise _NullError(f"{name}[{value.index(None)}]")
    return _written(context, value, name)


def _environment(bounds: Bounds) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        bounds, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.globals = {name: environment.globals[name] for name in _GLOBALS}
    environment.globals["raise_exception"] = _raise_exception
    environment.add_filters({"tojson": to_json})
    environment.filters |= {"written_": _written, "items_": _items}
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@contextmanager
def _syntax_errors(what: str) -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(f"{what}, line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise SpecError(f"{what}: nested too deeply") from None
    except BoundsError as error:
        raise SpecError(f"{what}: {error}") from None


def _assignment(environment: BoundedEnvironment, expression: nodes.Expr) -> jinja2.Template:
    assign = nodes.Assign(nodes.Name(_RESULT, "store", lineno=1), expression, lineno=1)
    return environment.compile_bounded(nodes.Template([assign], lineno=1))


def _columns(environment: BoundedEnvironment, tree: nodes.Template) -> frozenset[str]:
    """The names looked up in the row. `range` and the like are functions where they are called, columns elsewhere."""
    used = Counter(node.name for node in tree.find_all(nodes.Name))
    if used["self"]:
        raise jinja2.TemplateSyntaxError("'self' means the template itself; a column of that name cannot be used", 1)
    called = Counter(call.node.name for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name))
    shadowing = {name for name in environment.globals if used[name] > called[name]}
    return frozenset(meta.find_undeclared_variables(tree)) | shadowing


def _values(row: Mapping[str, Any], columns: frozenset[str]) -> dict[str, Any]:
    return {name: row[name] for name in columns if name in row}


def _single_expression(tree: nodes.Template) -> nodes.Expr | None:
    """The expression, if the template is one `{{ … }}` and nothing else."""
    if len(tree.body) == 1 and isinstance(output := tree.body[0], nodes.Output) and len(output.nodes) == 1:
        node = output.nodes[0]
        return None if isinstance(node, nodes.TemplateData) else node
    return None


def _row_error(error: Exception, what: str) -> RowError:
    if isinstance(error, _NullError):
        advice = f'write {{{{ {error} or "…" }}}} to put something else there'
        return RowError("prompt_missing", f"{what}: {error} is null ({advice})")
    if isinstance(error, BoundsError):
        return RowError("template_error", f"{what}: {error}")
    return RowError("template_error", f"{what} cannot be filled in: {str(error) or type(error).__name__}")
