"""The script that `elastic-train init sft` writes for a trial: it makes a tiny model, and chats on Python."""

TRIAL = r'''"""Make base/, a tiny model with random weights to fine-tune, and chats.jsonl, unless it is there."""

import importlib
import inspect
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MODULES = ("math", "os.path", "json", "re", "random", "statistics", "itertools", "shutil", "textwrap", "operator")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

if Path("base").exists():
    sys.exit("base exists already: remove it, or do without this script")
chats = []
for module in MODULES:
    for name, value in inspect.getmembers(importlib.import_module(module)):
        summary = (inspect.getdoc(value) or "").partition("\n")[0]
        if name.startswith("_") or not callable(value) or not summary:
            continue
        turns = [
            ("system", "You answer questions on Python, in one sentence."),
            ("user", f"What does {name} of the module {module} do?"),
            ("assistant", summary),
            ("user", "And how do I import it?"),
            ("assistant", f"Write `from {module} import {name}`."),
        ]
        chats.append({"messages": [{"role": role, "content": content} for role, content in turns]})

own = Path("chats.jsonl").exists()
if not own:
    with open("chats.jsonl", "w") as file:
        file.writelines(json.dumps(chat) + "\n" for chat in chats)

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
bpe.train_from_iterator(
    (message["content"] for chat in chats for message in chat["messages"]),
    trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    ),
)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=special[1:]
)
tokenizer.chat_template = TEMPLATE
tokenizer.save_pretrained("base")
config = transformers.LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
transformers.set_seed(1)
transformers.utils.logging.disable_progress_bar()
transformers.LlamaForCausalLM(config).save_pretrained("base")
print(f"base: a Llama of two layers; chats.jsonl: {'exists already, and stays' if own else f'{len(chats)} chats'}")
'''
