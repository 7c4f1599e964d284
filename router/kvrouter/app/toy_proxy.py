"""Flags of vLLM's toy proxy, so that its command line starts this router.

`tests/v1/kv_connector/nixl_integration/toy_proxy_server.py` of vLLM pairs hosts with ports.
"""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, Field

from kvrouter.options.types import Texts  # noqa: TC001 (pydantic reads it)

_HOST: Final = "localhost"
_PREFILL_PORT: Final = "8100"
_DECODE_PORT: Final = "8200"


class ToyProxySettings(BaseModel):
    """Engines as lists of hosts and ports."""

    prefiller_hosts: Texts = Field(
        default_factory=list,
        description="Hosts of engines for prefill legs. The first host goes with the first of "
        f"--prefiller-ports (default: {_PREFILL_PORT}). --prefill is the better flag.",
        json_schema_extra={
            "section": "Engines, as vLLM's toy proxy names them",
            "flags": ["--prefiller-host"],
        },
    )
    prefiller_ports: Texts = Field(
        default_factory=list,
        description=f"Ports of engines for prefill legs. The default host is {_HOST}.",
        json_schema_extra={"flags": ["--prefiller-port"]},
    )
    decoder_hosts: Texts = Field(
        default_factory=list,
        description="Hosts of engines for decode legs. The first host goes with the first of "
        f"--decoder-ports (default: {_DECODE_PORT}). --decode is the better flag.",
        json_schema_extra={"flags": ["--decoder-host"]},
    )
    decoder_ports: Texts = Field(
        default_factory=list,
        description=f"Ports of engines for decode legs. The default host is {_HOST}.",
        json_schema_extra={"flags": ["--decoder-port"]},
    )

    @property
    def paired_prefill(self) -> list[str]:
        """`HOST:PORT` of each prefill engine; ValueError if the lists do not match."""
        return _paired("prefiller", self.prefiller_hosts, self.prefiller_ports, _PREFILL_PORT)

    @property
    def paired_decode(self) -> list[str]:
        """`HOST:PORT` of each decode engine; ValueError if the lists do not match."""
        return _paired("decoder", self.decoder_hosts, self.decoder_ports, _DECODE_PORT)


def _paired(kind: str, hosts: list[str], ports: list[str], port: str) -> list[str]:
    if not hosts and not ports:
        return []
    hosts, ports = hosts or [_HOST], ports or [port]
    if len(hosts) != len(ports):
        raise ValueError(
            f"{len(hosts)} --{kind}-hosts and {len(ports)} --{kind}-ports: give as many of each"
        )
    return [
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for host, port in zip(hosts, ports, strict=True)
    ]
