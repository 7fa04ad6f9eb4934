"""Download models from the Hugging Face hub, or keep libraries from asking it."""

import os
from pathlib import Path

from dvp.errors import DvpError


def download(model: str, revision: str | None, otherwise: str) -> Path:
    """Download a model at a revision (None: the newest) and return its folder, whose name is the commit.

    Raises DvpError, whose message ends with `otherwise`: what to do instead.
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
    """Keep libraries of this process, and of those that it starts, from asking the hub anything from now on.

    A value of HF_HUB_OFFLINE that the user has set stays.
    """
    from huggingface_hub import constants

    if "HF_HUB_OFFLINE" not in os.environ:
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True  # it read the variable at import, which may be long ago
