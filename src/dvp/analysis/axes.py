"""Training settings in which the points of a grid differ: what is equal between the points all the same."""

from collections.abc import Sequence

from dvp.analysis.load import Scored
from dvp.experiment.config import Experiment
from dvp.progress import setting_as_read

CLOSE = 0.05  # runs whose sampled tokens differ by no more count as runs of equal cost


def settings_note(experiment: Experiment, loaded: Scored) -> str:
    """Which settings the rows differ in, and which sizes of a step and of a run are equal; empty if they do not differ.

    Sizes follow from the settings, the tokens of a run from its metrics (mean over seeds).
    """
    if not experiment.axes:
        return ""
    sizes: dict[str, list[float]] = {
        "prompts a step": [],
        "responses a step": [],
        "steps": [],
        "responses of a run": [],
    }
    tokens = []
    for point in experiment.points:
        training = experiment.training_of(point)
        responses = training.prompts_per_step * training.group_size
        row = (training.prompts_per_step, responses, training.steps, responses * training.steps)
        for name, size in zip(sizes, row, strict=True):
            sizes[name].append(size)
        own = loaded.metrics[loaded.metrics["point"] == point.path]
        tokens.append(responses * own["response_tokens_mean"].sum() / own["seed"].nunique())
    equal = [f"{name} ({span(values)})" for name, values in sizes.items() if min(values) == max(values)]
    differing = [f"{name} ({span(values)})" for name, values in sizes.items() if min(values) < max(values)]
    if max(tokens) - min(tokens) <= CLOSE * max(tokens):
        equal.append(f"sampled tokens of a run ({span(tokens)}, within {100 * CLOSE:g} %)")
    else:
        differing.append(f"sampled tokens of a run ({span(tokens)})")
    names = ", ".join(setting_as_read(key) for key in experiment.axes)
    return (
        f"The rows differ in training settings: {names}. Equal in all of them: {', '.join(equal) or 'nothing'}. "
        f"Not equal: {', '.join(differing) or 'nothing'}."
    )


def span(values: Sequence[float]) -> str:
    """The value, or the smallest to the largest: `48`, `1,536 to 12,288`; of large numbers three digits."""
    first, last = (f"{float(f'{end:.3g}') if end >= 1e5 else end:,.0f}" for end in (min(values), max(values)))
    return first if first == last else f"{first} to {last}"
