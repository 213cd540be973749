"""Configurations of upstream's that list kernels one by one: the rule sets profiler and tests, or the user's own.

``{"variant": "forward", "ndim_spatial": 2, "layout": "nhwgc", "datatype": "bf16", "instances": [{"tile_m": 64, ...}]}``

Source: CK, dispatcher/codegen/configs/grouped_conv, and dispatcher/codegen/grouped_conv/grouped_config_rules_builder.py
(_load_gemm_configs, _load_depthwise_configs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from catalog.errors import UsageError
from catalog.messages import did_you_mean
from catalog.ops.conv.traits import Direction

_AXES = ("m", "n", "k")
_RENAMED = {
    **{f"warp_{axis}": f"wave_{axis}" for axis in _AXES},
    **{f"vector_size_{tensor}": f"vector_{tensor}" for tensor in "abc"},
    "double_smem_buffer": "double_buffer",
    "streamk_persistent": "persistent",
}
"""Our names of upstream's fields, where they differ."""

_NEEDED = (
    *(f"{kind}_{axis}" for kind in ("tile", "warp", "warp_tile") for axis in _AXES),
    *(f"vector_size_{tensor}" for tensor in "abc"),
    *("pipeline", "scheduler", "epilogue"),
)
_OPTIONAL: Mapping[str, Any] = {
    "double_smem_buffer": False,
    "num_groups_to_merge": 1,
    "num_wave_groups": 1,
    "specialization": "default",
    "two_stage": False,
    "explicit_gemm": False,
    "split_image": False,
    "streamk_persistent": False,
}
_STREAM_K = ("streamk_enabled", "streamk_reduction_strategy")
_DEPTHWISE = {
    **{name: name for name in ("tile_h", "tile_w", "pad_h", "pad_w")},
    **{"filt": "filter_size", "str_h": "stride_h", "str_w": "stride_w", "nbatch": "images"},
    **{"sub_h": "subtile_h", "sub_w": "subtile_w", "in_vec": "vector_a", "out_vec": "vector_c"},
}
_DEPTHWISE_VARIANT = "forward_depthwise"
_DIRECTIONS = {"fwd": Direction.FORWARD, **{str(direction): direction for direction in Direction}}
_SPATIAL = (1, 2, 3)


def instances(document: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]] | None:
    """The relation that a configuration fills, and its rows; None if the configuration lists no instances.

    Raises:
        UsageError: a field is missing, unknown or outside its domain; the message says which.
    """
    if "instances" not in document:
        return None
    _check_fields("top level", document, ("variant", "ndim_spatial", "layout", "datatype", "instances"))
    if not isinstance(document["instances"], list):
        raise UsageError("instances: must be a list")
    variant, ndim = document["variant"], document["ndim_spatial"]
    common = {"ndim": ndim, "dtype": document["datatype"], "layout": document["layout"]}
    if ndim not in _SPATIAL or isinstance(ndim, bool):
        raise UsageError(f"ndim_spatial: {ndim!r} is not allowed", hint="Allowed: 1, 2, 3.")
    if variant != _DEPTHWISE_VARIANT and variant not in _DIRECTIONS:
        allowed = ", ".join((*_DIRECTIONS, _DEPTHWISE_VARIANT))
        raise UsageError(f"variant: {variant!r} is not allowed", hint=f"Allowed: {allowed}.")
    depthwise = variant == _DEPTHWISE_VARIANT
    read = _depthwise if depthwise else _product
    found = [common | read(place, one) for place, one in enumerate(_objects(document["instances"]))]
    if depthwise:
        return "depthwise.instance", _different(found)
    return "instance", _different([{"direction": str(_DIRECTIONS[variant])} | row for row in found])


def _objects(listed: list[Any]) -> Iterator[Mapping[str, Any]]:
    for place, one in enumerate(listed):
        if not isinstance(one, dict):
            raise UsageError(f"instances[{place}]: must be an object")
        yield one


def _product(place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The traits of an instance that computes a matrix product."""
    _check_fields(f"instances[{place}]", given, _NEEDED, ("id", *_OPTIONAL, *_STREAM_K))
    fields = {name: given.get(name, default) for name, default in _OPTIONAL.items()}
    fields |= {name: given[name] for name in _NEEDED}
    strategy = given.get("streamk_reduction_strategy") or "tree"
    reduction = str(strategy).lower() if given.get("streamk_enabled") else "no"
    persistent = bool(given.get("streamk_enabled") and fields["streamk_persistent"])
    return {_RENAMED.get(name, name): value for name, value in fields.items()} | {
        "reduction": reduction,
        "persistent": persistent,
    }


def _depthwise(place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The traits of a direct depthwise instance."""
    _check_fields(f"instances[{place}]", given, tuple(_DEPTHWISE), ("id",))
    return {trait: given[name] for name, trait in _DEPTHWISE.items()}


def _check_fields(at: str, given: Mapping[str, Any], needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    known = (*needed, *optional)
    for name in given:
        if name not in known:
            raise UsageError(
                f"{at}: no field is called {name!r}{did_you_mean(name, known)}", hint=f"There are: {', '.join(known)}."
            )
    for name in needed:
        if name not in given:
            raise UsageError(f"{at}: {name} is missing")


def _different(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without repetitions, as upstream has them."""
    return list({repr(sorted(row.items())): row for row in rows}.values())
