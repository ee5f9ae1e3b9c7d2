"""The jinja2 environment of all templates: sandboxed, and bounded in time and memory.

A rendering ends with a `BoundsError` when it

- runs more than `Bounds.max_steps` loop iterations and calls (loops over anything, recursion), or calls `range` on more
  than jinja2's own 100,000;
- takes longer than `Bounds.max_seconds`, looked at on every such step;
- writes more than `Bounds.max_chars`, counted while it is written;
- makes a longer text or list than that on the way, or a number of more than `Bounds.max_bits`: by `+`, `*`, `**`, `%`,
  `~`, by a call, a padding filter or method, or by assigning it.

Not covered: one single built-in operation that makes something huge out of small things (`replace` of every character
by a long text, a width inside a format string). Only a process limit could bound that.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_PADDING_FILTERS = ("center", "indent", "batch", "slice")


class BoundsError(Exception):
    """A rendering needs more time or memory than it may."""


@dataclass(frozen=True)
class Bounds:
    """`max_chars`: of the output, and characters or items of anything on the way; `max_bits`: of a number."""

    max_steps: int = 1_000_000
    max_seconds: float = 30.0
    max_chars: int = 16 * 2**20
    max_bits: int = 2**16


class _Meter:
    """Counts one rendering."""

    def __init__(self, bounds: Bounds):
        self._bounds = bounds
        self._steps_left = bounds.max_steps
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
        self.size(_length(value))
        return value


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
    """Sends what loops run over, what `~` joins and what is assigned through filters that check them."""

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
        return self.generic_visit(_filtered(nodes.List(node.nodes, lineno=node.lineno), "joined_"))


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compile with `compile_bounded`, render with `render_bounded`; other ways of rendering are refused."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, bounds: Bounds, **options: Any):
        super().__init__(extensions=[loopcontrols], **options)
        self._bounds = bounds
        self._meter: ContextVar[_Meter] = ContextVar("meter")
        own = {"counted_": self._counted, "sized_": self._sized, "joined_": self._joined}
        self.filters |= {name: _at_run_time(check) for name, check in own.items()}
        self.filters |= {name: self._padding(self.filters[name]) for name in _PADDING_FILTERS}

    def compile_bounded(self, tree: nodes.Template) -> jinja2.Template:
        """Compiles what `parse` returned (and changes it)."""
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

    # The parameters have the names that jinja2 gives them, lest they clash with a keyword argument.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = __self._meter.get()
        meter.step()
        if isinstance(getattr(__obj, "__self__", None), (str, bytes)):
            __self._check_numbers(args)
        return meter.value(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = self._meter.get()
        if operator == "*":
            meter.size(_repeated(left, right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            meter.bits(left.bit_length() * right)
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
        self._meter.get().size(sum(map(_length, values)))
        return str_join(values)

    def _padding(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            self._check_numbers((*args, *kwargs.values()))
            return inner(*args, **kwargs)

        checked.__dict__.update(inner.__dict__)
        return _at_run_time(checked) if not inner.__dict__ else checked

    def _check_numbers(self, values: tuple[Any, ...]) -> None:
        for value in values:
            if isinstance(value, int):
                self._meter.get().size(value)


def _at_run_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """As a filter that takes the context, so that it is not computed while compiling."""

    @jinja2.pass_context
    def filter_(context: Context, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return filter_


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _repeated(left: Any, right: Any) -> int:
    """The length of a text or list times a number; 0 for anything else."""
    if isinstance(left, int):
        left, right = right, left
    return _length(left) * right if isinstance(right, int) else 0
