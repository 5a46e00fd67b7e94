"""Keep documents of a packed row apart within a transformers model, and verify it by a trial.

Transformers calls a mask function, by attention name, for each kind of layer (full, sliding, chunked, …), passing that
kind's rule. Ours restricts the rule to tokens of one document, so windows are kept. Where a trial shows that our
attention computes the same, full layers have no mask (`parallel.attention.documents`). Outside `documents_apart`
transformers' functions are unchanged.

Other paths between tokens (recurrence, convolutions, a model's own masks) are detected by a trial before training.

A trial runs small fp32 passes, of a large model only the first layers. Results are cached: each model and configuration
is tried once per question.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from elastic_train.errors import ConfigError
from elastic_train.parallel.attention.documents import Documents, documents_of
from elastic_train.system.wording import first_line
from elastic_train.tasks.models.folder_weights import stand_ins, weights_to_try
from elastic_train.tasks.models.hugging_face import FAILURES, model_of_transformers
from elastic_train.tasks.models.own_attention import ATTENTION, DOCUMENTS, attend_by_ours
from elastic_train.tasks.rows.token_rows import sight_of
from elastic_train.tasks.task import Batch

_LONGEST_WINDOW = 64
_SPREAD = 7
_DOCUMENTS: ContextVar[Tensor | None] = ContextVar("documents", default=None)
_NUM_MADE: ContextVar[int] = ContextVar("masks made", default=0)
_LEAVES_MASKS_OUT: ContextVar[bool] = ContextVar("leaves masks out", default=False)
Masks = Literal["all", "some", "none"]
"""The layers that need a mask: all, those in which a token does not see all before it, or none since all are full.

If none do, packed rows are not pointed out to transformers, which would wait for a GPU to see that they are packed.
"""

Run = Callable[..., Tensor]
"""Returns the logits for named inputs."""
_LARGE = 50_000_000


@contextlib.contextmanager
def documents_apart(documents: Tensor, *, leaves_masks_out: bool = False) -> Iterator[None]:
    """Prevent attention between documents; `documents` (rows, width) are numbered within rows.

    With `leaves_masks_out`, layers in which a token sees all before it get no mask: the model has our attention.
    """
    _restrict_masks()
    token, left_out = _DOCUMENTS.set(documents), _LEAVES_MASKS_OUT.set(leaves_masks_out)
    try:
        yield
    finally:
        _DOCUMENTS.reset(token)
        _LEAVES_MASKS_OUT.reset(left_out)


@functools.cache
def _restrict_masks() -> None:
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import eager_mask, flex_attention_mask, sdpa_mask

    for name, function in (("sdpa", sdpa_mask), ("eager", eager_mask), ("flex_attention", flex_attention_mask)):
        AttentionMaskInterface.register(name, restricted(function))


def restricted(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mask function of transformers that respects `documents_apart`."""

    def make_mask(*arguments: Any, **named: Any) -> Any:
        documents = _DOCUMENTS.get()
        if documents is None:
            return make(*arguments, **named)
        if _LEAVES_MASKS_OUT.get() and not any(map(named.get, _OTHER_RULES)):
            return None
        _NUM_MADE.set(_NUM_MADE.get() + 1)
        rule = named["mask_function"]

        def within(row: Any, head: Any, query: Any, key: Any) -> Any:
            return rule(row, head, query, key) & (documents[row, query] == documents[row, key])

        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return make(*arguments, **{**named, **skips, "mask_function": within})

    return make_mask


_OTHER_RULES = ("local_size", "use_vmap", "allow_is_bidirectional_skip")
"""Arguments of mask functions for layers in which a token does not see all before it, and only these."""


def packed_logits(model: nn.Module, batch: Batch, masks: Masks) -> Tensor:
    """Return logits (rows, width, vocabulary) of rows in which no token sees another document's."""
    named: dict[str, Any] = {"position_ids": batch["positions"]} if _takes_positions(model) else {}
    sight = None if masks == "all" else sight_of(batch)
    if isinstance(sight, Documents):
        # Models of one configuration share its object, and each one that is built sets torch's attention there.
        attend_by_ours(model_of_transformers(model)[1], restricted)
        named |= _without_masks(sight, batch["tokens"], masks)
    with documents_apart(batch["documents"], leaves_masks_out=DOCUMENTS in named):
        logits: Tensor = model(input_ids=batch["tokens"], use_cache=False, **named).logits
    return logits


