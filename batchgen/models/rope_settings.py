"""What metadata says of rotary embedding, as tables of angles."""

from collections.abc import Mapping
from typing import Any

from batchgen.errors import ModelError
from batchgen.models.rope import KINDS, Kind, Rope, longrope_attention_factor, yarn_attention_factor
from batchgen.models.settings import Settings, positive

_OTHER_NAMES = {"default": "none", None: "none", "su": "longrope"}

_KNOWN = frozenset(
    (
        *("rope_theta", "rope_type", "type", "factor", "partial_rotary_factor", "original_max_position_embeddings"),
        *("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
        *("short_factor", "long_factor"),
    )
)
"""Keys of Hugging Face's that are understood."""


def read_ropes(settings: Settings, head_dim: int, context: int) -> tuple[Rope, ...]:
    """The tables that layers choose from: the first, and where layers differ one for those that are windowed, or for
    those without rotation."""
    architecture = settings.architecture
    if architecture.learned_positions:
        return (Rope(0),)
    if settings.naming == "hf":
        return _of_hf(settings, head_dim, context)
    first = _of_gguf(settings, head_dim, context)
    if architecture.local_rope:
        return first, Rope(first.dimensions, architecture.local_rope_theta or first.theta)
    return (first,) if architecture.rope_on == "all" else (first, Rope(0))


def _of_gguf(settings: Settings, head_dim: int, context: int) -> Rope:
    prefix = f"{settings.architecture.name}.rope."
    scaling = {key: settings.values.get(f"{prefix}scaling.{key}") for key in ("type", "factor", "attn_factor")}
    dimensions = settings.integer("rotary_dim", int(head_dim * settings.architecture.rotary))
    original = settings.values.get(f"{prefix}scaling.original_context_length")
    if scaling["type"] is None and original and scaling["attn_factor"]:
        scaling["type"] = "longrope"  # files of Phi 3 name no type
    kind = _kind(scaling["type"], f"{prefix}scaling.type")
    factor = scaling["factor"] or settings.values.get(f"{prefix}scale_linear", 1.0)
    if kind == "none" and factor != 1.0:
        kind = "linear"
    attention = scaling["attn_factor"]
    if kind == "yarn" and attention:
        attention *= yarn_attention_factor(factor)
    given = {"factor": factor, "attention_factor": attention}
    theta = settings.number("rope_theta", 10000.0)
    return _rope(
        settings, kind, _pairs(dimensions, head_dim, f"{prefix}dimension_count"), theta, original or context, given
    )


def _of_hf(settings: Settings, head_dim: int, context: int) -> tuple[Rope, ...]:
    """`rope_parameters`, or in older files `rope_theta`, `rope_scaling` and keys beside them."""
    values, architecture = settings.values, settings.architecture
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"rope_parameters = {given!r} is not supported")
    first = _hf_table(settings, given.get("full_attention", given), head_dim, context)
    if not architecture.local_rope:
        return (first,) if architecture.rope_on == "all" else (first, Rope(0))
    theta = values.get("rope_local_base_freq") or architecture.local_rope_theta or first.theta
    return first, _hf_table(settings, given.get("sliding_attention", {"rope_theta": theta}), head_dim, context)


def _hf_table(settings: Settings, given: Mapping[str, Any], head_dim: int, context: int) -> Rope:
    unknown = sorted(key for key, value in given.items() if key not in _KNOWN and value is not None)
    if unknown:
        raise ModelError(f"{settings.what} has {unknown[0]} for rotary embedding, which is not supported")

    def first_of(*keys: str) -> Any:
        """The first that is given, by preference among what belongs together."""
        found = [part[key] for part in (given, settings.values) for key in keys if part.get(key) is not None]
        return found[0] if found else None

    share = first_of("partial_rotary_factor", "rotary_pct") or settings.architecture.rotary
    share = positive(share, "partial_rotary_factor", settings.what)
    dimensions = _pairs(int(head_dim * share), head_dim, "partial_rotary_factor")
    kind = _kind(given.get("rope_type", given.get("type")), "rope_type")
    theta = positive(first_of("rope_theta", "rotary_emb_base") or 10000.0, "rope_theta", settings.what)
    original = first_of("original_max_position_embeddings") or context
    if kind == "longrope":
        given = {**given, "factor": context / original}
    return _rope(settings, kind, dimensions, theta, original, given)


def _kind(name: Any, key: str) -> Kind:
    name = _OTHER_NAMES.get(name, name)
    if name == "dynamic":
        raise ModelError(f"{key} 'dynamic' is not supported: a token's bits would depend on how long its prompt is")
    for kind in KINDS:
        if name == kind:
            return kind
    raise ModelError(f"{key} {name!r} is not supported; supported: {', '.join(KINDS)}")


def _pairs(dimensions: int, head_dim: int, key: str) -> int:
    if dimensions % 2 or dimensions > head_dim:
        raise ModelError(f"{key}: {dimensions} of {head_dim} dimensions cannot be rotated in pairs")
    return dimensions


def _rope(
    settings: Settings, kind: Kind, dimensions: int, theta: float, original: int, given: Mapping[str, Any]
) -> Rope:
    """A table with the scaling that `given` describes in Hugging Face's words."""

    def number(key: str, default: float | None = None) -> float:
        value = given.get(key)
        return positive(default if value is None else value, f"rope {key}", settings.what)

    if kind == "none":
        return Rope(dimensions, theta)
    factor = number("factor")
    if positive(original, "original context of rope", settings.what) < 2 or theta <= 1:
        raise ModelError(f"{settings.what} has a rope of base {theta} and an original context of {original}")
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise ModelError(f"{settings.what} has rope low_freq_factor = {low} and high_freq_factor = {high}")
        return Rope(dimensions, theta, kind, factor, original, low, high)
    if kind == "yarn":
        attention = number("attention_factor", yarn_attention_factor(factor))
        return Rope(
            dimensions, theta, kind, factor, original, number("beta_slow", 1.0), number("beta_fast", 32.0), attention
        )
    if kind == "longrope":
        attention = number("attention_factor", longrope_attention_factor(factor, original))
        divisors = tuple(positive(d, "rope short_factor", settings.what) for d in given.get("short_factor", ()))
        if len(divisors) not in (0, dimensions // 2):
            raise ModelError(f"{settings.what} has {len(divisors)} short_factor of rope; {dimensions // 2} are needed")
        return Rope(dimensions, theta, kind, factor, original, attention_factor=attention, divisors=divisors)
    return Rope(dimensions, theta, kind, factor, original)
