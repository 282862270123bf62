"""Check whether a model can be packed: only attention may connect tokens, and it must use the pack's plan.

Convolutions, linear attention and state-space layers would treat the pack as one row. Rotary frequencies that depend on
the longest row of a pack would make a row depend on its neighbours. Packed attention computes plain softmax attention:
no sinks, no soft-capping, no masks made by the model, and no window shorter than a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rft_platform.common.errors import UserError

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
#: By ``model_type``: transformers models whose attention never gets the pack's plan, or changes the mask itself.
OWN_ATTENTION = {
    "doge": "its attention computes its own mask",
    "moshi": "its attention lacks the interface that packs need",
    "nemotron": "its attention lacks the interface that packs need",
    "stablelm": "its attention lacks the interface that packs need",
    "xglm": "its attention lacks the interface that packs need",
}
#: By ``model_type``: the sliding window is only part of the mask, which a pack replaces, so it would be ignored.
WINDOW_IN_MASK = frozenset({"phimoe", "qwen2_moe"})


def check_packable(model: Any) -> None:
    """Raise UserError if rows of a pack would influence each other in ``model``, a transformers model with a head.

    Every decoder layer must be attention (``self_attn``; if the configuration has ``layer_types``: full or sliding) of
    the kind that packs support. Rotary frequencies must not depend on the length of the input.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    layers = getattr(getattr(model, model.base_model_prefix, None), "layers", None)
    without = [place for place, layer in enumerate(layers or ()) if getattr(layer, "self_attn", None) is None]
    if others or without or not layers:
        found = f"layers of type {', '.join(others)}" if others else f"decoder layers without self_attn, {without[:5]}"
        raise UserError(
            f"{name} has {found if layers else 'no decoder layers called layers'}: rows are trained in packs, where "
            "only attention separates them; choose a model whose layers are all full_attention or sliding_attention"
        )
    _check_attention(name, config, [layer.self_attn for layer in layers])
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            _check_rope(name, rope, config.max_position_embeddings)


def check_window(model: Any, longest: int | None) -> None:
    """Raise UserError if rows of ``longest`` tokens (None: the model's whole context) exceed its sliding window."""
    config = model.config.get_text_config()
    window, longest = sliding_window(config), longest or config.max_position_embeddings
    if window is not None and longest > window:
        raise UserError(
            f"{type(model).__name__} has sliding_window {window} in config.json, but rows can have {longest} tokens; "
            f"training supports no sliding window: set model.max_model_len to {window} or less, or choose another model"
        )


def sliding_window(config: Any) -> int | None:
    """Width of the sliding window that some layer applies; None if every layer has full attention."""
    types = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", None) is False or (types is not None and "sliding_attention" not in types):
        return None
    return getattr(config, "sliding_window", None) or None


def _check_attention(model: str, config: Any, layers: Sequence[Any]) -> None:
    """Raise UserError for attention that packs do not support."""
    found = OWN_ATTENTION.get(config.model_type)
    if any(getattr(layer, "sinks", None) is not None for layer in layers):
        found = "its attention has sinks"
    elif any(getattr(layer, "attn_logit_softcapping", None) is not None for layer in layers):
        found = f"its attention is soft-capped (attn_logit_softcapping {config.attn_logit_softcapping})"
    window = sliding_window(config) if config.model_type in WINDOW_IN_MASK else None
    if window is not None and window < config.max_position_embeddings:
        found = (
            f"its sliding_window {window} is shorter than its max_position_embeddings {config.max_position_embeddings}"
        )
    if found:
        raise UserError(f"{model} cannot be trained: {found}, which packed rows do not support; choose another model")


def _ropes(parameters: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of the rotary embedding in a configuration: one for all layers, or one per layer type."""
    if parameters and "rope_type" in parameters:
        yield parameters
    else:
        yield from (rope for rope in (parameters or {}).values() if isinstance(rope, Mapping))


def _check_rope(model: str, rope: Mapping[str, Any], longest: int) -> None:
    """Raise UserError for rotary frequencies that change with the row length, if rows can be long enough for a change.

    transformers changes the frequencies of ``dynamic`` beyond ``max_position_embeddings`` (``factor`` limits the row
    length) and those of ``longrope`` beyond ``original_max_position_embeddings``.
    """
    kind = rope["rope_type"]
    limit = rope.get("original_max_position_embeddings") or longest
    reach = longest * max(1.0, rope.get("factor") or 1.0) if kind == "dynamic" else longest
    if reach <= limit:
        return
    fix = (
        f"set rope_type default there, which is equal for rows of up to {longest} tokens, or yarn for longer rows"
        if kind == "dynamic"
        else f"for rows of at most {limit} tokens set max_position_embeddings {limit} and an explicit attention_factor "
        "there, or choose a model with another rope_type"
    )
    raise UserError(
        f"{model} has rope_type {kind} in its config.json: beyond {limit} tokens its frequencies depend on the "
        f"longest row of a pack, so a row's log-probs would depend on the other rows; {fix}"
    )
