"""Small tokenizers of transformers, and templates as models have them."""

from __future__ import annotations

from pathlib import Path

from elastic_train.data.corpora.tokenizer import train_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_MASK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REASONING = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1].strip() %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""It leaves the reasoning of earlier turns out, as Qwen3's does."""
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
)
"""It refuses roles that do not alternate, and has no generation prompt, as Llama 2's does."""
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SOME_ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.role + ': ' + m.content + eos_token }}"
    "{% endif %}{% endfor %}"
)
"""It leaves other roles out, and says nothing."""


def save_tokenizer(folder: Path, template: str | None) -> Path:
    """Write a byte-level tokenizer with special tokens, as a model's folder has it."""
    import transformers

    made = train_tokenizer(["It is a small text, of which a tokenizer learns some words. user assistant"] * 3, 320)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", additional_special_tokens=SPECIAL
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder
