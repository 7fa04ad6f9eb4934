"""Apply the engine's rounding to the trainer's model, so that a forward pass has the engine's own weights.

Modules get their rounded weights one at a time while they run. No second copy of the model is held, and ZeRO-3 gathers
and releases the layers as it always does.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from dvp.experiment.training import EngineConfig
from dvp.rollout.layout import matrices
from dvp.rollout.rounding import round_cached, round_matrix, round_weight


@contextmanager
def engine_rounding(model: PreTrainedModel, config: EngineConfig, *, activations: bool) -> Iterator[None]:
    """Round the weights, keys and values of every forward pass in this block as the engine rounds them.

    activations: also round what every module returns to the engine's dtype, and with `quantization` what vLLM
        multiplies to 8 bits. The engine's own errors have this size, but not these values: its sums have another order.
    """
    dtype, by_column = getattr(torch, config.dtype), matrices(model)
    head = model.get_output_embeddings()
    own: dict[torch.nn.Parameter, torch.Tensor] = {}

    def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name in by_column and config.weight_rounding != "none":
            weight = round_matrix(weight, config.weight_rounding, by_column[name])
        held = weight.to(dtype).to(weight.dtype)
        if name in by_column and config.quantization and activations:
            held = round_matrix(held, "fp8_e4m3", by_column[name])
        return held

    def enter(name: str, module: torch.nn.Module, inputs: tuple) -> tuple:
        for key, parameter in module.named_parameters(recurse=False):
            own[parameter] = parameter.data
            parameter.data = rounded(f"{name}.{key}", parameter.data)
        if f"{name}.weight" in by_column and config.quantization and activations:
            rows_NH = inputs[0].flatten(0, -2)
            return round_weight(rows_NH, "fp8_e4m3").view_as(inputs[0]), *inputs[1:]
        return inputs

    def leave(module: torch.nn.Module, inputs: tuple, output: Any) -> Any:
        for parameter in module.parameters(recurse=False):
            parameter.data = own.pop(parameter)
        exact = not activations or (module is head and config.head_dtype == "float32")
        return output if exact else _to(output, dtype)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(_named(enter, name)).remove)
            # Before DeepSpeed's hook, which gives gathered weights back.
            stack.callback(module.register_forward_hook(leave, prepend=True).remove)
        if config.kv_cache_dtype != "auto":
            stack.enter_context(_RoundedCache(config.kv_cache_dtype))
        try:
            yield
        finally:
            for parameter, data in own.items():  # left over from a pass that failed
                parameter.data = data


def _named(hook: Any, name: str) -> Any:
    return lambda module, inputs: hook(name, module, inputs)


def _to(output: Any, dtype: torch.dtype) -> Any:
    """Round the tensors of a module's output to a dtype and convert them back; return other outputs as they are."""
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        return output.to(dtype).to(output.dtype)
    return type(output)(_to(part, dtype) for part in output) if type(output) is tuple else output


class _RoundedCache(TorchFunctionMode):
    """A mode in which keys and values are rounded wherever attention is computed."""

    def __init__(self, form: str):
        super().__init__()
        self._form = form

    def __torch_function__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, key, value, *others = arguments
            if query.is_cuda:  # vLLM's attention on CUDA rounds queries, too, beside an 8-bit cache
                query = round_cached(query, self._form)
            arguments = query, round_cached(key, self._form), round_cached(value, self._form), *others
        return function(*arguments, **(options or {}))
