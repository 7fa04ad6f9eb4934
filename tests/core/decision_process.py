"""A softmax decision process small enough to enumerate: policies, objectives and gradients are exact, in float64.

A state is a prefix of tokens 0 … V−1. Token 0 ends the response, and so does the horizon. The policies are softmaxes
of logits z = features · θ, one row a state: tabular where the features are the identity, else with parameters that
all states share. The engine's logits are the trainer's plus a bounded perturbation.

Shape suffixes: S states, V vocabulary, Y responses, T tokens, P parameters.
"""

from dataclasses import dataclass

import torch


class DecisionProcess:
    """All states and all responses of at most `horizon` tokens.

    `state` maps a prefix to its row; `mask_YT` is False past a response's end, where `tokens_YT` and `states_YT` are 0.
    Without `ends` no token ends a response.
    """

    def __init__(self, vocabulary: int, horizon: int, ends: bool = True):
        prefixes, responses = [()], []
        for prefix in prefixes:  # grows while it is walked through
            for token in range(vocabulary):
                ended = (ends and token == 0) or len(prefix) + 1 == horizon
                (responses if ended else prefixes).append((*prefix, token))
        self.vocabulary, self.horizon = vocabulary, horizon
        self.state = {prefix: row for row, prefix in enumerate(prefixes)}
        self.responses = responses
        self.mask_YT = torch.tensor([[t < len(y) for t in range(horizon)] for y in responses])
        self.tokens_YT = torch.tensor([[*y, *[0] * (horizon - len(y))] for y in responses])
        self.states_YT = torch.tensor(
            [[self.state[y[:t]] if t < len(y) else 0 for t in range(horizon)] for y in responses]
        )

    def of_tokens(self, values_SV: torch.Tensor) -> torch.Tensor:
        """The entries of the responses' tokens, (Y, T); 0 at padding."""
        return torch.where(self.mask_YT, values_SV[self.states_YT, self.tokens_YT], 0.0)

    def of_states(self, values_S: torch.Tensor) -> torch.Tensor:
        """The entries of the states that the responses pass through, (Y, T); 0 at padding."""
        return torch.where(self.mask_YT, values_S[self.states_YT], 0.0)

    def response_log_prob(self, log_policy_SV: torch.Tensor) -> torch.Tensor:
        """log p(y), (Y,); −inf outside the support."""
        return self.of_tokens(log_policy_SV).sum(dim=1)

    def objective(self, log_policy_SV: torch.Tensor, reward_Y: torch.Tensor) -> torch.Tensor:
        """J = Σ_y p(y) R(y)."""
        return (self.response_log_prob(log_policy_SV).exp() * reward_Y).sum()


def log_policy(logits_SV: torch.Tensor, safe_SV: torch.Tensor | None = None) -> torch.Tensor:
    """log p, or log p^mp by exact omission: −inf outside V_S, which is constant under the gradient."""
    if safe_SV is not None:
        logits_SV = logits_SV.masked_fill(~safe_SV, -torch.inf)
    return logits_SV.log_softmax(dim=-1)


@dataclass(frozen=True)
class Instance:
    """A process with parameters, an engine and rewards."""

    process: DecisionProcess
    features: torch.Tensor
    """(S · V, P)."""
    theta_P: torch.Tensor
    """Leaf with gradient."""
    perturbation_SV: torch.Tensor
    """ε = z_infer − z_train."""
    reward_Y: torch.Tensor

    def trainer_logits(self, theta_P: torch.Tensor | None = None) -> torch.Tensor:
        """z_train, (S, V), of `theta_P` or of the instance's own parameters."""
        return (self.features @ (self.theta_P if theta_P is None else theta_P)).view_as(self.perturbation_SV)

    def engine_logits(self) -> torch.Tensor:
        """z_infer, (S, V): a constant, as the trainer does not differentiate through the engine."""
        return self.trainer_logits().detach() + self.perturbation_SV

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        """∇_θ of a scalar, (P,)."""
        return torch.autograd.grad(value, self.theta_P, retain_graph=True)[0]

    def token_scores(self, safe_SV: torch.Tensor | None = None) -> torch.Tensor:
        """∇_θ log p(y_t), or ∇_θ log p^mp(y_t) where V_S is given, of every token, (Y, T, P); 0 at padding."""

        def log_prob(theta_P):
            return self.process.of_tokens(log_policy(self.trainer_logits(theta_P), safe_SV))

        return torch.autograd.functional.jacobian(log_prob, self.theta_P.detach(), vectorize=True)

    def scores(self, safe_SV: torch.Tensor | None = None) -> torch.Tensor:
        """The same of every response, (Y, P)."""
        return self.token_scores(safe_SV).sum(dim=1)


def random_instance(
    seed: int,
    *,
    epsilon: float,
    shared: bool = False,
    vocabulary: int = 4,
    horizon: int = 3,
    lowest_reward: float = -1.0,
    ends: bool = True,
) -> Instance:
    """Normal logits of standard deviation 1.5, |ε| < `epsilon` uniform, rewards uniform up to 1."""
    generator = torch.Generator().manual_seed(seed)
    process = DecisionProcess(vocabulary, horizon, ends)
    shape = (len(process.state), vocabulary)
    entries = shape[0] * shape[1]
    if shared:
        features = torch.randn(entries, 5, generator=generator, dtype=torch.float64) / 5**0.5
    else:
        features = torch.eye(entries, dtype=torch.float64)
    theta_P = 1.5 * torch.randn(features.shape[1], generator=generator, dtype=torch.float64)
    uniform_SV = torch.rand(shape, generator=generator, dtype=torch.float64)
    uniform_Y = torch.rand(len(process.responses), generator=generator, dtype=torch.float64)
    return Instance(
        process=process,
        features=features,
        theta_P=theta_P.requires_grad_(),
        # A little inside the bound, so that float32 thresholds cannot round across a margin of 2 ε.
        perturbation_SV=0.999 * epsilon * (2.0 * uniform_SV - 1.0),
        reward_Y=lowest_reward + (1.0 - lowest_reward) * uniform_Y,
    )
