"""From a method's settings (dvp.experiment.methods) to the rules of dvp.core that a run applies."""

from dataclasses import replace

from dvp.core.importance import PRESETS, ImportanceRule
from dvp.core.objective import LOSSES, LossRule
from dvp.core.safe_vocabulary import EntropyScaled, FeedbackRho, FixedRho, MassBudget, SafeVocabulary, with_margin
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import parse_rho
from dvp.experiment.methods import EntropySafe, FeedbackSafe, Importance, Loss, MarginSafe, MassBudgetSafe, Method


def check_methods(experiment: Experiment) -> None:
    """Build what every run and every estimator would build, so that settings that do not fit together end none later.

    Raises DvpError, naming the method.
    """
    used = [(run.method, run.rho) for run in experiment.runs]
    if experiment.bias is not None:
        used += experiment.estimators
    for name, rho in dict.fromkeys(used):
        method = experiment.methods[name]
        try:
            importance_rule(method.importance)
            loss_rule(method.loss)
            SafeVocabularies(method, None if rho is None else parse_rho(rho), experiment.training.max_response_tokens)
        except DvpError as error:
            raise DvpError(f"methods.{name}: {error}") from None


def importance_rule(settings: Importance) -> ImportanceRule:
    """The preset, or no correction, with what the settings change. Raises DvpError for bounds that do not fit."""
    start = ImportanceRule() if settings.preset is None else PRESETS[settings.preset]
    return replace(start, **settings.model_dump(exclude={"preset"}, exclude_none=True))


def loss_rule(settings: Loss) -> LossRule:
    """The named loss with the clips that the settings change. Raises DvpError for clips out of range."""
    return replace(LOSSES[settings.kind], **settings.model_dump(exclude={"kind"}, exclude_none=True))


class SafeVocabularies:
    """The safe vocabularies of a run's two sides, as they are at the present step.

    Only feedback changes from step to step. It sees nothing but the metrics of finished steps, so a run that goes on
    from a checkpoint hands them in again.
    """

    def __init__(self, method: Method, rho: float | None, max_response_tokens: int):
        """`rho` is the grid's, None if the method takes none. Raises DvpError for values that do not fit together."""
        self.trainer: SafeVocabulary | None = None
        self.engine: SafeVocabulary | None = None
        self._feedback: FeedbackRho | None = None
        settings = method.safe_vocabulary
        if settings is None:
            return
        if isinstance(settings, MassBudgetSafe):
            self.trainer = self.engine = MassBudget(settings.delta / max_response_tokens)
        elif isinstance(settings, EntropySafe):
            self.trainer = self.engine = EntropyScaled(rho, **settings.model_dump(exclude={"rule"}))
        elif isinstance(settings, MarginSafe):
            wide, narrow = with_margin(rho, settings.epsilon), FixedRho(rho)
            self.trainer, self.engine = (wide, narrow) if settings.side == "trainer" else (narrow, wide)
        elif isinstance(settings, FeedbackSafe):
            self._feedback = FeedbackRho(rho, **settings.model_dump(exclude={"rule"}))
            self.trainer = self.engine = FixedRho(self._feedback.rho)
        else:
            self.trainer = self.engine = FixedRho(rho)

    @property
    def rho(self) -> float | None:
        """The engine's ρ, None if it has none or one for each state."""
        return self.engine.rho if isinstance(self.engine, FixedRho) else None

    def observe(self, row: dict) -> None:
        """Take in the metrics of a finished step."""
        if self._feedback is not None:
            self._feedback.observe(row)
            self.trainer = self.engine = FixedRho(self._feedback.rho)
