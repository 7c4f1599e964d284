"""What decides the KV of a chain of tokens: the weights and the options of the model.

Imports no vLLM: it reads the attributes of vLLM's configuration.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from kvrouter_store.connectors.settings import ConnectorRefused, ConnectorSettings
from kvrouter_store.identity.weights import revision_of, weights_digest

# Their positions are scaled by lengths that are set per engine, not by the weights alone.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def weights_revision(vllm_config: Any, settings: ConnectorSettings) -> str:
    """What decides the KV of a token chain: weights, their dtype, model options."""
    model = vllm_config.model_config
    weights = settings.weights_revision or revision_of(model.model, model.revision, weights_digest)
    if not weights:
        raise ConnectorRefused(
            f"the weights of {model.model} have no revision that engines could compare; set "
            '"weights_revision" in kv_connector_extra_config, or --revision to the commit'
        )
    options = _model_options(model.hf_config.to_dict())
    if _rope_type(options) in LENGTH_DEPENDENT_ROPE:
        options["max_model_len"] = model.max_model_len
    facts = [weights, options, str(model.dtype), str(model.quantization)]
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _model_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's configuration without where and by which program it was written."""
    volatile = ("_name_or_path", "transformers_version", "_commit_hash", "torch_dtype", "dtype")
    return {key: value for key, value in config.items() if key not in volatile}


def _rope_type(options: Mapping[str, Any]) -> str:
    rope = options.get("rope_parameters") or options.get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "")
