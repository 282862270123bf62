"""Which models can be packed: those in which nothing but attention lets one token of a pack know of another.

Attention follows the pack's plan. Convolutions, linear attention and state-space layers would run over the pack as if
it were one row, and rotary frequencies that follow the longest row in a pack would make a row depend on its neighbours.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rft_platform.errors import UserError

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


def check_packable(model: Any) -> None:
    """UserError where rows of one pack would leak into each other in ``model``, a model of transformers with a head.

    Every decoder layer must be attention (``self_attn``; ``layer_types`` of the configuration, where given, full or
    sliding), and rotary frequencies must not depend on the length of what is computed.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    layers = getattr(getattr(model, model.base_model_prefix, None), "layers", None)
    without = [place for place, layer in enumerate(layers or ()) if getattr(layer, "self_attn", None) is None]
    if others or without or not layers:
        found = f"layers of type {', '.join(others)}" if others else f"decoder layers without self_attn, {without[:5]}"
        raise UserError(
            f"{name} has {found if layers else 'no decoder layers called layers'}: rows are trained in packs, where "
            "only attention keeps them apart; choose a model whose layers are all full_attention or sliding_attention"
        )
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            _check_rope(name, rope, config.max_position_embeddings)


def _ropes(parameters: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The rotary settings of a configuration: one for all layers, or one a type of layer."""
    if parameters and "rope_type" in parameters:
        yield parameters
    else:
        yield from (rope for rope in (parameters or {}).values() if isinstance(rope, Mapping))


def _check_rope(model: str, rope: Mapping[str, Any], longest: int) -> None:
    """UserError for frequencies that change with the length, where a row can be long enough that they do.

    transformers changes those of ``dynamic`` beyond ``max_position_embeddings`` (``factor`` says how far rows may go)
    and those of ``longrope`` beyond ``original_max_position_embeddings``.
    """
    kind = rope["rope_type"]
    limit = rope.get("original_max_position_embeddings") or longest
    reach = longest * max(1.0, rope.get("factor") or 1.0) if kind == "dynamic" else longest
    if reach <= limit:
        return
    fix = (
        f"set rope_type default there, which is the same for rows of up to {longest} tokens, or yarn for longer ones"
        if kind == "dynamic"
        else f"set max_position_embeddings {limit} there and write out its attention_factor, for rows no longer than "
        "that, or choose a model of another rope_type"
    )
    raise UserError(
        f"{model} has rope_type {kind} in its config.json: beyond {limit} tokens its frequencies follow the longest "
        f"row of a pack, and a row's log-probs would depend on the rows beside it; {fix}"
    )
