"""Settings of models: other names for them, and limits of their own.

An alias stands for one model, or for several versions of one that share its sessions by weight.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, Field

from kvrouter.options.types import ModelCounts, ModelTokens, by_model, checked

Aliases = Mapping[str, Mapping[str, float]]
"""The weight of each model, by alias; models without weight are left out."""
FORM: Final = "NAME=MODEL or NAME=MODEL:WEIGHT,MODEL:WEIGHT"
_WEIGHT: Final = re.compile(r"\d{1,9}(\.\d{1,9})?")


def alias_texts(given: Any) -> Any:
    """A list of aliases from a text with blanks between them, or a mapping of YAML.

    In a mapping the models of an alias may be a mapping to their weights: then their names may end
    in what looks like a weight.
    """
    if isinstance(given, str):
        return given.split()
    if not isinstance(given, Mapping):
        return given  # a list, or what pydantic refuses
    return [f"{alias}={_models_text(models)}" for alias, models in given.items()]


def read_aliases(texts: Iterable[str]) -> Aliases:
    """Read aliases of the form FORM.

    ValueError: a text is wrong, or not clear; a sentence with the remedy.
    """
    found: dict[str, Mapping[str, float]] = {}
    for text in texts:
        alias, _, models = text.partition("=")
        if not alias or not all(models.split(",")):
            raise ValueError(f"{text!r}: give it as {FORM}")
        if alias in found:
            raise ValueError(f"the alias {alias!r} occurs twice; give all its models at once")
        found[alias] = _versions(alias, models.split(","))
    for alias, versions in found.items():
        for model in versions:
            if model != alias and model in found:
                raise ValueError(f"{alias!r} stands for {model!r}, an alias too; name its models")
    return found


def _models_text(models: Any) -> str:
    if isinstance(models, list) and all(isinstance(model, str) for model in models):
        return ",".join(models)
    if isinstance(models, str):
        return models
    if not isinstance(models, Mapping):
        raise ValueError(f"{models!r} is no model; give a name, or a mapping of names to weights")
    for model, weight in models.items():
        if not _WEIGHT.fullmatch(str(weight)):
            raise ValueError(f"{model!r}: {weight!r} is no weight; give a number, as 90 or 0.5")
    return ",".join(f"{model}:{weight}" for model, weight in models.items())


def _versions(alias: str, texts: list[str]) -> Mapping[str, float]:
    """The weight of each model of one alias; equal ones if none is given."""
    parts = [_split(text) for text in texts]
    weighed = [weight is not None for _, weight in parts]
    if len(parts) == 1 and weighed[0] and _split(parts[0][0])[1] is None:
        (text,), ((model, _),) = texts, parts
        raise ValueError(
            f"{alias}={text} is not clear: write {alias}={model} for the model {model!r}, or "
            f"{alias}={text}:1 for the model {text!r}"
        )
    if any(weighed) and not all(weighed):
        unweighed = parts[weighed.index(False)][0]
        raise ValueError(f"{alias}: {unweighed!r} has no weight, others have; give all of them one")
    names = Counter(model for model, _ in parts)
    twice = next((model for model, times in names.items() if times > 1), None)
    if twice is not None:
        raise ValueError(f"{alias}: {twice!r} occurs twice; give it one weight")
    versions = {model: 1.0 if weight is None else weight for model, weight in parts if weight != 0}
    if not versions:
        raise ValueError(f"{alias}: all weights are 0; give one model a higher one")
    return versions


def _split(text: str) -> tuple[str, float | None]:
    """Model and weight of `MODEL:WEIGHT`; without a number at the end all of it is the model."""
    model, _, weight = text.rpartition(":")
    return (model, float(weight)) if model and _WEIGHT.fullmatch(weight) else (text, None)


_Given = list[str] | dict[str, str | dict[str, float]]
AliasTexts = Annotated[
    list[str],
    BeforeValidator(alias_texts, json_schema_input_type=_Given),
    checked(read_aliases),
]


class ModelSettings(BaseModel):
    """What clients call the models, and what holds for some of them alone."""

    model_alias: AliasTexts = Field(
        default_factory=list,
        description="Other names for models: NAME=MODEL, or NAME=MODEL:WEIGHT,MODEL:WEIGHT for "
        "several versions that share its sessions, as chat=llama-a:90,llama-b:10. All requests of "
        "a session get one version (--session-key). In YAML also a mapping, of aliases to models "
        "or to mappings of models to weights.",
        json_schema_extra={"section": "Models", "metavar": "NAME=MODEL"},
    )
    model_max_concurrent_requests: ModelCounts = Field(
        default_factory=list,
        description="Requests in flight at a time for a model or an alias, besides "
        "--max-concurrent-requests. Further requests wait in a queue of their own, as long as "
        "--queue-size, and keep no other model waiting. Requests for an alias count for its model "
        "too.",
    )
    model_prefill_threshold: ModelTokens = Field(
        default_factory=list,
        description="--prefill-threshold of an alias or a model, in this order.",
    )

    @property
    def model_limits(self) -> dict[str, int]:
        """`model_max_concurrent_requests` by name."""
        return by_model(self.model_max_concurrent_requests)

    @property
    def model_thresholds(self) -> dict[str, int]:
        """`model_prefill_threshold` by name."""
        return by_model(self.model_prefill_threshold)

    @property
    def aliases(self) -> Aliases:
        """`model_alias`, read."""
        return read_aliases(self.model_alias)
