"""A folder's model before it has weights: they are read from the folder's safetensors one by one, when needed.

A tensor is a view of its file's pages, in the file's type, so a rank reads nothing that it does not keep. transformers
itself maps file tensors to parameters. A folder in which tensors and parameters are not one to one (joined or split on
loading, or other file kinds) is not opened here: such a model is built whole, with unchanged bits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from elastic_train.tasks.models.hugging_face import Kind, Source, drawn_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class FolderWeights:
    """Locations of a model's parameters, by first name: file, and tensor name in it; and which ones are random."""

    source: Source
    kind: Kind
    places: Mapping[str, tuple[Path, str]]
    drawn: Sequence[str]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter with the bits of `Source.build` in its type; random ones advance torch's generator."""
        yield from _read(self.places)
        if self.drawn:
            yield from self._draw()

    def _draw(self) -> Iterator[tuple[str, Tensor]]:
        model: Any = hollow(self.source, self.kind)
        with _address_space():  # some modules draw values that they then discard: the generator advances
            for name, hollow_one in list(model.named_parameters(remove_duplicate=False)):
                owner, _, leaf = name.rpartition(".")
                one = nn.Parameter(torch.empty(hollow_one.shape, dtype=hollow_one.dtype))
                model.get_submodule(owner)._parameters[leaf] = one
        known = {id(model.get_parameter(name)) for name in self.drawn}
        for tensor in (*model.parameters(), *model.buffers()):
            tensor._is_hf_initialized = id(tensor) not in known
        for module in model.modules():
            vars(module).pop("_is_hf_initialized", None)
        model.initialize_weights()  # initialises unmarked parameters module by module, as when a folder is loaded
        for name in self.drawn:
            yield name, model.get_parameter(name).detach()


@contextlib.contextmanager
def _address_space() -> Iterator[None]:
    """Let new tensors have memory pages only once written: torch would fill them with NaN."""
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def open_folder(source: Source, kind: Kind) -> tuple[PreTrainedModel, FolderWeights] | None:
    """Return a folder's model, with parameters on the meta device and real buffers, and its weights.

    None if its weights cannot be read one by one, or are incomplete, which `Source.build` reports.
    """
    files = None if source.path is None else _tensors_of(source.path)
    if files is None:
        return None
    model = hollow(source, kind)
    named = _named(model, files)
    if named is None or model._get_dtype_plan(source.dtype):
        return None
    buffers = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    if not buffers <= named.keys() or (buffers and source.dtype != torch.float32):
        return None
    places, lacking = dict[str, tuple[Path, str]](), set[str]()
    for name, aliases in _aliases(model).items():
        found = [named[alias] for alias in (*aliases, source.copied_from(model, name)) if alias in named]
        if len(found) > 1:  # tied here, but not in the folder
            return None
        if found and _shape_of(*found[0]) == model.get_parameter(name).shape:
            places[name] = found[0]
        else:
            lacking.add(name)
    if lacking - drawn_of(model, kind, lacking):
        return None
    for name, tensor in _read({name: named[name] for name in sorted(buffers)}):
        model.get_buffer(name).copy_(tensor)
    return model, FolderWeights(source, kind, places, [name for name in _aliases(model) if name in lacking])


def hollow(source: Source, kind: Kind) -> PreTrainedModel:
    """Build a model with parameters on the meta device, one after the other, and buffers on the CPU."""
    from transformers.initialization import no_init_weights

    def lay(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(lay)  # type: ignore[arg-type]  # it may return another one
    try:
        with no_init_weights(), torch.random.fork_rng([]):  # a folder is loaded into a model that has drawn nothing
            model = source.from_config(kind)
        model.tie_weights()
        return model
    finally:
        hook.remove()


def stand_ins(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return weights that take hardly any memory, to try out a model without weights.

    They have the model's own types unless `dtype` is given. Those of several dimensions view a line of random numbers
    with small strides; the others are ones.
    """
    generator, found = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        shape, kind = parameter.shape, dtype or parameter.dtype
        if parameter.ndim < 2:
            found[name] = torch.ones((), dtype=kind).expand(shape)
            continue
        strides = [1 + 2 * place for place in range(parameter.ndim)]
        length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        line = torch.randn(length, generator=generator).mul_(0.1).to(kind)
        found[name] = line.as_strided(shape, strides)
    return found


def weights_to_try(model: nn.Module) -> Mapping[str, Tensor]:
    """Return a model's weights, or stand-ins if it has none."""
    named = dict(model.named_parameters())
    has_memory = all(not one.is_meta and one.untyped_storage().nbytes() >= one.nbytes for one in named.values())
    return named if has_memory else stand_ins(model)


@torch.no_grad()
def runs_as_listed(model: nn.Module, **inputs: Tensor) -> bool:
    """Return True if a model without weights runs each entry of its module lists once, in list order."""
    listed = [entry for module in model.modules() if isinstance(module, nn.ModuleList) for entry in module]
    ran = list[nn.Module]()
    places = {id(module): place for place, module in enumerate(model.modules())}
    hooks = [entry.register_forward_pre_hook(lambda module, arguments: ran.append(module)) for entry in listed]
    was_training = model.training
    model.eval()
    try:
        torch.func.functional_call(model, stand_ins(model), (), dict(inputs))
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    return [places[id(one)] for one in ran] == sorted(places[id(one)] for one in listed)


def _tensors_of(folder: Path) -> dict[str, Path] | None:
    """Return the file of every tensor in a folder's safetensors, by its name there; None without such files."""
    from safetensors import safe_open

    if (folder / _FILE).is_file():
        with safe_open(str(folder / _FILE), framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / _FILE)
    if (folder / _INDEX).is_file():
        names: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    return None


def _named(model: PreTrainedModel, files: Mapping[str, Path]) -> dict[str, tuple[Path, str]] | None:
    """Return the locations of the model's tensors, by its own names; None if any is composed of others."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping, own = get_model_conversion_mapping(model), model.state_dict()
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    found = dict[str, tuple[Path, str]]()
    for key, file in files.items():
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if converter is not None or name in found:
            return None
        found[name] = file, key
    return found


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter by the first."""
    found = dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in found.values()}


def _shape_of(path: Path, key: str) -> torch.Size:
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return torch.Size(file.get_slice(key).get_shape())


def _read(places: Mapping[str, tuple[Path, str]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name, file by file, as views of their pages."""
    from safetensors import safe_open

    for path in dict.fromkeys(path for path, _ in places.values()):
        with safe_open(str(path), framework="pt") as file:
            for name, (where, key) in places.items():
                if where == path:
                    yield name, file.get_tensor(key)