def _without_masks(documents: Documents, tokens: Tensor, masks: Masks) -> dict[str, Any]:
    given: dict[str, Any] = {DOCUMENTS: documents}
    return given if masks == "some" else {**given, "attention_mask": torch.ones_like(tokens, dtype=torch.bool)}


def _takes_positions(model: nn.Module) -> bool:
    """Return True if a model, or an adapter's inner one, takes positions; with ALiBi it does not."""
    from transformers import PreTrainedModel

    inner: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    return any(_names_positions(kind.forward) for kind in (type(inner), type(inner.base_model)))


@functools.cache
def _names_positions(forward: Callable[..., Any]) -> bool:
    return "position_ids" in inspect.signature(forward).parameters


def depends_on_length(config: Any, max_tokens: int) -> str:
    """Return why rows of up to this many tokens are computed differently from short ones; "" if they are not."""
    rotations = getattr(config, "rope_parameters", None) or {}
    for one in (rotations, *(value for value in rotations.values() if isinstance(value, dict))):
        original = one.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if one.get("rope_type") == "dynamic":
            original = config.max_position_embeddings
        if one.get("rope_type") in ("longrope", "dynamic") and (original is None or original < max_tokens):
            return f"turns positions by how long a row is ({one['rope_type']}, from {original} tokens on)"
    most = getattr(config, "index_topk", None)
    if isinstance(most, int) and most < max_tokens:
        return f"attends to the best tokens alone (index_topk: {most}), and equal ones win by their place in the row"
    return ""


def check_documents(model: nn.Module, max_tokens: int, *, has_holes: bool) -> Masks:
    """Reject a model whose packed documents differ from transformers' results for each alone; raise ConfigError.

    With `has_holes`, also documents with masked tokens inside. Returns the masks that the model, from now on with our
    attention if not all, needs for the same results. Each model and configuration is tried once.
    """
    inner: Any = model
    config = inner.config.get_text_config()
    found = tried(model, f"documents, {has_holes=}", lambda run: _difference(model, run, has_holes=has_holes))
    why = found.difference or found.error or depends_on_length(config, max_tokens)
    if why:
        raise ConfigError(
            f"task.params.hf: {type(model).__name__} ({inner.config.model_type}) cannot keep the documents of a row "
            f"apart: {why}: give each document its own row, with document_ids: false, or another model"
        )
    if inner.config._attn_implementation not in ("sdpa", ATTENTION) or not inner._can_set_attn_implementation():
        return "all"
    attend_by_ours(model, restricted)
    few: tuple[Masks, ...] = ("none", "some")
    for masks in few:
        found = tried(model, f"documents, masks: {masks}", functools.partial(_difference, model, masks=masks))
        if not (found.difference or found.error):
            return masks
    inner.set_attn_implementation("sdpa")
    return "all"


def _difference(model: nn.Module, run: Run, *, has_holes: bool = False, masks: Masks = "all") -> str:
    """Try two documents packed and alone, with the first one changed; return the difference, or ""."""
    inner: Any = model
    config = inner.config.get_text_config()
    length = _SPREAD + _shortest_window(config)
    alone = (torch.arange(3 * length).view(3, length) * 7 + 3) % config.vocab_size
    alone[2] = (alone[2] * 5 + 1) % config.vocab_size
    first, changed, second = alone
    tokens = torch.stack((torch.cat((first, second)), torch.cat((changed, second))))
    documents = (torch.arange(2 * length) >= length).long().expand(2, -1)
    positions = (torch.arange(2 * length) % length).expand(2, -1)
    is_read = torch.ones(3, length, dtype=torch.bool)
    holes: dict[str, Tensor] = {}
    if has_holes:
        is_read[:, [0, 2, 3]] = False  # including first tokens, by which some models count their chunks
        holes = {"attention_mask": is_read.long()}
        documents = documents.masked_fill(~is_read[[0, 0]].repeat(1, 2), -1)

    own = run(input_ids=alone, **holes)
    named: dict[str, Any] = {"position_ids": positions} if _takes_positions(model) else {}
    if masks != "all":
        named |= _without_masks(documents_of([length] * 4, tokens.device), tokens, masks)
    before = _NUM_MADE.get()
    with documents_apart(documents, leaves_masks_out=masks != "all"):
        packed = run(input_ids=tokens, **named)
    if masks == "none" and _NUM_MADE.get() > before:
        return "some of its layers have a mask"
    packed = packed[:, -2 * length :]
    most = most_rounding(own)
    if not (own.isfinite().all() and packed.isfinite().all()):
        return "its outputs are not finite"

    def differs(logits: Tensor, row: int) -> bool:
        return bool(((logits - own[row])[is_read[row]].abs() > most).any())

    if differs(packed[0, length:], 2) or differs(packed[1, length:], 2):
        leaks = bool(((packed[0] - packed[1])[length:].abs() > most).any())
        return (
            "a document's loss depends on the one before it"
            if leaks
            else "a document's loss is not that of the document alone"
        )
    return "the first document's loss is not that of the document alone" if differs(packed[0, :length], 0) else ""


