"""The extra imports of test programs that run models of transformers, where each model type is a separate module."""

import peft  # noqa: F401
import transformers.models.auto.modeling_auto
import transformers.models.bert.modeling_bert
import transformers.models.cohere.modeling_cohere
import transformers.models.gemma2.modeling_gemma2
import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt2.modeling_gpt2
import transformers.models.granite.modeling_granite
import transformers.models.llama.modeling_llama
import transformers.models.mistral.modeling_mistral
import transformers.models.olmo2.modeling_olmo2
import transformers.models.phi.modeling_phi
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3
import transformers.models.starcoder2.modeling_starcoder2  # noqa: F401
