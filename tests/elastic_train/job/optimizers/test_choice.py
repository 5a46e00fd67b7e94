"""The optimizer and the parameter groups of a configuration, and refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.build import build_state
from elastic_train.job.optimizers import choice as choice_module
from elastic_train.job.optimizers.choice import MuonWithAdamW, choose
from elastic_train.job.optimizers.rehearsal import shows_no_cut
from elastic_train.job.state import AppliedState
from elastic_train.tasks.task import ParameterGroup

HERE = __name__


class Plain(torch.optim.Optimizer):
    """Accepts no weight decay, but any other option."""

    def __init__(self, params: Any, lr: float, power: int = 1) -> None:
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad ** group["power"])


class Net(nn.Module):
    """The kinds that Muon's authors distinguish: an embedding, hidden matrices, norms, a convolution, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.conv = nn.Embedding(9, 4), nn.LayerNorm((2, 4)), nn.Conv1d(4, 4, 2)
        self.hidden, self.head = nn.Linear(4, 6), nn.Linear(6, 9)


def built(shards: str = "none", groups: tuple[ParameterGroup, ...] = (), **values: Any) -> AppliedState:
    config = OptimizerConfig(**{"lr": 0.1, "weight_decay": 0.5, "warmup_steps": 0, **values})
    parallel = ParallelConfig(shards=shards)  # type: ignore[arg-type]
    return build_state(Net(), config, 20, "cpu", is_fp16=False, groups=groups, parallel=parallel)


def groups_of(state: AppliedState, key: str) -> dict[object, set[str]]:
    """Return the parameter names, by the value that their groups have for a key."""
    names, found = {id(one): name for name, one in state.model.named_parameters()}, dict[object, set[str]]()
    for group in state.optimizer.param_groups:
        found.setdefault(group[key], set()).update(names[id(one)] for one in group["params"])
    return found


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("adamw", {"amsgrad": True}, torch.optim.AdamW),
        ("adamw", {"betas": (0.9, 0.95)}, torch.optim.AdamW),
        ("muon", {"betas": (0.9, 0.95)}, MuonWithAdamW),
        ("sgd", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
        ("adafactor", {"beta2_decay": -0.7}, torch.optim.Adafactor),
        ("muon", {"ns_steps": 3}, MuonWithAdamW),
        ("torch.optim:NAdam", {"momentum_decay": 0.01}, torch.optim.NAdam),
    ],
)
def test_an_optimizer_is_chosen_by_name_or_path(name: str, options: dict[str, object], kind: type) -> None:
    state = built(name=name, options=options)
    assert type(state.optimizer) is kind
    key, value = next(iter(options.items()))
    assert value in [group.get(key) for group in state.optimizer.param_groups]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "sgd", "options": {"momentun": 0.9}}, "'sgd' has no 'momentun'; did you mean 'momentum'?"),
        ({"name": "adamw", "options": {"betas": [1.0, 0.9]}}, "'adamw' refuses them: Invalid beta"),
        ({"name": "adamw", "options": {"betas": [0.9]}}, "'adamw' refuses them: IndexError: tuple index out of range"),
        ({"name": "sgd", "options": {"betas": [0.9, 0.95]}}, "'sgd' has no 'betas'"),
        ({"name": "sgd", "options": {"nesterov": True}}, "'sgd' refuses them: Nesterov momentum requires a momentum"),
        ({"name": "muon", "options": {"adamw_names": "head"}}, "adamw_names: write a list of patterns"),
        ({"name": "torch.optim:AdamX"}, r"optimizer\.name: 'torch\.optim:AdamX' cannot be imported"),
        ({"name": "torch.nn:Linear"}, "'torch.nn:Linear' is no class of torch.optim.Optimizer's kind"),
        ({"name": f"{HERE}:Plain"}, r"optimizer\.weight_decay: '.*:Plain' takes none; set it to 0"),
    ],
)
def test_what_cannot_be_made_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(OptimizerConfig(**values))


def test_an_optimizer_of_ones_own_gets_its_options() -> None:
    state = built(name=f"{HERE}:Plain", weight_decay=0.0, options={"power": 3})
    assert [group["power"] for group in state.optimizer.param_groups] == [3]


