"""Read experiment files: YAML, the catalogue, DeepSpeed's options. A mistake is one line that names its place."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, Field, ValidationError

from dvp.errors import DvpError
from dvp.experiment.base import Bases, LocalBase, Pretrained
from dvp.experiment.config import Experiment
from dvp.experiment.data import FileSource, GeneratedSource
from dvp.experiment.training import BF16_AUTOCAST
from dvp.files import read_json, sha256_file, write_text
from dvp.strict import EXPERIMENT, Strict, first_problem

RESERVED = ("evidence", "reference", "mlflow.db", "mlartifacts")  # names that the folder of results uses itself
SHIPPED = Path(__file__).parents[1] / "config"  # in a clone, a link to the repository's config/
TABLES = ("sources", "engines", "methods")  # filled from config/catalogue
MODEL = ("kind", "path", "revision", "package", "version", "sha256", "file")  # the keys that say which base it is,
PROBLEMS = ("kind", "path", "name", "split", "revision", "generator")  # and which source, but for count and seed
DEEPEST = 100  # levels of a value; libyaml's recursion would end the process at some ten thousand
M = TypeVar("M", bound=Strict)
Given = Annotated[str, Field(min_length=1)]


class _Loader(yaml.CSafeLoader):
    """A YAML loader that refuses duplicate keys; libyaml's parser is ten times as fast as Python's."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key for key, _ in node.value]
        for place, key in enumerate(keys):
            if key.value in [before.value for before in keys[:place]]:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is a duplicate", key.start_mark)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = self.construct_scalar(node)
        return int(value, 0 if value.startswith(("0o", "0x")) else 10)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes what the loader would not read as the same text."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None  # line breaks, unless they are escaped
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


# Numbers of YAML 1.2: YAML 1.1 reads `1e-6` as text, `010` as 8 and `1:30` as 90.
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if not tag.endswith((":int", ":float"))]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for _tag, _form in (
        ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
        ("float", r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    ):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"({_form})\Z"), list("-+0123456789."))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Dumper.add_representer(str, _Dumper.represent_str)


def read_yaml(path: Path) -> dict:
    """Read a YAML mapping. Raises DvpError, naming the file and the line."""
    try:
        text, depth = path.read_text(encoding="utf-8"), 0
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ValueError(f"expected at most {DEEPEST} levels, found more at line {event.start_mark.line + 1}")
        value = yaml.load(text, Loader=_Loader)
    except FileNotFoundError:
        raise DvpError(f"{path}: no such file{_elsewhere(path)}") from None
    except OSError as error:
        raise DvpError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML's errors, and those that it does not catch for a tag whose text does not fit it (`!!bool maybe`).
        raise DvpError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise DvpError(f"{path}: expected a mapping of keys to values")
    return value


def _elsewhere(path: Path) -> str:
    """Return a hint for the error of a missing file if the current folder is not the repository's root, or ""."""
    root = path.parts[0]
    found = path.is_absolute() or Path(root).is_dir()
    return "" if found else f"; run this in the repository's root, which has {root}/"


def parse(model: type[M], value: dict, where: Path | str, files: Mapping[tuple, Path] | None = None) -> M:
    """Validate a value as this model.

    Raises DvpError that names the file: `where`, or that of `files` which has the entry.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        location, message = first_problem(error, value, model, more=("extends",))
        raise DvpError(f"{(files or {}).get(location[:2], where)}: {message}") from None


def parse_experiment(value: dict, where: Path) -> Experiment:
    """Validate a resolved experiment. Raises DvpError; `where` is the file that messages name."""
    return parse(Experiment, value, where)


def config_folder() -> Path:
    """Return the current folder's config/, if it has a catalogue, or else the one that the package brings."""
    here = Path("config")
    return here if (here / "catalogue").is_dir() else SHIPPED


def experiment_files(config: Path | None = None) -> dict[str, Path]:
    """Return the experiments of config/experiments and its folders, by name. Raises DvpError for a name in two."""
    files: dict[str, Path] = {}
    config = config or config_folder()
    for file in sorted((config / "experiments").rglob("*.yaml")):
        if file.stem in files:
            raise DvpError(f"{file}: {files[file.stem]} has the same name; expected another one")
        files[file.stem] = file
    return files


