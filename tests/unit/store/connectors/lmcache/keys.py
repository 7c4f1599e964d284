"""Keys and layouts as LMCache has them, without LMCache."""

from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True)
class Key:
    """lmcache/v1/distributed/api.py: ObjectKey."""

    chunk_hash: bytes
    model_name: str = "models/tiny"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Dtype:
    """Of torch, as far as the names of objects need it."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


FLOAT16, BFLOAT16 = Dtype("float16", 2), Dtype("bfloat16", 2)


def chunk(number: int, prompt: str = "a") -> bytes:
    return sha256(f"{prompt} {number}".encode()).digest()
