"""Count the memory and FLOPs of one update on fake tensors, which have a shape but no numbers: no weight is read.

torch documents fake tensors and dispatch modes, but has no public name for them.
"""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.from_recipe.methods import build_meta_method
from laconic.interfaces import Batch
from laconic.models.config import DecoderConfig
from laconic.training.step import check_output, get_loss_denominators

aten: Any = torch.ops.aten
FLOP_FORMULAS: dict[Any, Any] = {  # torch has none for attention on the CPU, whose arguments begin like the GPU's
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


class CostCounter(TorchDispatchMode):
    """Counts FLOPs, and the most bytes of tensors that are alive at the same time, those of `module` excepted.

    Integers and masks that no fake tensor has touched are real, so that code may branch on them; a fake number is 0,
    and a fake mask selects as many rows as it has.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.flops, self.bytes, self.peak_bytes = 0, 0, 0
        self.alive: dict[int, object] = {
            id(x.untyped_storage()): x.untyped_storage() for x in (*module.parameters(), *module.buffers())
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return torch.zeros((), dtype=args[0].dtype).item()
        name = func.overloadpacket.__name__
        dtype = (kwargs or {}).get("dtype")
        if dtype is not None and not dtype.is_floating_point and (name[:4] == "new_" or name[-5:] == "_like"):
            args = (torch.empty(args[0].shape), *args[1:])  # a mask of this shape is real
        if func is aten.nonzero.default:
            output = find_selected(args[0])
        elif func is aten.masked_select.default:
            x, mask = torch.broadcast_tensors(*args)
            output = x[tuple(find_selected(mask).unbind(1))]
        else:
            if func is aten.index.Tensor:  # a boolean mask becomes the indices that it selects
                is_mask = (x is not None and x.dtype == torch.bool for x in args[1])
                selected = [find_selected(x).unbind(1) if m else [x] for x, m in zip(args[1], is_mask, strict=True)]
                args = (args[0], [x for part in selected for x in part])
            output = func(*args, **(kwargs or {}))
        if (formula := FLOP_FORMULAS.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=output)
        for x in output if isinstance(output, tuple | list) else (output,):
            if isinstance(x, Tensor):
                self.count_storage(x.untyped_storage())
        return output

    def count_storage(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a new storage until it is freed."""
        key = id(storage)
        size = storage.nbytes()
        if key in self.alive:
            return

        def free(_: object) -> None:
            del self.alive[key]
            self.bytes -= size

        self.alive[key] = ref(storage, free)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)


def find_selected(mask: Tensor) -> Tensor:
    """Return the indices that a mask selects, [n, dimensions], as many as the mask has numbers if it is fake."""
    return torch.zeros(mask.numel(), mask.ndim, dtype=torch.long) if isinstance(mask, FakeTensor) else mask.nonzero()


class UpdateCost(NamedTuple):
    """Peak bytes of activations, gradients of activations and copies in a batch, and FLOPs of forward and backward."""

    peak_bytes: float
    flops: float


def count_update(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, batch: Batch) -> UpdateCost:
    """Run forward and backward of a batch with fake parameters, part by part as an update does."""
    method = build_meta_method(recipe, config, tokenizer)
    tensors = cast(dict[str, Tensor], method.state_dict(keep_vars=True))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {x: torch.empty_like(x, device="cpu") for x in tensors.values()}  # tied weights stay one tensor
    for x, fake in fakes.items():
        if isinstance(x, nn.Parameter):
            fakes[x] = nn.Parameter(fake, x.requires_grad)
    method.load_state_dict({name: fakes[x] for name, x in tensors.items()}, assign=True)
    for p in method.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    whole: Any = replace(cast(Any, batch), loss_denominators=get_loss_denominators(method, batch))
    state = None
    with warnings.catch_warnings(), CostCounter(method) as counter:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # which is 0
        for part in whole.sequential_parts:
            output = check_output(method, method(part) if state is None else method(part, state))
            output.loss.backward()
            state = None if output.state is None else output.state.detach()
            del output
    return UpdateCost(counter.peak_bytes, counter.flops)


def estimate_update(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, batch: Batch) -> UpdateCost:
    """Extrapolate the cost of a batch, which is linear in the number of layers, from one and two layers.

    With activation checkpointing, from one and two groups of layers that are recomputed together.
    """
    unit = recipe.train.activation_checkpointing or 1
    if config.num_hidden_layers <= 2 * unit:
        return count_update(recipe, config, tokenizer, batch)
    one, two = (count_update(*with_num_layers(recipe, config, n * unit), tokenizer, batch) for n in (1, 2))
    more = config.num_hidden_layers / unit - 1
    return UpdateCost(*(a + more * (b - a) for a, b in zip(one, two, strict=True)))


def with_num_layers(recipe: Recipe, config: DecoderConfig, n: int) -> tuple[Recipe, DecoderConfig]:
    """Return the recipe of a model with the first n layers, which match keys and values in all of them."""
    first: dict[str, Any] = {name: getattr(config, name)[:n] for name in ("sliding_windows", "attention_scales")}
    matching = recipe.kv_distillation and recipe.kv_distillation.model_copy(update={"layers": None})
    return recipe.model_copy(update={"kv_distillation": matching}), replace(config, num_hidden_layers=n, **first)
