"""The models the engines serve: recipes, made once into a cache outside the checkout."""

import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """What a model is made of: a transformers architecture and its options."""

    name: str
    architecture: str
    options: dict[str, Any]
    seed: int = 4321


def _options(hidden: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 2 * hidden,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }


TINY = Recipe("tiny", "qwen2", _options(128, 4, 4, 2, 2048))
MID = Recipe("mid", "qwen2", _options(512, 8, 8, 4, 4096) | {"intermediate_size": 1536})
WINDOW = Recipe("window", "mistral", _options(128, 4, 4, 2, 2048) | {"sliding_window": 128})


SMALL = _options(128, 4, 4, 2, 2048)
GEMMA = Recipe(
    "gemma",
    "gemma3_text",
    _options(128, 6, 4, 2, 2048)
    | {
        "head_dim": 32,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 32,
    },
)
GPT_OSS = Recipe(
    "gpt-oss",
    "gpt_oss",
    SMALL
    | {
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
)
QWEN_NEXT = Recipe(
    "qwen-next",
    "qwen3_next",
    SMALL
    | {
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
)
DEEPSEEK = Recipe(
    "deepseek",
    "deepseek_v2",
    SMALL
    | {
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 4,
    },
)
NEMOTRON = Recipe(
    "nemotron",
    "nemotron_h",
    SMALL
    | {
        "head_dim": 32,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "chunk_size": 64,
        "expand": 2,
    },
)


def cache_folder() -> Path:
    """Where environments, models and builds are kept between test runs."""
    named = os.environ.get("KVROUTER_TEST_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "kvrouter-tests"


def model_folder(recipe: Recipe, python: Path) -> Path:
    """The folder of a model, made by the vLLM environment's `python` if it is not there yet."""
    text = json.dumps(asdict(recipe), sort_keys=True)
    key = sha256((text + (HERE / "inside" / "make_model.py").read_text()).encode()).hexdigest()[:16]
    folder = cache_folder() / f"model-{recipe.name}-{key}"
    if (folder / "config.json").exists():
        return folder
    making = folder.with_name(f"{folder.name}.{os.getpid()}")
    making.mkdir(parents=True)
    (making / "recipe.json").write_text(text)
    subprocess.run(
        [python, HERE / "inside" / "make_model.py", making, making / "recipe.json"],
        check=True,
        capture_output=True,
        timeout=300,
    )
    try:
        making.rename(folder)
    except OSError:  # another run made it meanwhile
        shutil.rmtree(making)
    return folder