def load_experiment(name: str, config: Path | None = None) -> Experiment:
    """Load NAME.yaml of config/experiments or a folder in it, resolved against config/catalogue.

    `config` is `config_folder()` if left out. Raises DvpError.

    The local files that it names must exist: Snakemake would take results made of earlier ones for results of these. An
    experiment that says `extends: OTHER` is the other one, which may extend another in turn, with its own keys on top:
    mappings are merged key by key, unless their `kind` or `rule` differs, anything else is replaced, by the name of a
    base as well, and null removes a key. What the other one says of itself is not inherited (`_say_anew`).
    """
    return _load(name, config or config_folder(), ())[1]


def _load(name: Any, config: Path, extended_by: tuple[str, ...]) -> tuple[dict, Experiment]:
    """Return an experiment twice: as its file and those that it extends have it, and resolved."""
    folder = config / "experiments"
    files = experiment_files(config)
    asker = extended_by[-1].partition("~")[0] if extended_by else None
    asked = f"{files[asker]}: extends: " if asker else ""
    if not isinstance(name, str) or not EXPERIMENT.fullmatch(name) or name.endswith(".yaml"):
        meant = Path(str(name)).stem
        expected = f"'{meant}'" if meant in files else f"the name of a file in {folder}, without .yaml"
        raise DvpError(f"{asked}experiment '{name}': expected {expected}")
    if name in extended_by:
        raise DvpError(f"{asked}{' → '.join([*extended_by, name])} is a circle; one of them must stand alone")
    whole, _, base = name.partition("~")
    path = files.get(whole, folder / f"{whole}.yaml")
    if whole not in files:
        known = ", ".join(sorted(files))
        yours = "; yours are read where config/ is" if config == SHIPPED else ""
        raise DvpError(f"{asked}{path}: no such experiment; known are {known}{yours}")
    value = _with_base(_load(whole, config, extended_by)[1], base) if base else read_yaml(path)
    if value.get("name") != name or name in RESERVED:
        expected = f"another one than '{name}', which the folder of results has" if name in RESERVED else f"'{name}'"
        raise DvpError(f"{path}: name: expected {expected}, as the file is called, found {value.get('name')!r}")
    if "deepspeed" in value:
        raise DvpError(f"{path}: deepspeed: unknown key; training.deepspeed names a file of {config / 'deepspeed'}")
    named = isinstance(value.get("base"), str)
    if named:
        base = read_bases(config).get(value["base"])
        if base is None:
            known = ", ".join(sorted(read_bases(config)))
            raise DvpError(f"{path}: base: '{value['base']}' is not in config/catalogue/bases.yaml; known are {known}")
        value["base"] = base.model_dump(mode="json", exclude_unset=True)
    if "extends" in value:  # mistakes of the parent are reported in its own name
        parent, own = value.pop("extends"), value
        inherited = _load(parent, config, (*extended_by, name))[0]
        below = {key: part for key, part in inherited.items() if not (named and key == "base")}  # it is whole
        value = _say_anew(_merged(below, own), own, inherited, read_yaml(config / "catalogue" / "sources.yaml"))
    resolved, of_catalogue = dict(value), {}
    for table in TABLES:
        own = value.get(table, {})
        if not isinstance(own, dict):
            raise DvpError(f"{path}: {table}: expected a mapping of names to entries")
        file = config / "catalogue" / f"{table}.yaml"
        catalogue = read_yaml(file)
        resolved[table] = catalogue | own
        of_catalogue |= {(table, entry): file for entry in catalogue if entry not in own}
    experiment = parse(Experiment, resolved, path, of_catalogue)
    for key in (experiment.data.train, *experiment.data.evaluation):
        source = experiment.sources[key]
        if isinstance(source, FileSource) and not source.path.is_file():
            raise DvpError(
                f"{of_catalogue.get(('sources', key), path)}: sources.{key}.path: {source.path}: no such file"
            )
    if (own := experiment.data.reward) is not None:
        if not own.file.is_file():
            raise DvpError(f"{path}: data.reward.file: {own.file}: no such file")
        sha256 = sha256_file(own.file)
        if own.sha256 not in (None, sha256):
            raise DvpError(f"{path}: data.reward.sha256: {own.file} has another one, {sha256}")
        data = experiment.data.model_copy(update={"reward": own.model_copy(update={"sha256": sha256})})
        experiment = experiment.model_copy(update={"data": data})
    if isinstance(experiment.base, LocalBase) and not Path(experiment.base.path, "config.json").is_file():
        raise DvpError(
            f"{path}: base.path: {experiment.base.path}: expected a Hugging Face model, found no config.json"
        )
    file = config / "deepspeed" / f"{experiment.training.deepspeed}.json"
    if not file.is_file():
        raise DvpError(f"{path}: training.deepspeed: {file} does not exist")
    options = read_json(file)
    parse(_DeepSpeed, options, file)
    experiment = experiment.model_copy(update={"deepspeed": options})
    return value, experiment


