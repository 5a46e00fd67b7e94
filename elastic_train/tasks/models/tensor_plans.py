"""Tensor and sequence parallelism for transformers models, by the plans that they bring.

Column and row layers are cut as planned, and per-head norms sum their gradients over ranks. Modules that the plan
gathers at once, and embeddings, stay whole, as in the package's own decoder: results are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from torch import nn

from elastic_train.config.combinations import Found, refusals
from elastic_train.tasks.models.adapters import Adapter
from elastic_train.tasks.models.hugging_face import has_transformers, model_of_transformers
from elastic_train.tasks.models.stage_plans import planned
from elastic_train.tasks.placements import CutUse, Placements, Stream, TokenUse

_USES: Mapping[str, CutUse] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "partial",
}
_WHOLE = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise", "replicate")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob")
_DROPOUT_MODULES = ("embd_pdrop", "resid_pdrop")
"""Dropouts before the layers, or as modules of each."""
_ALIKE: tuple[Stream, Stream] = ("shared", "shared")


def placed(model: nn.Module, degree: int, adapter: Adapter | None, *, sequence: bool = False) -> Placements:
    """Return how `degree` tensor ranks share a model that is or contains one of transformers; empty for a model that no
    degree can cut. A task with another model must place it itself."""
    found = [] if adapter is None else list(adapter.found())
    if not has_transformers(model):
        return Placements(found=found)
    cut, draws = _cut_uses(model)
    found += _unfit(model, degree)
    if refusals({"tensor": "parallel.tensor"}, found):
        return Placements(found=found)
    tokens, unfit = _token_uses(model, cut) if sequence else ({}, [])
    return Placements({**cut, **tokens}, draws=draws, found=[*found, *unfit])


def _unfit(model: nn.Module, degree: int) -> Iterator[Found]:
    """Yield why ranks cannot share a model: its plan, or sizes."""
    _, inner = model_of_transformers(model)
    kind, styles = type(inner).__name__, inner.tp_plan or {}
    if not any(style in _USES for style in styles.values()):
        yield Found(
            "models of transformers without a plan for it", f"{kind}, which brings no base_model_tp_plan", "tensor"
        )
    for name, style in styles.items():
        if style not in _USES and style not in _WHOLE:
            what = f"the plan of {kind}, which cuts '{name}' as {style}"
            yield Found("models of transformers without a plan for it", what, "tensor")
            break
    config = inner.config.get_text_config()
    for name in _HEADS:
        size = getattr(config, name, None)
        if size is not None and size % degree:
            yield Found("a size that it does not divide", f"task.params.hf.config.{name}: {size}", "tensor")


def _cut_uses(model: nn.Module) -> tuple[dict[str, CutUse], dict[str, tuple[Stream, Stream]]]:
    """Return how a model is cut by its plan, and where a rank draws its own random numbers.

    These are dropout of its attention heads, between column and row layers, and of a row layer's part of LoRA.

    LoRA's two matrices are cut like the layer they are added to: for a column layer the second, for a row layer the
    first. Between them all ranks have the few values of LoRA's rank.
    """
    prefix, inner = model_of_transformers(model)
    plan = {f"{prefix}{name}": _USES[style] for name, style in (inner.tp_plan or {}).items() if style in _USES}
    draws = _draws_of_heads(plan) if any(getattr(inner.config.get_text_config(), name, 0) for name in _DROPOUTS) else {}
    if inner is model:
        return plan, draws
    cut = dict[str, CutUse]()
    for pattern, use in plan.items():
        is_in = _matching({pattern: use})
        for name, module in model.named_modules():
            if is_in(name) is None:
                continue
            if not hasattr(module, "lora_A"):
                cut[name] = use
                continue
            cut[f"{name}.base_layer"] = use
            cut[f"{name}.{'lora_B' if use == 'column' else 'lora_A'}.*"] = use
            if use == "row" and any(isinstance(one, nn.Dropout) and one.p for one in module.modules()):
                draws[f"{name}.lora_dropout.*"] = "own", "shared"
    return cut, draws


def _draws_of_heads(plan: Mapping[str, CutUse]) -> dict[str, tuple[Stream, Stream]]:
    columns, rows = ([name for name, use in plan.items() if use == of] for of in ("column", "row"))
    around = [name.rpartition(".")[0] for name in columns]  # also where a pass ends before the row layer
    return {**dict.fromkeys([*around, *rows], _ALIKE), **dict.fromkeys(columns, ("shared", "own"))}


def _token_uses(model: nn.Module, cut: Mapping[str, CutUse]) -> tuple[dict[str, TokenUse], list[Found]]:
    """Return how tensor ranks split the tokens of a cut model, and what prevents it.

    Masks and positions are made from all tokens before the first layer, so tokens are split where that begins.
    Attention takes the number of tokens from its input, so modules with column layers get all of them.
    """
    kind, parts = type(model).__name__, planned(model)
    if parts is None:
        what = f"{kind}, which brings no base_model_pp_plan"
        return {}, [Found("models of transformers without a plan for it", what, "sequence")]
    uses: dict[str, TokenUse] = {parts.layers[0]: "enter", parts.after[0]: "join"}
    is_cut = _matching({} if _drops_within(model) else cut)
    for layer in parts.layers:
        module = model.get_submodule(layer)
        for name, _ in module.named_parameters(recurse=False):
            what = f"the plan of {kind}, which says nothing of '{layer}.{name}'"
            return {}, [Found("models of transformers without a plan for it", what, "sequence")]
        uses |= _uses_in(layer, module, is_cut)
    return uses, []


def _uses_in(layer: str, module: nn.Module, is_cut: Callable[[str], CutUse | None]) -> Iterator[tuple[str, TokenUse]]:
    """Yield the token use of a layer's modules: whole, unless they are known to need no other token.

    A module whose weights are all cut gathers its column layers' input and returns some tokens by its row layers.
    """
    for name, child in ((f"{layer}.{name}", child) for name, child in module.named_children()):
        inside = [f"{name}.{one}".rpartition(".")[0] for one, _ in child.named_parameters()]
        columns = [one for one in dict.fromkeys(inside) if is_cut(one) == "column"]
        if isinstance(child, nn.Dropout):
            yield name, "dropout"
        elif columns and all(map(is_cut, inside)):
            yield from ((parent, "gather") for parent in dict.fromkeys(one.rpartition(".")[0] for one in columns))
        elif inside:
            yield name, "tokens" if isinstance(child, nn.Linear) or "Norm" in type(child).__name__ else "whole"


def _matching(cut: Mapping[str, CutUse]) -> Callable[[str], CutUse | None]:
    """Return a function from a module's name to its use; * in the names of `cut` stands for one component."""
    fits = [(re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")), use) for pattern, use in cut.items()]
    return lambda name: next((use for pattern, use in fits if pattern.fullmatch(name)), None)


def _drops_within(model: nn.Module) -> bool:
    """Return True if modules that are cut have dropout of their outputs, which ranks must draw for all tokens."""
    config = model_of_transformers(model)[1].config.get_text_config().to_dict()
    others = [name for name in config if "drop" in name and name not in (*_DROPOUT_MODULES, *_DROPOUTS)]
    return any(isinstance(config[name], float) and config[name] for name in others)
