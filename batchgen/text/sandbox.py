"""The jinja2 environment of all templates: sandboxed, and bounded in time and memory.

A source is refused with a `BoundsError` when it is longer than `MAX_SOURCE` or nested too deeply. A rendering ends with
one when it

- runs more than `Bounds.max_steps` loop iterations, calls, filters and tests (loops over anything, recursion), or calls
  `range` on more than jinja2's own 100,000;
- takes longer than `Bounds.max_seconds`, looked at on every such step;
- writes more than `Bounds.max_chars`, counted while it is written;
- makes a longer text, a list that holds more on the way, or a number of more than `Bounds.max_bits`. Lists within lists
  are counted as often as they occur, so that nothing small is written, compared or sorted as something huge;
- makes more than `MADE_TEXTS` times `max_chars` by filters (which `map` runs without a loop).

An operation that makes more than it is given (`replace`, `join`, formats, padding) is measured before it runs.
Attributes that could not be measured, and filters that no prompt needs, are not there.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1 << 18
"""Characters of a template; those of models have up to 30,000."""
MADE_TEXTS = 16

_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
_PADDING = ("center", "batch", "slice")
_NO_FILTERS = ("random", "pprint", "urlize", "xmlattr")
_NO_ATTRIBUTES = frozenset({"translate", "maketrans", "expandtabs", "to_bytes", "from_bytes"})
_BITS_PER_DIGIT = 3
_ITEM = 8
"""Characters that an item of a list counts as, beside what it is."""


class BoundsError(Exception):
    """A template needs more time or memory than it may."""


@dataclass(frozen=True)
class Bounds:
    """`max_chars`: of the output, and of anything on the way (an item of a list counts as some); `max_bits`: of a
    number."""

    max_steps: int = 1_000_000
    max_seconds: float = 30.0
    max_chars: int = 16 * 2**20
    max_bits: int = 2**16


class _Meter:
    """Counts one rendering."""

    def __init__(self, bounds: Bounds):
        self._bounds = bounds
        self._steps_left = bounds.max_steps
        self._made_left = MADE_TEXTS * bounds.max_chars
        self._deadline = time.monotonic() + bounds.max_seconds

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise BoundsError(f"the template runs more than {self._bounds.max_steps:,} loop iterations and calls")
        if time.monotonic() > self._deadline:
            raise BoundsError(f"the template runs for more than {self._bounds.max_seconds:g} seconds")

    def size(self, amount: int) -> None:
        if amount > self._bounds.max_chars:
            raise BoundsError(f"the template makes a text or list longer than {self._bounds.max_chars:,}")

    def bits(self, amount: int) -> None:
        if amount > self._bounds.max_bits:
            raise BoundsError(f"the template makes a number of more than {self._bounds.max_bits:,} bits")

    def value(self, value: Any) -> Any:
        """Checks a value's own size and returns it."""
        if isinstance(value, int):
            self.bits(value.bit_length())
        self.size(_weight(value, self._bounds.max_chars))
        return value

    def made(self, value: Any) -> Any:
        """`value`, which a filter made."""
        self._made_left -= len(value) if isinstance(value, (str, list)) else 0
        if self._made_left < 0:
            raise BoundsError(f"the template makes texts of more than {MADE_TEXTS * self._bounds.max_chars:,}")
        return self.value(value)


