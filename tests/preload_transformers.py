"""What trainers of transformers' models are forked from, in tests of these."""

import peft  # noqa: F401
import transformers.models.auto.modeling_auto
import transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import tests.preload  # noqa: F401