def _with_base(whole: Experiment, base: str) -> dict:
    """Return the file of an experiment with one of the base models of another: it extends that one.

    A seed is that of the base model, and of the problems to train on if they are generated.
    """
    chosen = {str(one): one for one in whole.bases}.get(base)
    if chosen is None:
        expected = f"expected one of {', '.join(whole.of_bases)}" if whole.bases else "it has one base model"
        raise DvpError(f"experiment '{whole.name}~{base}': {expected}")
    own = {"name": f"{whole.name}~{base}", "extends": whole.name, "bases": None}
    own["description"] = f"{whole.description.strip().rstrip('.')}: base model {base}."
    if isinstance(chosen, str):
        return own | {"base": chosen}
    own["base"] = {"seed": chosen}
    train = whole.data.train
    if isinstance(source := whole.sources[train], GeneratedSource):
        own["sources"] = {train: source.model_dump(mode="json", exclude_unset=True) | {"seed": chosen}}
    return own


def stored_dtype(model: Path) -> str | None:
    """Return the dtype in a model's config.json; None if it has none."""
    config = read_json(model / "config.json")
    return config.get("dtype") or config.get("torch_dtype")


def read_bases(config: Path | None = None) -> dict[str, Pretrained]:
    """Read the base models that config/catalogue/bases.yaml names. Raises DvpError."""
    file = (config or config_folder()) / "catalogue" / "bases.yaml"
    return parse(Bases, {"bases": read_yaml(file)}, file).bases


def _merged(below: Any, above: Any) -> Any:
    """Lay `above` over `below`, without the inherited keys that `above` sets to null.

    Mappings of different kinds, such as a `generated` and a `hub` source, share no keys: `above` replaces `below`.
    """
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if any(key in above and above[key] != below.get(key) for key in ("kind", "rule")):
        return above
    gone = {key for key in below if key in above and above[key] is None}
    merged = below | {key: _merged(below.get(key), value) for key, value in above.items()}
    return {key: value for key, value in merged.items() if key not in gone}


def _say_anew(value: dict, own: dict, inherited: dict, catalogue: dict) -> dict:
    """Replace what an extended experiment says of itself and its extension does not say again.

    The description holds for both only where the extension gives nothing. The scale is made from the settings where the
    base model, the problems or the lengths differ; declarations are dropped where the base model or the problems do.

    Args:
        value: the merged mapping of the extension, perhaps with mistakes.
        own: the keys that the extension's file gives.
        inherited: the valid mapping of the extended experiment.
        catalogue: sources by name, for those that no experiment gives.
    """

    def subject(said: dict) -> list[Any]:
        train = str(_at(said, "data", "train"))
        source = _at(said, "sources", train) or catalogue.get(train)
        return [train, *(_at(said, "base", key) for key in MODEL), *(_at(source, key) for key in PROBLEMS)]

    train, anew = _at(value, "data", "train"), subject(value) != subject(inherited)
    lengths = [("base", "architecture"), ("training", "steps"), ("training", "max_response_tokens")]
    other = anew or any(_at(value, *key) != _at(inherited, *key) for key in lengths)
    given = ", ".join(key for key in own if key != "name")
    if given and "description" not in own:
        value = value | {"description": f"{inherited['name']} with other {given}."}
    if "scale" not in own and other:
        base, steps = value.get("base"), _at(value, "training", "steps")
        model = _at(base, "path") or Path(str(_at(base, "file"))).stem
        model = "A model made here" if _at(base, "kind") == "trained" else model
        scale = f"{model} on {train}, {steps} steps, responses of up to {_at(value, *lengths[-1])} tokens; "
        value = value | {"scale": f"{scale}the papers train billions of parameters on competition mathematics."}
    report = value.get("report")
    if anew and isinstance(report, dict) and _at(own, "report", "declarations") is None:
        value = value | {"report": {key: told for key, told in report.items() if key != "declarations"}}
    return value


