"""The mathematics of the method as pure functions of tensors: no framework, no state.

It needs torch, and pydantic, which checks the settings of its rules for experiments and library users alike.

The names in `PUBLIC` are a stable library interface (docs/library.md). A module is imported when one of its names is
first used.
"""

from importlib import import_module
from typing import Any

PUBLIC = {
    "head": ("TokenStatistics", "dense_log_prob", "token_statistics"),
    "safe_vocabulary": ("EntropyScaled", "FixedRho", "MassBudget", "TopK", "TopNSigma", "safe_mask", "with_margin"),
    "importance": ("PRESETS", "ImportanceRule", "ImportanceWeights", "importance_weights"),
    "masks": ("DivergenceMask", "OffPolicyMask", "SpuriousMask"),
    "advantages": ("ADVANTAGES", "Responses", "optimal_token_proxy"),
    "objective": ("LOSSES", "Cispo", "Gspo", "PolicyLoss", "Ppo", "Reinforce", "policy_loss"),
    "diagnostics": ("mismatch_metrics", "pruned_mass_metrics", "tail_mismatch"),
    "batch": ("Batch", "Rollout"),
    "update": ("Update", "make_update"),
}
_MODULES = {name: module for module, names in PUBLIC.items() for name in names}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"dvp.core has no public name {name!r}; it has {', '.join(sorted(_MODULES))}")
    return getattr(import_module(f"dvp.core.{_MODULES[name]}"), name)
