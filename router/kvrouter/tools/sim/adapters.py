"""LoRA adapters of a simulated engine, loaded and unloaded at run time as in vLLM. Pure.

Rules and wording follow OpenAIServingModels of vllm/entrypoints/openai/models/serving.py. Any path
can be loaded: an adapter is only its name and path, which are part of the hashes of its blocks.
"""

from collections.abc import Mapping

from kvrouter.errors import ApiError
from kvrouter.tools.sim.requests import json_object


class Adapters:
    """The loaded adapters."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    @property
    def paths(self) -> Mapping[str, str]:
        """The path of each by its name, in the order of loading."""
        return self._paths

    def find(self, model: str) -> tuple[str, str] | None:
        """Name and path of the adapter that `model` names, or None."""
        path = self._paths.get(model)
        return None if path is None else (model, path)

    def load(self, body: bytes) -> str:
        """Load the adapter that a request names; vLLM's answer.

        Raises:
            ApiError: 400: it names none, or without `load_inplace` one that is loaded.
        """
        data = json_object(body, _invalid)
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
        """Unload the adapter that a request names; vLLM's answer.

        Raises:
            ApiError: 400: it names none; 404: it is not loaded.
        """
        name = json_object(body, _invalid).get("lora_name")
        if not (isinstance(name, str) and name):
            raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._paths:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
        del self._paths[name]
        return f"Success: LoRA adapter '{name}' removed successfully."


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, kind="InvalidUserInput")