class _Counted:
    """What a loop runs over, counted."""

    def __init__(self, values: Any, meter: _Meter):
        self._values = values
        self._meter = meter

    def __iter__(self) -> Iterator[Any]:
        values = iter(self._values)
        return self._count(values)

    def __len__(self) -> int:
        return len(self._values)

    def _count(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self._meter.step()
            yield value


class _Bounding(NodeTransformer):
    """Sends what loops run over, what `~` joins, what is put together and what is assigned through filters that check
    them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = _filtered(node.iter, "counted_")
        return self.generic_visit(node)

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        node.node = _filtered(node.node, "sized_")
        return self.generic_visit(node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        inner = node.filter
        node.filter = nodes.Filter(inner, "sized_", [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        items = nodes.List([self.visit(item) for item in node.nodes], lineno=node.lineno)
        return _filtered(items, "joined_")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered(self.generic_visit(node), "sized_")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), "sized_")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return _filtered(self.generic_visit(node), "sized_") if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compile with `compile_bounded`, render with `render_bounded`; other ways of rendering are refused.

    `add_filters` is for filters of one's own. There are no globals but functions that loop over nothing.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, bounds: Bounds, **options: Any):
        super().__init__(extensions=[loopcontrols], **options)
        self._bounds = bounds
        self._meter: ContextVar[_Meter] = ContextVar("meter")
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.add_filters({name: self.filters[name] for name in self.filters.keys() - set(_NO_FILTERS)}, replace=True)
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: self._metered(test, name) for name, test in tests.items()}
        own = {"counted_": self._counted, "sized_": self._sized, "joined_": self._joined}
        self.filters |= {name: _at_run_time(check) for name, check in own.items()}

    def add_filters(self, filters: Mapping[str, Callable[..., Any]], replace: bool = False) -> None:
        """Filters that are metered as jinja2's own are."""
        self.filters = ({} if replace else self.filters) | {
            name: self._metered(function, name) for name, function in filters.items()
        }

    def parse_bounded(self, source: str) -> nodes.Template:
        """The syntax tree. Raises BoundsError and jinja2.TemplateSyntaxError."""
        if len(source) > MAX_SOURCE:
            raise BoundsError(f"longer than {MAX_SOURCE:,} characters")
        with _compile_errors():
            return self.parse(source)

    def compile_bounded(self, tree: nodes.Template) -> jinja2.Template:
        """Compiles what `parse_bounded` returned (and changes it). Raises as that does."""
        with _compile_errors():
            bounded = _Bounding().visit(tree)
            return jinja2.Template.from_code(self, self.compile(bounded), self.make_globals(None))

    def render_bounded(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """The template's text. Raises BoundsError, and whatever the template raises."""
        meter = _Meter(self._bounds)
        token = self._meter.set(meter)
        try:
            return self._collect(template, values, meter)
        finally:
            self._meter.reset(token)

    def evaluate_bounded(self, template: jinja2.Template, name: str, values: Mapping[str, Any]) -> Any:
        """The value that the template's top level assigns to `name`."""
        token = self._meter.set(_Meter(self._bounds))
        try:
            context = template.new_context(dict(values))
            for _ in template.root_render_func(context):
                pass
            return context.vars[name]
        finally:
            self._meter.reset(token)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_ATTRIBUTES and super().is_safe_attribute(obj, attr, value)

    # The parameters have the names that jinja2 gives them, lest they clash with a keyword argument.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = __self._meter.get()
        meter.step()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # jinja2 wraps `format`
        if isinstance(owner, (str, bytes)):
            __self._check_numbers((*args, *kwargs.values()))
            meter.size(_growth(getattr(__obj, "__name__", ""), (owner, *args), kwargs))
        return meter.value(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = self._meter.get()
        if operator == "*":
            meter.size(_repeated(left, right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            meter.bits(left.bit_length() * right)
        if operator == "%" and isinstance(left, (str, bytes)):
            self._check_numbers(right if isinstance(right, tuple) else (right,))
            meter.size(_formatted(left, right))
        return meter.value(super().call_binop(context, operator, left, right))

    def _collect(self, template: jinja2.Template, values: Mapping[str, Any], meter: _Meter) -> str:
        chunks, length = [], 0
        for chunk in template.generate(**values):
            length += len(chunk)
            meter.size(length)
            chunks.append(chunk)
        return "".join(chunks)

    def _counted(self, values: Any) -> _Counted:
        return _Counted(values, self._meter.get())

    def _sized(self, value: Any) -> Any:
        return self._meter.get().value(value)

    def _joined(self, values: list[Any]) -> str:
        return str_join(self._meter.get().value(values))

    def _metered(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A filter or test that counts as a step and is measured before and after. Without a meter, that is while a
        template is compiled, it fails, so that nothing is computed then."""
        first = 1 if hasattr(inner, "jinja_pass_arg") else 0  # the context or environment

        @wraps(inner)
        def metered(*args: Any, **kwargs: Any) -> Any:
            meter = self._meter.get()
            meter.step()
            if args[first:] and isinstance(args[first], Iterator):
                args = (*args[:first], list(args[first]), *args[first + 1 :])
            given = args[first:]
            if name in _GROWTH or name in _PADDING:
                self._check_numbers((*given[1:], *kwargs.values()))
                meter.size(_growth(name, given, kwargs))
            return meter.made(inner(*args, **kwargs))

        return metered

    def _check_numbers(self, values: tuple[Any, ...]) -> None:
        for value in values:
            if isinstance(value, int):
                self._meter.get().size(value)


@contextmanager
def _compile_errors() -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError:
        raise
    except (RecursionError, MemoryError):
        raise BoundsError("nested too deeply") from None
    except SyntaxError as error:  # of the Python code that jinja2 makes of a template
        raise BoundsError(f"nested too deeply, or not valid: {error.msg}") from None
    except (ValueError, OverflowError) as error:  # a number of thousands of digits
        raise BoundsError(f"not valid: {error}") from None


def _at_run_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """As a filter that takes the context, so that it is not computed while compiling."""

    @jinja2.pass_context
    def filter_(context: Context, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return filter_


# --- how much something is --------------------------------------------------------------------------------------


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _weight(value: Any, most: int) -> int:
    """Characters and items of a value and all that it holds, as often as it holds it; counted up to above `most`."""
    if isinstance(value, (str, bytes)):
        return len(value)
    total, waiting = 0, [value]
    while waiting and total <= most:
        item = waiting.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // _BITS_PER_DIGIT
        elif isinstance(item, dict):
            total += _ITEM * len(item)
            waiting += [*item, *item.values()]
        elif isinstance(item, (list, tuple)):
            total += _ITEM * len(item)
            waiting += item
    return total


def _repeated(left: Any, right: Any) -> int:
    """The size of a text or list times a number; 0 for anything else."""
    if isinstance(left, int):
        left, right = right, left
    if not isinstance(right, int) or not isinstance(left, (str, bytes, list, tuple)) or right <= 0:
        return 0
    return max(1, _weight(left, _MOST)) * right


_MOST = 1 << 40
"""No bound: what is weighed has been within bounds before."""


def _growth(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """At least what the filter or method of that name makes of its arguments, if it can be more than these."""
    return _GROWTH[name](*args, **kwargs) if name in _GROWTH else 0


def _replaced(text: Any = "", old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + text.count(old) * len(new)


def _joined_length(*args: Any, d: Any = "", attribute: Any = None) -> int:
    """Of a list that is joined; `"x".join(list)` and `list | join("x")` alike."""
    separator = max((len(arg) for arg in (*args, d) if isinstance(arg, str)), default=0)
    lists = [arg for arg in args if hasattr(arg, "__len__") and not isinstance(arg, str)]
    return sum(_weight(items, _MOST) + separator * len(items) for items in lists)


def _formatted(text: Any, *args: Any, **kwargs: Any) -> int:
    """Every field may hold all that is given, and as much as the widths in the text say."""
    text = str(text)
    fields, digits = text.count("%") + text.count("{"), map(len, re.findall(r"[0-9]{1,400}", text))
    widths = sum(10**count for count in digits if count > 3)
    return len(text) + widths + fields * _weight([*args, kwargs], _MOST)


def _items(text: Any = "", *_: Any, **__: Any) -> int:
    """Of a text that is taken apart."""
    return _ITEM * len(text) if isinstance(text, str) else 0


def _words(text: Any = "", separator: Any = None, *_: Any, sep: Any = None, **__: Any) -> int:
    found = separator or sep
    return _ITEM * (text.count(found) if isinstance(found, str) else len(text) // 2)


def _indented(text: Any = "", width: Any = 4, *_: Any, **__: Any) -> int:
    return len(str(text)) + (str(text).count("\n") + 1) * (width if isinstance(width, int) else _length(width))


def _wrapped(text: Any = "", *args: Any, wrapstring: Any = "", **_: Any) -> int:
    return len(str(text)) * max([1, *map(_length, (*args, wrapstring))])


def _json_length(value: Any = None, *args: Any, indent: Any = None, separators: Any = (), **_: Any) -> int:
    between = max([0, *map(_length, separators or ()), *(arg for arg in (*args, indent) if type(arg) is int)])
    return _weight(value, _MOST) * (1 + between + _length(indent))


def _started(value: Any = None, attribute: Any = None, start: Any = 0) -> int:
    return 0 if isinstance(start, (int, float)) else _MOST  # lists: each sum is a copy


_GROWTH: dict[str, Callable[..., int]] = {
    "list": _items,
    **dict.fromkeys(("split", "rsplit", "splitlines"), _words),
    "replace": _replaced,
    "join": _joined_length,
    "format": _formatted,
    "format_map": _formatted,
    "indent": _indented,
    "wordwrap": _wrapped,
    "tojson": _json_length,
    "sum": _started,
}
