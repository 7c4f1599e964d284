"""A causal language model of transformers, and what makes its KV the same as another's."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from kvrouter_store.identity.weights import revision_of, weights_digest

from .settings import EngineSettings

_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash", "torch_dtype", "dtype")


class ModelRefused(ValueError):
    """This engine cannot serve the model; the message says why."""


@dataclass(frozen=True)
class Model:
    """The network and its tokenizer (None where the folder has none)."""

    network: Any
    tokenizer: Any
    folder: str

    @classmethod
    def load(cls, settings: EngineSettings) -> "Model":
        """From a folder or the Hugging Face Hub. Raises ModelRefused."""
        dtype = getattr(torch, settings.dtype)
        network = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
        try:
            tokenizer = AutoTokenizer.from_pretrained(settings.model)
        except (OSError, ValueError):
            tokenizer = None
        model = cls(network.to(settings.device).eval(), tokenizer, settings.model)
        _ = model.kv_shapes
        return model

    @property
    def layers(self) -> Sequence[torch.nn.Module]:
        """The modules after each of which a layer's KV is in the cache."""
        found: Sequence[torch.nn.Module] = self.network.get_decoder().layers
        return found

    @cached_property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """KV heads and elements of a head of each layer, as one computed token shows them."""
        probe = DynamicCache(config=self.network.config)
        self.forward([0], probe)
        keys = [getattr(layer, "keys", None) for layer in probe.layers]
        if len(keys) != len(self.layers) or any(each is None or each.dim() != 4 for each in keys):
            raise ModelRefused("its layers do not keep one key and value for each token")
        return [(each.shape[1], each.shape[3]) for each in keys if each is not None]

    @cached_property
    def revision(self) -> str:
        """What decides the KV of a token chain: weights, options and type of the network."""
        commit = getattr(self.network.config, "_commit_hash", None)
        weights = revision_of(self.folder, commit, weights_digest)
        if not weights:
            raise ModelRefused(f"the weights of {self.folder} have no revision to compare")
        options = self.network.config.to_dict()
        kept = {key: value for key, value in options.items() if key not in _VOLATILE}
        facts = [weights, kept, str(self.network.dtype)]
        return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return int(self.network.get_input_embeddings().num_embeddings)

    @property
    def end_tokens(self) -> set[int]:
        """Tokens that end an answer."""
        found = self.network.generation_config.eos_token_id
        return set(found if isinstance(found, list) else [found]) - {None}

    def forward(
        self, tokens: Sequence[int], cache: Any, computed: Callable[[int], None] | None = None
    ) -> Tensor:
        """The logits after the last of these tokens, which follow those in the cache.

        computed: called with the number of each layer when the cache has its KV.
        """
        hooks = []
        if computed is not None:
            for at, module in enumerate(self.layers):
                hooks.append(module.register_forward_hook(partial(_tell, computed, at)))
        try:
            with torch.inference_mode():
                ids = torch.tensor([list(tokens)], device=self.network.device)
                output = self.network(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()
        return output.logits[0, -1].float()


def _tell(computed: Callable[[int], None], layer: int, *_: object) -> None:
    """A forward hook; what it returns would replace the layer's output."""
    computed(layer)
