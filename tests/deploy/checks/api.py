"""Objects against the schemas of Kubernetes and of custom resources; unknown fields are errors."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from tests.deploy.checks.manifests import Json, Overlay

VERSIONS = ("1.32", "1.37")
"""The newest release, and the oldest that large clouds still run: upstream supports three."""
SCHEMAS = Path(__file__).resolve().parents[1] / "schemas"


def complaints(overlay: Overlay) -> Iterator[str]:
    for item in overlay.objects:
        for problem in _problems(json.dumps(item)):
            yield f"{overlay.title(item)}: {problem}"


@cache
def _problems(text: str) -> list[str]:
    """What is wrong with an object; most are in several overlays."""
    item = json.loads(text)
    custom = _custom().get((item["apiVersion"], item["kind"]))
    if custom is not None:
        errors = jsonschema.Draft202012Validator(custom).iter_errors(item)
        return [f"{error.json_path}: {error.message}" for error in errors]
    return [said for version in VERSIONS if (said := _refused(item, version))]


def _refused(item: Json, version: str) -> str:
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return f"Kubernetes {version}: {error.message}; is it a custom resource?"
    return ""


@cache
def _custom() -> dict[tuple[str, str], Json]:
    """Schemas of custom resources by apiVersion and kind."""
    files = [json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")]
    return {(each["apiVersion"], each["kind"]): closed(each["schema"]) for each in files}


def closed(schema: Any) -> Any:
    """The schema with every object closed: an API server drops unknown fields without a word."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    open_ = "additionalProperties" in made or made.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(made.get("properties"), dict) and not open_:
        made["additionalProperties"] = False
    return made
