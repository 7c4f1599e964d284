"""Make a small model with random weights and a tokenizer; run by the vLLM environment's python.

make_model.py FOLDER RECIPE.json: the recipe is what models.py wrote; the same recipe gives the same
files. Weights are drawn wide, so that what is generated depends on the whole prompt.
"""

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SPECIAL = ["<|pad|>", "<|turn|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def make_tokenizer(folder: Path, vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the standard library's sources: any text has tokens, none is unknown."""
    library = Path(sysconfig.get_path("stdlib"))
    corpus = [str(path) for path in sorted(library.glob("*.py"))[:120]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def main(folder: Path, recipe: dict[str, Any]) -> None:
    """Write the tokenizer, the configuration and the weights."""
    tokenizer = make_tokenizer(folder, recipe["options"]["vocab_size"])
    end = tokenizer.eos_token_id
    options = {
        **recipe["options"],
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(recipe["seed"])
    config = CONFIG_MAPPING[recipe["architecture"]](**options)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