def _shortest_window(config: Any) -> int:
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    return min((size for size in sizes if isinstance(size, int) and 0 < size <= _LONGEST_WINDOW), default=0)


class Found(NamedTuple):
    """The difference found by a trial, or the error that ended it; both empty if nothing is wrong."""

    difference: str = ""
    error: str = ""


_found = dict[tuple[type, str, int, str], Found]()


def tried(model: nn.Module, question: str, look: Callable[[Run], str]) -> Found:
    """Return what `look` finds by passes of a model; nothing for a model of fake tensors.

    Generator and training mode are preserved.
    """
    inner: Any = model
    if any(isinstance(one, FakeTensor) for one in model.parameters()):
        return Found()
    num_hooks = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())
    key = type(model), inner.config.to_json_string(use_diff=False), num_hooks, question
    if key not in _found:
        with torch.random.fork_rng([]):
            _found[key] = _try(model, look)
    return _found[key]


@torch.no_grad()
def _try(model: nn.Module, look: Callable[[Run], str]) -> Found:
    was_training = model.training
    model.eval()
    try:
        with _first_of_each_kind(model):
            weights = _weights(model)

            def run(**inputs: Any) -> Tensor:
                return torch.func.functional_call(model, weights, (), {"use_cache": False, **inputs}).logits  # type: ignore[no-any-return]

            return Found(look(run))
    except FAILURES as error:
        return Found(error=f"{type(error).__name__}: {first_line(error)}")
    finally:
        model.train(was_training)


def most_rounding(other: Tensor) -> float:
    """Return the most by which rounding may change results of passes as deep as usual models."""
    most: float = torch.finfo(other.dtype).eps ** (2 / 3) * float(other.abs().max())
    return most


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return fp32 weights to try: the model's own, or stand-ins."""
    buffers = {name: one.float() for name, one in model.named_buffers() if one.is_floating_point()}
    if all(one.dtype == torch.float32 for one in model.parameters()):
        return {**weights_to_try(model), **buffers}
    return {**stand_ins(model, torch.float32), **buffers}


@contextlib.contextmanager
def _first_of_each_kind(model: nn.Module) -> Iterator[None]:
    """Keep a large model's first layer of each kind (by modules and settings), and no output layer."""
    from elastic_train.tasks.models.stage_plans import planned

    inner: Any = model
    if sum(one.numel() for one in model.parameters()) <= _LARGE:
        yield
        return
    parts, listed = planned(model), inner.config.get_text_config().to_dict().values()
    others = dict[tuple[nn.Module, str], nn.Module]()
    for owner, leaf, child in _children(model):
        if child is inner.get_output_embeddings():
            others[owner, leaf] = nn.Identity()
        elif (
            parts is not None
            and isinstance(child, nn.ModuleList)
            and len(child)
            and child[0] is model.get_submodule(parts.layers[0])
        ):
            by_layer = [value for value in listed if isinstance(value, list) and len(value) == len(child)]
            kinds = [(_settings(layer), *(str(values[n]) for values in by_layer)) for n, layer in enumerate(child)]
            others[owner, leaf] = child[: 1 + max(kinds.index(kind) for kind in kinds)]
    own = {place: getattr(*place) for place in others}
    try:
        for (owner, leaf), other in others.items():
            setattr(owner, leaf, other)
        yield
    finally:
        for (owner, leaf), module in own.items():
            setattr(owner, leaf, module)


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(owner, name, child) for owner in model.modules() for name, child in owner.named_children()]


def _settings(layer: nn.Module) -> str:
    """Return a layer's modules with their plain attributes, without its number."""
    plain = (bool, int, float, str, list, tuple, type(None))
    return repr(layer) + repr(
        [
            (
                name,
                sorted(
                    (key, repr(value))
                    for key, value in vars(module).items()
                    if isinstance(value, plain) and not key.endswith(("_idx", "_id", "layer_number"))
                ),
            )
            for name, module in layer.named_modules()
        ]
    )
