"""LoRA adapters of a simulated engine, loaded and unloaded at run time as vLLM does it. Pure.

Rules and wording follow OpenAIServingModels of vllm/entrypoints/openai/models/serving.py. Any path
may be loaded: an adapter is nothing but its name and path, which enter the hashes of its blocks.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from kvrouter.tools.sim.requests import RequestError

__all__ = ["Adapters"]


class Adapters:
    """The adapters that are loaded."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    @property
    def paths(self) -> Mapping[str, str]:
        """Where each was loaded from, by its name, in the order of loading."""
        return self._paths

    def find(self, model: str) -> tuple[str, str] | None:
        """Name and path of the adapter that `model` names; None where it names none."""
        path = self._paths.get(model)
        return None if path is None else (model, path)

    def load(self, body: bytes) -> str:
        """Load the adapter that a request names; returns what vLLM answers.

        Raises:
            RequestError: 400: it names none, or one that is loaded, without `load_inplace`.
        """
        data = _object(body)
        name, path = data.get("lora_name"), data.get("lora_path")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._paths and data.get("load_inplace") is not True:
            raise _invalid(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        self._paths[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: bytes) -> str:
        """Unload the adapter that a request names; returns what vLLM answers.

        Raises:
            RequestError: 400: it names none; 404: one that is not loaded.
        """
        name = _object(body).get("lora_name")
        if not (isinstance(name, str) and name):
            raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._paths:
            message = f"The lora adapter '{name}' cannot be found."
            raise RequestError(message, status=404, type="NotFoundError")
        del self._paths[name]
        return f"Success: LoRA adapter '{name}' removed successfully."


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _invalid(f"JSON decode error: {error}") from None
    if not isinstance(data, dict):
        raise _invalid("Input should be a valid dictionary")
    return data


def _invalid(message: str) -> RequestError:
    return RequestError(message, type="InvalidUserInput")
