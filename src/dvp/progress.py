"""Print progress of long work as lines that read the same on a terminal, in a log file and in a cluster's job."""

import re
import sys
import time

_SUPERSCRIPT = str.maketrans("0123456789.-", "⁰¹²³⁴⁵⁶⁷⁸⁹·⁻")
_POINT = re.compile(r"method~(?P<method>[^/\s]+)/engine~(?P<engine>[^/\s]+)/rho~(?P<rho>[^/\s]+)")
_SETTING = re.compile(r"/(?!by~|on~|seed~)([a-z_]+)~([^/\s]+)")
_SHORT = {"group_size": "G"}


def readable(text: str) -> str:
    """Rewrite the paths of runs and measurements in a text as a person would write them.

    `training method~dvp_mis/engine~coarse/rho~exp-13/seed~0` becomes `training dvp_mis · coarse · ρ e⁻¹³ · seed 0`.
    Settings between ρ and seed follow: `…/rho~none/group_size~4/seed~0` becomes `… · G 4 · seed 0`.
    """

    def point(match: re.Match) -> str:
        rho = "" if match["rho"] == "none" else f" · ρ {rho_as_read(match['rho'])}"
        return f"{match['method']} · {match['engine']}{rho}"

    text = _SETTING.sub(lambda match: f" · {setting_as_read(match[1], match[2])}", _POINT.sub(point, text))
    return re.sub(r"/(by|on|seed)~", r" · \1 ", text)


def rho_as_read(rho: str) -> str:
    """Format ρ for a person: e⁻¹³ for exp(-13), which is exp-13 in a path; other values as they are written."""
    exponent = re.fullmatch(r"exp(-[\d.]+)", re.sub("[()]", "", rho))
    return f"e{exponent[1].translate(_SUPERSCRIPT)}" if exponent else rho


def setting_as_read(key: str, value: str = "") -> str:
    """Format a training setting for a person: `G 4`, `learning rate 0.0001`; without a value, its name alone."""
    return f"{_SHORT.get(key, key.replace('_', ' '))} {value}".rstrip()


def duration(seconds: float, *, rough: bool = False) -> str:
    """Format seconds as `50 s`, `2 min 10 s` or `3 h 05 min`; with `rough`, minutes without seconds (`7 min`)."""
    total = round(seconds)
    if total < 60:
        return f"{max(total, 1)} s"
    if total < 3600:
        return f"{max(1, round(total / 60))} min" if rough else f"{total // 60} min {total % 60:02} s"
    minutes = round(total / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


class Progress:
    """A printer of `name: step 12/40  details  34 s left`, at most every few seconds, and at the last step."""

    def __init__(self, name: str, steps: int, every_seconds: float = 10.0):
        self._name, self._steps, self._every = readable(name), steps, every_seconds
        self._shown = time.monotonic()
        self._first: tuple[int, float] | None = None

    def step(self, step: int, details: str) -> bool:
        """Report that `step` (1-based) is done; return whether a line was printed."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        if now - self._shown < self._every and step != self._steps:
            return False
        self._shown = now
        first, started = self._first
        left = f"  {(now - started) / (step - first) * (self._steps - step):.0f} s left" if step > first else ""
        print(f"{self._name}: step {step}/{self._steps}  {details}{left}", file=sys.stderr, flush=True)
        return True
