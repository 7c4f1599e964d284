"""Quotas as people write them: TENANT=SIZE or TENANT=PERCENT of the pool. Knows no tenant."""

import re
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

MIN_QUOTA_BYTES = 1 << 20
HOW = "write TENANT=SIZE or TENANT=PERCENT, as research=40GiB or batch=25%"
QUOTA = re.compile(
    r"(?P<tenant>[A-Za-z0-9._-]{1,64})=(?P<size>[0-9]+(\.[0-9]+)?)(?P<unit>[A-Za-z%]*)"
)
SIZE = TypeAdapter(ByteSize)


def split_quotas(value: Any) -> Any:
    """The quotas as a list of texts; they may come as one text, as a list or as a mapping."""
    if isinstance(value, dict):
        return [f"{tenant}={size}" for tenant, size in value.items()]
    if isinstance(value, str):
        return value.replace(",", " ").split()
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return [part for one in value for part in split_quotas(one)]
    raise ValueError(HOW)


def quota_bytes(quotas: list[str], pool_bytes: int) -> dict[str, int]:
    """The bytes that each tenant named can count on.

    Raises ValueError, one sentence with the remedy: a quota that is not understood, named twice, or
    less than 1 MiB, and quotas that are together more than the pool.
    """
    found: dict[str, int] = {}
    for text in quotas:
        tenant, size_bytes = _read(text, pool_bytes)
        if tenant in found:
            raise ValueError(f"tenant {tenant!r} has two quotas; give it one")
        if size_bytes < MIN_QUOTA_BYTES:
            raise ValueError(f"{text!r} is less than 1MiB; give more, or none")
        found[tenant] = size_bytes
    if sum(found.values()) > pool_bytes:
        together = ByteSize(sum(found.values())).human_readable()
        pool = ByteSize(pool_bytes).human_readable()
        raise ValueError(
            f"the quotas are {together}, more than the pool of {pool}; "
            "lower them, or raise --memory"
        )
    return found


def _read(text: str, pool_bytes: int) -> tuple[str, int]:
    match = QUOTA.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not understood; {HOW}")
    try:
        if match["unit"] == "%":
            return match["tenant"], int(pool_bytes * float(match["size"]) / 100)
        return match["tenant"], int(SIZE.validate_python(match["size"] + match["unit"]))
    except (ValueError, ValidationError):
        raise ValueError(f"{text!r} is not understood; {HOW}") from None
