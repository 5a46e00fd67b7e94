"""Generate text: encode a prompt to token ids, extend these, and decode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_train.errors import ConfigError
from elastic_train.inference.opening import Trained
from elastic_train.tasks.task import Chatting, Generating, Sampling


def complete(
    trained: Trained, prompt: str | Sequence[int], sampling: Sampling, *, is_chat: bool = False
) -> tuple[list[int], str | None]:
    """Return the generated token ids and their text; the text is None if `prompt` has ids and there is no tokenizer.

    With `is_chat`, the prompt is a user's message and the result is the answer. Raises ConfigError if the task does not
    generate, has no tokenizer for a text, or has none with a chat template.
    """
    task, model = trained.plan.task, trained.model.eval()
    if not isinstance(task, Generating):
        raise ConfigError(f"task.path: '{trained.plan.config.task.path}' does not generate: it is no language model")
    tokenizer = task.tokenizer()
    if not isinstance(prompt, str):
        ids = list(prompt)
    elif tokenizer is None:
        raise ConfigError(
            f"{trained.plan.manifest.url}: has no tokenizer, and neither has the model: give token ids, --ids 5,6,7"
        )
    elif not is_chat:
        ids = tokenizer.encode(prompt)
    elif isinstance(tokenizer, Chatting):
        ids = tokenizer.encode_chat(prompt)
    else:
        raise ConfigError("--chat needs the tokenizer of a model's folder, and a chat template: leave --chat out")
    torch.manual_seed(sampling.seed)
    with torch.no_grad():
        found = task.continue_ids(model, ids, sampling)
    return found, None if tokenizer is None else tokenizer.decode(found)
