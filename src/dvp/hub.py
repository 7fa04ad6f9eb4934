"""Models of the Hugging Face hub."""

import os
from pathlib import Path

from dvp.errors import DvpError


def download(model: str, revision: str | None, otherwise: str) -> Path:
    """The folder of a model at a revision (by default the newest one): its last part is the commit.

    Raises DvpError, which ends with what to do `otherwise`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DvpError(f"{model}{at} cannot be downloaded from the hub ({reason}); {otherwise}") from None


def go_offline() -> None:
    """Let libraries of this process, and those that it starts, ask the hub nothing from now on.

    A value of HF_HUB_OFFLINE that the user has set stays.
    """
    from huggingface_hub import constants

    if "HF_HUB_OFFLINE" not in os.environ:
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True  # the variable was read when it was imported, which may be long ago
