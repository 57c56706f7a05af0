"""Where ranks are reached, as text: for the store, the launcher, the agents. Called by rendezvous.py and by users."""

from __future__ import annotations

import json

from trainmover_ext import _C

__all__ = ["decode_endpoint", "encode_endpoint"]

_FIELDS: dict[str, type] = {"incarnation": int, "machine_id": str, "address": str, "socket": str, "pid": int}


def encode_endpoint(endpoint: _C.Endpoint) -> str:
    """`endpoint` as JSON."""
    return json.dumps({name: getattr(endpoint, name) for name in _FIELDS}, sort_keys=True)


def decode_endpoint(text: str | bytes) -> _C.Endpoint:
    """The endpoint that `text` encodes. Raises ValueError for text that encodes none."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"found {text!r}; expected an endpoint as JSON, from trainmover_ext.endpoint()") from error
    found = {name: type(value) for name, value in fields.items()} if isinstance(fields, dict) else {}
    if found != _FIELDS:
        raise ValueError(
            f"found {text!r}; expected JSON with exactly {sorted(_FIELDS)}, from trainmover_ext.endpoint()"
        )
    endpoint = _C.Endpoint()
    for name, value in fields.items():
        setattr(endpoint, name, value)
    return endpoint