def test_norms_and_biases_do_not_decay_unless_somebody_says_so() -> None:
    """This goes by module type as well, as a norm may have two dimensions. Without any decay no group is split."""
    matrices = {"embed.weight", "conv.weight", "hidden.weight", "head.weight"}
    everything = {name for name, _ in Net().named_parameters()}
    assert groups_of(built(), "weight_decay") == {0.5: matrices, 0.0: everything - matrices}
    assert groups_of(built(decay_norms_and_biases=True), "weight_decay") == {0.5: everything}
    assert len(built(weight_decay=0.0).optimizer.param_groups) == 1
    task = (ParameterGroup(("norm.weight",), weight_decay=0.1), ParameterGroup(("head.weight", "head.bias"), 3.0))
    state = built(groups=task)
    assert groups_of(state, "weight_decay")[0.1] == {"norm.weight"}
    assert groups_of(state, "initial_lr")[0.1 * 3.0] == {"head.weight", "head.bias"}
    assert "head.bias" in groups_of(state, "weight_decay")[0.0]


def test_muon_updates_hidden_matrices_and_adamw_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW updates the embedding and all that a pattern excludes; both use one learning rate and one decay."""
    assert groups_of(built(name="muon"), "use_muon")[True] == {"hidden.weight", "head.weight"}
    with monkeypatch.context() as patched:
        patched.setattr(Net, "get_output_embeddings", lambda self: self.head, raising=False)  # as in transformers
        assert groups_of(built(name="muon"), "use_muon")[True] == {"hidden.weight"}
    state = built(name="muon", options={"adamw_names": ["head.*"]})
    assert groups_of(state, "use_muon")[True] == {"hidden.weight"}
    before = {name: value.detach().clone() for name, value in state.model.named_parameters()}
    for parameter in state.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    state.optimizer.step()
    sizes = {
        n: float((v.detach() - 0.95 * before[n]).square().mean().sqrt()) for n, v in state.model.named_parameters()
    }
    assert 0.01 < sizes["hidden.weight"] < 0.05 and sizes["head.weight"] == pytest.approx(0.1, rel=0.1)
    kept = {name: set(state.optimizer.state[one]) for name, one in state.model.named_parameters()}
    assert kept["hidden.weight"] == {"momentum_buffer"} and kept["head.weight"] == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("has_it", [True, False])
def test_a_gpu_updates_by_one_kernel_unless_a_cut_shows_in_its_bits(
    monkeypatch: pytest.MonkeyPatch, has_it: bool
) -> None:
    """A CPU uses the kernel only on request."""

    def fused(name: str, device: str, **options: object) -> object:
        choice = choose(OptimizerConfig(name=name, options=options), device)
        [group] = choice.make([{"params": [nn.Parameter(torch.ones(3))], "use_muon": False}]).param_groups
        return group.get("fused")

    monkeypatch.setattr(choice_module, "shows_no_cut", lambda *_: has_it)
    for name in ("adamw", "sgd", "muon"):
        assert fused(name, "cuda") is (True if has_it else None)
        assert fused(name, "cpu") is None
    assert fused("adamw", "cuda", fused=False) is False and fused("sgd", "cpu", fused=True) is True
    assert fused("adafactor", "cuda") is None


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_update_on_a_cpu_shows_where_tensors_are_cut(kind: Any) -> None:
    """Therefore it is not the default there; torch's other updates do not depend on the cuts."""
    options = {} if kind is torch.optim.AdamW else {"momentum": 0.9}
    assert shows_no_cut(partial(kind, **options), {})
    assert not shows_no_cut(partial(kind, fused=True, **options), {}) or not has_fma()


def has_fma() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.mark.parametrize("shards", ["optimizer", "gradients", "parameters"])
def test_an_update_that_does_not_start_from_zeros_is_refused_in_shards(shards: str) -> None:
    options = {"momentum": 0.9, "dampening": 0.5}
    with pytest.raises(ConfigError, match=r"results of SGD would depend on .* set parallel\.shards to none"):
        built(shards, name="sgd", options=options)