def _at(value: Any, *keys: str) -> Any:
    """Return the value at a path of keys; None where the path ends early."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


class _Zero(Strict, extra="allow"):
    stage: Annotated[int, Field(ge=1, le=3)]
    compute_grad_norm: Literal[True] = True  # training steps report it


def _is_bf16(value: dict) -> dict:
    if value != BF16_AUTOCAST:
        raise ValueError(f"expected {BF16_AUTOCAST} or no such key")
    return value


class _DeepSpeed(Strict):
    """The options that a file for DeepSpeed may set.

    All others follow from `training`, change gradients, or are ignored if they are misspelt.
    """

    zero_optimization: _Zero
    torch_autocast: Annotated[dict[str, Any], AfterValidator(_is_bf16)] = BF16_AUTOCAST


def _folder(value: str) -> str:
    """Normalise a folder for Snakemake's paths: it warns of each that has ./ or // in it. Raises ValueError."""
    if set("{}") & set(value) or not value.isprintable():
        raise ValueError(f"expected a folder in one line without braces, which Snakemake reads, found {value!r}")
    path = Path(os.path.expanduser(value))
    if not path.name or path.parts[0].startswith("~"):
        raise ValueError(f"expected a folder for results alone, found {value!r}")
    return str(path)


class Settings(Strict):
    """The keys of config/config.yaml.

    They name the experiment, the folder of results, and the experiments that answer config/claims.yaml.
    """

    experiment: Given
    results: Annotated[Given, AfterValidator(_folder)]
    evidence: Annotated[dict[str, Given], Field(min_length=1)]


def check_settings(settings: dict) -> Settings:
    """Check what Snakemake has read from config/config.yaml, --configfile and --config. Raises DvpError."""
    checked = parse(Settings, settings, "config/config.yaml, --configfile or --config")
    for folder in (Path(checked.results), Path(checked.results) / checked.experiment):
        if folder.exists() and not folder.is_dir():
            raise DvpError(f"{folder}: expected a folder, found a file")
    return checked


def read_settings(pairs: list[str], config: Path | None = None) -> dict[str, str]:
    """Return `experiment` and `results` of config/config.yaml with KEY=VALUE pairs on top, as in Snakemake's --config.

    Raises DvpError.
    """
    for pair in pairs:
        if "=" not in pair:
            raise DvpError(f"--config {pair}: expected KEY=VALUE, such as experiment=tiny")
    given = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
    file = (config or config_folder()) / "config.yaml"
    settings = parse(Settings, read_yaml(file) | given, f"{file} or --config")
    return settings.model_dump(exclude={"evidence"})


def read_resolved(path: Path) -> Experiment:
    """Read the resolved experiment that `dvp resolve` wrote. Raises DvpError."""
    value = read_yaml(path)
    if "extends" in value or not value.keys() >= set(TABLES):
        raise DvpError(f"{path}: not a resolved experiment; expected one that dvp wrote, results/NAME/config.yaml")
    return parse_experiment(value, path)


def dump_experiment(experiment: Experiment) -> str:
    """Return an experiment as YAML that `read_resolved` reads back unchanged."""
    return yaml.dump(experiment.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def write_resolved(experiment: Experiment, folder: Path) -> None:
    """Write an experiment's config.yaml, with those entries of the catalogue that it uses.

    A file that already says the same is left alone, its modification time included. Raises DvpError if it is another
    experiment's.
    """
    path, text = folder / "config.yaml", dump_experiment(experiment.used)
    if path.is_file() and path.read_bytes() == text.encode():
        return
    try:
        other = read_yaml(path).get("name")
    except DvpError:  # the file is missing or unreadable
        other = experiment.name
    if other != experiment.name:
        raise DvpError(f"{path}: is of experiment '{other}'; expected a folder of its own for '{experiment.name}'")
    write_text(path, text)
