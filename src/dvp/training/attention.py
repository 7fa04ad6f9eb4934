"""The trainer's attention on a GPU, where a pass in fp32 must not hold a number for every pair of tokens.

Of PyTorch's kernels on CUDA the flash kernel takes no fp32, and the memory-efficient one no keys and values that
several heads share (`enable_gqa` of torch.nn.functional.scaled_dot_product_attention, which transformers asks for).
What is left computes all scores: 11 GB for 32 heads and 9,215 tokens, several times over. So in fp32 each head gets
its own copy.
"""

from types import SimpleNamespace

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "sdpa_fp32"


def attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa`; in fp32 each of the H heads has its own copy of one of K keys and values."""
    groups = query_BHTD.shape[1] // key_BKTD.shape[1]
    if groups > 1 and key_BKTD.dtype == torch.float32 and not torch.is_autocast_enabled(key_BKTD.device.type):
        key_BKTD, value_BKTD = repeat_kv(key_BKTD, groups), repeat_kv(value_BKTD, groups)
        # By the module transformers would see heads that share, and ask for `enable_gqa`.
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(module, query_BHTD, key_BKTD, value_BKTD, attention_mask, **options)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
