"""Run a transformers model in pipeline stages: by its own pipeline plan and forward pass.

The plan names the modules before the model's layers, the layers, and those after. A stage runs the model's own forward
pass from the start, so positions, rotations and masks are the whole model's on every stage; its first layer takes the
previous stage's output instead of its input, and the pass ends at the first layer of a later stage. Omitted modules are
never called, so their weights may be elsewhere.

A trial checks, layer by layer, whether a model can run this way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elastic_train.config.combinations import Found
from elastic_train.system.wording import first_line
from elastic_train.tasks.models.folder_weights import weights_to_try
from elastic_train.tasks.models.hugging_face import model_of_transformers
from elastic_train.tasks.placements import deal

_GPT2 = ("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h", "transformer.ln_f", "lm_head")
_PLANS: Mapping[str, Sequence[str]] = {"gpt2": _GPT2, "gpt_bigcode": _GPT2}
"""Plans of model kinds that bring none."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Names of a model's modules with weights, in running order: before the layers, the layers, and after."""

    before: tuple[str, ...]
    layers: tuple[str, ...]
    after: tuple[str, ...]

    def dealt(self, num_stages: int) -> list[Sequence[str]]:
        first = len(self.before)
        return deal((*self.before, *self.layers, *self.after), num_stages, range(first, first + len(self.layers)))


def unfit_for_stages(model: nn.Module, parts: Parts | None, num_stages: int) -> Iterator[Found]:
    """Yield why a model cannot run in this many stages: no plan, or too few layers."""
    kind = type(model_of_transformers(model)[1]).__name__
    if parts is None:
        yield Found(
            "models of transformers without a plan for it", f"{kind}, which brings no base_model_pp_plan", "pipeline"
        )
        return
    if num_stages > len(parts.layers):
        yield Found("fewer blocks than stages", f"the {len(parts.layers)} layers of {kind} in {num_stages} stages")
    known = _ids(model, (*parts.before, *parts.layers, *parts.after))
    if left_out := [name for name, one in model.named_parameters() if id(one) not in known]:
        what = f"the plan of {kind}, which leaves out '{left_out[0]}'"
        yield Found("models of transformers without a plan for it", what, "pipeline")


def try_in_parts(model: nn.Module, parts: Parts) -> Iterator[Found]:
    """Run the model in training mode, whole and in stages of one layer with only their own weights; yield the
    differences.

    A model without weights is tried with stand-ins.
    """
    weights, kind = weights_to_try(model), type(model).__name__
    names = {id(one): name for name, one in model.named_parameters()}
    # Once in each module: functional_call does not restore what it puts into a module of two names.
    own = ((name, *each) for name, module in model.named_modules() for each in module.named_parameters(recurse=False))
    ids = {f"{name}.{key}" if name else key: id(one) for name, key, one in own}

    def run(held: Container[int]) -> Tensor:
        inputs = {"input_ids": torch.tensor([[0, 1]]), "use_cache": False}
        tried = {name: weights[names[key]] for name, key in ids.items()}
        tried = {name: one if ids[name] in held else torch.empty(0, dtype=one.dtype) for name, one in tried.items()}
        return torch.func.functional_call(model, tried, (), inputs, tie_weights=False).logits  # type: ignore[no-any-return]

    made: Tensor | None = None
    with _training(model), torch.no_grad():
        torch.manual_seed(0)
        whole = run(names)
        torch.manual_seed(0)
        for modules in parts.dealt(len(parts.layers)):
            try:
                made = run_parts(model, parts, modules, made, partial(run, _ids(model, modules)))
            except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
                what = f"'{modules[0]}' of {kind}, which fails on a stage ({first_line(error)})"
                yield Found("layers that depend on more than the last", what)
                return
    if made is None or not made.equal(whole):
        what = f"{kind}, whose layers, run one by one, give a different result from the whole model"
        yield Found("layers that depend on more than the last", what)


class _Ended(Exception):  # noqa: N818 - it is none
    """Ends a forward pass, with the output of a stage's layers."""

    def __init__(self, made: Tensor) -> None:
        self.made = made


def run_parts(
    model: nn.Module, parts: Parts, modules: Sequence[str], given: Tensor | None, run: Callable[[], Tensor]
) -> Tensor:
    """Return the output of consecutive parts, given that of the parts before them (None for the first).

    `run` is a pass of the whole model, whose result is that of the last parts.
    """
    own = [place for place, name in enumerate(parts.layers) if name in modules]
    forwards = dict[str, Callable[..., Any]]()
    if given is not None:
        forwards |= {name: _absent(model.get_submodule(name)) for name in parts.before}
        forwards |= dict.fromkeys(parts.layers[: own[0]], passed)
        first = parts.layers[own[0]]
        forwards[first] = _beginning(model.get_submodule(first).forward, given, torch.get_rng_state())
    if own[-1] + 1 < len(parts.layers):
        forwards[parts.layers[own[-1] + 1]] = _end
    try:
        with forwards_of({model.get_submodule(name): forward for name, forward in forwards.items()}):
            return run()
    except _Ended as found:
        return found.made


def _beginning(forward: Callable[..., Any], given: Tensor, state: Tensor) -> Callable[..., Any]:
    """Return the forward pass of a layer that takes `given`, with torch's generator in `state`: modules before the
    layers may have drawn from it."""

    def begin(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        torch.set_rng_state(state)
        return forward(given, *arguments, **named)

    return begin


def passed(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Act as the forward pass of an omitted module."""
    return hidden_states


def _end(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    raise _Ended(hidden_states)


def _absent(module: nn.Module) -> Callable[..., Tensor]:
    """Return a forward pass for a module before the layers that is on another stage: output of the right shape."""
    table = getattr(module, "embedding", module)  # of peft's prompts
    if not isinstance(table, nn.Embedding):
        return passed
    return lambda ids, *_, **__: table.weight.new_zeros((*ids.shape, table.embedding_dim))


@contextlib.contextmanager
def forwards_of(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward passes of modules within the context."""
    before = [vars(module).get("forward") for module in forwards]
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, own in zip(forwards, before, strict=True):
            if own is None:
                vars(module).pop("forward", None)
            else:
                module.forward = own


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Run a model in training mode, and preserve torch's generator."""
    was_training = model.training
    model.train()
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        model.train(was_training)


def planned(model: nn.Module) -> Parts | None:
    """Return the parts by the plan of a transformers model (it may be nested, as with adapters), or ours."""
    prefix, found = model_of_transformers(model)
    inner: Any = found
    base, plan = f"{inner.base_model_prefix}.", inner._pp_plan or _PLANS.get(inner.config.model_type, ())
    modules = dict(model.named_modules())
    ordered = sorted(plan, key=lambda name: not name.startswith(base))
    names = [f"{prefix}{name}" for name in ordered if f"{prefix}{name}" in modules]
    lists = [place for place, name in enumerate(names) if isinstance(modules[name], nn.ModuleList)]
    if len(lists) != 1:
        return None
    [place] = lists
    layers = tuple(f"{names[place]}.{number}" for number in range(len(modules[names[place]])))
    prompts = [name for name in modules if name.rpartition(".")[0] == "prompt_encoder"]
    return Parts((*prompts, *names[:place]), layers, tuple(names[place + 1 :]))


def _ids(model: nn.Module, names: Iterable[str]) -> set[int]:
    return {id(one) for name in names for one in model.get_submodule(name).parameters()}
