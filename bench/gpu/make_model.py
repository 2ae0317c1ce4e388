"""The shape of an 8B Llama without its weights, and prompts of exact length: `make_model.py FOLDER`.

The tokenizer has 32,000 whole words (`t3` ... `t31999`), so a prompt of N words has N tokens. Serve it with
`--load-format dummy`: times are those of the shape, text and acceptance mean nothing.

`make_model.py --prompts FOLDER` writes the prompts of examples/h200-sglang.yaml instead (seeded, so always the same).
"""

import json
import random
import sys
from pathlib import Path

WORDS = 32_000
SPECIAL = ("<unk>", "<s>", "</s>")
PROMPTS = {"words-1k": (17, 1_024), "words-7k": (9, 7_000)}
"""Name: prompts (the last one is for warm-up), and words in each."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": WORDS,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "use_cache": True,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "model_max_length": 8192,
    "clean_up_tokenization_spaces": False,
    "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
}


def tokenizer() -> dict[str, object]:
    """tokenizer.json of a word-level model."""
    vocab = {word: i for i, word in enumerate(SPECIAL)}
    vocab |= {f"t{i}": i for i in range(len(SPECIAL), WORDS)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }


def model(folder: Path) -> None:
    """Write the files that a server reads."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "config.json": CONFIG,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "do_sample": True},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": TOKENIZER_CONFIG,
    }
    for name, page in pages.items():
        (folder / name).write_text(json.dumps(page), encoding="utf-8")


def prompts(folder: Path) -> None:
    """Write one JSONL file for each length."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (count, words) in PROMPTS.items():
        rng = random.Random(name)
        lines = [
            json.dumps({"prompt": " ".join(f"t{rng.randrange(len(SPECIAL), WORDS)}" for _ in range(words))})
            for _ in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--prompts", where]:
            prompts(Path(where))
        case [where]:
            model(Path(where))
        case _:
            sys.exit(__doc__)
