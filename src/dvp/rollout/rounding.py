"""Round weights, keys and values to the numbers that a low-precision format can represent."""

import torch

INTEGER_BITS = {"int8": 8, "int4": 4, "int3": 3, "int4_g128": 4}
GROUPS = {"int4_g128": 128}
"""Number of an output's weights that share a scale; in other formats all of them do."""
FLOAT_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
CACHE_TYPES = FLOAT_TYPES | {"fp8": torch.float8_e4m3fn}


def round_weight(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Round a matrix (rows, columns) to `form`, symmetrically, with one scale per row or per group (GROUPS).

    Returns a tensor of the same shape and dtype. The largest magnitude of each row or group is representable.
    """
    groups = weight.split(GROUPS.get(form, weight.shape[1]), dim=1)
    return torch.cat([_rounded(group, form) for group in groups], dim=1)


def _rounded(weight: torch.Tensor, form: str) -> torch.Tensor:
    scale_R1 = weight.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny).float()
    integer = form in INTEGER_BITS
    largest = 2 ** (INTEGER_BITS[form] - 1) - 1 if integer else torch.finfo(FLOAT_TYPES[form]).max
    scaled = weight.float() / scale_R1 * largest
    rounded = scaled.round() if integer else scaled.to(FLOAT_TYPES[form]).float()
    return (rounded / largest * scale_R1).to(weight.dtype)


def round_matrix(weight: torch.Tensor, form: str, by_column: bool) -> torch.Tensor:
    """Round a linear layer's matrix to `form`; `by_column` if a column, not a row, makes an output.

    Returns a tensor of the same shape and dtype.
    """
    return round_weight(weight.T, form).T if by_column else round_weight(weight, form)


def round_cached(values: torch.Tensor, form: str) -> torch.Tensor:
    """Round keys or values as vLLM's 8-bit cache does, without a scale: toward zero on a CPU, to nearest on a GPU.

    Returns a tensor of the same shape and dtype. A value beyond the format's range becomes its largest number.
    """
    dtype = CACHE_TYPES[form]
    largest = torch.finfo(dtype).max
    nearest = values.float().clamp(-largest, largest).to(dtype)
    if values.is_cuda:
        return nearest.to(values.dtype)
    # The sign is a bit of its own, so one less in the byte is one step toward zero.
    beyond = nearest.float().abs() > values.float().abs()
    return (nearest.view(torch.uint8) - beyond.to(torch.uint8)).view(dtype).to(values.dtype)
